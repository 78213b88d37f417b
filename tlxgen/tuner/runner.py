"""`Runner`: gates and times candidates on the GPU in a child process; a hang or a fault costs that candidate only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tlxgen.codegen.emit import KernelSource
from tlxgen.errors import GpuLostError, TuningError
from tlxgen.problem import Problem
from tlxgen.tuner.measure import DeviceReport, Forget, Gate, Invite, Measure, Setup, Verdict
from tlxgen.tuner.process import Child, ChildDiedError, ChildTimeoutError

T = TypeVar("T")

_REPLAY_US = 2000.0  #: upper estimate for capture and replay of a small candidate
_SETUP_S = 120.0

#: Default seconds on the GPU after which a candidate counts as hung.
LIMIT_S = 20.0

#: Seconds to wait before each try to get the GPU back: a driver that resets it takes a while.
_PAUSES = (0.0, 2.0, 10.0)

#: Failed measurements without a culprit after which all their candidates are given up.
_MAX_UNEXPLAINED = 3


class _OutOfMemoryError(TuningError):
    """An allocation on the GPU failed."""


class _JobFailedError(TuningError):
    """A job raised an unexpected error; the child's state is unknown."""


#: What ends a measurement.
_FAULTS = (ChildTimeoutError, ChildDiedError, _OutOfMemoryError, _JobFailedError)


@dataclass
class Runner:
    """Gates and times the candidates of one problem, which are known by name."""

    operator: str
    problem: Problem
    seed: int
    limit: float = LIMIT_S  #: seconds on the GPU after which a candidate counts as hung
    child: Child = field(default_factory=Child)
    sources: dict[str, KernelSource] = field(default_factory=dict)  #: of candidates that passed the gate
    launch_us: dict[str, float] = field(default_factory=dict)
    faults: dict[str, Verdict] = field(default_factory=dict)  #: of candidates that passed the gate and failed later
    _ready: bool = False
    _invites: bool = False
    _lost: bool = False

    @property
    def ready(self) -> bool:
        """Whether the child runs and knows this problem and its candidates."""
        return self.child.alive and self._ready

    def setup(self) -> DeviceReport:
        """Starts the child and makes inputs and reference.

        Raises:
            TuningError: the GPU cannot be used, or has too little free memory, or the child does not start.
        """
        try:
            report = self._call(Setup(self.operator, self.problem, self.seed), _SETUP_S)
        except (ChildTimeoutError, ChildDiedError) as error:
            raise TuningError(f"the process that measures does not come up: {error}") from None
        self._ready = True
        return report

    def invite(self) -> tuple[str, ...]:
        """Adds the other installed libraries to every measurement from now on; returns their names."""
        self._ensure()
        self._invites = True
        return self._call(Invite(), _SETUP_S)

    def gate(self, name: str, source: KernelSource) -> Verdict:
        """Runs a candidate for the first time and compares its results; never raises for what the candidate does.

        Raises:
            GpuLostError: the GPU is lost, as the verdict on the candidate before said already.
        """
        try:
            self._ensure()
        except GpuLostError as error:
            if self._lost:
                raise
            self._lost = True
            return Verdict("gpu_lost", str(error))
        verdict = self._verdict(name, source)
        if verdict.status == "ok":
            self.sources[name] = source
            self.launch_us[name] = verdict.launch_us or 0.0
        return verdict

    def measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Microseconds per round, by candidate and for the peer, all of one measurement.

        Candidates that failed while they were timed are missing; `faults` says why.

        Raises:
            GpuLostError: the GPU does not come back after a candidate ended the child.
        """
        unexplained = 0
        while True:
            self._ensure()
            names = [name for name in names if name in self.sources]
            if not names:
                return {}
            try:
                return self._measure(names, rounds)
            except _FAULTS as error:
                unexplained += 1
                if unexplained == _MAX_UNEXPLAINED:
                    self._drop(names, error)
                    return {}
                self._drop_culprits(names, error)
                if any(name not in self.sources for name in names):  # else it was probably killed from outside
                    unexplained = 0

    def forget(self, names: Sequence[str]) -> None:
        """Frees candidates; one that is measured again must pass the gate again."""
        for name in names:
            self.sources.pop(name, None)
        if self.child.alive:
            with suppress(*_FAULTS):  # a dead child has freed everything
                self._call(Forget(tuple(names)), self.limit)

    def leave(self) -> None:
        """Lets the runner of another problem use the child; the next call here sets this problem up again."""
        self._ready = False

    def close(self) -> None:
        """Kills the child."""
        self.child.kill()

    def _measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        expected_us = rounds * sum(_REPLAY_US + 3 * self.launch_us.get(name, 0.0) for name in names)
        try:
            return self._call(Measure(tuple(names), rounds), self.limit + 4e-6 * expected_us)
        except _OutOfMemoryError:
            self.child.kill()  # an unfinished capture is left in it
            raise

    def _drop(self, names: Sequence[str], error: Exception) -> None:
        """Gives candidates up and notes the fault."""
        for name in names:
            if self.sources.pop(name, None) is not None:
                self.faults[name] = self._fault(error)

    def _drop_culprits(self, names: Sequence[str], error: Exception) -> None:
        """Times each candidate alone and gives up those that fail.

        No bisection: timing one takes half a second, whereas each half with a hanging candidate takes the whole limit.
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

    def _verdict(self, name: str, source: KernelSource) -> Verdict:
        try:
            return self._call(Gate(name, source), self.limit)
        except _FAULTS as error:
            return self._fault(error)

    def _fault(self, error: Exception) -> Verdict:
        """The class of an error that a candidate caused."""
        if isinstance(error, ChildTimeoutError):
            return Verdict("hang", f"no result after {self.limit:.0f} s: the process was killed")
        if isinstance(error, ChildDiedError):
            return Verdict("killed" if error.killed else "launch_failed", f"the process ended: {error}")
        if isinstance(error, _JobFailedError):
            return Verdict("launch_failed", str(error))
        return Verdict("out_of_memory", str(error))

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
                raise _OutOfMemoryError(what) from error
            self.child.kill()
            raise _JobFailedError(f"{type(error).__name__} on the GPU: {error}") from error

    def _ensure(self) -> None:
        """Replaces a dead child, and gates the candidates in `sources` again; drops those that fail."""
        while not self.ready:
            self._restart()
            if self._invites:
                self._call(Invite(), _SETUP_S)
            for name, source in list(self.sources.items()):
                verdict = self._verdict(name, source)
                if verdict.status != "ok":
                    self.faults[name] = verdict
                    del self.sources[name]
                if not self.child.alive:  # this candidate ended the new child too: once more without it
                    break

    def _restart(self) -> None:
        """Starts a new child and sets the problem up.

        Raises:
            GpuLostError: it does not start. On a working GPU, nothing that a candidate does outlives its process.
        """
        for pause in _PAUSES:
            time.sleep(pause)
            try:
                self.setup()
            except Exception as error:  # noqa: BLE001 - whatever a driver without its GPU raises
                self.child.kill()
                reason = " ".join(str(error).split())[:300]
            else:
                return
        raise GpuLostError(f"the GPU does not come back after a process on it ended: {reason}")
