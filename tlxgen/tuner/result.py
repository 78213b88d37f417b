"""Budget, progress and result of a tuning run, with a GPU (`tune`) or without (`rank`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tlxgen.config import Config
from tlxgen.db.record import TunedRecord
from tlxgen.problem import Problem
from tlxgen.tuner.timing import Timing


@dataclass(frozen=True)
class Budget:
    """When to stop: whichever comes first."""

    trials: int = 200
    seconds: float = 120.0


@dataclass
class State:
    """Progress of a run."""

    legal: int
    budget: Budget
    started: float = field(default_factory=time.monotonic)
    tried: int = 0
    resumed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    sample_error: str = ""
    best: Config | None = None
    best_us: float | None = None
    best_ratio: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def fail(self, kind: str, message: str) -> None:
        """Counts a refused candidate; `kind` is its `TrialStatus`."""
        self.failures[kind] += 1
        self.sample_error = self.sample_error or message

    @property
    def failures_in_words(self) -> str:
        """Counts by class, the most frequent first; empty if none failed."""
        return ", ".join(f"{count} {kind}" for kind, count in self.failures.most_common())


Progress = Callable[[State], None]


@dataclass(frozen=True)
class TuneResult:
    """The winner of a run, and how it was found."""

    record: TunedRecord
    stored: bool
    state: State
    interrupted: bool
    finalists: dict[Config, Timing]
    disturbed: str = ""  #: sign that another process used the GPU during the final
    loss: float | None = None  #: the winner's greatest loss to the best config over all twins; None without twins


def nothing_works(problem: Problem, state: State) -> str:
    """The message of a run without a winner, one line."""
    sample = f"; for example: {state.sample_error}" if state.sample_error else ""
    why = state.failures_in_words or "none was tried within the budget"
    return f"no candidate for {problem.label} works: {why}{sample}"
