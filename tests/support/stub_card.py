"""Stub GPUs for the tuner's own child processes; tests import this module by one name in parents and children.

- `StubChild` answers the tuner's jobs from parameters of each config: `us`, its time, and `fault`, such as `gate hang`,
  which the process really does. `install` puts it into the tuner, with a compiler that fails in the same way.
- `CpuChild` runs the jobs of `tlxgen.tuner.measure` unchanged, on the CPU and in virtual time, over `cpu_kernel`s.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tlxgen import devices
from tlxgen.codegen.emit import KernelSource
from tlxgen.config import Config
from tlxgen.errors import CompileError
from tlxgen.tuner import measure
from tlxgen.tuner.measure import PEER, DeviceReport, Forget, Gate, Measure, Setup, Verdict
from tlxgen.tuner.process import Child

LIMIT_S = 1.0  #: of gate and timing
COMPILE_S = 2.0
PEER_US = 100.0

# ---- StubChild: hangs, crashes and errors by config, without a GPU and without torch --------------------------------

#: Environment variable with a folder where children leave their process ids. There a file `lost` means that the GPU is
#: gone, and a file `hold` names a job, such as `gate` or `timing` with a candidate's id, that writes `held` and hangs.
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
    """Process ids of all children so far."""
    return [int(path.name.removeprefix("pid-")) for path in notes().glob("pid-*")]


def gated() -> list[str]:
    """Ids of the configs that were gated, in order."""
    log = notes() / "gated"
    return log.read_text().split() if log.exists() else []


def held() -> bool:
    """Whether the job that `hold` names has begun."""
    return (notes() / "held").exists()


def _hold(job: str) -> None:
    hold = notes() / "hold"
    if hold.exists() and hold.read_text() == job:
        (notes() / "held").touch()
        _hang()


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def _hang() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def _abort() -> None:
    sys.stderr.write("LLVM ERROR: an assertion\n")
    os.abort()


def _illegal_access() -> None:
    sys.stdout.write("AcceleratorError: CUDA error: an illegal memory access was encountered\n")
    sys.stdout.flush()
    os._exit(3)


def _lose_gpu() -> None:
    (notes() / "lost").touch()
    os._exit(3)


def _raise(error: Exception) -> None:
    raise error


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "hang": _hang,
    "abort": _abort,
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "ptxas": lambda: _raise(CompileError("ptxas", "ptxas fatal: register allocation failed")),
    "illegal": _illegal_access,
    "memory": lambda: _raise(OutOfMemoryError("tried to allocate 2 TiB")),
    "capture": lambda: _raise(RuntimeError("operation not permitted when stream is capturing")),
    "lost": _lose_gpu,
}


def _act(config: Config, phase: str) -> None:
    (notes() / f"pid-{os.getpid()}").touch()
    where, _, what = str(config.params["fault"]).partition(" ")
    if where == phase:
        FAULTS[what]()


@dataclass(frozen=True)
class Compile:
    """Replaces `CompileJob`."""

    source: KernelSource
    capability: tuple[int, int]
    simulate: bool

    def __call__(self) -> None:
        _act(self.source.config, "compile")


_known: dict[str, Config] = {}


def _answer(job: Any) -> Any:
    """Answers a job of `tlxgen.tuner.measure` in the child."""
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
    """A real process whose jobs are answered by config."""

    def call(self, job: Callable[[], Any], timeout: float) -> Any:
        return super().call(functools.partial(_answer, job), timeout)


def install(patch: Callable[[Any, str, Any], None], configs: Sequence[Config]) -> None:
    """Replaces GPU, compiler and candidates of the tuner; `patch` is `setattr` or a monkeypatch's."""
    from tlxgen.tuner import compile_pool, runner, tune  # here: children start in half the time without them

    pool, make = compile_pool.CompilePool, runner.Runner
    patch(tune, "Runner", lambda name, problem, seed, limit: make(name, problem, seed, limit, child=StubChild()))
    patch(compile_pool, "CompilePool", functools.partial(pool, timeout=COMPILE_S))
    patch(tune, "candidates", lambda *_: list(configs))
    patch(tune, "emit", emit)
    patch(compile_pool, "CompileJob", Compile)
    patch(runner, "_PAUSES", (0.0, 0.0))
    patch(os, "cpu_count", lambda: 2)  # the size of a batch


