"""Vector clocks: which operations an actor knows to be finished.

Every operation belongs to a *component*: a task (its index is an epoch), an mbarrier (completed phases) or a task's
queue of asynchronous operations (finished groups). An access with (component, index) is finished for an actor that
knows the component at that index or a later one. Knowledge travels only with arrivals and waits, so an order that one
schedule happens to take is not mistaken for an enforced one.

(L. Lamport, Time, Clocks, and the Ordering of Events; F. Mattern, Virtual Time and Global States of Distributed
Systems.)
"""

from __future__ import annotations

#: Index of an access that is still in flight.
IN_FLIGHT = 1 << 62


class Clock(dict[int, int]):
    """Component → the latest index known to be finished."""

    def join(self, other: Clock) -> None:
        """Takes the maximum with another clock."""
        get = self.get
        for component, index in other.items():
            if get(component, 0) < index:
                self[component] = index

    def knows(self, component: int, index: int) -> bool:
        """Whether the component's `index` is known to be finished."""
        return self.get(component, 0) >= index


class Knowledge:
    """Two clocks: what has finished, and what of it a fence has made visible to the asynchronous proxy."""

    __slots__ = ("fenced", "finished")

    def __init__(self, finished: Clock | None = None, fenced: Clock | None = None) -> None:
        self.finished = finished if finished is not None else Clock()
        self.fenced = fenced if fenced is not None else Clock()

    def copy(self) -> Knowledge:
        """A snapshot."""
        return Knowledge(Clock(self.finished), Clock(self.fenced))

    def join(self, other: Knowledge) -> None:
        """Takes the maximum with another actor's knowledge, as a wait does."""
        self.finished.join(other.finished)
        self.fenced.join(other.fenced)

    def fence(self) -> None:
        """Makes all that is finished visible to the asynchronous proxy."""
        self.fenced.join(self.finished)
