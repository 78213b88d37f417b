"""What a tuning run is asked for, how it stands, and what it found; with a GPU (`tune`) or without (`rank`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from tlxgen.config import Config
from tlxgen.db.record import TunedRecord
from tlxgen.devices import Gpu
from tlxgen.problem import Problem
from tlxgen.tuner.card import Timing
from tlxgen.tuner.compile_pool import CompilePool


@dataclass(frozen=True)
class Budget:
    """When to stop: whichever comes first."""

    trials: int = 200
    seconds: float = 120.0


@dataclass
class State:
    """How a run stands; `Progress` callbacks read it."""

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
        """Takes a candidate that does not work into the account."""
        self.failures[kind] += 1
        self.sample_error = self.sample_error or message

    @property
    def failures_in_words(self) -> str:
        """How many of each class, the most frequent first; nothing where none failed."""
        return ", ".join(f"{count} {kind}" for kind, count in self.failures.most_common())


Progress = Callable[[State], None]


@dataclass(frozen=True)
class TuneResult:
    """What a run found."""

    record: TunedRecord
    stored: bool
    state: State
    interrupted: bool
    finalists: dict[Config, Timing]
    disturbed: str = ""  #: what says that something else ran on the card during the final
    loss: float | None = None  #: to the best config, on the twin where the winner loses most; None without twins


def compilers(pool: CompilePool | None, gpu: Gpu, workers: int | None) -> CompilePool | nullcontext[CompilePool]:
    """Those that were lent, or such as end with the run."""
    return CompilePool(gpu.capability, workers, simulate=True) if pool is None else nullcontext(pool)


def nothing_works(problem: Problem, state: State) -> str:
    """Why there is no winner, in one line."""
    sample = f"; for example: {state.sample_error}" if state.sample_error else ""
    why = state.failures_in_words or "none was tried within the budget"
    return f"no candidate for {problem.label} works: {why}{sample}"
