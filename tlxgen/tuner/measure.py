"""Jobs of the child process that uses the GPU: `Setup`, `Gate` (first run and accuracy), `Measure` (times), `Forget`.

Protocol of the times (`PROTOCOL` names its version; times of different versions are not compared):

- Candidates are timed against the peer, the operator's library (`Operator.peer`), in the same rounds.
- Input sets are rotated, so that a launch does not find its inputs in L2 from the launch before. At most 96 sets are
  kept, which L2 may hold if a set has less than 0.5 MB.
- Each candidate is a CUDA graph of several launches. Events around one replay give one sample, without host time.
- Rounds start after a warm-up. A cool GPU runs at its highest clock for about 100 ms, until it meets its power limit,
  and the two states rank kernels differently; the second is timed, because it lasts.
- A round replays every candidate and the peer once; the order is reversed each round, so that a GPU that slows down
  slows all equally. An untimed replay of the peer comes first and last: next to a synchronisation, times are 2 to 19 %
  too long.
"""

from __future__ import annotations

import functools
import math
import os
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
from tlxgen.tuner import nvml

if TYPE_CHECKING:
    import torch

PROTOCOL = "graph-2"

#: Name of the peer among those of one measurement.
PEER = "peer"

#: Torch device of candidates; tests use the CPU.
_DEVICE = "cuda"

_SAMPLE_US = 400.0  #: of one replay (96 launches at most): long against the events' resolution of 0.5 us
_MAX_LAUNCHES = 96
_WARM_UP_S = 0.3
_PEER_ROUNDS = 9
_REPEATS = 4  #: launches whose results must be bitwise equal
_GUARD = 4096  #: elements before and after the output that must stay unchanged
_GUARD_VALUE = 7.0


@dataclass(frozen=True)
class DeviceReport:
    """The GPU, versions, and the peer's error and time."""

    gpu: Gpu
    versions: dict[str, str]
    peer_error: float
    peer_us: float
    peer_launch_us: float | None = None  #: a rough time, as a candidate's in the gate


@dataclass(frozen=True)
class Verdict:
    """Result of the gate: `status` is `ok`, or the `TrialStatus` of the failure."""

    status: str
    message: str = ""
    error: float | None = None
    launch_us: float | None = None  #: a rough time, which sizes the graph


@dataclass
class _Candidate:
    """A kernel or a library's function, as one call per input set; a kernel's last call writes the guarded output."""

    calls: list[Callable[[], object]]
    launch_us: float = 0.0
    graph: Any = None
    launches: int = 0

    def capture(self, sets: int) -> None:
        """Captures a graph of launches over rotating input sets."""
        import torch

        # At least one launch per set: the rough time of a small kernel is mostly host time.
        self.launches = max(2, min(_MAX_LAUNCHES, max(sets, math.ceil(_SAMPLE_US / self.launch_us))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for i in range(self.launches):
                self.calls[i % sets]()
        self.graph = graph

    def replay(self) -> tuple[Any, Any]:
        """Replays the graph between two events, and returns them."""
        start, stop = _events()
        start.record()
        self.graph.replay()
        stop.record()
        return start, stop

    def sample_us(self, events: tuple[Any, Any]) -> float:
        """Microseconds per launch between two events that the GPU has passed."""
        start, stop = events
        return float(start.elapsed_time(stop)) * 1e3 / self.launches


@dataclass
class Session:
    """State shared by the jobs of one child: inputs, expected results, and the candidates that passed the gate."""

    operator: Any
    problem: Problem
    sets: list[tuple[dict[str, Any], Any]]
    reference: Any
    library: Any
    beside: dict[str, Any]  #: references of side outputs, which candidates write into input tensors
    untouched: dict[str, Any]  #: copies of the inputs of set 0, which must not change
    guarded: Any
    num_sms: int
    capability: tuple[int, int]
    candidates: dict[str, _Candidate] = field(default_factory=dict)
    invited: tuple[str, ...] = ()  #: other libraries, timed in every measurement

    @staticmethod
    def current() -> Session:
        """The session that `Setup` made in this process."""
        assert _session is not None, "Setup must be the first job"
        return _session

    def warm_up(self, names: list[str]) -> None:
        """Replays the candidates that are to be timed until the clock has settled."""
        import torch

        for name in names:
            if self.candidates[name].graph is None:
                self.candidates[name].capture(len(self.sets))
        until = time.perf_counter() + _WARM_UP_S
        while time.perf_counter() < until:
            for name in names:
                self.candidates[name].graph.replay()
            torch.cuda.synchronize()


_session: Session | None = None


@dataclass(frozen=True)
class Setup:
    """Makes inputs, reference and peer; the first job of a child."""

    operator: str
    problem: Problem
    seed: int

    def __call__(self) -> DeviceReport:
        """The report on GPU and peer."""
        import torch

        global _session  # noqa: PLW0603 - jobs of one process share it
        _session = None  # frees the memory of an earlier problem
        operator = ops.get(self.operator)
        gpu = devices.detect()
        if gpu is None:
            raise UnsupportedDeviceError("measuring needs a CUDA GPU, and torch sees none here")
        torch.backends.cuda.matmul.allow_tf32 = True  # for the peer of fp32 problems, which are computed in TF32
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
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "driver": nvml.driver_version() or ""}
        rough_us = _session.candidates[PEER].launch_us
        return DeviceReport(gpu, versions, accuracy.error(library, reference).norm, peer_us, rough_us)


@dataclass(frozen=True)
class Gate:
    """Runs one candidate for the first time and decides whether it may be timed."""

    name: str
    source: KernelSource

    def __call__(self) -> Verdict:
        """The verdict; a candidate that passes can be measured by its name from now on."""
        import torch

        try:
            return self._verdict()
        except torch.cuda.OutOfMemoryError as error:
            return Verdict("out_of_memory", str(error)[:500])
        except Exception as error:  # noqa: BLE001 - any error of driver or launcher: the candidate did not run
            _raise_if_poisoned(error)
            return Verdict("launch_failed", f"{type(error).__name__}: {error}"[:500])

    def _verdict(self) -> Verdict:
        session = Session.current()
        candidate = _load(session, self.source)
        session.guarded.fill_(_GUARD_VALUE)  # the candidate before may have overwritten them
        try:
            results = [_run_once(session, candidate) for _ in range(_REPEATS)]
        finally:
            changed = _restored_inputs(session)
        if changed:  # first, since it explains other defects
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
        candidate.launch_us = _rough_us(candidate.calls[0])
        session.candidates[self.name] = candidate
        found = accuracy.error(results[0], session.reference)
        return Verdict("ok", error=found.norm, launch_us=candidate.launch_us)


@dataclass(frozen=True)
class Invite:
    """Adds the other libraries that are installed and support the problem to all measurements."""

    def __call__(self) -> tuple[str, ...]:
        """Their names."""
        session = Session.current()
        for name, function in session.operator.other_libraries(session.problem).items():
            try:
                result = function(*session.sets[0])
            except RuntimeError:  # does not support this problem
                continue
            if accuracy.why_wrong(result, session.reference, session.library) is None:
                session.candidates[name] = _library(session, function)
                session.invited += (name,)
        return session.invited


@dataclass(frozen=True)
class Measure:
    """Times candidates that passed the gate, the peer and invited libraries in the same rounds."""

    names: tuple[str, ...]
    rounds: int

    def __call__(self) -> dict[str, list[float]]:
        """Microseconds per launch, one value per round: of each name, of `PEER` and of invited libraries."""
        try:
            return self._samples()
        except Exception as error:
            _raise_if_poisoned(error)
            raise

    def _samples(self) -> dict[str, list[float]]:
        import torch

        session = Session.current()
        half = len(self.names) // 2
        names = [*self.names[:half], PEER, *session.invited, *self.names[half:]]
        session.warm_up(names)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.rounds):
            order = names if turn % 2 else names[::-1]
            session.candidates[PEER].replay()
            events = {name: session.candidates[name].replay() for name in order}
            session.candidates[PEER].replay()
            torch.cuda.synchronize()
            for name, pair in events.items():
                samples[name].append(session.candidates[name].sample_us(pair))
        return samples


