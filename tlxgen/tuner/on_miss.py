"""Tuning that a running program asks for: once for each problem, however many threads and processes ask for it."""

from __future__ import annotations

from tlxgen import devices, toolchain
from tlxgen.db.store import Store
from tlxgen.db.validity import is_tuned
from tlxgen.devices import Gpu
from tlxgen.errors import GpuLostError, LaunchError, TuningError
from tlxgen.problem import Problem
from tlxgen.runtime import kernel, plans
from tlxgen.runtime.caches import CACHES
from tlxgen.runtime.selection import HOPPER
from tlxgen.tuner import gpu_lock
from tlxgen.tuner.state import Budget
from tlxgen.tuner.tune import tune

#: Problems for which no candidate worked in this process, and why: they would take two minutes at every call.
_FAILED: dict[tuple[Problem, Gpu], str] = {}
CACHES.append(_FAILED)


def tune_here(problem: Problem) -> None:
    """Tunes the problem if the current device can, and has the next look-up find the row.

    Raises:
        LaunchError: a CUDA graph is captured.
        TuningError: no candidate works, now or when this process last tried.
    """
    gpu = _tunable(problem)
    if gpu is not None:
        tune_once(problem, gpu)
        kernel.look_again()


def _tunable(problem: Problem) -> Gpu | None:
    """The GPU that the problem can be tuned on here and now."""
    gpu = devices.detect()
    able = gpu is not None and gpu.capability == HOPPER and toolchain.has_tlx() and not problem.empty
    return gpu if able else None


def tune_once(problem: Problem, gpu: Gpu) -> None:
    """Tunes the problem, alone on the current GPU among tuners, unless somebody has meanwhile.

    Raises:
        LaunchError: a CUDA graph is captured.
        TuningError: no candidate works, now or when this process last tried.
    """
    if plans.is_capturing():
        raise LaunchError(f"{problem.label}: tuning would break the capture of this CUDA graph; tune before capturing")
    _refuse_what_failed(problem, gpu)
    uuid = devices.uuid()
    with Store.open(read_only_ok=False) as store, gpu_lock.exclusive(uuid, lambda _: None):
        _refuse_what_failed(problem, gpu)  # while this thread waited for another
        if is_tuned(problem, gpu, store):
            return
        try:
            tune(problem, store, budget=Budget(), neighbours=lambda: gpu_lock.other_processes(uuid))
        except GpuLostError:
            raise
        except TuningError as error:
            _FAILED[problem, gpu] = str(error)
            raise


def _refuse_what_failed(problem: Problem, gpu: Gpu) -> None:
    why = _FAILED.get((problem, gpu))
    if why is not None:
        raise TuningError(f"{why} (as this process found before)")
