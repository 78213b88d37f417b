"""Kernels that were served before, found again without search space, template and tokens.

Whether a config is legal and which code it emits takes a new process 40 ms to find out: YAML, expressions and jinja2 to
import, a template to render, its tokens to hash, and all that for a file which the last process has written. A note
remembers which file, under everything that decides it: problem, config, GPU, and every byte of tlxgen's own code,
templates and search spaces.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache
from pathlib import Path

from tlxgen import notes, paths
from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.emit import KernelSource
from tlxgen.problem import Problem

_KIND = "served"
_IMPORTED = time.time()


def recall(problem: Problem, config: Config, gpu: Gpu) -> KernelSource | None:
    """What `emit` would make of a config that is legal for the problem on this GPU; None if that is not known."""
    parts = _parts(problem, config, gpu)
    note = None if parts is None else notes.recall(_KIND, parts)
    if note is None:
        return None
    try:
        text = (paths.kernel_dir() / note["file"]).read_text(encoding="utf-8")
        source = KernelSource(problem.operator, problem, config, text)
        if source.file_name != note["file"]:  # which holds a hash of what the file should hold
            return None
        vars(source)["code_hash"] = str(note["code_hash"])  # in place of what the property would work out
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return source


def remember(source: KernelSource, gpu: Gpu) -> None:
    """Notes what was emitted for a config that is legal, and written where emitted kernels are."""
    content = {"file": source.file_name, "code_hash": source.code_hash}
    parts = _parts(source.problem, source.config, gpu)
    if parts is not None:
        notes.remember(_KIND, parts, content)


def _parts(problem: Problem, config: Config, gpu: Gpu) -> list[str] | None:
    everything = _everything(paths.TEMPLATES, paths.SEARCH_SPACES)
    if everything is None:
        return None
    asked = [problem.operator, problem.model_dump(), config.template, config.params]
    return [json.dumps(asked, sort_keys=True), str(gpu), everything]


@cache
def _everything(templates: Path, spaces: Path) -> str | None:
    """Hash of all that legality and code come from: contents, for times and sizes may agree where contents do not.

    None if some of it is younger than this process's import of it: what runs here is not what the files say.
    """
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for folder, pattern in ((package, "*.py"), (package / "ops", "*.py"), (templates, "**/*.j2"), (spaces, "*.yaml")):
        for path in sorted(folder.glob(pattern)):
            if path.stat().st_ctime > _IMPORTED:
                return None
            name = path.relative_to(folder).as_posix()
            digest.update(f"{pattern} {name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def forget() -> None:
    """Reads the code anew."""
    _everything.cache_clear()
