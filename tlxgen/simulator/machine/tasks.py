"""Tasks (roles), CTAs and clusters: their state, their knowledge and their asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tlxgen.simulator.findings import Place
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.barriers import Arrival, Mbarrier, NamedBarrier
from tlxgen.simulator.machine.clocks import IN_FLIGHT, Knowledge

if TYPE_CHECKING:
    from tlxgen.simulator.machine.shared_memory import Allocation


@dataclass
class Queue:
    """Asynchronous operations of one task that finish in order: wgmma groups, TMA stores, cp.async groups."""

    component: int
    name: str
    issued: int = 0  #: groups
    done: int = 0  #: groups that the hardware has finished; a task knows only after a wait
    waited: int = 0  #: groups that the task knows to be finished
    work: list[Callable[[], None]] = field(default_factory=list)  #: of the groups that are not done
    place: Place | None = None  #: of the last operation

    def issue(self, work: Callable[[], None], place: Place) -> int:
        """Adds a group; returns its number, which is its index in the clocks."""
        self.issued += 1
        self.work.append(work)
        self.place = place
        return self.issued

    def finish(self, number: int) -> None:
        """The hardware finishes all groups up to this one, unless a wait has already forced it to."""
        while self.done < number:
            self.done += 1
            self.work.pop(0)()

    def wait(self, pending: int, known: Knowledge) -> None:
        """Finishes groups until `pending` are left; `known` learns that they are finished."""
        self.finish(self.issued - pending)
        self.waited = max(self.waited, self.issued - pending)
        known.finished[self.component] = max(known.finished.get(self.component, 0), self.waited)


@dataclass(frozen=True)
class Wait:
    """What a task waits for.

    Attributes:
        ready: whether it may continue.
        what: the wait and its current state in words.
        partners: roles that have arrived on the barrier before, and so may end the wait.
    """

    ready: Callable[[], bool]
    what: Callable[[], str]
    partners: Callable[[], Sequence[str]] = tuple
    barrier: Mbarrier | NamedBarrier | None = None


@dataclass
class Task:
    """One role: the code of one `async_task`, or the kernel around it.

    All its threads move as one, except for what an atomic on one address releases: one thread does it, and knows of the
    other threads' global accesses only up to their last barrier.

    Attributes:
        component, epoch: the clock position of its current accesses.
        one_thread: the component of accesses that one thread makes for all: those to a single address.
        dots, stores, copies: its wgmma, TMA stores and cp.async under way.
        replica: its number among those of one `async_task(replicate=...)`.
        line: where it was last seen.
        diverged_at: epoch of the first global access of all threads since their last barrier; 0 if none.
    """

    name: str
    cta: Cta
    threads: int
    component: int
    one_thread: int
    dots: Queue
    stores: Queue
    copies: Queue
    known: Knowledge = field(default_factory=Knowledge)
    epoch: int = 1
    replica: int = 0
    waiting: Wait | None = None
    greenlet: Any = None
    line: int = 0
    diverged_at: int = 0
    ended: bool = False
    joining: bool = False  #: a kernel that waits for its tasks to end
    uncommitted: list[Callable[[], None]] = field(default_factory=list)  #: cp.async copies without a group
    uncommitted_accesses: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known.finished[self.component] = self.known.finished[self.one_thread] = self.epoch

    @property
    def now(self) -> Arrival:
        """This moment, for others to refer to."""
        return Arrival(self.component, self.epoch, self.name)

    @property
    def place(self) -> Place:
        """The line it is at."""
        return Place(self.name, self.line)

    def release(self) -> Knowledge:
        """Returns a snapshot of what it knows, and starts a new epoch: later accesses are not in the snapshot."""
        snapshot = self.known.copy()
        self.epoch += 1
        self.known.finished[self.component] = self.known.finished[self.one_thread] = self.epoch
        return snapshot

    def sync_threads(self) -> None:
        """A barrier of its threads: each may now release what all have done."""
        self.diverged_at = 0
        self.release()

    def known_to_one_thread(self) -> Knowledge:
        """The knowledge of one of its threads: without the others' global accesses since their last barrier."""
        if not self.diverged_at:
            return self.known
        known = self.known.copy()
        known.finished[self.component] = self.diverged_at - 1
        return known

    def access(self, what: str, *, write: bool) -> Access:
        """A synchronous access at this moment."""
        return Access(what, self.place, write, self.component, self.epoch)

    def global_access(self, what: str, addresses: int, *, write: bool) -> Access:
        """A synchronous access to global memory: by one thread if there is one address, else by each for itself."""
        if addresses == 1:
            return Access(what, self.place, write, self.one_thread, self.epoch)
        if not self.diverged_at and self.threads > 1:
            self.diverged_at = self.epoch
        return self.access(what, write=write)

    def async_access(self, what: str, *, write: bool, atomic: bool = False) -> Access:
        """An access through the asynchronous proxy, in flight."""
        return Access(what, self.place, write, self.component, IN_FLIGHT, generic=False, atomic=atomic)

    def queued_read(self, what: str, queue: Queue) -> Access:
        """A read by the next group of a queue."""
        return Access(what, self.place, False, queue.component, queue.issued + 1, generic=False)


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
    at_cluster_barrier: int = 0  #: threads that have arrived there
    used_cluster_barrier: bool = False

    @property
    def live_threads(self) -> int:
        """Threads of the tasks that run now."""
        return sum(task.threads for task in self.tasks if not (task.ended or task.joining))


@dataclass
class Cluster:
    """CTAs that may access each other's shared memory."""

    ctas: list[Cta] = field(default_factory=list)
    barrier: NamedBarrier | None = None
