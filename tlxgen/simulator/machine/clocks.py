"""Who knows what to be finished: vector clocks.

Everything that happens belongs to a *component*: a task (its index is an epoch), an mbarrier (completed phases) or a
task's queue of asynchronous operations (finished groups). An access with (component, index) has finished, for an actor,
if the actor knows the component to be at that index or later. Knowledge travels with arrivals and waits alone, so an
order that one schedule merely happened to take is never mistaken for one that is enforced.

(L. Lamport, Time, Clocks, and the Ordering of Events; F. Mattern, Virtual Time and Global States of Distributed
Systems.)
"""

from __future__ import annotations

#: Index of an access that nothing can be known about yet: it is still in flight.
IN_FLIGHT = 1 << 62


class Clock(dict[int, int]):
    """Component → the latest index known to be finished."""

    def join(self, other: Clock) -> None:
        """Learns all that `other` knows."""
        get = self.get
        for component, index in other.items():
            if get(component, 0) < index:
                self[component] = index

    def knows(self, component: int, index: int) -> bool:
        """Whether the component's `index` is known to be finished."""
        return self.get(component, 0) >= index


class Knowledge:
    """Two clocks: what has finished, and what of it has also passed a fence to the asynchronous proxy."""

    __slots__ = ("fenced", "finished")

    def __init__(self, finished: Clock | None = None, fenced: Clock | None = None) -> None:
        self.finished = finished if finished is not None else Clock()
        self.fenced = fenced if fenced is not None else Clock()

    def copy(self) -> Knowledge:
        """A snapshot, as an arrival releases it."""
        return Knowledge(Clock(self.finished), Clock(self.fenced))

    def join(self, other: Knowledge) -> None:
        """What a wait acquires."""
        self.finished.join(other.finished)
        self.fenced.join(other.fenced)

    def fence(self) -> None:
        """Makes all that is finished visible to the asynchronous proxy."""
        self.fenced.join(self.finished)
