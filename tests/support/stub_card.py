"""A card and a compiler that really hang, crash and die, in the tuner's own child processes and without a GPU.

A config says by its parameters what its candidate does: `fault`, such as `gate hang`, and `us`, its time. Parent and
child import this module by one name, as `jobs`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlxgen import devices
from tlxgen.codegen.emit import KernelSource
from tlxgen.config import Config
from tlxgen.errors import CompileError
from tlxgen.tuner.measure import PEER, DeviceReport, Forget, Gate, Measure, Setup, Verdict
from tlxgen.tuner.process import Child

LIMIT_S = 1.0  #: of gate and timing, for those who wait for it
COMPILE_S = 2.0
PEER_US = 100.0

#: Names a folder where children leave their process ids, and where a file `lost` means that the card is gone. A file
#: `hold` names a job, such as `gate` or `timing` with a candidate's id, that leaves a file `held` and does not end.
NOTES = "TLXGEN_STUB_NOTES"


def config(us: int, fault: str = "none") -> Config:
    return Config(template="stub", params={"us": us, "fault": fault})


def healthy(n: int, first_us: int = 120) -> list[Config]:
    return [config(first_us + i) for i in range(n)]


def emit(operator: Any, problem: Any, config: Config) -> KernelSource:
    return KernelSource(operator.name, problem, config, f"CONFIG = {config.short!r}\n")


def notes() -> Path:
    return Path(os.environ[NOTES])


def pids() -> list[int]:
    """Of all children there ever were."""
    return [int(path.name.removeprefix("pid-")) for path in notes().glob("pid-*")]


def gated() -> list[str]:
    """What was gated, in order, by id."""
    log = notes() / "gated"
    return log.read_text().split() if log.exists() else []


def held() -> bool:
    """Whether the job that is to hold has begun."""
    return (notes() / "held").exists()


def _hold(job: str) -> None:
    hold = notes() / "hold"
    if hold.exists() and hold.read_text() == job:
        (notes() / "held").touch()
        _hang()


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


def _hang() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def _die_of(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _abort() -> None:
    sys.stderr.write("LLVM ERROR: an assertion\n")
    os.abort()


def _illegal_access() -> None:
    sys.stdout.write("AcceleratorError: CUDA error: an illegal memory access was encountered\n")
    sys.stdout.flush()
    os._exit(3)


def _lose_the_card() -> None:
    (notes() / "lost").touch()
    os._exit(3)


def _refuse(error: Exception) -> Callable[[], None]:
    def refuse() -> None:
        raise error

    return refuse


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "hang": _hang,
    "abort": _abort,
    "segfault": _die_of(signal.SIGSEGV),
    "killed": _die_of(signal.SIGKILL),
    "ptxas": _refuse(CompileError("ptxas", "ptxas fatal: register allocation failed")),
    "illegal": _illegal_access,
    "memory": _refuse(OutOfMemoryError("tried to allocate 2 TiB")),
    "capture": _refuse(RuntimeError("operation not permitted when stream is capturing")),
    "lost": _lose_the_card,
}


def _act(config: Config, phase: str) -> None:
    (notes() / f"pid-{os.getpid()}").touch()
    where, _, what = str(config.params["fault"]).partition(" ")
    if where == phase:
        FAULTS[what]()


@dataclass(frozen=True)
class Compile:
    """Stands in for `CompileJob`."""

    source: KernelSource
    capability: tuple[int, int]
    simulate: bool

    def __call__(self) -> None:
        _act(self.source.config, "compile")


_known: dict[str, Config] = {}


@dataclass(frozen=True)
class OnCard:
    """Answers a job of `tlxgen.tuner.measure` in the child."""

    job: Any

    def __call__(self) -> Any:
        job = self.job
        if isinstance(job, Setup):
            (notes() / f"pid-{os.getpid()}").touch()
            if (notes() / "lost").exists():
                raise RuntimeError("CUDA error: no CUDA-capable device is detected")
            return DeviceReport(devices.target("h200"), {"torch": "none"}, 1e-3, PEER_US)
        if isinstance(job, Gate):
            with (notes() / "gated").open("a") as log:
                log.write(f"{job.name}\n")
            time.sleep(0.02)
            _hold(f"gate {job.name}")
            _act(job.source.config, "gate")
            _known[job.name] = job.source.config
            return Verdict("ok", error=1e-3, launch_us=1.0)
        if isinstance(job, Measure):
            for name in job.names:
                _hold(f"timing {name}")
                _act(_known[name], "timing")
            times = {name: float(_known[name].params["us"]) for name in job.names} | {PEER: PEER_US}
            return {name: [time_us] * job.rounds for name, time_us in times.items()}
        assert isinstance(job, Forget)
        return None


class StubChild(Child):
    """A real process that thinks it has a card."""

    def call(self, job: Callable[[], Any], timeout: float) -> Any:
        return super().call(OnCard(job), timeout)


def install(patch: Callable[[Any, str, Any], None], configs: Sequence[Config]) -> None:
    """Puts card, compiler and candidates in the tuner's way; `patch` is `setattr` or a monkeypatch's."""
    from tlxgen.tuner import card, compile_pool, state, tune  # here, for children do without and start in half the time
    from tlxgen.tuner.card import Card
    from tlxgen.tuner.compile_pool import CompilePool

    patch(tune, "Card", lambda name, problem, seed, limit: Card(name, problem, seed, limit, child=StubChild()))
    patch(state, "CompilePool", functools.partial(CompilePool, timeout=COMPILE_S))
    patch(tune, "candidates", lambda *_: list(configs))
    patch(tune, "emit", emit)
    patch(compile_pool, "CompileJob", Compile)
    patch(card, "_PAUSES", (0.0, 0.0))
    patch(os, "cpu_count", lambda: 2)  # the size of a batch


def command(folder: Path, n: int, fault: str) -> None:
    """`tlxgen`, as a process of its own on a machine with such a card; words from `sys.argv`.

    There are `n` healthy candidates, and one more if there is to be a fault.
    """
    from tlxgen import paths
    from tlxgen.cli import app
    from tlxgen.cli import tune as tuning_cli
    from tlxgen.tuner import gpu_lock

    install(setattr, [*healthy(n), *([] if fault == "none" else [config(50, fault)])])
    vars(devices).update(detect=lambda *_: devices.target("h200"), uuid=lambda: "stub")
    vars(gpu_lock).update(other_processes=lambda *_: 0, exclusive=functools.partial(gpu_lock.exclusive, folder=folder))
    vars(paths).update(SHIPPED_CACHE=folder / "nothing-shipped")
    vars(tuning_cli).update(require_tlx=lambda: None)
    app.main()
