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
def exclusive(tell: Callable[[str], None], folder: Path | None = None) -> Iterator[None]:
    """Holds the lock of the visible GPU; waits for another tuner and says so.

    The lock ends with the process that holds it, however it ends.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-") or "none"
    path = (folder or Path(tempfile.gettempdir())) / f"tlxgen-gpu-{visible}.lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another tlxgen is measuring on this GPU ({path}); waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def other_processes() -> int:
    """Processes that compute on the GPUs now, by the driver's count; 0 where it cannot be asked."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(answer.split())
