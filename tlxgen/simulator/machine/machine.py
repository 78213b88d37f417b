"""The machine: CTAs whose tasks take turns under a seeded scheduler, and copies that finish when they like.

One thread of control at a time (a greenlet each), which may change at every operation on shared state. What is found
does not depend on the turns taken, as far as it comes from the clocks; several schedules are run all the same, since
results and deadlocks are seen in one schedule only.

A machine runs one launch, in the thread that calls `run`; machines in several threads know nothing of each other.
"""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, NamedTuple, NoReturn

import greenlet
import numpy as np

from tlxgen.simulator.findings import Finding, Place
from tlxgen.simulator.machine import exit_checks
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.barriers import BarrierError, Mbarrier, NamedBarrier
from tlxgen.simulator.machine.clocks import Knowledge
from tlxgen.simulator.machine.deadlock import explain
from tlxgen.simulator.machine.global_memory import GlobalMemory
from tlxgen.simulator.machine.shared_memory import Tile
from tlxgen.simulator.machine.tasks import Cluster, Cta, Queue, Task, Wait
from tlxgen.simulator.machine.timeline import Timeline

#: When copies finish: as soon as they may, at any time, or when nothing else can go on.
Policy = Literal["early", "random", "late"]
POLICIES: tuple[Policy, ...] = ("early", "random", "late")

_SWITCH = 0.5  # chance that a task is interrupted at an operation
_LATEST = 200  # steps in a row that late copies let others go on


@dataclass(frozen=True)
class Limits:
    """When a run is given up."""

    steps: int = 2_000_000
    seconds: float = 60.0


class StopSimulationError(Exception):
    """Ends a run from within a task; what is to be said has been said."""


class Completion(NamedTuple):
    """The end of an asynchronous operation, and the place that started it."""

    finish: Callable[[], None]
    place: Place


