"""Tuning that a running program asks for: once for each problem, however many threads and processes ask for it."""

from __future__ import annotations

from tlxgen import devices, gpu_lock, plans
from tlxgen.devices import Gpu
from tlxgen.errors import GpuLostError, LaunchError, TuningError
from tlxgen.problem import Problem
from tlxgen.runtime import CACHES
from tlxgen.staleness import is_tuned
from tlxgen.store import Store
from tlxgen.tune import tune
from tlxgen.tuning import Budget

#: Problems for which no candidate worked in this process, and why: they would take two minutes at every call.
_FAILED: dict[tuple[Problem, Gpu], str] = {}
CACHES.append(_FAILED)


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
