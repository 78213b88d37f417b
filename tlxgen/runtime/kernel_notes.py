"""Notes of emitted files, by which a new process finds the kernel of an earlier one without emitting it.

Checking that a config is legal and emitting its code takes a new process 40 ms: importing YAML, simpleeval and jinja2,
rendering, hashing tokens. A note stores the emitted file's name under everything that decides it: problem, config, GPU,
and the content of tlxgen's deciding code, templates and search spaces.
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
    """The source that `emit` would return, if a note says that the config is legal on this GPU; else None."""
    parts = _parts(problem, config, gpu)
    note = None if parts is None else notes.recall(_KIND, parts)
    if note is None:
        return None
    try:
        text = (paths.kernel_dir() / note["file"]).read_text(encoding="utf-8")
        source = KernelSource(problem.operator, problem, config, text)
        if source.file_name != note["file"]:  # the name contains a hash of the content
            return None
        vars(source)["code_hash"] = str(note["code_hash"])  # fills the cached property
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return source


def remember(source: KernelSource, gpu: Gpu) -> None:
    """Notes the emitted file of a legal config."""
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
    """Hash of the content of all files that decide legality and emitted code.

    None if a file is younger than this process, which may then run older code, or cannot be read.
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
    """Names and paths of files, sorted; with `os.scandir`, since `Path` would double the time."""
    with os.scandir(folder) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for child in children:
        if child.name.endswith(ending):
            yield f"{within}{child.name}", child.path
        elif deep and child.is_dir():
            yield from _files(child.path, ending, deep=True, within=f"{within}{child.name}/")


def _read(path: str) -> tuple[bytes, float]:
    """Content of a file, and the time of its last change, read after the content."""
    file = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(file, _CHUNK), b"")), os.fstat(file).st_ctime
    finally:
        os.close(file)


def forget() -> None:
    """Drops the cached hash."""
    _everything.cache_clear()
