"""One tuner on a GPU at a time, and a look at who else is there."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Seconds that the driver's figure of a GPU's load looks back, and some more.
_WINDOW_S = 1.5


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
    return len(_answer(gpu, "--query-compute-apps=pid"))


def load(gpu: str, settle: float = _WINDOW_S) -> int:
    """Percent of the last second in which something ran on the GPU; 0 where the driver cannot be asked.

    Waits first, so that what the caller did before is not in it.
    """
    time.sleep(settle)
    words = _answer(gpu, "--query-gpu=utilization.gpu")
    return int(words[0]) if words and words[0].isdecimal() else 0


def _answer(gpu: str, query: str) -> list[str]:
    """The driver's words; none where it does not answer."""
    command = ["nvidia-smi", "-i", f"GPU-{gpu}", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
