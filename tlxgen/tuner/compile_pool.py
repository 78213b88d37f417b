"""Parallel compilation and simulation of candidates in child processes, which may crash or hang without harm."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tlxgen.codegen.compile import Binary, compile_candidate
from tlxgen.codegen.emit import KernelSource
from tlxgen.devices import Gpu
from tlxgen.errors import CompileError
from tlxgen.simulator.verdicts import why_unsafe
from tlxgen.tuner.process import Child, ChildDiedError, ChildTimeoutError

#: No CUDA context: the GPU belongs to the process that measures. One thread: there is a child for each core.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class CompileJob:
    """Compiles one source, and simulates it if asked to; runs in a child."""

    source: KernelSource
    capability: tuple[int, int]
    simulate: bool

    def __call__(self) -> Binary:
        """See `compile_candidate`.

        Raises:
            CompileError: also of kind `unsafe`: the simulator finds a deadlock, a race or a wrong result.
        """
        binary = compile_candidate(self.source, self.capability)
        reason = why_unsafe(self.source) if self.simulate else None
        if reason:
            raise CompileError("unsafe", f"simulator: {reason}")
        return binary


class CompilePool(AbstractContextManager["CompilePool"]):
    """Compiles sources in `workers` children (default: one per core), with a limit of `timeout` seconds per source.

    With `simulate`, each binary has also passed the simulator and may be launched.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        workers: int | None = None,
        timeout: float = 60.0,
        *,
        simulate: bool = False,
    ) -> None:
        self._capability = capability
        self._simulate = simulate
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="compile")
        self._local = threading.local()
        self._children: list[Child] = []

    def submit(self, source: KernelSource) -> Future[Binary]:
        """The binary's future; its exception is a CompileError, or a bug of tlxgen."""
        return self._threads.submit(self._compile, source)

    def close(self) -> None:
        """Cancels what has not begun and kills the children."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.kill()
        self._threads.shutdown(wait=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compile(self, source: KernelSource) -> Binary:
        child: Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = Child(_ENVIRONMENT)
            self._children.append(child)
        try:
            return child.call(CompileJob(source, self._capability, self._simulate), self._timeout)
        except ChildTimeoutError as error:
            raise CompileError("timeout", f"compilation: {error}") from None
        except ChildDiedError as error:
            raise CompileError("killed" if error.killed else "compiler_crash", str(error)) from None


def given_or_new(pool: CompilePool | None, gpu: Gpu, workers: int | None) -> AbstractContextManager[CompilePool]:
    """A context with the caller's pool, which stays open, or with a new one that also simulates."""
    return CompilePool(gpu.capability, workers, simulate=True) if pool is None else nullcontext(pool)
