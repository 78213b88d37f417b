"""Paths of shipped files and of the user's cache; `write_atomically`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).parent


def _shipped(folder: str) -> Path:
    """A folder of the project: inside the package in a wheel, beside it in a source tree."""
    installed = _PACKAGE / "_shipped" / folder
    return installed if installed.is_dir() else _PACKAGE.parent / folder


TEMPLATES = _shipped("templates")
SEARCH_SPACES = _shipped("search_spaces")
SHIPPED_CACHE = _shipped("cache")
SUITES = _shipped("benchmarks/suites")


def in_operator_folder(root: Path, name: str) -> Path | None:
    """The file of this name in one of the operators' folders of `TEMPLATES` or `SEARCH_SPACES`; None if there is none.

    A template's name is unique among all operators, so the name alone finds its file.
    """
    try:
        folders = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    except OSError:
        return None
    return next((Path(path) for folder in folders if os.path.isfile(path := f"{folder}/{name}")), None)  # noqa: PTH113 - part of every first launch, and faster


def user_cache_dir() -> Path:
    """The user's cache directory: emitted kernels, and the database unless `TLXGEN_CACHE` names another place.

    It is created by the first writer.
    """
    return Path(platformdirs.user_cache_dir("tlxgen"))


def database_path() -> Path:
    """The tuned-config database: `TLXGEN_CACHE` (a file, or a directory to hold `tuned.db`) or the user's cache."""
    override = os.environ.get("TLXGEN_CACHE")
    if not override:
        return user_cache_dir() / "tuned.db"
    path = Path(override).expanduser()
    return path / "tuned.db" if path.is_dir() else path


def kernel_dir() -> Path:
    """Directory of emitted kernels."""
    return user_cache_dir() / "kernels"


def write_atomically(path: Path, text: str, *, make_folder: bool = True) -> None:
    """Writes a file atomically, and creates its folder.

    Raises:
        OSError: it cannot be written.
    """
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
