"""One tuner per GPU, and how much other processes use it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tlxgen.tuner import nvml

#: Seconds that the driver's figure of a GPU's load looks back, and some more.
_WINDOW_S = 1.5


@contextmanager
def exclusive(gpu: str, log: Callable[[str], None], folder: Path | None = None) -> Iterator[None]:
    """Holds the lock of the GPU with this UUID; while another tuner holds it, waits, and says so through `log`.

    The lock ends with the process that holds it. Its file is shared by all users of the machine.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"tlxgen-gpu-{gpu}.lock"
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log(f"another tlxgen is measuring on this GPU ({path}); waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def other_processes(gpu: str) -> int:
    """How many processes compute on the GPU with this UUID; 0 if the driver does not answer."""
    return len(nvml.ask(lambda driver: driver.nvmlDeviceGetComputeRunningProcesses(_handle(driver, gpu))) or ())


def load(gpu: str, settle: float = _WINDOW_S) -> int:
    """Percent of the last second in which the GPU was busy; 0 if the driver does not answer.

    Waits `settle` seconds first, so that the caller's own work is not counted.
    """
    time.sleep(settle)
    return nvml.ask(lambda driver: int(driver.nvmlDeviceGetUtilizationRates(_handle(driver, gpu)).gpu)) or 0


def _handle(driver: Any, gpu: str) -> Any:
    return driver.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}")
