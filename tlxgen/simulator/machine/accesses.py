"""Races: accesses to one place that nothing orders."""

from __future__ import annotations

from dataclasses import dataclass

from tlxgen.simulator.findings import Place
from tlxgen.simulator.machine.clocks import IN_FLIGHT, Clock


@dataclass(slots=True)
class Access:
    """One read or write, and when it counts as finished.

    Attributes:
        component, index: finished for whoever knows `component` at `index`; `IN_FLIGHT` while that is open.
        generic: through the ordinary proxy, which TMA and wgmma see only after a fence.
        atomic: does not conflict with others that are.
    """

    what: str
    place: Place
    write: bool
    component: int
    index: int
    generic: bool = True
    atomic: bool = False

    def finished(self, known: Clock) -> bool:
        """Whether somebody who knows that much may rely on it."""
        return self.index <= known.get(self.component, 0)

    def conflicts(self, other: Access) -> bool:
        """Whether the two need an order."""
        return (self.write or other.write) and not (self.atomic and other.atomic)

    @property
    def in_flight(self) -> bool:
        """Whether nobody can know its end yet."""
        return self.index == IN_FLIGHT

    def __str__(self) -> str:
        return f"{self.what} by {self.place}"
