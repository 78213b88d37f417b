"""Mbarriers and named barriers as PTX defines them, and the checks on the order of their use.

An mbarrier counts phases. A phase completes when no arrival is pending and as many bytes have come as were expected;
the next one begins at once, with the full count. A wait names the parity of a phase and passes if the current phase has
the other parity: on a fresh barrier a wait for parity 1 passes at once. (PTX ISA, "Parallel synchronization and
communication instructions: mbarrier"; `barrier.cta` for named barriers.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tlxgen.simulator.machine.clocks import Clock, Knowledge


class BarrierError(Exception):
    """Use of a barrier that PTX leaves undefined; `kind` is a kind of finding."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Phases:
    """The counters of an mbarrier, by the rules of the PTX manual.

    Attributes:
        count: arrivals that a phase takes.
        completed: number of complete phases.
        pending: arrivals that the current phase lacks.
        missing_bytes: bytes that are expected and have not come; negative if they came before they were expected.
    """

    count: int
    completed: int = 0
    pending: int = field(init=False)
    missing_bytes: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1) -> bool:
        """Counts arrivals; returns whether they complete the phase.

        Raises:
            BarrierError: more arrivals than the phase takes, which PTX leaves undefined.
        """
        if count > self.pending:
            message = f"{count} arrivals where {self.pending} of {self.count} are pending in the phase under way"
            raise BarrierError("barrier_reuse", message)
        self.pending -= count
        return self._complete()

    def expect(self, size: int) -> bool:
        """`mbarrier.arrive.expect_tx`: more bytes to come, and one arrival."""
        self.missing_bytes += size
        return self.arrive()

    def deliver(self, size: int) -> bool:
        """`complete_tx`: counts bytes that have come; returns whether they complete the phase."""
        self.missing_bytes -= size
        return self._complete()

    def passes(self, parity: int) -> bool:
        """Whether a wait for `parity` passes now."""
        return self.completed % 2 != parity

    def _complete(self) -> bool:
        if self.pending or self.missing_bytes:
            return False
        self.completed += 1
        self.pending = self.count
        return True


@dataclass(frozen=True)
class Arrival:
    """A task's arrival on a barrier (or wait) as a position in the vector clocks."""

    component: int
    epoch: int
    role: str


@dataclass
class Mbarrier:
    """An mbarrier: its counters, the knowledge that arrivals release, and the checks on the order of its users.

    Attributes:
        component: of the clocks; its index is the number of completed phases.
        name: as in the source, with its index in the array.
        line: where it was allocated.
        per_thread: a TLX warp barrier, on which every thread of a task arrives.
    """

    component: int
    name: str
    line: int
    phases: Phases
    per_thread: bool = False
    released: Knowledge = field(default_factory=Knowledge)  #: what a wait for the last complete phase acquires
    arrivals: list[Arrival] = field(default_factory=list)  #: of the current phase
    arrivals_before: list[Arrival] = field(default_factory=list)  #: of the last complete phase
    waited: list[Arrival] = field(default_factory=list)  #: for the last complete phase, or on a fresh barrier
    partners: dict[str, None] = field(default_factory=dict)  #: roles that have arrived so far, in order
    in_flight: int = 0  #: copies that will deliver bytes here
    bytes_in_phase: int = 0
    bytes_before: int = 0
    _releasing: Knowledge = field(default_factory=Knowledge)

    def arrive(self, who: Arrival, known: Knowledge, count: int = 1, expect: int | None = None) -> list[str]:
        """Counts an arrival, with expected bytes if given; returns violations of the order, if any.

        If the arrival is the last of its phase in every schedule, `known` learns that the phase is complete.

        Raises:
            BarrierError: more arrivals than the phase takes.
        """
        violations = self._too_early(known.finished)
        self.partners[who.role] = None
        self.arrivals.append(who)
        self._releasing.join(known)
        if self.phases.arrive(count) if expect is None else self.phases.expect(expect):
            last = not self.bytes_in_phase and all(known.finished.knows(a.component, a.epoch) for a in self.arrivals)
            violations += self._complete()
            if last:
                known.finished[self.component] = self.phases.completed
        return violations

    def deliver(self, size: int, issuer: Knowledge, role: str) -> list[str]:
        """Counts the bytes of a copy that started with the knowledge `issuer`; returns violations of the order."""
        self.partners[role] = None
        self.bytes_in_phase += size
        self._releasing.join(issuer)
        return self._complete() if self.phases.deliver(size) else []

    def wait(self, who: Arrival, parity: int, known: Knowledge) -> list[str]:
        """A wait that passes: `known` acquires what the last complete phase released; returns violations of the order.

        The phase that the task means follows from the phases that it knows to be complete: the last of them if its
        parity is the one asked for, the next one otherwise. It is a violation if another phase lets the wait pass.
        """
        completed = self.phases.completed
        meant = known.finished.get(self.component, 0) - 1
        if meant % 2 != parity:
            meant += 1
        violations = []
        if completed - 1 != meant:
            ahead = f"phase {completed - 1} is complete already: the wait passes, or hangs, by chance"
            violations.append(f"waits for phase {meant} of {self.name}, but {ahead}")
        if completed:
            known.join(self.released)
            known.finished[self.component] = max(known.finished.get(self.component, 0), completed)
        self.waited.append(who)
        return violations

    def describe(self) -> str:
        """The barrier's name, and what the current phase has and lacks."""
        phases = self.phases
        missing = phases.missing_bytes
        lacking = f"{missing} bytes missing" if missing >= 0 else f"{-missing} bytes that were not expected"
        return (
            f"{self.name} (allocated in line {self.line}; phase {phases.completed} is under way with "
            f"{phases.count - phases.pending} of {phases.count} arrivals and {lacking})"
        )

    def _too_early(self, known: Clock) -> list[str]:
        """Violations by an arrival that some schedule puts before an arrival of the last phase."""
        if self.phases.completed == 0:
            return []
        unknown = [a.role for a in self.arrivals_before if not known.knows(a.component, a.epoch)]
        if self.bytes_before and not known.knows(self.component, self.phases.completed):
            unknown.append("the copies")
        if not unknown:
            return []
        phase, late = self.phases.completed, _listed(unknown)
        early = f"arrives on {self.name} for phase {phase} without having waited for phase {phase - 1}"
        return [f"{early}: if {late} came later, the arrival would count for that one"]

    def _complete(self) -> list[str]:
        """Starts the next phase; violations by waiters that may not yet have seen the last one."""
        late = [w.role for w in self.waited if not self._releasing.finished.knows(w.component, w.epoch)]
        number = self.phases.completed - 1
        violations = []
        if late:
            seen = f"phase {number - 1}" if number else "that it is fresh"
            lost = f"phase {number} of {self.name} may complete before {_listed(late)} has seen {seen}"
            violations.append(f"{lost}: that wait would hang, or take a later phase for its own")
        self.released, self._releasing = self._releasing, Knowledge()
        self.arrivals_before, self.arrivals, self.waited = self.arrivals, [], []
        self.bytes_before, self.bytes_in_phase = self.bytes_in_phase, 0
        return violations