def command(folder: Path, n: int, fault: str) -> None:
    """`tlxgen`, as a process of its own on a machine with a stub GPU; words from `sys.argv`.

    There are `n` healthy candidates, and one with the fault unless that is `none`.
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


# ---- CpuChild: gate and timing on the CPU, in virtual time ----------------------------------------------------------

CPU_PEER_US = 10.0

#: By operator: the tensors of a call, and a right kernel.
_CALLS = {"vector_add": ("x, y, out", "out.copy_(x + y)"), "gemm": ("a, b, c", "c.copy_(a.float() @ b.float())")}


@dataclass
class VirtualGpu:
    """Clock and state of the GPU."""

    now_us: float = 0.0
    poisoned: bool = False
    after_sync: bool = False
    drift: float = 0.0  #: slowdown per microsecond
    cold: float = 0.0  #: slowdown of what comes first after a synchronisation

    def spend(self, us: float) -> None:
        self.now_us += us * (1 + self.drift * self.now_us) * (1 + self.cold * self.after_sync)
        self.after_sync = False

    def synchronize(self) -> None:
        self.after_sync = True
        if self.poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fault(self) -> None:
        """An illegal access: every synchronisation fails from now on."""
        self.poisoned = True


gpu = VirtualGpu()


class _Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self.us = 0.0

    def record(self) -> None:
        self.us = gpu.now_us

    def elapsed_time(self, later: _Event) -> float:
        return (later.us - self.us) * 1e-3


class _Launcher:
    slim = False

    def __init__(self, module: Any, args: Any, capability: tuple[int, int]) -> None:
        self.module = module

    def __call__(self, grid: Any, stream: int, args: Any) -> None:
        gpu.spend(self.module.time_us(*args))
        self.module.run(*args)


def _capture(candidate: Any, sets: int) -> None:
    """A list of calls in place of a CUDA graph."""
    candidate.launches = 2

    def replay() -> None:
        for call in candidate.calls[:2]:
            call()
            if call.func is not measure._launch:
                gpu.spend(CPU_PEER_US)

    candidate.graph = SimpleNamespace(replay=replay)


def install_cpu(patch: Callable[[Any, str, Any], None]) -> None:
    """Replaces the GPU for `tlxgen.tuner.measure` in this process; `patch` is `setattr` or a monkeypatch's."""
    import torch

    from tlxgen.runtime import launch

    patch(torch.cuda, "synchronize", lambda: gpu.synchronize())  # noqa: PLW0108 - tests replace `gpu`
    patch(torch.cuda, "Event", _Event)
    patch(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    patch(launch, "Launcher", _Launcher)
    patch(measure, "_DEVICE", "cpu")
    patch(measure._Candidate, "capture", _capture)
    patch(measure, "_WARM_UP_S", 0.0)
    patch(devices, "detect", lambda *_: replace(devices.target("h200"), l2_bytes=0))


@functools.cache
def _install_once() -> None:
    install_cpu(setattr)


def _run_on_cpu(job: Callable[[], Any]) -> Any:
    _install_once()
    return job()


class CpuChild(Child):
    """A real process that runs the tuner's jobs on the CPU."""

    def call(self, job: Callable[[], Any], timeout: float) -> Any:
        return super().call(functools.partial(_run_on_cpu, job), timeout)


def cpu_kernel(problem: Any, body: str | None = None, time_us: str = "5.0") -> KernelSource:
    """A module in place of a kernel, which does what `body` says, by default the right thing, and takes `time_us`."""
    tensors, right = _CALLS[problem.operator]
    text = f"""\
import torch
import stub_card

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
    name = hashlib.sha256(text.encode()).hexdigest()  # different texts have different configs
    return KernelSource(problem.operator, problem, Config(template="stub", params={"text": name}), text)
