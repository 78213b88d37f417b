"""The machine that a launch runs on: a seeded scheduler for the tasks of all CTAs and for their asynchronous copies.

Each task is a greenlet; the scheduler may switch at every operation on shared state. Findings about order come from
the vector clocks and are the same in every schedule; wrong results and deadlocks may show in some schedules only, so
`check` runs several. A machine runs one launch, in the thread that calls `run`, and shares no state with others.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import greenlet
import numpy as np

from tlxgen.simulator.findings import Finding, Place
from tlxgen.simulator.machine import exit_checks, races, source_lines
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.barriers import BarrierError, Mbarrier, NamedBarrier
from tlxgen.simulator.machine.clocks import Knowledge
from tlxgen.simulator.machine.deadlock import explain
from tlxgen.simulator.machine.global_memory import GlobalMemory, Storage
from tlxgen.simulator.machine.shared_memory import Tile
from tlxgen.simulator.machine.tasks import Cluster, Cta, Queue, Task, Wait
from tlxgen.simulator.machine.timeline import Timeline

#: When copies finish: before any task continues, at random, or when no task can continue.
Policy = Literal["early", "random", "late"]
POLICIES: tuple[Policy, ...] = ("early", "random", "late")

_SWITCH = 0.5  # probability that a task is interrupted at an operation
_LATEST = 200  # steps after which a late copy finishes although tasks could continue


@dataclass(frozen=True)
class Limits:
    """When a run is stopped."""

    steps: int = 2_000_000
    seconds: float = 60.0


class StopSimulationError(Exception):
    """Ends a run from within a task, after its finding has been recorded."""


class Completion(NamedTuple):
    """The end of an asynchronous operation, and the line that started it."""

    finish: Callable[[], None]
    place: Place


@dataclass
class Machine:
    """One launch: grid, memory, tasks and findings.

    Attributes:
        files: source files of the kernel; findings point into these.
        resident: CTAs that run at the same time; the others start as these end.
        timeline: collects a trace of the run, if given.
    """

    files: frozenset[str] = frozenset()
    seed: int = 0
    policy: Policy = "random"
    limits: Limits = field(default_factory=Limits)
    resident: int = 132
    timeline: Timeline | None = None
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    findings: list[Finding] = field(default_factory=list)
    steps: int = 0
    completed: bool = False  #: whether every program ran to its end
    grid: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        self.task: Task = None  # type: ignore[assignment] # set while a task runs
        self._random = random.Random(self.seed)  # noqa: S311 - a schedule, not a secret
        self._tasks: list[Task] = []  # that have not ended
        self._roles: dict[str, Task] = {}  # every task so far, by name
        self._ctas: list[Cta] = []
        self._completions: list[Completion] = []
        self._components = itertools.count()
        self._hub: Any = None  # the greenlet of the scheduler
        self._last_completion = 0  # step of it
        self._reported: set[tuple[Any, ...]] = set()

    # ---- running

    def run(
        self, body: Callable[[], None], grid: tuple[int, int, int], *, cluster_size: int = 1, num_warps: int = 4
    ) -> None:
        """Runs `body` once for every program of the grid; the result is in `findings`.

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
                if task.greenlet:  # is running
                    task.greenlet.throw(greenlet.GreenletExit)
        self.report(exit_checks.of_launch(self._ctas))

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
        """Adds a task that runs `body`; `known` is its parent's knowledge."""
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
        except Exception as error:  # noqa: BLE001 - any error of a kernel is a finding
            lines = source_lines.of_error(error, self.files)
            task.line = lines[0] if lines else task.line
            self._abort(error, task.place, lines[1:])

    def _end_task(self, task: Task) -> None:
        task.ended = True
        self.report(exit_checks.of_task(task))
        for queue in (task.dots, task.stores, task.copies):
            queue.finish(queue.issued)
        self._tasks.remove(task)
        cta = task.cta
        if all(other.ended for other in cta.tasks):
            self.report(exit_checks.of_cta(cta))
            cta.known_at_end = Knowledge()
            for other in cta.tasks:
                cta.known_at_end.join(other.known)

    def _step(self, deadline: float) -> None:
        """One decision of the scheduler: a task continues, or a copy finishes."""
        self.steps += 1
        if self.steps > self.limits.steps or (self.steps % 256 == 0 and time.monotonic() > deadline):
            message = f"stopped after {self.steps} steps: this role has not ended"
            self.fail("limit", message, self._tasks[0].place)
            raise StopSimulationError
        ready = [task for task in self._tasks if task.waiting is None or task.waiting.ready()]
        if self._completions and (not ready or self._finishes_now()):
            self._complete(self._completions.pop(int(self._random.random() * len(self._completions))))
        elif ready:
            self._resume(ready[int(self._random.random() * len(ready))])
        else:
            self.report(explain(self._tasks, self._roles))
            raise StopSimulationError

    def _resume(self, task: Task) -> None:
        task.waiting = None
        self.task = task
        task.greenlet.switch()

    def _finishes_now(self) -> bool:
        """Whether a copy finishes although tasks could continue; a late copy too must finish while a task spins."""
        if self.policy == "late":
            return self.steps - self._last_completion > _LATEST
        return self.policy == "early" or self._random.random() < _SWITCH

    def complete_later(self, finish: Callable[[], None], place: Place) -> None:
        """Schedules the end of an asynchronous operation: `finish` is called when the policy decides."""
        self._completions.append(Completion(finish, place))

    def _complete(self, completion: Completion) -> None:
        self._last_completion = self.steps
        try:
            completion.finish()
        except StopSimulationError:
            raise
        except Exception as error:  # noqa: BLE001 - any error in a copy is a finding
            self._abort(error, completion.place)

    def pause(self, what: str = "", *, always: bool = False) -> None:
        """Starts an operation that other tasks can observe: the scheduler may run another task first."""
        task = self.task
        task.line = self.line()
        if self.timeline is not None:
            self.timeline.operation(task, what, self.steps)
        if always or self._random.random() < _SWITCH:
            self._hub.switch()

    def block(self, wait: Wait) -> None:
        """Suspends the running task until the wait is over."""
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
        """The innermost line of the kernel's files on the stack."""
        frame = sys._getframe(1)  # noqa: SLF001 - inspect.currentframe costs ten times as much here
        while frame is not None and frame.f_code.co_filename not in self.files:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else self.task.line

    def new_component(self) -> int:
        """A new component of the vector clocks."""
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
        lines = source_lines.of_stack(self.files)
        callers = lines[1:] if lines[:1] == [place.line] else ()
        self.findings.append(Finding(kind, message + source_lines.called_from(callers), place, other))

    def report(self, findings: Iterable[Finding]) -> None:
        """Records findings."""
        for finding in findings:
            self.fail(finding.kind, finding.message, finding.place, finding.other)

    def refuse_launch(self, message: str) -> None:
        """Records that the launch is invalid."""
        self.fail("launch", message, Place("launch", 0))

    def _abort(self, error: Exception, place: Place, callers: Sequence[int] = ()) -> NoReturn:
        """Records an exception as a finding and ends the run."""
        if isinstance(error, BarrierError):
            kind, message = error.kind, str(error)
        else:
            kind = "out_of_bounds" if isinstance(error, IndexError) else "error"
            message = f"{type(error).__name__}: {error}"
        self.fail(kind, message + source_lines.called_from(callers), place)
        raise StopSimulationError from None

    # ---- memory

    def access_shared(self, tile: Tile, access: Access, *, poison: bool = False) -> None:
        """Records the running task's access to shared memory, and its races; `poison` makes the tile NaN."""
        self.report(races.in_shared_memory(tile, access, self.task.known))
        if poison:
            tile.poison()

    def access_global(self, storage: Storage, elements: Any, access: Access) -> None:
        """Records the running task's access to elements of global memory, given by number, and its races."""
        self.report(races.in_global_memory(self.memory, storage, elements, access, self.task.known))

    def require_fence(self, tile: Tile, what: str) -> None:
        """Records generic writes to a tile that no fence has made visible to TMA."""
        self.report(races.without_fence(tile, what, self.task.place, self.task.known))

    # ---- mbarriers

    def arrive(self, barrier: Mbarrier, count: int, expect: int | None = None) -> None:
        """An arrival of the running task, with bytes to expect if given."""
        task = self.task
        who, known = task.now, task.release()
        in_flight, before = barrier.in_flight, barrier.phases.completed
        try:
            violations = barrier.arrive(who, known, count, expect)
        except BarrierError as error:
            raise BarrierError(error.kind, f"arrives on {barrier.name}: {error}") from None
        self._report_reuse(violations, task.place)
        task.known.finished.join(known.finished)
        self._check_bytes(barrier, before, in_flight, task.place)

    def deliver(self, barrier: Mbarrier, size: int, issuer: Knowledge, place: Place) -> None:
        """Bytes of a copy arrive on a barrier."""
        barrier.in_flight -= 1
        before = barrier.phases.completed
        self._report_reuse(barrier.deliver(size, issuer, place.role), place)
        self._check_bytes(barrier, before, barrier.in_flight, place)

    def _check_bytes(self, barrier: Mbarrier, before: int, in_flight: int, place: Place) -> None:
        if barrier.phases.completed > before and in_flight:
            copies = "a copy that signals it is" if in_flight == 1 else f"{in_flight} copies that signal it are"
            message = f"phase {before} of {barrier.name} is complete while {copies} under way"
            self.fail("wrong_byte_count", f"{message}: fewer bytes are expected than come", place)

    def wait(self, barrier: Mbarrier, parity: int) -> None:
        """The running task waits for the phase of a parity."""
        task = self.task
        self.block(
            Wait(
                lambda: barrier.phases.passes(parity),
                lambda: f"waits for parity {parity} of {barrier.describe()}",
                lambda: tuple(barrier.partners),
                barrier,
            )
        )
        self._report_reuse(barrier.wait(task.now, parity, task.known), task.place)

    def _report_reuse(self, messages: Iterable[str], place: Place) -> None:
        self.report(Finding("barrier_reuse", message, place) for message in messages)

    # ---- named barriers and the barrier of a cluster

    def named_barrier(self, number: int, threads: int, wanted: int, *, wait: bool) -> None:
        """The running task arrives on a named barrier, and waits there or continues."""
        named = self.task.cta.named
        if number not in named:
            named[number] = NamedBarrier(self.new_component(), number)
        self._arrive_named(named[number], threads, wanted, wait=wait)

    def cluster_barrier(self) -> None:
        """The running task waits for all threads of the cluster.

        The warps of async tasks are threads too: they exist from the kernel's start to its end, and arrive on no
        cluster barrier but fbtriton's own (read from its PTX; kernels that wait here hung on an H200).
        """
        task, cta, cluster = self.task, self.task.cta, self.task.cta.cluster
        cta.used_cluster_barrier = True
        if cta.partitions:
            self.fail("deadlock", "the warps of async tasks never arrive on the barrier of the cluster: no wait passes")
        if cluster.barrier is None:
            cluster.barrier = NamedBarrier(self.new_component(), -1)
        cta.at_cluster_barrier += task.threads
        complete = cta.at_cluster_barrier >= cta.live_threads
        if complete:
            cta.at_cluster_barrier = 0
        self._arrive_named(cluster.barrier, 32 * complete, 32 * len(cluster.ctas), wait=True)  # a CTA counts as a warp

    def _arrive_named(self, barrier: NamedBarrier, threads: int, wanted: int, *, wait: bool) -> None:
        task = self.task
        number = barrier.rounds
        for error in barrier.arrive(task.name, threads, wanted, task.release()):
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
            task.sync_threads()


def _clusters(grid: tuple[int, int, int], size: int) -> list[list[tuple[int, int, int]]]:
    """The programs of a grid, in groups of neighbours along its first axis."""
    programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    return [programs[i : i + size] for i in range(0, len(programs), size)]
