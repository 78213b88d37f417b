"""Checking and timing on the GPU: the jobs of the child process that owns the card.

Protocol (`PROTOCOL` names its version; times of different versions are not compared):

- Input sets are rotated so that what a launch reads is not in L2 from the launch before (but for the smallest
  problems: at most 96 sets are kept, which L2 may hold if a set has less than 0.5 MB).
- Each candidate is a CUDA graph of several launches; an event pair around one replay gives one sample, so host time is
  not in it.
- Rounds start once the card has been busy for a while. A cool card runs at its highest clock for some 100 ms, until it
  meets its power limit, and the two states rank kernels differently; times are those of the second, which lasts.
- A round replays every candidate and the peer once; the order is reversed each round, so that a card that slows down
  slows them alike. A dummy stands first and last: what is timed next to a synchronisation reads 2 to 19 % slow.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tlxgen import devices, ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import KernelSource
from tlxgen.devices import Gpu
from tlxgen.errors import UnsupportedDeviceError
from tlxgen.ops import accuracy
from tlxgen.problem import Problem

if TYPE_CHECKING:
    import torch

PROTOCOL = "graph-2"

#: The peer among the names of one measurement.
PEER = "peer"

#: Where candidates run; the tests put a stand-in for a card on the CPU.
_DEVICE = "cuda"

# One replay takes about this long (96 launches at most), so that the events' resolution of 0.5 us does not matter.
_SAMPLE_US = 400.0
_MAX_LAUNCHES = 96
_WARM_UP_S = 0.3
_PEER_ROUNDS = 9
_REPEATS = 4  # launches whose results must agree bit by bit
_GUARD = 4096  # elements before and after the output that nobody may touch
_GUARD_VALUE = 7.0


@dataclass(frozen=True)
class DeviceReport:
    """What the card and the peer are like."""

    gpu: Gpu
    versions: dict[str, str]
    peer_error: float
    peer_us: float
    peer_launch_us: float | None = None  #: one rough look, as at a candidate in its gate


@dataclass(frozen=True)
class Verdict:
    """What the accuracy gate found: `status` is `ok` or a `TrialStatus` of failure."""

    status: str
    message: str = ""
    error: float | None = None
    launch_us: float | None = None  #: one rough look, to size the graph


@dataclass
class _Candidate:
    """A kernel that passed the gate, with its arguments for every input set; or a library's function."""

    launcher: Any
    calls: list[tuple[tuple[int, int, int], tuple[Any, ...]]]
    launch_us: float
    library: Callable[..., Any] | None = None  #: takes inputs and output
    graph: Any = None
    launches: int = 0


@dataclass
class Session:
    """The state that the jobs of one child share: inputs, what they should give, and the candidates that did."""

    operator: Any
    problem: Problem
    sets: list[tuple[dict[str, Any], Any]]
    reference: Any
    library: Any
    beside: dict[str, Any]  #: references of what candidates write into tensors that the call brings
    untouched: dict[str, Any]  #: copies of the inputs of set 0, which nobody may change
    guarded: Any
    num_sms: int
    capability: tuple[int, int]
    candidates: dict[str, _Candidate] = field(default_factory=dict)
    guests: tuple[str, ...] = ()  #: other libraries among the candidates, timed whenever something is

    @staticmethod
    def current() -> Session:
        """The one that `Setup` made in this process."""
        assert _session is not None, "Setup must be the first job"
        return _session

    def warm_up(self, names: list[str]) -> None:
        """Keeps the card busy with what is to be timed, until its clock has settled."""
        import torch

        for name in names:
            _capture(self, self.candidates[name])
        until = time.perf_counter() + _WARM_UP_S
        while time.perf_counter() < until:
            for name in names:
                self.candidates[name].graph.replay()
            torch.cuda.synchronize()

    def replay(self, name: str) -> tuple[Any, Any]:
        """Replays a captured candidate; the events before and after it."""
        start, stop = _events()
        start.record()
        self.candidates[name].graph.replay()
        stop.record()
        return start, stop

    def sample_us(self, name: str, events: tuple[Any, Any]) -> float:
        """Microseconds of one launch between two events that the card has passed."""
        start, stop = events
        return float(start.elapsed_time(stop)) * 1e3 / self.candidates[name].launches


_session: Session | None = None


