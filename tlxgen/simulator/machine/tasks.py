"""Tasks: what runs in a CTA, what it knows, what it waits for, and what it has under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tlxgen.simulator.findings import Place
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.barriers import Arrival, Mbarrier, NamedBarrier
from tlxgen.simulator.machine.clocks import Knowledge

if TYPE_CHECKING:
    from tlxgen.simulator.machine.shared_memory import Allocation


@dataclass
class Queue:
    """Asynchronous operations of one task that finish in order: wgmma groups, TMA stores, cp.async groups."""

    component: int
    name: str
    issued: int = 0  #: groups
    done: int = 0  #: groups that the hardware has finished, known to nobody before a wait
    waited: int = 0  #: groups that the task knows to be finished
    work: list[Callable[[], None]] = field(default_factory=list)  #: of the groups that are not done
    place: Place | None = None  #: of the last operation

    def issue(self, work: Callable[[], None], place: Place) -> int:
        """Adds a group; its number, which is its index in the clocks."""
        self.issued += 1
        self.work.append(work)
        self.place = place
        return self.issued

    def finish_one(self) -> None:
        """The hardware finishes the oldest group."""
        self.done += 1
        self.work.pop(0)()

    def finish(self, number: int) -> None:
        """The hardware finishes all groups up to this one, as far as no wait has made it do so before."""
        while self.done < number:
            self.finish_one()

    def wait(self, pending: int, known: Knowledge) -> None:
        """Until at most `pending` groups are under way; the task knows the others to be finished."""
        self.finish(self.issued - pending)
        self.waited = max(self.waited, self.issued - pending)
        known.finished[self.component] = max(known.finished.get(self.component, 0), self.waited)


@dataclass(frozen=True)
class Wait:
    """What a task waits for.

    Attributes:
        ready: whether it may go on.
        what: in words, as it stands now.
        partners: roles that could end the wait, as far as they have shown themselves.
    """

    ready: Callable[[], bool]
    what: Callable[[], str]
    partners: Callable[[], Sequence[str]] = tuple
    barrier: Mbarrier | NamedBarrier | None = None


@dataclass
class Task:
    """One role: the code of one `async_task`, or the kernel around it.

    All its threads move as one, but for one thing: what one of them tells others by an atomic holds for what this one
    has done, and for what all had done when they last met.

    Attributes:
        component, epoch: what it does now is known to be finished by whoever knows the component at the epoch.
        speaker: likewise, of what one thread does for all: whatever has a single address.
        dots, stores, copies: what it has under way, of wgmma, of TMA stores and of cp.async.
        known: what it knows to be finished.
        replica: its number among those of one `async_task(replicate=...)`.
        line: where it was last seen.
        apart: the epoch of the first accesses of its threads to global memory that they have not met after; 0 if none.
    """

    name: str
    cta: Cta
    threads: int
    component: int
    speaker: int
    dots: Queue
    stores: Queue
    copies: Queue
    known: Knowledge = field(default_factory=Knowledge)
    epoch: int = 1
    replica: int = 0
    waiting: Wait | None = None
    greenlet: Any = None
    line: int = 0
    apart: int = 0
    ended: bool = False
    joining: bool = False  #: a kernel whose tasks run; it does nothing until they have ended
    uncommitted: list[Callable[[], None]] = field(default_factory=list)  #: cp.async copies that no group has yet
    uncommitted_accesses: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known.finished[self.component] = self.known.finished[self.speaker] = self.epoch

    @property
    def now(self) -> Arrival:
        """This moment, for others to refer to."""
        return Arrival(self.component, self.epoch, self.name)

    @property
    def place(self) -> Place:
        """The line it is at."""
        return Place(self.name, self.line)

    def release(self) -> Knowledge:
        """What it knows, as of now; what it does from here on is later."""
        snapshot = self.known.copy()
        self.epoch += 1
        self.known.finished[self.component] = self.known.finished[self.speaker] = self.epoch
        return snapshot

    def part(self) -> None:
        """Each of its threads comes to global memory by itself."""
        if not self.apart and self.threads > 1:
            self.apart = self.epoch

    def meet(self) -> None:
        """Its threads wait for each other: what they have done, whichever goes on may tell."""
        self.apart = 0
        self.release()

    def told_by_one(self) -> Knowledge:
        """What one of its threads knows to be finished: not what the others have done since they met."""
        if not self.apart:
            return self.known
        told = self.known.copy()
        told.finished[self.component] = self.apart - 1
        return told

    def access(self, what: str, *, write: bool) -> Access:
        """An ordinary access at this moment."""
        return Access(what, self.place, write, self.component, self.epoch)

    def access_of_one(self, what: str, *, write: bool) -> Access:
        """One thread's."""
        return Access(what, self.place, write, self.speaker, self.epoch)


@dataclass
class Cta:
    """A thread block: its shared memory, its barriers, its tasks."""

    number: int
    program: tuple[int, int, int]
    rank: int
    cluster: Cluster
    allocations: list[Allocation] = field(default_factory=list)
    barriers: list[list[Mbarrier]] = field(default_factory=list)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    shared_bytes: int = 0
    in_flight: int = 0  #: copies that will write to its shared memory
    remote_accesses: list[tuple[Access, str]] = field(default_factory=list)  #: to its memory, by other CTAs
    known_at_end: Knowledge | None = None  #: what its tasks knew when the last of them ended
    partitions: int = 0  #: of its warps beside the default one, for which the compiler uses named barriers
    at_barrier: int = 0  #: threads that have come to the cluster's barrier
    met_others: bool = False  #: whether any ever came there

    @property
    def live_threads(self) -> int:
        """Threads of the tasks that run now."""
        return sum(task.threads for task in self.tasks if not (task.ended or task.joining))


@dataclass
class Cluster:
    """CTAs that may reach each other's shared memory."""

    ctas: list[Cta] = field(default_factory=list)
    barrier: NamedBarrier | None = None
