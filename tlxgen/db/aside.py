"""Moving a damaged database file aside, safely for other processes that use it.

Renaming a database under a process that has it open is dangerous: that process goes on to delete the journal of the
file that took its place (https://sqlite.org/howtocorrupt.html, section 2.4). So a file is moved only if SQLite's
own lock shows that no process has it open, and by one process at a time.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO

#: The bytes that SQLite locks: pending, reserved and shared (https://sqlite.org/src/file/src/os.h). A connection in WAL
#: mode holds a shared one from its first read to its end.
_LOCKED_FROM = 0x40000000
_LOCKED_BYTES = 512

_PATIENCE_S = 1.0

#: Suffixes of SQLite's files beside a database. Left behind, they would be applied to the new file.
_COMPANIONS = ("-journal", "-wal", "-shm")


def size(path: Path) -> int | None:
    """Bytes of a regular file; None for no file, a device or a folder."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether no other process is in this block for the same folder; False if the file system has no locks."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(handle)


def move(path: Path) -> Path | None:
    """Renames a database and its journal files; returns the new path, or None if it is in use or cannot be moved."""
    path = path.resolve()
    try:
        with path.open("r+b") as file:
            _take_lock(file)
            place = _free(path)
            for companion in _COMPANIONS:  # first: a kill in between must not leave them to the new file
                beside = Path(f"{path}{companion}")
                if beside.exists():
                    beside.rename(f"{place}{companion}")
            path.rename(place)
    except OSError:
        return None
    return place


def _take_lock(file: BinaryIO) -> None:
    """Takes SQLite's lock, waiting for processes that only read.

    Raises:
        OSError: another process holds it, or the file system has no locks.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while not _locked(file):
        if time.monotonic() > deadline:
            raise BlockingIOError(f"{file.name} is in use")
        time.sleep(0.01)


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _LOCKED_BYTES, _LOCKED_FROM)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    return True


def _free(path: Path) -> Path:
    """An unused name in the file's folder."""
    names = (path.with_name(f"{path.name}.aside-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