@dataclass(frozen=True)
class Forget:
    """Frees candidates and their graphs."""

    names: tuple[str, ...]

    def __call__(self) -> None:
        """Frees them."""
        for name in self.names:
            Session.current().candidates.pop(name, None)


def _load(session: Session, source: KernelSource) -> _Candidate:
    from tlxgen.runtime.launch import Launcher, SlimDescriptor

    module = loader.load(source)
    make = session.operator.arguments
    _, args = make(module, *session.sets[0], num_sms=session.num_sms)
    launcher = Launcher(module, args, session.capability)
    slim = {"descriptor": SlimDescriptor} if launcher.slim else {}
    sets = [*session.sets, (session.sets[0][0], _guarded_output(session))]
    made = [make(module, *one, num_sms=session.num_sms, **slim) for one in sets]
    return _Candidate([functools.partial(_launch, launcher, grid, args) for grid, args in made])


def _launch(launcher: Callable[..., object], grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
    import torch

    launcher(grid, torch.cuda.current_stream().cuda_stream, args)


def _library(session: Session, function: Callable[..., Any]) -> _Candidate:
    calls = [functools.partial(function, *one) for one in session.sets]
    return _Candidate(list(calls), _rough_us(calls[0]))


def _guarded_output(session: Session) -> torch.Tensor:
    output: torch.Tensor = session.sets[0][1]
    inside: torch.Tensor = session.guarded[_GUARD : _GUARD + output.numel()]
    return inside.view(output.shape)


def _guards_intact(session: Session) -> bool:
    guarded = session.guarded
    return bool((guarded[:_GUARD] == _GUARD_VALUE).all() and (guarded[-_GUARD:] == _GUARD_VALUE).all())


def _restored_inputs(session: Session) -> list[str]:
    """Names of inputs that a kernel changed; restores them for the next candidate."""
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
    candidate.calls[-1]()
    torch.cuda.synchronize()
    return output.clone()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are bitwise equal; NaN remains where an operator leaves parts of its output unwritten."""
    import torch

    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _events() -> tuple[Any, Any]:
    import torch

    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, second


def _rough_us(call: Any) -> float:
    """A rough time of one call, which may include host time."""
    import torch

    call()
    start, stop = _events()
    start.record()
    for _ in range(3):
        call()
    stop.record()
    torch.cuda.synchronize()
    return max(1.0, float(start.elapsed_time(stop)) * 1e3 / 3)


def _raise_if_poisoned(error: Exception) -> None:
    """Ends the process if its CUDA context is broken, as after an illegal access: every later call would fail."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any failure here means a broken context
        print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201 - the parent reads a dead child's output
        os._exit(3)