@dataclass
class NamedBarrier:
    """A hardware barrier of a CTA: a round completes with the number of threads that every user names.

    Attributes:
        number: in the hardware, 0 to 15; -1 is the barrier of a cluster.
        rounds: number of complete rounds.
        threads: that have arrived in the current round.
        wanted: threads that the last user named.
        last_round: role → its last round and what that releases.
        partners: roles that have arrived so far, in order.
    """

    component: int
    number: int
    rounds: int = 0
    threads: int = 0
    wanted: int = 0
    last_round: dict[str, tuple[int, Knowledge]] = field(default_factory=dict)
    partners: dict[str, None] = field(default_factory=dict)
    _releasing: Knowledge = field(default_factory=Knowledge)

    @property
    def name(self) -> str:
        """Its name in findings."""
        return f"named barrier {self.number}" if self.number >= 0 else "the barrier of the cluster"

    def arrive(self, role: str, threads: int, wanted: int, known: Knowledge) -> Iterable[BarrierError]:
        """Counts a task's threads, which wait there or continue; yields what is wrong with that."""
        if wanted % 32:
            message = f"{self.name} takes {wanted} threads here, which are no whole warps of 32"
            yield BarrierError("wrong_thread_count", message)
        if threads > wanted:
            message = f"{threads} threads come to {self.name}, which takes {wanted} here"
            yield BarrierError("wrong_thread_count", message)
        same_round = self.threads or (self.rounds and not known.finished.knows(self.component, self.rounds))
        if same_round and wanted != self.wanted:  # or in the round before, as far as this role can tell
            message = f"{self.name} takes {wanted} threads here and {self.wanted} elsewhere in this round"
            yield BarrierError("wrong_thread_count", message)
        last = self.last_round.get(role)
        if last is not None and not known.finished.knows(self.component, last[0] + 1):
            message = f"comes to {self.name} again without having seen the end of its last round there"
            yield BarrierError("barrier_reuse", message)
        elif self.rounds and not known.finished.knows(self.component, self.rounds):
            message = f"comes to {self.name} without having seen the end of the round before: it may count for that one"
            yield BarrierError("barrier_reuse", message)
        self.partners[role] = None
        self.last_round[role] = self.rounds, self._releasing
        self.wanted = wanted
        self.threads += threads
        self._releasing.join(known)
        if self.threads > wanted:
            message = f"{self.threads} threads have come to {self.name}, which takes {wanted} here"
            yield BarrierError("wrong_thread_count", message)
        if self.threads >= wanted:
            self.rounds += 1
            self.threads = 0
            self._releasing = Knowledge()

    def pass_round(self, number: int, known: Knowledge) -> None:
        """A wait for a round passes: `known` acquires what that round released, and nothing of later ones."""
        known.join(dict(self.last_round.values())[number])
        known.finished[self.component] = max(known.finished.get(self.component, 0), number + 1)


def _listed(roles: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(roles))
