"""A card of nothing but a CPU, for `tlxgen.tuner.measure` itself: gate and timing run as they are, on kernels that lie.

What stands in for a kernel is a module whose `run` does to its tensors what a kernel would do. Time is virtual: a
kernel takes what its `time_us` says. Parent and child import this module by one name, as `jobs`.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from tlxgen import devices
from tlxgen.codegen.emit import KernelSource
from tlxgen.config import Config
from tlxgen.tuner import measure
from tlxgen.tuner.process import Child

PEER_US = 10.0

#: By operator: the tensors of a call, a right kernel, and what stands for its output.
_CALLS = {"vector_add": ("x, y, out", "out.copy_(x + y)"), "gemm": ("a, b, c", "c.copy_(a.float() @ b.float())")}


@dataclass
class Card:
    """The state of the card that there is not."""

    now_us: float = 0.0
    poisoned: bool = False
    after_sync: bool = False
    drift: float = 0.0  #: by so much everything is slower with every microsecond
    cold: float = 0.0  #: and by so much what comes first after a synchronisation

    def spend(self, us: float) -> None:
        self.now_us += us * (1 + self.drift * self.now_us) * (1 + self.cold * self.after_sync)
        self.after_sync = False

    def synchronize(self) -> None:
        self.after_sync = True
        if self.poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fault(self) -> None:
        """What an illegal access does: nothing works any more, from the next synchronisation on."""
        self.poisoned = True


card = Card()


def _synchronize() -> None:
    card.synchronize()


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self.us = 0.0

    def record(self) -> None:
        self.us = card.now_us

    def elapsed_time(self, later: Event) -> float:
        return (later.us - self.us) * 1e-3


class Launcher:
    slim = False

    def __init__(self, module: Any, args: Any, capability: tuple[int, int]) -> None:
        self.module = module

    def __call__(self, grid: Any, stream: int, args: Any) -> None:
        card.spend(self.module.time_us(*args))
        self.module.run(*args)


def _capture(session: measure.Session, candidate: Any) -> None:
    """In place of a CUDA graph: a list of calls."""
    candidate.launches = 2

    def replay() -> None:
        for i in range(2):
            if candidate.library is not None:
                card.spend(PEER_US)
            else:
                measure._launch(candidate, i)

    candidate.graph = SimpleNamespace(replay=replay)


def install(patch: Callable[[Any, str, Any], None]) -> None:
    """Puts the card where torch would look for one; `patch` is `setattr` or a monkeypatch's."""
    import torch

    from tlxgen.runtime import launch

    patch(torch.cuda, "synchronize", _synchronize)
    patch(torch.cuda, "Event", Event)
    patch(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    patch(launch, "Launcher", Launcher)
    patch(measure, "_DEVICE", "cpu")
    patch(measure, "_capture", _capture)
    patch(measure, "_WARM_UP_S", 0.0)
    patch(devices, "detect", lambda *_: replace(devices.target("h200"), l2_bytes=0))


_installed = False


@dataclass(frozen=True)
class OnDevice:
    """Runs a job of `tlxgen.tuner.measure` in a child that has such a card."""

    job: Any

    def __call__(self) -> Any:
        global _installed  # noqa: PLW0603 - once a process
        if not _installed:
            install(setattr)
            _installed = True
        return self.job()


class DeviceChild(Child):
    """A real process that thinks it has a card."""

    def call(self, job: Callable[[], Any], timeout: float) -> Any:
        return super().call(OnDevice(job), timeout)


def source(problem: Any, body: str | None = None, time_us: str = "5.0") -> KernelSource:
    """A kernel that does what `body` says, by default the right thing."""
    tensors, right = _CALLS[problem.operator]
    text = f"""\
import torch
import stub_device

calls = 0


def arguments({tensors}, num_sms):
    return (1, 1, 1), ({tensors})


def time_us({tensors}):
    return {time_us}


def run({tensors}):
    global calls
    calls += 1
{textwrap.indent(right if body is None else body, "    ")}
"""
    name = hashlib.sha256(text.encode()).hexdigest()  # configs of different texts differ
    return KernelSource(problem.operator, problem, Config(template="stub", params={"text": name}), text)
