"""One step of tuning: candidates compiled, gated and timed on the card, each to a `Trial`.

The GPU's owner is a child process. A candidate that hangs or faults ends it; the candidate is marked, the child comes
back, and the others go on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tlxgen.codegen.emit import KernelSource
from tlxgen.errors import GpuLostError, TuningError
from tlxgen.problem import Problem
from tlxgen.tuner import measure
from tlxgen.tuner.measure import DeviceReport, Forget, Gate, Invite, Measure, Setup, Verdict
from tlxgen.tuner.process import Child, ChildDiedError, ChildTimeoutError

T = TypeVar("T")

_REPLAY_US = 2000.0  # capture and replay of a small candidate, generously
_SETUP_S = 120.0

#: Seconds that one candidate may take, unless the caller says otherwise.
LIMIT_S = 20.0

#: Seconds to wait before each try to get the card back: a driver that resets it takes a while.
_PAUSES = (0.0, 2.0, 10.0)

#: Measurements that may fail without a culprit before all candidates in it are given up.
_FRUITLESS = 3


class _CardFullError(TuningError):
    """An allocation failed."""


class _JobFailedError(TuningError):
    """A job raised what nobody expected of it; what it left in the child is not known."""


#: What ends a measurement.
_FAULTS = (ChildTimeoutError, ChildDiedError, _CardFullError, _JobFailedError)


@dataclass
class Card:
    """The card, as the tuner sees it: candidates by name, times relative to the peer of the same rounds."""

    operator: str
    problem: Problem
    seed: int
    limit: float = LIMIT_S  #: seconds that one candidate may take
    child: Child = field(default_factory=Child)
    sources: dict[str, KernelSource] = field(default_factory=dict)
    launch_us: dict[str, float] = field(default_factory=dict)
    faults: dict[str, Verdict] = field(default_factory=dict)  #: of candidates that passed the gate and fell later
    _ready: bool = False
    _inviting: bool = False
    _lost: bool = False

    @property
    def ready(self) -> bool:
        """Whether the child is there, and knows this problem and its candidates."""
        return self.child.alive and self._ready

    def setup(self) -> DeviceReport:
        """Starts the child and makes inputs and reference.

        Raises:
            TuningError: the GPU cannot be used, or has too little free memory, or the child does not come up.
        """
        try:
            report = self._call(Setup(self.operator, self.problem, self.seed), _SETUP_S)
        except (ChildTimeoutError, ChildDiedError) as error:
            raise TuningError(f"the process that measures does not come up: {error}") from None
        self._ready = True
        return report

    def invite(self) -> tuple[str, ...]:
        """Has other libraries timed beside every candidate from now on; the names of those that can be."""
        self._ensure()
        self._inviting = True
        return self._call(Invite(), _SETUP_S)

    def gate(self, name: str, source: KernelSource) -> Verdict:
        """Runs a candidate for the first time; never raises for what the candidate does.

        Raises:
            GpuLostError: the GPU was found lost by the candidate before, whose verdict said so, and still is.
        """
        try:
            self._ensure()
        except GpuLostError as error:
            if self._lost:
                raise
            self._lost = True
            return Verdict("gpu_lost", str(error))
        try:
            verdict = self._call(Gate(name, source), self.limit)
        except _FAULTS as error:
            return self._fault(error)
        if verdict.status == "ok":
            self.sources[name] = source
            self.launch_us[name] = verdict.launch_us or 0.0
        return verdict

    def measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Microseconds by name, the peer's among them; names missing from the answer did not survive timing.

        All of an answer comes from one measurement, so that its rounds pair up.

        Raises:
            GpuLostError: the GPU does not come back after a candidate's death.
        """
        fruitless = 0
        while True:
            self._ensure()
            names = [name for name in names if name in self.sources]
            if not names:
                return {}
            try:
                return self._measure(names, rounds)
            except _FAULTS as error:
                fruitless += 1
                if fruitless == _FRUITLESS:
                    self._drop(names, error)
                    return {}
                self._drop_culprits(names, error)
                if any(name not in self.sources for name in names):  # else it was killed from outside, most likely
                    fruitless = 0

    def _measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        expected_us = rounds * sum(_REPLAY_US + 3 * self.launch_us.get(name, 0.0) for name in names)
        try:
            return self._call(Measure(tuple(names), rounds), self.limit + 4e-6 * expected_us)
        except _CardFullError:
            self.child.kill()  # half a capture is left in it
            raise

    def _drop(self, names: Sequence[str], error: Exception) -> None:
        """Gives candidates up, and says why."""
        for name in names:
            if self.sources.pop(name, None) is not None:
                self.faults[name] = self._fault(error)

    def _drop_culprits(self, names: Sequence[str], error: Exception) -> None:
        """Times one after the other to find who ends the child, and gives them up.

        Not by halves: a look at one takes half a second, and each half that holds one that hangs takes the limit.
        """
        if len(names) == 1:
            self._drop(names, error)
            return
        for name in names:
            self._ensure()
            if name not in self.sources:
                continue
            try:
                self._measure([name], 1)
            except _FAULTS as fault:
                self._drop([name], fault)

    def _fault(self, error: Exception) -> Verdict:
        """The class of what a candidate did to the child."""
        if isinstance(error, ChildTimeoutError):
            return Verdict("hang", f"no result after {self.limit:.0f} s: the process was killed")
        if isinstance(error, ChildDiedError):
            return Verdict("killed" if error.killed else "launch_failed", f"the process ended: {error}")
        if isinstance(error, _JobFailedError):
            return Verdict("launch_failed", str(error))
        return Verdict("out_of_memory", str(error))

    def forget(self, names: Sequence[str]) -> None:
        """Frees candidates that are out; one that comes back passes the gate again."""
        for name in names:
            self.sources.pop(name, None)
        if self.child.alive:
            with suppress(*_FAULTS):  # a dead child has forgotten everything
                self._call(Forget(tuple(names)), self.limit)

    def leave(self) -> None:
        """Lets another problem have the child; whatever comes next here begins with a setup."""
        self._ready = False

    def close(self) -> None:
        """Ends the child."""
        self.child.kill()

    def _call(self, job: Callable[[], T], timeout: float) -> T:
        """The job's result.

        Raises:
            TuningError: the GPU has too little free memory, or the job failed otherwise.
            ChildTimeoutError, ChildDiedError: no result.
        """
        try:
            return self.child.call(job, timeout)
        except (ChildTimeoutError, ChildDiedError):
            raise
        except Exception as error:
            # Torch's, CUDA's and Triton's errors have no class in common.
            if type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower():
                what = f"the GPU has too little free memory for {self.problem.label}: {error}"
                raise _CardFullError(what) from error
            self.child.kill()
            raise _JobFailedError(f"{type(error).__name__} on the card: {error}") from error

    def _ensure(self) -> None:
        """After a death: a new child that knows the candidates which had passed and still do."""
        while not self.ready:
            self._restart()
            if self._inviting:
                self._call(Invite(), _SETUP_S)
            for name, source in list(self.sources.items()):
                if not self._passes_again(name, source):
                    del self.sources[name]
                if not self.child.alive:  # this one took the new child with it: once more, without it
                    break

    def _restart(self) -> None:
        """A new child in place of one that ended.

        Raises:
            GpuLostError: none comes up; nothing that a candidate does outlives its process on a card that works.
        """
        for pause in _PAUSES:
            time.sleep(pause)
            try:
                self.setup()
            except Exception as error:  # noqa: BLE001 - whatever a driver without its card says
                self.child.kill()
                reason = " ".join(str(error).split())[:300]
            else:
                return
        raise GpuLostError(f"the GPU does not come back after a process on it ended: {reason}")

    def _passes_again(self, name: str, source: KernelSource) -> bool:
        try:
            verdict = self._call(Gate(name, source), self.limit)
        except _FAULTS as error:
            verdict = self._fault(error)
        if verdict.status != "ok":
            self.faults[name] = verdict
        return verdict.status == "ok"


