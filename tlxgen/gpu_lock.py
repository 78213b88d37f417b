"""One tuner on a GPU at a time, and a look at who else is there."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(gpu: str, tell: Callable[[str], None], folder: Path | None = None) -> Iterator[None]:
    """Holds the lock of the GPU with this UUID; waits for another tuner and says so.

    The lock ends with the process that holds it, however it ends.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"tlxgen-gpu-{gpu}.lock"
    with os.fdopen(_opened(path)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another tlxgen is measuring on this GPU ({path}); waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(path: Path) -> int:
    """The lock file, which is for all users of the machine."""
    try:
        return os.open(path, os.O_RDWR)  # no O_CREAT: Linux refuses it for another user's file in /tmp
    except FileNotFoundError:
        before = os.umask(0)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        finally:
            os.umask(before)


def other_processes(gpu: str) -> int:
    """Processes that compute on the GPU with this UUID now, by the driver's count; 0 where it cannot be asked."""
    command = ["nvidia-smi", "-i", f"GPU-{gpu}", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(answer.split())
