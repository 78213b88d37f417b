"""Many candidates compiled at once, each in a process that may crash or hang without harm."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from tlxgen.compile import Binary, compile_candidate
from tlxgen.emit import KernelSource
from tlxgen.errors import CompileError
from tlxgen.process import Child, ChildDiedError, ChildTimeoutError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class CompileJob:
    """Compiles one source; runs in a child."""

    source: KernelSource
    capability: tuple[int, int]

    def __call__(self) -> Binary:
        """See `compile_candidate`."""
        return compile_candidate(self.source, self.capability)


class CompilePool:
    """Compiles sources in `workers` children (default: one a core), each under a limit of `timeout` seconds."""

    def __init__(self, capability: tuple[int, int], workers: int | None = None, timeout: float = 60.0) -> None:
        self._capability = capability
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="compile")
        self._local = threading.local()
        self._children: list[Child] = []

    def submit(self, source: KernelSource) -> Future[Binary]:
        """The binary to come; its exception is a CompileError, or a bug of tlxgen."""
        return self._threads.submit(self._compile, source)

    def map(self, sources: Iterable[KernelSource]) -> list[Future[Binary]]:
        """One future for each source, in order."""
        return [self.submit(source) for source in sources]

    def close(self) -> None:
        """Drops what has not begun and ends the children."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.kill()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _compile(self, source: KernelSource) -> Binary:
        child: Child | None = getattr(self._local, "child", None)
        if child is None:
            # No CUDA context: the card belongs to the process that measures.
            child = self._local.child = Child({"CUDA_VISIBLE_DEVICES": ""})
            self._children.append(child)
        try:
            return child.call(CompileJob(source, self._capability), self._timeout)
        except ChildTimeoutError as error:
            raise CompileError("timeout", f"compilation: {error}") from None
        except ChildDiedError as error:
            raise CompileError("compiler_crash", str(error)) from None
