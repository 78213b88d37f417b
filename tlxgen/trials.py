"""One step of tuning: candidates compiled, gated and timed on the card, each to a `Trial`.

The GPU's owner is a child process. A candidate that hangs or faults ends it; the candidate is marked, the child comes
back, and the others go on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tlxgen import measure
from tlxgen.emit import KernelSource
from tlxgen.errors import TuningError
from tlxgen.measure import DeviceReport, Forget, Gate, Invite, Measure, Setup, Verdict
from tlxgen.problem import Problem
from tlxgen.process import Child, ChildDiedError, ChildTimeoutError

T = TypeVar("T")

_REPLAY_US = 2000.0  # capture and replay of a small candidate, generously


@dataclass
class Card:
    """The card, as the tuner sees it: candidates by name, times relative to the peer of the same rounds."""

    operator: str
    problem: Problem
    seed: int
    limit: float = 20.0  #: seconds that one candidate may take
    child: Child = field(default_factory=Child)
    sources: dict[str, KernelSource] = field(default_factory=dict)
    launch_us: dict[str, float] = field(default_factory=dict)
    _ready: bool = False
    _inviting: bool = False

    def setup(self) -> DeviceReport:
        """Starts the child and makes inputs and reference."""
        report = self._call(Setup(self.operator, self.problem, self.seed), 120.0)
        self._ready = True
        return report

    def invite(self) -> tuple[str, ...]:
        """Has other libraries timed beside every candidate from now on; the names of those that can be."""
        self._ensure()
        self._inviting = True
        return self._call(Invite(), 120.0)

    def gate(self, name: str, source: KernelSource) -> Verdict:
        """Runs a candidate for the first time; never raises for what the candidate does."""
        self._ensure()
        try:
            verdict = self._call(Gate(name, source), self.limit)
        except ChildTimeoutError:
            return Verdict("hang", f"no result after {self.limit:.0f} s: the process was killed")
        except ChildDiedError as error:
            return Verdict("launch_failed", f"the process ended: {error}")
        if verdict.status == "ok":
            self.sources[name] = source
            self.launch_us[name] = verdict.launch_us or 0.0
        return verdict

    def measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Microseconds by name, the peer's among them; names missing from the answer did not survive timing.

        All of an answer comes from one measurement, so that its rounds pair up.
        """
        while True:
            self._ensure()
            names = [name for name in names if name in self.sources]
            if not names:
                return {}
            try:
                return self._measure(names, rounds)
            except (ChildTimeoutError, ChildDiedError):
                self._drop_culprits(names)

    def _measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        expected_us = rounds * sum(_REPLAY_US + 3 * self.launch_us.get(name, 0.0) for name in names)
        return self._call(Measure(tuple(names), rounds), self.limit + 4e-6 * expected_us)

    def _drop_culprits(self, names: Sequence[str]) -> None:
        """Finds by halves who ends the child when timed, and forgets them."""
        if len(names) == 1:
            self.sources.pop(names[0], None)
            return
        half = len(names) // 2
        for part in (names[:half], names[half:]):
            self._ensure()
            present = [name for name in part if name in self.sources]
            try:
                if present:
                    self._measure(present, 1)
            except (ChildTimeoutError, ChildDiedError):
                self._drop_culprits(present)

    def forget(self, names: Sequence[str]) -> None:
        """Frees candidates that are out; one that comes back passes the gate again."""
        for name in names:
            self.sources.pop(name, None)
        if self.child.alive:
            self._call(Forget(tuple(names)), self.limit)

    def close(self) -> None:
        """Ends the child."""
        self.child.kill()

    def _call(self, job: Callable[[], T], timeout: float) -> T:
        """The job's result; a full card is nobody's fault among the candidates, and ends the run.

        Raises:
            TuningError: the GPU has too little free memory.
        """
        try:
            return self.child.call(job, timeout)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            raise TuningError(f"the GPU has too little free memory for {self.problem.label}: {error}") from None

    def _ensure(self) -> None:
        """After a death: a new child that knows the candidates which had passed and still do."""
        while not (self.child.alive and self._ready):
            self.setup()
            if self._inviting:
                self._call(Invite(), 120.0)
            for name, source in list(self.sources.items()):
                if not self._passes_again(name, source):
                    del self.sources[name]
                if not self.child.alive:  # this one took the new child with it: once more, without it
                    break

    def _passes_again(self, name: str, source: KernelSource) -> bool:
        try:
            return self._call(Gate(name, source), self.limit).status == "ok"
        except (ChildTimeoutError, ChildDiedError):
            return False


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
