"""The machine: CTAs whose tasks take turns under a seeded scheduler, and copies that finish when they like.

One thread of control at a time (a greenlet each), which may change at every operation on shared state. What is found
does not depend on the turns taken, as far as it comes from the clocks; several schedules are run all the same, since
results and deadlocks are seen in one schedule only.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import greenlet
import numpy as np

from tlxgen.simulator import global_memory
from tlxgen.simulator.accesses import Access
from tlxgen.simulator.barriers import BarrierError, Mbarrier, NamedBarrier
from tlxgen.simulator.blocks import Block, numpy_dtype
from tlxgen.simulator.clocks import IN_FLIGHT, Knowledge
from tlxgen.simulator.descriptors import Descriptor
from tlxgen.simulator.findings import Finding, Place
from tlxgen.simulator.global_memory import GlobalMemory, Storage
from tlxgen.simulator.shared_memory import Tile
from tlxgen.simulator.tasks import Cluster, Cta, Queue, Task, Wait
from tlxgen.simulator.timeline import Timeline

#: When copies finish: as soon as they may, at any time, or when nothing else can go on.
Policy = Literal["early", "random", "late"]
POLICIES: tuple[Policy, ...] = ("early", "random", "late")

_SWITCH = 0.5  # chance that a task is interrupted at an operation
_LATEST = 200  # steps in a row that late copies let others go on
_LOCKSTEP_LANES = 64  # atomics on more lanes than these add up data; they synchronise nobody


@dataclass(frozen=True)
class Limits:
    """When a run is given up."""

    steps: int = 2_000_000
    seconds: float = 60.0


class StopSimulationError(Exception):
    """Ends a run from within a task; what is to be said has been said."""


@dataclass
class Machine:
    """One launch: grid, memory, tasks, and what was found.

    Attributes:
        files: of the kernel's code; findings point into these.
        resident: CTAs that run at the same time; the others start as these end.
    """

    files: frozenset[str]
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
        self.random = random.Random(self.seed)  # noqa: S311 - a schedule, not a secret
        self.tasks: list[Task] = []
        self.completions: list[Callable[[], None]] = []
        self.task: Task = None  # type: ignore[assignment] # set while a task runs
        self._components = itertools.count()
        self._hub: Any = None
        self._last_copy = 0  # step at which a copy finished
        self._said: set[tuple[Any, ...]] = set()
        self._atomics: dict[int, Knowledge] = {}
        self._roles: dict[str, Task] = {}

    # ---- running

    def run(
        self, body: Callable[[], None], grid: tuple[int, int, int], *, cluster_size: int = 1, num_warps: int = 4
    ) -> None:
        """Runs `body` once for every program of the grid; what was found is in `findings`."""
        self.grid = grid
        self._hub = greenlet.getcurrent()
        programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        if grid[0] % cluster_size:
            message = f"a grid of {grid[0]} programs is no multiple of the cluster's {cluster_size} CTAs"
            self.findings.append(Finding("launch", message, Place("launch", 0)))
            return
        groups = [programs[i : i + cluster_size] for i in range(0, len(programs), cluster_size)]
        waiting = iter(list(enumerate(groups)))
        running: list[Cluster] = []
        deadline = time.monotonic() + self.limits.seconds
        try:
            while True:
                running = [cluster for cluster in running if not all(cta.farewell for cta in cluster.ctas)]
                for number, group in itertools.islice(waiting, max(0, self.resident // cluster_size - len(running))):
                    running.append(self._start(number, group, body, num_warps))
                if not running:
                    self.completed = True
                    break
                self._step(deadline)
        except StopSimulationError:
            pass
        finally:
            for task in self.tasks:
                if task.greenlet:
                    task.greenlet.throw(greenlet.GreenletExit)
        self._check_visits()

    def _start(self, number: int, group: Sequence[tuple[int, int, int]], body: Any, num_warps: int) -> Cluster:
        cluster = Cluster()
        for rank, program in enumerate(group):
            cta = Cta(number * len(group) + rank, program, rank, cluster)
            cluster.ctas.append(cta)
            name = "kernel" if self.grid == (1, 1, 1) else f"cta {cta.number}"
            self.add_task(cta, name, num_warps * 32, body, Knowledge())
        return cluster

    def add_task(self, cta: Cta, name: str, threads: int, body: Callable[[], None], known: Knowledge) -> Task:
        """A task that will run `body`; it starts with what its parent knows."""
        component, *queues = (next(self._components) for _ in range(4))
        names = ("wgmma", "TMA store", "cp.async")
        dots, stores, copies = (Queue(c, n) for c, n in zip(queues, names, strict=True))
        task = Task(name, cta, threads, component, dots, stores, copies, known)
        task.greenlet = greenlet.greenlet(lambda: self._run_task(task, body), self._hub)
        cta.tasks.append(task)
        self.tasks.append(task)
        self._roles[name] = task
        return task

    def _run_task(self, task: Task, body: Callable[[], None]) -> None:
        try:
            with np.errstate(all="ignore"):
                body()
        except StopSimulationError:
            raise
        except BarrierError as error:
            self.fail(error.kind, str(error))
            raise StopSimulationError from None
        except Exception as error:  # noqa: BLE001 - whatever a kernel does wrong is a finding
            task.line = self._line_of(error) or task.line
            self.fail("out_of_bounds" if isinstance(error, IndexError) else "error", f"{type(error).__name__}: {error}")
            raise StopSimulationError from None
        self._end_task(task)

    def _step(self, deadline: float) -> None:
        """One decision of the scheduler: a task goes on, or a copy finishes."""
        self.steps += 1
        if self.steps > self.limits.steps or (self.steps % 256 == 0 and time.monotonic() > deadline):
            some = next((task for task in self.tasks if not task.ended), None)
            place = some.place if some else Place("kernel", 0)
            self.findings.append(Finding("limit", f"given up after {self.steps} steps", place))
            raise StopSimulationError
        ready = [task for task in self.tasks if task.waiting is None or task.waiting.ready()]
        if self.completions and (not ready or self._finishes_now()):
            self._finish_copy()
        elif ready:
            self._resume(ready[int(self.random.random() * len(ready))])
        else:
            from tlxgen.simulator.deadlock import explain

            self.findings += explain(self.tasks, self._roles)
            raise StopSimulationError

    def _resume(self, task: Task) -> None:
        task.waiting = None
        self.task = task
        task.greenlet.switch()

    def _finishes_now(self) -> bool:
        """Whether a copy finishes though tasks could go on; in the end it does, however long somebody spins."""
        if self.policy == "late":
            return self.steps - self._last_copy > _LATEST
        return self.policy == "early" or self._coin()

    def _finish_copy(self) -> None:
        self._last_copy = self.steps
        copy = self.completions.pop(int(self.random.random() * len(self.completions)))
        try:
            copy()
        except (IndexError, ValueError) as error:
            self.findings.append(Finding("error", f"{type(error).__name__}: {error}", Place("copy", 0)))
            raise StopSimulationError from None

    def _coin(self) -> bool:
        return self.random.random() < _SWITCH

    def pause(self, what: str = "", *, always: bool = False) -> None:
        """An operation that others can see begins: somebody else may come first."""
        task = self.task
        task.line = self.line()
        if self.timeline is not None:
            self.timeline.operation(task, what, self.steps)
        if always or self.random.random() < _SWITCH:
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

    def _line_of(self, error: BaseException) -> int:
        line, traceback = 0, error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename in self.files:
                line = traceback.tb_lineno
            traceback = traceback.tb_next
        return line

    # ---- findings

    def fail(self, kind: str, message: str, place: Place | None = None, other: Place | None = None) -> None:
        """Records a finding, once for each pair of places."""
        if place is None:
            self.task.line = self.line() or self.task.line
            place = self.task.place
        key = (kind, place, other, message if other is None else "")
        if key not in self._said:
            self._said.add(key)
            self.findings.append(Finding(kind, message, place, other))

    def complain(self, kind: str, messages: Sequence[str], place: Place | None = None) -> None:
        """Records several."""
        for message in messages:
            self.fail(kind, message, place)

    # ---- shared memory

    def touch(self, tile: Tile, access: Access, known: Knowledge, *, poison: bool = False) -> None:
        """An access to shared memory: whether something unordered, or nobody at all, was there before."""
        for old in tile.conflicts(access, known):
            kind = "early_release" if not old.write and not old.generic else "data_race"
            why = "is still under way" if old.in_flight or not old.generic else "is not ordered before it"
            self.fail(kind, f"{access.what} of {tile.name}, while {old} {why}", access.place, old.place)
        if not access.write and not tile.written.all():
            self.fail("unwritten_shared", f"{access.what} of {tile.name}, which nobody has written", access.place)
        if poison:
            tile.poison()

    def require_fence(self, tile: Tile, what: str) -> None:
        """Ordinary writes must have passed a fence before TMA reads them."""
        for old in tile.unfenced(self.task.known):
            self.fail("missing_fence", f"{what} of {tile.name}: {old} has passed no fence", None, old.place)

    # ---- mbarriers

    def arrive(self, barrier: Mbarrier, count: int, expect: int | None = None) -> None:
        """An arrival of the running task."""
        task = self.task
        who, known = task.now, task.release()
        try:
            in_flight = barrier.in_flight
            before = barrier.phases.completed
            self.complain("barrier_reuse", barrier.arrive(who, known, count, expect))
            task.known.finished.join(known.finished)
            self._check_bytes(barrier, before, in_flight, task.place)
        except BarrierError as error:
            self.fail(error.kind, f"{barrier.name}: {error}")
            raise StopSimulationError from None

    def deliver(self, barrier: Mbarrier, size: int, issuer: Knowledge, place: Place) -> None:
        """Bytes of a copy arrive on a barrier."""
        barrier.in_flight -= 1
        before = barrier.phases.completed
        self.complain("barrier_reuse", barrier.deliver(size, issuer, place.role), place)
        self._check_bytes(barrier, before, barrier.in_flight, place)

    def _check_bytes(self, barrier: Mbarrier, before: int, in_flight: int, place: Place) -> None:
        if barrier.phases.completed > before and in_flight:
            message = f"phase {before} of {barrier.name} is complete while {in_flight} of its copies are under way"
            self.fail("wrong_byte_count", f"{message}: fewer bytes are expected than come", place)

    def wait(self, barrier: Mbarrier, parity: int) -> None:
        """The running task waits for a phase."""
        task = self.task
        phases = barrier.phases
        self.block(
            Wait(
                lambda: phases.passes(parity),
                lambda: (
                    f"waits for phase {parity} of {barrier.name} (allocated in line {barrier.line}; phase "
                    f"{phases.completed} is under way with {phases.count - phases.pending} of {phases.count} arrivals "
                    f"and {phases.missing_bytes} bytes missing)"
                ),
                lambda: tuple(barrier.partners),
                barrier,
            )
        )
        self.complain("barrier_reuse", barrier.wait(task.now, parity, task.known))

    # ---- named barriers

    def come(self, number: int, threads: int, wanted: int, *, wait: bool) -> None:
        """The running task comes to a named barrier, and waits there or goes on."""
        task = self.task
        barrier = task.cta.named.get(number)
        if barrier is None:
            barrier = task.cta.named[number] = NamedBarrier(next(self._components), number)
        self.meet(barrier, threads, wanted, wait=wait)

    def meet(self, barrier: NamedBarrier, threads: int, wanted: int, *, wait: bool) -> None:
        """Comes to a barrier of threads; `come` and the barrier of a cluster share this."""
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

    def cluster_barrier(self) -> None:
        """All threads of all CTAs of the cluster meet."""
        cluster = self.task.cta.cluster
        if cluster.barrier is None:
            cluster.barrier = NamedBarrier(next(self._components), -1)
        cta = self.task.cta
        cta.at_barrier += self.task.threads
        complete = cta.at_barrier >= cta.live_threads
        if complete:
            cta.at_barrier = 0
        self.meet(cluster.barrier, 32 * complete, 32 * len(cluster.ctas), wait=True)  # a CTA counts as a warp

    def new_component(self) -> int:
        """A component of the clocks."""
        return next(self._components)

    # ---- global memory: what `tlxgen.simulator.language` calls

    def program_id(self, axis: int) -> int:
        """Place of the running program in the grid."""
        return self.task.cta.program[axis]

    def num_programs(self, axis: int) -> int:
        """Size of the grid."""
        return self.grid[axis]

    def global_load(self, addresses: np.ndarray, element: Any, mask: np.ndarray | None) -> np.ndarray:
        """Values at byte addresses; lanes that are masked out hold anything."""
        self.pause("load")
        addresses = np.asarray(addresses)
        result = np.zeros(addresses.shape, numpy_dtype(element))
        for storage, lanes in self.memory.split(addresses, numpy_dtype(element).itemsize, mask):
            if storage is None:
                self.fail("out_of_bounds", "load from addresses that belong to no argument")
                continue
            values, places = global_memory.gather(storage, addresses, element, lanes)
            self.note_elements(storage, places if lanes is ... else places[lanes], self._access("load", write=False))
            if lanes is ...:
                result = values
            else:
                result[lanes] = values[lanes]
        return result

    def global_store(self, addresses: np.ndarray, values: np.ndarray, element: Any, mask: np.ndarray | None) -> None:
        """Writes values to byte addresses."""
        self.pause("store")
        addresses = np.asarray(addresses)
        for storage, lanes in self.memory.split(addresses, numpy_dtype(element).itemsize, mask):
            if storage is None:
                self.fail("out_of_bounds", "store to addresses that belong to no argument")
                continue
            places = global_memory.scatter(storage, addresses, values, element, lanes)
            self.note_elements(storage, places, self._access("store", write=True))

    def global_atomic(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        element: Any,
        mask: np.ndarray | None,
        operation: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Read-modify-write; the old values. Acquires and releases, so other CTAs may be waited for."""
        self.pause("atomic", always=True)
        task = self.task
        addresses = np.asarray(addresses)
        result = np.zeros(addresses.shape, numpy_dtype(element))
        for storage, lanes in self.memory.split(addresses, numpy_dtype(element).itemsize, mask):
            if storage is None:
                self.fail("out_of_bounds", "atomic on addresses that belong to no argument")
                continue
            if addresses.size <= _LOCKSTEP_LANES:
                meant = addresses if lanes is ... else addresses[lanes]
                for address in np.unique(meant).tolist():
                    clock = self._atomics.setdefault(address, Knowledge())
                    task.known.join(clock)
                    clock.join(task.known)
            old, places = global_memory.combine(storage, addresses, values, element, lanes, operation)
            access = self._access("atomic", write=True)
            access.atomic = True
            self.note_elements(storage, places, access)
            result = old if lanes is ... else np.where(lanes, old, result)
        task.release()
        return result

    def _access(self, what: str, *, write: bool) -> Access:
        self.task.line = self.line()
        return self.task.access(what, write=write)

    def note_elements(self, storage: Storage, places: Any, access: Access, known: Knowledge | None = None) -> None:
        """Records what touches elements of global memory."""
        known = known or self.task.known
        for old in self.memory.note(storage, places, access, known.finished):
            message = f"{access.what} of {storage.name}, while {old} is not ordered before it"
            self.fail("data_race", message, access.place, old.place)

    def make_descriptor(
        self, base: Block, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], padding: str
    ) -> Descriptor:
        """A descriptor that the kernel makes itself."""
        address = int(base.data)
        storage = self.memory.at(address)
        if storage is None:
            raise IndexError("make_tensor_descriptor: the base belongs to no argument")
        self._check_descriptor(storage, address, shape, strides, block_shape, base.dtype.element_ty)
        return Descriptor(
            self, storage, address, tuple(shape), tuple(strides), list(block_shape), base.dtype.element_ty, padding
        )

    def _check_descriptor(
        self, storage: Storage, address: int, shape: Any, strides: Any, block_shape: Any, dtype: Any
    ) -> None:
        size = numpy_dtype(dtype).itemsize
        if address % 16 or any(s * size % 16 for s in strides[:-1]) or strides[-1] != 1 or min(shape) <= 0:
            message = f"descriptor of {storage.name}: TMA wants a base and strides of whole 16 bytes, rows without gaps"
            self.fail("launch", f"{message}, and sizes above 0; got strides {list(strides)}, shape {list(shape)}")
        if max(block_shape) > 256 or block_shape[-1] * size < 16:
            message = f"descriptor of {storage.name}: boxes have sides of at most 256 and rows of at least 16 bytes"
            self.fail("launch", f"{message}, got {list(block_shape)}")

    def descriptor_load(self, descriptor: Descriptor, offsets: Sequence[Any]) -> Block:
        """`desc.load`."""
        self.pause("desc.load")
        where = [int(o) for o in offsets]
        access = self._access("TMA load", write=False)
        self.note_box(descriptor, where, access, self.task.known)
        return Block(descriptor.read(where), descriptor.dtype)

    def descriptor_store(self, descriptor: Descriptor, offsets: Sequence[Any], value: Any, reduction: str) -> None:
        """`desc.store`: the task goes on when the staging tile has been read; the write itself ends with the kernel."""
        self.pause("desc.store")
        where = [int(o) for o in offsets]
        access = self._access("TMA store", write=True)
        access.index, access.generic, access.atomic = IN_FLIGHT, False, bool(reduction)
        self.note_box(descriptor, where, access, self.task.known)
        descriptor.write(where, value.to(descriptor.dtype).data, reduction)

    def note_box(self, descriptor: Descriptor, offsets: Sequence[int], access: Access, known: Knowledge) -> None:
        """Records what a box touches in global memory."""
        _, start, extent = descriptor.inside(offsets)
        if all(extent):
            self.note_elements(descriptor.storage, descriptor.places(start, extent), access, known)

    def block_barrier(self) -> None:
        """`tl.debug_barrier`: threads of one task move as one here."""

    def asm_meaning(self, text: str) -> Callable[..., Any] | None:
        """What a piece of inline assembly computes."""
        return self.assembly(text)

    # ---- ends

    def _end_task(self, task: Task) -> None:
        """A role is done: nothing of it may be under way."""
        task.ended = True
        self.task = task
        for queue, issued in ((task.dots, task.dots.issued), (task.stores, task.stores.issued)):
            if queue.waited < issued:
                message = f"{issued - queue.waited} {queue.name} group(s) were never waited for"
                self.fail("unfinished_at_exit", message, queue.place or task.place)
        if task.copies.waited < task.copies.issued or task.uncommitted:
            message = "cp.async copies were never waited for: they may write to memory that has another use by then"
            self.fail("unfinished_at_exit", message, task.copies.place or task.place)
        for queue in (task.dots, task.stores, task.copies):
            while queue.work:
                queue.finish_one()
        self.tasks.remove(task)
        if all(other.ended for other in task.cta.tasks):
            self._end_cta(task.cta)

    def _end_cta(self, cta: Cta) -> None:
        place = cta.tasks[0].place
        if cta.in_flight:
            message = f"{cta.in_flight} copies into its shared memory are under way at the end of the CTA"
            self.fail("unfinished_at_exit", message, place)
        for barrier in itertools.chain.from_iterable(cta.barriers):
            here = Place(place.role, barrier.line)
            phases = barrier.phases
            if phases.missing_bytes and not barrier.in_flight:
                message = f"{barrier.name} still expects {phases.missing_bytes} bytes in phase {phases.completed}"
                self.fail("wrong_byte_count", f"{message} at the end", here)
            if barrier.bytes_before and not barrier.waited:
                message = f"phase {phases.completed - 1} of {barrier.name} brought bytes that nobody waited for"
                self.fail("roles_out_of_step", message, here)
        cta.farewell = Knowledge()
        for task in cta.tasks:
            cta.farewell.join(task.known)

    def _check_visits(self) -> None:
        """Nothing may come from another CTA once a CTA has ended and its shared memory is somebody else's."""
        seen: set[int] = set()
        for task in self._roles.values():
            cta = task.cta
            if id(cta) in seen or cta.farewell is None:
                continue
            seen.add(id(cta))
            for access, what in cta.visits:
                if not access.finished(cta.farewell.finished):
                    message = f"{what} may reach CTA {cta.number} after it has ended: end with tlx.cluster_barrier()"
                    self.fail("unfinished_at_exit", message, access.place)
