"""Triton's and pydantic's searches for plugins, skipped if no plugin is installed.

Triton looks for backends, and pydantic for plugins, among the entry points of all installed distributions. Each parses
one file for every distribution (together 20 to 35 ms for 200), and an environment variable turns the search off. This
module reads those files once for both, in a quarter of the time of one search, and parses only those that name either
library. If there are other backends than triton's own, or this cannot be decided, both searches run.

The result is not stored (`tlxgen.startup.notes`): editing a file in place leaves the times of its directory unchanged,
and asking for the time of each file takes two thirds of the time of reading it.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

#: Variables with the values that turn the searches off.
_PYDANTIC = "PYDANTIC_DISABLE_PLUGINS"
_TRITON = "TRITON_BACKENDS_IN_TREE"
_VALUES = {_PYDANTIC: "__all__", _TRITON: "1"}

#: A directory, and numbers of its state that an installation or removal changes; None if it does not exist.
_Place: TypeAlias = tuple[str, tuple[int, int, int] | None]

#: More than any `entry_points.txt` has.
_LONG = 1 << 16


@contextmanager
def spared() -> Iterator[None]:
    """Skips needless searches during imports.

    Only if no other thread runs, since it might read the environment or start a process that inherits it.
    """
    names = _to_set() if _alone() else ()
    try:
        for name in names:
            os.environ[name] = _VALUES[name]
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def _alone() -> bool:
    return threading.active_count() == 1


def _to_set() -> Sequence[str]:
    """Variables of future searches that would find nothing; those that the user set are left alone."""
    to_come = [name for name in _to_come() if name not in os.environ]
    needless = _needless() if to_come else frozenset()
    return [name for name in to_come if name in needless]


def _to_come() -> Iterator[str]:
    """Variables of the libraries that have not searched yet; each searches once in a process."""
    loader = sys.modules.get("pydantic.plugin._loader")
    if loader is None or getattr(loader, "_plugins", {}) is None:
        yield _PYDANTIC
    if "triton.backends" not in sys.modules:
        yield _TRITON


def _needless() -> frozenset[str]:
    """Variables of the libraries that would find nothing; none if this cannot be decided."""
    try:
        if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
            return frozenset()  # it may know distributions that lie nowhere
        return _would_find_nothing(tuple(_place(path) for path in dict.fromkeys(sys.path)))
    except Exception:  # noqa: BLE001 - the libraries look for themselves, and say what is wrong
        return frozenset()


def _place(path: object) -> _Place:
    if not isinstance(path, str):
        raise TypeError(path)
    path = path or os.curdir
    try:
        found = os.stat(path)  # noqa: PTH116 - a tenth of what `Path` takes, here and below
    except FileNotFoundError:
        return path, None
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(path)  # a zip may hold distributions, too
    return path, (found.st_dev, found.st_ino, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _would_find_nothing(places: tuple[_Place, ...]) -> frozenset[str]:
    """As `_needless`, cached until something is installed or removed.

    Raises:
        Exception: it cannot be decided.
    """
    from importlib.metadata import Distribution

    points = [point for folder in _telling(places) for point in Distribution.at(folder).entry_points]
    backends = {(point.name, point.value) for point in points if point.group == "triton.backends"}
    found = set()
    if all(point.group != "pydantic" for point in points):
        found.add(_PYDANTIC)
    if backends and backends == {(name, f"triton.backends.{name}") for name in _in_tree()}:
        found.add(_TRITON)
    return frozenset(found)


def _telling(places: Sequence[_Place]) -> Iterator[Path]:
    """The folders of distributions that may have entry points of either library."""
    for path, state in places:
        children = os.listdir(path) if state is not None else ()  # noqa: PTH208
        for child in children:
            if child.lower().endswith((".dist-info", "egg-info")):
                text = _read(f"{path}/{child}/entry_points.txt")
                if b"pydantic" in text or b"triton.backends" in text or len(text) >= _LONG:
                    yield Path(path, child)


def _read(path: str) -> bytes:
    """The beginning of a file; empty if `importlib.metadata` would read nothing."""
    try:
        file = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return b""
    try:
        return os.read(file, _LONG)
    except IsADirectoryError:
        return b""
    finally:
        os.close(file)


def _in_tree() -> set[str]:
    """The backends that Triton uses without a search."""
    spec = find_spec("triton")
    if spec is None or not spec.origin:
        return set()
    folder = Path(spec.origin).parent / "backends"
    return {child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("__")}
