"""Tuning from a running program (`on_miss="tune"`): once per problem for all threads and processes."""

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
from tlxgen.tuner.result import Budget
from tlxgen.tuner.tune import tune

#: Problems without a working candidate, and why: trying again would take two minutes at every call.
_FAILED: dict[tuple[Problem, Gpu], str] = {}
CACHES.append(_FAILED)


def tune_here(problem: Problem) -> None:
    """Tunes the problem if the current device can run TLX kernels; the next look-up finds the row.

    Raises:
        LaunchError: a CUDA graph is captured.
        TuningError: no candidate works, now or when this process tried before.
    """
    gpu = _tunable(problem)
    if gpu is not None:
        tune_once(problem, gpu)
        kernel.look_again()


def _tunable(problem: Problem) -> Gpu | None:
    """The current GPU; None if the problem cannot be tuned on it."""
    gpu = devices.detect()
    able = gpu is not None and gpu.capability == HOPPER and toolchain.has_tlx() and not problem.empty
    return gpu if able else None


def tune_once(problem: Problem, gpu: Gpu) -> None:
    """Tunes the problem under the GPU's lock, unless another thread or process has done so meanwhile.

    Raises:
        LaunchError: a CUDA graph is captured.
        TuningError: no candidate works, now or when this process tried before.
    """
    if plans.is_capturing():
        raise LaunchError(f"{problem.label}: tuning would break the capture of this CUDA graph; tune before capturing")
    _refuse_failed(problem, gpu)
    uuid = devices.uuid()
    with Store.open(read_only_ok=False) as store, gpu_lock.exclusive(uuid, lambda _: None):
        _refuse_failed(problem, gpu)  # in another thread meanwhile
        if is_tuned(problem, gpu, store):
            return
        try:
            tune(problem, store, budget=Budget(), gpu_processes=lambda: gpu_lock.other_processes(uuid))
        except GpuLostError:
            raise
        except TuningError as error:
            _FAILED[problem, gpu] = str(error)
            raise


def _refuse_failed(problem: Problem, gpu: Gpu) -> None:
    why = _FAILED.get((problem, gpu))
    if why is not None:
        raise TuningError(f"{why} (as this process found before)")