@dataclass(frozen=True)
class Setup:
    """Makes inputs, reference and peer; the first job of a child."""

    operator: str
    problem: Problem
    seed: int

    def __call__(self) -> DeviceReport:
        """The card's report."""
        import torch

        global _session  # noqa: PLW0603 - jobs of one process share the card
        _session = None  # what an earlier problem held is free before this one asks for memory
        operator = ops.get(self.operator)
        gpu = devices.detect()
        if gpu is None:
            raise UnsupportedDeviceError("measuring needs a CUDA GPU, and torch sees none here")
        torch.backends.cuda.matmul.allow_tf32 = True  # the peer of an fp32 problem, which is computed through TF32
        per_set = operator.bytes_moved(self.problem)
        count = max(2, min(_MAX_LAUNCHES, math.ceil(3 * gpu.l2_bytes / per_set)))
        sets = []
        for i in range(count):
            inputs = operator.inputs(self.problem, _DEVICE, self.seed + i)
            sets.append((inputs, operator.output(self.problem, inputs)))
        inputs, output = sets[0]
        guarded = torch.full((output.numel() + 2 * _GUARD,), _GUARD_VALUE, dtype=output.dtype, device=_DEVICE)
        library = operator.eager(self.problem, inputs, torch.empty_like(output)).clone()
        reference = operator.reference(self.problem, inputs)
        beside = operator.side_outputs(self.problem, inputs)
        untouched = {
            name: value.clone()
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and name not in beside
        }
        _session = Session(
            operator, self.problem, sets, reference, library, beside, untouched, guarded, gpu.sm_count, gpu.capability
        )
        _session.candidates[PEER] = _library(_session, functools.partial(operator.timed_peer, self.problem))
        peer_us = statistics.median(Measure((), _PEER_ROUNDS)()[PEER])
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "driver": _driver_version()}
        rough_us = _session.candidates[PEER].launch_us
        return DeviceReport(gpu, versions, accuracy.error(library, reference).norm, peer_us, rough_us)


@dataclass(frozen=True)
class Gate:
    """Runs one candidate for the first time and decides whether it may be timed."""

    name: str
    source: KernelSource

    def __call__(self) -> Verdict:
        """The verdict; a candidate that passes is known by its name from now on."""
        import torch

        try:
            return self._verdict()
        except torch.cuda.OutOfMemoryError as error:
            return Verdict("out_of_memory", str(error)[:500])
        except Exception as error:  # noqa: BLE001 - whatever a driver or launcher says, the candidate did not run
            _raise_if_poisoned(error)
            return Verdict("launch_failed", f"{type(error).__name__}: {error}"[:500])

    def _verdict(self) -> Verdict:
        session = Session.current()
        candidate = _load(session, self.source)
        session.guarded.fill_(_GUARD_VALUE)  # the candidate before may have been the one that the guards are for
        try:
            results = [_run_once(session, candidate) for _ in range(_REPEATS)]
        finally:
            changed = _restored_inputs(session)
        if changed:  # said first: it explains whatever else is wrong
            return Verdict("wrong_result", f"the kernel wrote to its input {', '.join(changed)}")
        reason = accuracy.why_wrong(results[0], session.reference, session.library)
        inputs = session.sets[0][0]
        reason = reason or session.operator.why_side_output_wrong(session.problem, inputs, session.beside)
        if reason:
            return Verdict("wrong_result", reason)
        if not _guards_intact(session):
            return Verdict("wrong_result", "memory before or after the output was overwritten")
        if not all(_same_bits(results[0], result) for result in results[1:]):
            return Verdict("unstable_result", "launches on the same inputs gave different results: a race")
        candidate.launch_us = _rough_us(lambda: _launch(candidate, 0))
        session.candidates[self.name] = candidate
        found = accuracy.error(results[0], session.reference)
        return Verdict("ok", error=found.norm, launch_us=candidate.launch_us)


@dataclass(frozen=True)
class Invite:
    """Makes candidates of the other libraries that are installed and take the problem."""

    def __call__(self) -> tuple[str, ...]:
        """Their names."""
        session = Session.current()
        for name, function in session.operator.other_libraries(session.problem).items():
            try:
                result = function(*session.sets[0])
            except RuntimeError:  # installed, but not for this problem
                continue
            if accuracy.why_wrong(result, session.reference, session.library) is None:
                session.candidates[name] = _library(session, function)
                session.guests += (name,)
        return session.guests