@dataclass(frozen=True)
class Timing:
    """How long a candidate takes, its spread, and how long the peer takes in the same rounds; microseconds."""

    time_us: float
    spread_us: float
    peer_us: float
    samples: tuple[float, ...]
    peer_samples: tuple[float, ...]

    @property
    def relative(self) -> float:
        """Time over the peer's: what a search compares, since cards slow down as they warm."""
        return self.time_us / self.peer_us

    @property
    def peer_spread(self) -> float:
        """Interquartile range of the peer's times over their median: how restless the card was."""
        return _iqr(self.peer_samples) / self.peer_us


def timings(samples: dict[str, list[float]]) -> dict[str, Timing]:
    """Summaries of one measurement.

    The peer's time is its median. A candidate's is the peer's times the median of their ratio, taken round by round:
    where the card's clock jumps between rounds, two medians may come from different clocks.
    """
    if not samples:
        return {}
    peer = samples[measure.PEER]
    peer_us = statistics.median(peer)
    return {
        name: Timing(peer_us * _median_ratio(times, peer), _iqr(times), peer_us, tuple(times), tuple(peer))
        for name, times in samples.items()
        if name != measure.PEER
    }


def _median_ratio(times: Sequence[float], peer: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, peer, strict=True))


def _iqr(times: Sequence[float]) -> float:
    """Interquartile range."""
    if len(times) < 4:
        return max(times) - min(times)
    first, _, third = statistics.quantiles(times, n=4)
    return third - first
