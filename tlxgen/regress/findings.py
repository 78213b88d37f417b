"""What the gate says of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlxgen.codegen.facts import Facts
from tlxgen.db.record import TunedRecord

#: Name of a check → what it asks. In this order, since each rests on those before it.
CHECKS = {
    "schema": "the line holds a row",
    "dead": "the operator has this template",
    "key": "the key is the one that tuner and run time make for the problem and the GPU",
    "toolchain": "the row is of the installed compiler",
    "duplicate": "no earlier line has the key",
    "unverified": "the config was measured in a final, with its error and the library's time",
    "config": "the config is in the search space and legal on the GPU",
    "code": "the config emits the code that was measured",
    "compile": "it compiles, and the binary passes what tuning asks of it",
    "simulator": "the simulator finds no deadlock, race or wrong result",
    "protocol": "it was timed as finals are timed now",
    "ratio": "the row claims no lower ratio to the library than was stored of its problem",
    "unrecorded": "the facts of its binary are in the ratchet",
    "facts": "they have not become worse",
    "removed": "a row of the ratchet is still there",
    "coverage": "a shape of the suites that had a row has one",
    "card": "the kernel runs on the card",
    "numerics": "its results pass the accuracy gate",
    "time": "its ratio to the library is what it was",
}


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what to do about it.

    Attributes:
        check: one of `CHECKS`.
        what: what is wrong, in one line.
        remedy: what to do, in one line.
        red: whether the gate fails over it; otherwise it is a remark.
    """

    check: str
    what: str
    remedy: str
    red: bool = True


@dataclass(frozen=True)
class Row:
    """One line of a file, or what should be one (`line` 0)."""

    file: Path
    line: int
    name: str  #: the problem in the words of the command line, and the GPU
    record: TunedRecord | None = None
    trouble: str = ""  #: why the line holds no record

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.file.name}:{self.line}" if self.line else self.file.name


@dataclass(frozen=True)
class Retimed:
    """A row timed again; times in microseconds, `ratio` the library's over the kernel's."""

    time_us: float
    peer_us: float
    ratio: float
    stored_ratio: float
    margin: float  #: how far `ratio` may be below `stored_ratio`
    rounds: int

    @property
    def slower(self) -> bool:
        """Whether the ratio fell by more than noise explains."""
        return self.ratio < self.stored_ratio - self.margin


@dataclass(frozen=True)
class Outcome:
    """A row with all that was found."""

    row: Row
    findings: tuple[Finding, ...] = ()
    facts: Facts | None = None
    seconds: float = 0.0  #: of the compiler
    retimed: Retimed | None = None

    @property
    def red(self) -> bool:
        """Whether the gate fails over this row."""
        return any(finding.red for finding in self.findings)

    def adding(self, *findings: Finding, **changes: Any) -> Outcome:
        """The outcome with more findings."""
        return replace(self, findings=(*self.findings, *findings), **changes)