@dataclass(frozen=True)
class Measure:
    """Times candidates that passed the gate, and the peer, in turn."""

    names: tuple[str, ...]
    rounds: int

    def __call__(self) -> dict[str, list[float]]:
        """Microseconds of one launch, one value a round, for each name, for `PEER` and for invited libraries."""
        try:
            return self._samples()
        except Exception as error:
            _raise_if_poisoned(error)
            raise

    def _samples(self) -> dict[str, list[float]]:
        import torch

        session = Session.current()
        half = len(self.names) // 2
        names = [*self.names[:half], PEER, *session.guests, *self.names[half:]]
        session.warm_up(names)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.rounds):
            order = names if turn % 2 else names[::-1]
            session.replay(PEER)
            events = {name: session.replay(name) for name in order}
            session.replay(PEER)
            torch.cuda.synchronize()
            for name, pair in events.items():
                samples[name].append(session.sample_us(name, pair))
        return samples


@dataclass(frozen=True)
class Forget:
    """Drops candidates that are out, with their graphs."""

    names: tuple[str, ...]

    def __call__(self) -> None:
        """Forgets them."""
        for name in self.names:
            Session.current().candidates.pop(name, None)


def _load(session: Session, source: KernelSource) -> _Candidate:
    from tlxgen.runtime.launch import Launcher, SlimDescriptor

    module = loader.load(source)
    make = session.operator.arguments
    _, args = make(module, *session.sets[0], num_sms=session.num_sms)
    launcher = Launcher(module, args, session.capability)
    slim = {"descriptor": SlimDescriptor} if launcher.slim else {}
    calls = [make(module, inputs, output, num_sms=session.num_sms, **slim) for inputs, output in session.sets]
    guarded = make(module, session.sets[0][0], _guarded_output(session), num_sms=session.num_sms, **slim)
    return _Candidate(launcher, [*calls, guarded], 0.0)


def _library(session: Session, function: Callable[..., Any]) -> _Candidate:
    return _Candidate(None, [], _rough_us(lambda: function(*session.sets[0])), function)


def _guarded_output(session: Session) -> torch.Tensor:
    output: torch.Tensor = session.sets[0][1]
    inside: torch.Tensor = session.guarded[_GUARD : _GUARD + output.numel()]
    return inside.view(output.shape)


def _guards_intact(session: Session) -> bool:
    guarded = session.guarded
    return bool((guarded[:_GUARD] == _GUARD_VALUE).all() and (guarded[-_GUARD:] == _GUARD_VALUE).all())


def _restored_inputs(session: Session) -> list[str]:
    """Names of inputs that are not what they were; they are now, or every later candidate would be wrong."""
    import torch

    inputs = session.sets[0][0]
    changed = [name for name, before in session.untouched.items() if not torch.equal(inputs[name], before)]
    for name in changed:
        inputs[name].copy_(session.untouched[name])
    return changed


def _run_once(session: Session, candidate: _Candidate) -> torch.Tensor:
    """The result on set 0, written over NaN between guards."""
    import torch

    output = _guarded_output(session)
    output.fill_(float("nan"))
    for name in session.beside:
        session.sets[0][0][name].fill_(float("nan"))
    _launch(candidate, -1)
    torch.cuda.synchronize()
    return output.clone()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are the same, NaN and all: of an output that is not written everywhere some is left."""
    import torch

    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _launch(candidate: _Candidate, index: int) -> None:
    import torch

    grid, args = candidate.calls[index]
    candidate.launcher(grid, torch.cuda.current_stream().cuda_stream, args)


def _events() -> tuple[Any, Any]:
    import torch

    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, second


def _rough_us(call: Any) -> float:
    """A first look at one call's time; the host's own time may be in it."""
    import torch

    call()
    start, stop = _events()
    start.record()
    for _ in range(3):
        call()
    stop.record()
    torch.cuda.synchronize()
    return max(1.0, float(start.elapsed_time(stop)) * 1e3 / 3)


def _capture(session: Session, candidate: _Candidate) -> None:
    """A graph of launches over rotating input sets."""
    import torch

    if candidate.graph is not None:
        return
    sets = session.sets
    # A small kernel's rough look is mostly host time, so the number of sets sets the least number of launches.
    candidate.launches = max(2, min(_MAX_LAUNCHES, max(len(sets), math.ceil(_SAMPLE_US / candidate.launch_us))))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(candidate.launches):
            if candidate.library is not None:
                candidate.library(*sets[i % len(sets)])
            else:
                _launch(candidate, i % len(sets))
    candidate.graph = graph


def _raise_if_poisoned(error: Exception) -> None:
    """After an illegal access every later call in the process fails: end the process, so that the next one is clean."""
    import os

    import torch

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any failure here means the context is gone
        print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201 - the parent reads a dead child's last words
        os._exit(3)


def _driver_version() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