@dataclass
class Machine:
    """One launch: grid, memory, tasks, and what was found.

    Attributes:
        files: of the kernel's code; findings point into these.
        resident: CTAs that run at the same time; the others start as these end.
        timeline: what happened when, if that is wanted.
        assembly: what a piece of inline assembly computes on arrays, None if that is not known.
    """

    files: frozenset[str] = frozenset()
    seed: int = 0
    policy: Policy = "random"
    limits: Limits = field(default_factory=Limits)
    resident: int = 132
    timeline: Timeline | None = None
    assembly: Callable[[str], Callable[..., Any] | None] = lambda _: None
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    findings: list[Finding] = field(default_factory=list)
    steps: int = 0
    completed: bool = False  #: whether every program ran to its end
    grid: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        self.task: Task = None  # type: ignore[assignment] # set while a task runs
        self._random = random.Random(self.seed)  # noqa: S311 - a schedule, not a secret
        self._tasks: list[Task] = []  # that have not ended
        self._roles: dict[str, Task] = {}  # every task that there ever was
        self._ctas: list[Cta] = []
        self._completions: list[Completion] = []
        self._components = itertools.count()
        self._hub: Any = None  # the greenlet of the scheduler
        self._last_completion = 0  # its step
        self._reported: set[tuple[Any, ...]] = set()

    # ---- running

    def run(
        self, body: Callable[[], None], grid: tuple[int, int, int], *, cluster_size: int = 1, num_warps: int = 4
    ) -> None:
        """Runs `body` once for every program of the grid; what was found is in `findings`.

        Raises:
            RuntimeError: the machine has run before.
        """
        if self._hub is not None:
            raise RuntimeError("a machine runs one launch: make another one for the next")
        self._hub = greenlet.getcurrent()
        self.grid = grid
        if grid[0] % cluster_size:
            self.refuse_launch(f"a grid of {grid[0]} programs is no multiple of the cluster's {cluster_size} CTAs")
            return
        try:
            with np.errstate(all="ignore"):
                self._run_clusters(_clusters(grid, cluster_size), body, num_warps)
            self.completed = True
        except StopSimulationError:
            pass
        finally:
            for task in self._tasks:
                if task.greenlet:  # is under way
                    task.greenlet.throw(greenlet.GreenletExit)
        exit_checks.check_remote_accesses(self, self._ctas)

    def _run_clusters(
        self, clusters: Sequence[Sequence[tuple[int, int, int]]], body: Callable[[], None], num_warps: int
    ) -> None:
        """Starts clusters as there is room for them, until all have ended."""
        deadline = time.monotonic() + self.limits.seconds
        waiting = iter(clusters)
        running: list[Cluster] = []
        while True:
            running = [cluster for cluster in running if not all(cta.known_at_end for cta in cluster.ctas)]
            room = max(0, self.resident // len(clusters[0]) - len(running)) if clusters else 0
            running += [self._start(programs, body, num_warps) for programs in itertools.islice(waiting, room)]
            if not running:
                return
            self._step(deadline)

    def _start(self, programs: Sequence[tuple[int, int, int]], body: Callable[[], None], num_warps: int) -> Cluster:
        cluster = Cluster()
        for rank, program in enumerate(programs):
            cta = Cta(len(self._ctas), program, rank, cluster)
            cluster.ctas.append(cta)
            self._ctas.append(cta)
            name = "kernel" if self.grid == (1, 1, 1) else f"cta {cta.number}"
            self.add_task(cta, name, num_warps * 32, body, Knowledge())
        return cluster

    def add_task(self, cta: Cta, name: str, threads: int, body: Callable[[], None], known: Knowledge) -> Task:
        """A task that will run `body`; it starts with what its parent knows."""
        component = self.new_component()
        dots, stores, copies = (Queue(self.new_component(), what) for what in ("wgmma", "TMA store", "cp.async"))
        task = Task(name, cta, threads, component, self.new_component(), dots, stores, copies, known)
        task.greenlet = greenlet.greenlet(lambda: self._run_task(task, body), self._hub)
        cta.tasks.append(task)
        self._tasks.append(task)
        self._roles[name] = task
        return task

    def _run_task(self, task: Task, body: Callable[[], None]) -> None:
        try:
            with np.errstate(all="ignore"):
                body()
                self._end_task(task)
        except StopSimulationError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a kernel does wrong is a finding
            lines = self._lines_of(error)
            task.line = lines[0] if lines else task.line
            self._give_up(error, task.place, lines[1:])

    def _end_task(self, task: Task) -> None:
        task.ended = True
        exit_checks.check_task(self, task)
        for queue in (task.dots, task.stores, task.copies):
            queue.finish(queue.issued)
        self._tasks.remove(task)
        cta = task.cta
        if all(other.ended for other in cta.tasks):
            exit_checks.check_cta(self, cta)
            cta.known_at_end = Knowledge()
            for other in cta.tasks:
                cta.known_at_end.join(other.known)

    def _step(self, deadline: float) -> None:
        """One decision of the scheduler: a task goes on, or a copy finishes."""
        self.steps += 1
        if self.steps > self.limits.steps or (self.steps % 256 == 0 and time.monotonic() > deadline):
            message = f"given up after {self.steps} steps: this role, for one, has not ended"
            self.fail("limit", message, self._tasks[0].place)
            raise StopSimulationError
        ready = [task for task in self._tasks if task.waiting is None or task.waiting.ready()]
        if self._completions and (not ready or self._finishes_now()):
            self._complete(self._completions.pop(int(self._random.random() * len(self._completions))))
        elif ready:
            self._resume(ready[int(self._random.random() * len(ready))])
        else:
            for finding in explain(self._tasks, self._roles):
                self.fail(finding.kind, finding.message, finding.place)
            raise StopSimulationError

    def _resume(self, task: Task) -> None:
        task.waiting = None
        self.task = task
        task.greenlet.switch()

    def _finishes_now(self) -> bool:
        """Whether a copy finishes though tasks could go on; in the end it does, however long somebody spins."""
        if self.policy == "late":
            return self.steps - self._last_completion > _LATEST
        return self.policy == "early" or self._random.random() < _SWITCH

    def complete_later(self, finish: Callable[[], None], place: Place) -> None:
        """`finish` is called at some later time, as the policy has it: an asynchronous operation ends."""
        self._completions.append(Completion(finish, place))

    def _complete(self, completion: Completion) -> None:
        self._last_completion = self.steps
        try:
            completion.finish()
        except StopSimulationError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a copy is a finding too
            self._give_up(error, completion.place)

    def pause(self, what: str = "", *, always: bool = False) -> None:
        """An operation that others can see begins: somebody else may come first."""
        task = self.task
        task.line = self.line()
        if self.timeline is not None:
            self.timeline.operation(task, what, self.steps)
        if always or self._random.random() < _SWITCH:
            self._hub.switch()

    def block(self, wait: Wait) -> None:
        """Waits; returns when the wait is over."""
        if wait.ready():
            return
        task = self.task
        task.waiting = wait
        if self.timeline is not None:
            self.timeline.wait_begins(task, wait.what(), self.steps)
        self._hub.switch()
        if self.timeline is not None:
            self.timeline.wait_ends(task, self.steps)

    def line(self) -> int:
        """The line of the kernel's file that is being run."""
        frame = sys._getframe(1)  # noqa: SLF001 - the public inspect.currentframe costs ten times as much here
        while frame is not None and frame.f_code.co_filename not in self.files:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else self.task.line

    def new_component(self) -> int:
        """A component of the clocks."""
        return next(self._components)

    # ---- findings

    def fail(self, kind: str, message: str, place: Place | None = None, other: Place | None = None) -> None:
        """Records a finding, once for each pair of places; by default at the running task's line."""
        if place is None:
            self.task.line = self.line()
            place = self.task.place
        key = (kind, place, other, message if other is None else "")
        if key in self._reported:
            return
        self._reported.add(key)
        lines = self._lines_here()
        callers = lines[1:] if lines[:1] == [place.line] else ()
        self.findings.append(Finding(kind, message + _called_from(callers), place, other))

    def refuse_launch(self, message: str) -> None:
        """Records that a launch cannot be made."""
        self.fail("launch", message, Place("launch", 0))

    def _complain(self, kind: str, messages: Iterable[str], place: Place) -> None:
        for message in messages:
            self.fail(kind, message, place)

    def _give_up(self, error: Exception, place: Place, callers: Sequence[int] = ()) -> NoReturn:
        """An exception becomes a finding, and ends the run."""
        if isinstance(error, BarrierError):
            kind, message = error.kind, str(error)
        else:
            kind = "out_of_bounds" if isinstance(error, IndexError) else "error"
            message = f"{type(error).__name__}: {error}"
        self.fail(kind, message + _called_from(callers), place)
        raise StopSimulationError from None

    def _lines_here(self) -> list[int]:
        """Lines of the kernel's file that are being run, that of a helper before that of its call."""
        calls, frame = [], inspect.currentframe()
        while frame is not None:
            calls.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return self._lines(calls)

    def _lines_of(self, error: BaseException) -> list[int]:
        """Lines of the kernel's file that an exception has come through, likewise."""
        calls, traceback = [], error.__traceback__
        while traceback is not None:
            calls.append((traceback.tb_frame.f_code, traceback.tb_lineno))
            traceback = traceback.tb_next
        return self._lines(reversed(calls))

    def _lines(self, calls: Iterable[tuple[CodeType, int]]) -> list[int]:
        lines, inside = [], False
        for code, line in calls:
            if code.co_filename in self.files:
                if not inside:
                    lines.append(line)
                inside = code.co_name.startswith("<")  # a comprehension or lambda is no call that anybody wrote
        return lines

    # ---- shared memory

    def touch(self, tile: Tile, access: Access, known: Knowledge, *, poison: bool = False) -> None:
        """An access to shared memory: whether something unordered, or nobody at all, was there before."""
        for old in tile.conflicts(access, known):
            if not old.write and not old.generic:
                kind, why = "early_release", f"{old} may still read it"
            elif old.in_flight or not old.generic:
                kind, why = "data_race", f"{old} may still be under way"
            else:
                kind, why = "data_race", f"nothing orders {old} before it"
            self.fail(kind, f"{access.what} of {tile.name}, while {why}", access.place, old.place)
        if not access.write and not tile.written.all():
            which = "parts of which nobody has written" if tile.written.any() else "which nobody has written"
            self.fail("unwritten_shared", f"{access.what} of {tile.name}, {which}", access.place)
        if poison:
            tile.poison()

    def require_fence(self, tile: Tile, what: str) -> None:
        """Ordinary writes must have passed a fence before TMA reads them."""
        for old in tile.unfenced(self.task.known):
            message = f"{what} of {tile.name}: no fence has shown it {old}, so it may read what was there before"
            self.fail("missing_fence", message, None, old.place)

    # ---- mbarriers

    def arrive(self, barrier: Mbarrier, count: int, expect: int | None = None) -> None:
        """An arrival of the running task."""
        task = self.task
        who, known = task.now, task.release()
        in_flight, before = barrier.in_flight, barrier.phases.completed
        try:
            complaints = barrier.arrive(who, known, count, expect)
        except BarrierError as error:
            raise BarrierError(error.kind, f"arrives on {barrier.name}: {error}") from None
        self._complain("barrier_reuse", complaints, task.place)
        task.known.finished.join(known.finished)
        self._check_bytes(barrier, before, in_flight, task.place)

    def deliver(self, barrier: Mbarrier, size: int, issuer: Knowledge, place: Place) -> None:
        """Bytes of a copy arrive on a barrier."""
        barrier.in_flight -= 1
        before = barrier.phases.completed
        self._complain("barrier_reuse", barrier.deliver(size, issuer, place.role), place)
        self._check_bytes(barrier, before, barrier.in_flight, place)

    def _check_bytes(self, barrier: Mbarrier, before: int, in_flight: int, place: Place) -> None:
        if barrier.phases.completed > before and in_flight:
            copies = "a copy that signals it is" if in_flight == 1 else f"{in_flight} copies that signal it are"
            message = f"phase {before} of {barrier.name} is complete while {copies} under way"
            self.fail("wrong_byte_count", f"{message}: fewer bytes are expected than come", place)

    def wait(self, barrier: Mbarrier, parity: int) -> None:
        """The running task waits for a phase."""
        task = self.task
        self.block(
            Wait(
                lambda: barrier.phases.passes(parity),
                lambda: f"waits for parity {parity} of {barrier.describe()}",
                lambda: tuple(barrier.partners),
                barrier,
            )
        )
        self._complain("barrier_reuse", barrier.wait(task.now, parity, task.known), task.place)

    # ---- named barriers

    def come(self, number: int, threads: int, wanted: int, *, wait: bool) -> None:
        """The running task comes to a named barrier, and waits there or goes on."""
        task = self.task
        barrier = task.cta.named.get(number)
        if barrier is None:
            barrier = task.cta.named[number] = NamedBarrier(self.new_component(), number)
        self._meet(barrier, threads, wanted, wait=wait)

    def _meet(self, barrier: NamedBarrier, threads: int, wanted: int, *, wait: bool) -> None:
        task = self.task
        number = barrier.rounds
        for error in barrier.come(task.name, threads, wanted, task.release()):
            self.fail(error.kind, str(error))
        if wait:
            self.block(
                Wait(
                    lambda: barrier.rounds > number,
                    lambda: f"waits at {barrier.name} ({barrier.threads} of {wanted} threads are there)",
                    lambda: tuple(barrier.partners),
                    barrier,
                )
            )
            barrier.pass_round(number, task.known)
            task.meet()

    def cluster_barrier(self) -> None:
        """All threads of all CTAs of the cluster meet.

        The warps of async tasks are threads too, and wait for work from the kernel's start to its end: fbtriton has
        them come to no barrier of the cluster but its own (as read from its PTX, and an H200 hung).
        """
        cluster = self.task.cta.cluster
        self.task.cta.met_others = True
        if self.task.cta.partitions:
            self.fail("deadlock", "the warps of async tasks never come to the barrier of the cluster: nobody passes it")
        if cluster.barrier is None:
            cluster.barrier = NamedBarrier(self.new_component(), -1)
        cta = self.task.cta
        cta.at_barrier += self.task.threads
        complete = cta.at_barrier >= cta.live_threads
        if complete:
            cta.at_barrier = 0
        self._meet(cluster.barrier, 32 * complete, 32 * len(cluster.ctas), wait=True)  # a CTA counts as a warp


def _clusters(grid: tuple[int, int, int], size: int) -> list[list[tuple[int, int, int]]]:
    """The programs of a grid, in groups of neighbours along its first axis."""
    programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    return [programs[i : i + size] for i in range(0, len(programs), size)]


def _called_from(lines: Sequence[int]) -> str:
    distinct = dict.fromkeys(lines)  # a recursion has the same ones many times
    return f" (called from line {', from line '.join(map(str, distinct))})" if distinct else ""
