"""Kernels that were served before, found again without search space, template and tokens.

Whether a config is legal and which code it emits takes a new process 40 ms to find out: YAML, expressions and jinja2 to
import, a template to render, its tokens to hash, and all that for a file which the last process has written. A note
remembers which file, under everything that decides it: problem, config, GPU, and every byte of tlxgen's own code,
templates and search spaces.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tlxgen import paths
from tlxgen.codegen.emit import KernelSource
from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.problem import Problem
from tlxgen.startup import notes

_KIND = "served"
_IMPORTED = time.time()
_CHUNK = 1 << 16
#: Packages whose code decides which configs are legal and what is emitted for them.
_DECIDING = ("codegen", "ops", "space")


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

    None if some of it is younger than this process's import of it: what runs here is not what the files say. None as
    well if some of it cannot be read.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    try:
        for folder, ending, deep in (
            (package, ".py", False),
            *((package / name, ".py", True) for name in _DECIDING),
            (templates, ".j2", True),
            (spaces, ".yaml", True),
        ):
            for name, path in _files(str(folder), ending, deep=deep):
                content, changed = _read(path)
                if changed > _IMPORTED:
                    return None
                digest.update(f"{ending} {name} {len(content)}\0".encode() + content)
    except OSError:
        return None
    return digest.hexdigest()


def _files(folder: str, ending: str, *, deep: bool, within: str = "") -> Iterator[tuple[str, str]]:
    """Names and paths, in order. `Path` would take as long as all the rest, here and below."""
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for child in children:
        if child.name.endswith(ending):
            yield f"{within}{child.name}", child.path
        elif deep and child.is_dir():
            yield from _files(child.path, ending, deep=True, within=f"{within}{child.name}/")


def _read(path: str) -> tuple[bytes, float]:
    """What a file holds, and when it was last changed, at the time of the reading or later."""
    file = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(file, _CHUNK), b"")), os.fstat(file).st_ctime
    finally:
        os.close(file)


def forget() -> None:
    """Reads the code anew."""
    _everything.cache_clear()
