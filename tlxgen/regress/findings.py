"""Rows, the findings on them, and outcomes: a row with its findings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlxgen.codegen.facts import Facts
from tlxgen.db.record import TunedRecord

#: Name of each check → what must hold. In the order in which they are made; a failed one skips those after it.
CHECKS = {
    "schema": "the line holds a row",
    "dead": "the operator has this template",
    "key": "the key is the one that tuner and run time make for the problem and the GPU",
    "toolchain": "the row was measured under the installed compiler",
    "duplicate": "no earlier line has the key",
    "unverified": "the config was measured in a final, with its error and the library's time",
    "config": "the config is in the search space and legal on the GPU",
    "code": "the config emits the code that was measured",
    "compile": "it compiles, and the tuner would accept the binary",
    "simulator": "the simulator finds no deadlock, race or wrong result",
    "protocol": "it was timed by the current protocol",
    "ratio": "the row's ratio to the library is not lower than the one stored for its problem",
    "unrecorded": "the facts of its binary are in the ratchet",
    "facts": "they have not become worse",
    "removed": "a row of the ratchet still exists",
    "coverage": "a shape of the suites that had a row still has one",
    "card": "the kernel runs on the GPU",
    "numerics": "its results pass the accuracy gate",
    "time": "its measured ratio to the library is not lower than the row's",
}


@dataclass(frozen=True)
class Finding:
    """A failed check.

    Attributes:
        check: one of `CHECKS`.
        what: what is wrong, in one line.
        remedy: what to do, in one line.
        red: whether it fails the gate; otherwise it is a remark.
    """

    check: str
    what: str
    remedy: str
    red: bool = True


@dataclass(frozen=True)
class Row:
    """One line of a file; line 0 stands for a row that is missing."""

    file: Path
    line: int
    name: str  #: the problem as on the command line, and the GPU
    record: TunedRecord | None = None
    trouble: str = ""  #: why the line holds no record

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file.name}:{self.line}" if self.line else self.file.name


@dataclass(frozen=True)
class Retimed:
    """A row's times of today in microseconds; `ratio` is the library's time over the kernel's."""

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
    """A row with its findings, and what was measured of it."""

    row: Row
    findings: tuple[Finding, ...] = ()
    facts: Facts | None = None
    seconds: float = 0.0  #: of compilation
    retimed: Retimed | None = None

    @property
    def red(self) -> bool:
        """Whether the row fails the gate."""
        return any(finding.red for finding in self.findings)

    def adding(self, *findings: Finding, **changes: Any) -> Outcome:
        """The outcome with more findings and with changed fields."""
        return replace(self, findings=(*self.findings, *findings), **changes)
