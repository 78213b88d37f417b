"""Accesses to memory: when one counts as finished, and which two need an order."""

from __future__ import annotations

from dataclasses import dataclass

from tlxgen.simulator.findings import Place
from tlxgen.simulator.machine.clocks import IN_FLIGHT, Clock


@dataclass(slots=True)
class Access:
    """One read or write.

    Attributes:
        component, index: the access is finished for an actor that knows `component` at `index`; `IN_FLIGHT` while
            its end is open.
        generic: through the generic proxy; TMA and wgmma see its writes only after a fence.
        atomic: does not conflict with other atomics.
    """

    what: str
    place: Place
    write: bool
    component: int
    index: int
    generic: bool = True
    atomic: bool = False

    def finished(self, known: Clock) -> bool:
        """Whether an actor with this clock may rely on the access being over."""
        return self.index <= known.get(self.component, 0)

    def conflicts(self, other: Access) -> bool:
        """Whether the two need an order."""
        return (self.write or other.write) and not (self.atomic and other.atomic)

    @property
    def in_flight(self) -> bool:
        """Whether its end is still open."""
        return self.index == IN_FLIGHT

    def __str__(self) -> str:
        return f"{self.what} by {self.place}"
