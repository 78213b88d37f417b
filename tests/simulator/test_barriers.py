"""Barriers and clocks against the PTX rules: counting of phases, violations of order, and knowledge."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tlxgen.simulator.findings import Place
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.barriers import Arrival, BarrierError, Mbarrier, NamedBarrier, Phases
from tlxgen.simulator.machine.clocks import IN_FLIGHT, Clock, Knowledge
from tlxgen.simulator.machine.tasks import Cluster, Cta, Queue, Task

# ---- a reference for the PTX rules, independent of the simulator


class PackedMbarrier:
    """An mbarrier as one 64-bit word: phase | -expected | -pending | tx, of 1, 20, 20 and 21 bits.

    PTX leaves the layout open. Here the count of arrivals runs up, as a counter in hardware does, to an overflow of its
    field; the tx-count is a two's complement number, for PTX lets it be -(2**20 - 1) to 2**20 - 1.
    """

    COUNT = (1 << 20) - 1
    TX = (1 << 21) - 1

    def __init__(self, count: int) -> None:
        """`mbarrier.init`: phase 0, `count` arrivals expected and pending, no bytes."""
        lacking = -count & self.COUNT
        self.word = lacking << 41 | lacking << 21

    @property
    def phase(self) -> int:
        return self.word >> 61

    @property
    def pending(self) -> int:
        return -(self.word >> 21) & self.COUNT

    @property
    def tx(self) -> int:
        bits = self.word & self.TX
        return bits - (bits >> 20 << 21)

    def arrive(self, count: int) -> None:
        """`mbarrier.arrive`: the arrive-on operation."""
        self._set(tx=self.tx, pending=self.pending - count)

    def arrive_expect_tx(self, size: int) -> None:
        """`mbarrier.arrive.expect_tx`: an expect-tx operation, then an arrive-on operation with count 1."""
        self.word = self.word & ~self.TX | self.tx + size & self.TX
        self.arrive(1)

    def complete_tx(self, size: int) -> None:
        self._set(tx=self.tx - size, pending=self.pending)

    def test_wait_parity(self, parity: int) -> bool:
        """True if the phase of that parity is complete: the current one, which is not, has the other parity."""
        return self.phase ^ parity == 1

    def _set(self, tx: int, pending: int) -> None:
        high = self.word >> 41
        if tx == pending == 0:
            high ^= 1 << 20
            pending = -high & self.COUNT
        self.word = high << 41 | (-pending & self.COUNT) << 21 | tx & self.TX


class PhasesMachine(RuleBasedStateMachine):
    """Any legal use of an mbarrier, in the simulator and in the reference."""

    @initialize(count=st.one_of(st.integers(1, 4), st.sampled_from([128, 256, (1 << 20) - 1])))
    def init(self, count: int) -> None:
        self.phases = Phases(count)
        self.packed = PackedMbarrier(count)
        self.completed = 0

    @precondition(lambda self: self.packed.pending)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        pending = self.packed.pending
        count = data.draw(st.one_of(st.just(pending), st.integers(1, min(pending, 3)), st.integers(1, pending)))
        self._same(partial(self.packed.arrive, count), partial(self.phases.arrive, count))

    @precondition(lambda self: self.packed.pending)
    @rule(size=st.sampled_from([0, 16, 32, 16384]))
    def arrive_expect_tx(self, size: int) -> None:
        self._same(partial(self.packed.arrive_expect_tx, size), partial(self.phases.expect, size))

    @rule(size=st.sampled_from([16, 32, 16384]))
    def complete_tx(self, size: int) -> None:
        self._same(partial(self.packed.complete_tx, size), partial(self.phases.deliver, size))

    @precondition(lambda self: self.packed.tx > 0)
    @rule()
    def complete_all_tx(self) -> None:
        self.complete_tx(self.packed.tx)

    def _same(self, reference: Callable[[], None], simulated: Callable[[], bool]) -> None:
        """Both do the operation; a phase completes if the reference's phase bit flips."""
        before = self.packed.phase
        reference()
        flips = self.packed.phase != before
        self.completed += flips
        assert simulated() == flips

    @invariant()
    def counts_as_the_packed_word_does(self) -> None:
        assert (self.phases.pending, self.phases.missing_bytes) == (self.packed.pending, self.packed.tx)

    @invariant()
    def completes_the_same_phases(self) -> None:
        assert self.phases.completed == self.completed

    @invariant()
    def passes_the_waits_that_ptx_passes(self) -> None:
        assert [self.phases.passes(p) for p in (0, 1)] == [self.packed.test_wait_parity(p) for p in (0, 1)]


TestPhasesInAnyHistory = PhasesMachine.TestCase
TestPhasesInAnyHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class TestPhase:
    def test_fresh_barrier_passes_parity_one_only(self) -> None:
        assert Phases(3).passes(1)
        assert not Phases(3).passes(0)

    @given(st.permutations(["arrive", "expect 32", "bytes 16", "bytes 16"]))
    def test_arrivals_and_bytes_may_come_in_any_order(self, order: list[str]) -> None:
        """Bytes may come before they are expected: the tx-count is negative for a while."""
        phases = Phases(2)
        does: dict[str, Callable[[], bool]] = {
            "arrive": phases.arrive,
            "expect 32": lambda: phases.expect(32),
            "bytes 16": lambda: phases.deliver(16),
        }
        assert [does[what]() for what in order] == [False, False, False, True]
        assert (phases.completed, phases.pending, phases.missing_bytes) == (1, 2, 0)

    @given(count=st.integers(1, 300), excess=st.integers(1, 300), data=st.data())
    def test_too_many_arrivals_are_refused(self, count: int, excess: int, data: st.DataObject) -> None:
        phases = Phases(count)
        arrived = data.draw(st.integers(0, count - 1))
        phases.arrive(arrived)
        with pytest.raises(BarrierError, match=f"of {count} are pending") as error:
            phases.arrive(count - arrived + excess)
        assert error.value.kind == "barrier_reuse"
        assert (phases.completed, phases.pending) == (0, count - arrived)

    def test_missing_bytes_hold_back_the_next_phase(self) -> None:
        phases = Phases(1)
        phases.expect(32)
        with pytest.raises(BarrierError, match="1 arrivals where 0 of 1 are pending"):
            phases.expect(32)


# ---- programs, and their interleavings

Steps = Iterator[Callable[[], bool]]  # continues when the yielded condition is true


def at_any_time() -> bool:
    return True


@dataclass
class Run:
    """One interleaving of a program: violations, and whether all actors finished."""

    actors: list[Steps] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    finished: bool = False
    components: int = 0

    def component(self) -> int:
        self.components += 1
        return self.components

    def task(self, name: str, threads: int = 128) -> Task:
        cta = Cta(0, (0, 0, 0), 0, Cluster())
        dots, stores, copies = (Queue(self.component(), kind) for kind in ("wgmma", "store", "cp.async"))
        return Task(name, cta, threads, self.component(), self.component(), dots, stores, copies)

    def mbarrier(self, name: str, count: int) -> Mbarrier:
        return Mbarrier(self.component(), name, 1, Phases(count))

    def named_barrier(self, number: int) -> NamedBarrier:
        return NamedBarrier(self.component(), number)

    # ---- steps of tasks

    def wait(self, task: Task, barrier: Mbarrier, phase: int) -> Steps:
        yield partial(barrier.phases.passes, phase % 2)
        self.violations += barrier.wait(task.now, phase % 2, task.known)

    def arrive(self, task: Task, barrier: Mbarrier, expect: int | None = None) -> Steps:
        yield at_any_time
        self.violations += arrive(barrier, task, expect)

    def copy(self, task: Task, barrier: Mbarrier, size: int) -> Steps:
        """Starts a copy, which ends on its own."""
        yield at_any_time
        self.actors.append(self._bytes(barrier, size, task.release(), task.name))

    def _bytes(self, barrier: Mbarrier, size: int, issuer: Knowledge, role: str) -> Steps:
        yield at_any_time
        self.violations += barrier.deliver(size, issuer, role)

    def named(self, task: Task, barrier: NamedBarrier, wanted: int, *, wait: bool = True) -> Steps:
        """`barrier.cta.sync`, or `barrier.cta.arrive`."""
        yield at_any_time
        number = barrier.rounds
        self.violations += map(str, barrier.arrive(task.name, task.threads, wanted, task.release()))
        if wait:
            yield lambda: barrier.rounds > number
            barrier.pass_round(number, task.known)

    # ---- the interleaving

    def play(self, choose: Callable[[list[int]], int]) -> Run:
        """Takes steps until no actor can; like the simulator, it stops at what PTX leaves undefined."""
        waiting: list[Callable[[], bool] | None] = []
        while True:
            waiting += [next(actor, None) for actor in self.actors[len(waiting) :]]
            ready = [i for i, may_go_on in enumerate(waiting) if may_go_on is not None and may_go_on()]
            if not ready:
                self.finished = not any(waiting)
                return self
            turn = choose(ready)
            try:
                waiting[turn] = next(self.actors[turn], None)
            except BarrierError as error:
                self.violations.append(str(error))
                return self


Program = Callable[[], Run]


def interleaved(program: Program, seed: int) -> Run:
    """A random interleaving in which some actors are much faster than others."""
    rng = random.Random(seed)
    speeds = [rng.choice([1, 10, 1000]) for _ in range(8)]
    return program().play(lambda ready: rng.choices(ready, [speeds[i % len(speeds)] for i in ready])[0])


def every_interleaving(program: Program) -> Iterator[Run]:
    """All interleavings, depth first: the last choice with another alternative takes it."""
    path: list[tuple[int, int]] = []  # which of how many, choice by choice
    while True:
        depth = 0

        def choose(ready: list[int]) -> int:
            nonlocal depth
            if depth == len(path):
                path.append((0, len(ready)))
            depth += 1
            return ready[path[depth - 1][0]]

        yield program().play(choose)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1] = path[-1][0] + 1, path[-1][1]


@dataclass(frozen=True)
class Ring:
    """A ring of stages that one producer fills and all consumers read, with its defects."""

    stages: int = 1
    consumers: int = 1
    items: int = 3
    size: int = 0  #: bytes of two copies that fill a stage; 0: the producer writes it by itself, then arrives
    copies_first: bool = False  #: before their bytes are expected
    empty_count: int | None = None
    producer_waits: bool = True
    silent: frozenset[int] = frozenset()  #: consumers that never release a stage
    hasty: frozenset[int] = frozenset()  #: consumers that release a stage before they have waited for it

    def __call__(self) -> Run:
        run = Run()
        full = [run.mbarrier(f"full[{i}]", 1) for i in range(self.stages)]
        count = self.consumers if self.empty_count is None else self.empty_count
        empty = [run.mbarrier(f"empty[{i}]", count) for i in range(self.stages)]
        run.actors.append(self._producer(run, full, empty))
        run.actors += [self._consumer(run, number, full, empty) for number in range(self.consumers)]
        return run

    def _producer(self, run: Run, full: list[Mbarrier], empty: list[Mbarrier]) -> Steps:
        me = run.task("producer")
        for item in range(self.items):
            phase, stage = divmod(item, self.stages)
            if self.producer_waits:
                yield from run.wait(me, empty[stage], phase + 1)
            if self.size and self.copies_first:
                yield from run.copy(me, full[stage], self.size)
                yield from run.copy(me, full[stage], self.size)
            yield from run.arrive(me, full[stage], 2 * self.size if self.size else None)
            if self.size and not self.copies_first:
                yield from run.copy(me, full[stage], self.size)
                yield from run.copy(me, full[stage], self.size)

    def _consumer(self, run: Run, number: int, full: list[Mbarrier], empty: list[Mbarrier]) -> Steps:
        me = run.task(f"consumer {number}")
        for item in range(self.items):
            phase, stage = divmod(item, self.stages)
            if number in self.hasty:
                yield from run.arrive(me, empty[stage])
            yield from run.wait(me, full[stage], phase)
            if number not in self.silent | self.hasty:
                yield from run.arrive(me, empty[stage])


seeds = st.integers(0, 2**32)


class TestRightRing:
    @settings(max_examples=200, deadline=None)
    @given(
        ring=st.builds(
            Ring,
            stages=st.integers(1, 4),
            consumers=st.integers(1, 3),
            items=st.integers(0, 14),
            size=st.sampled_from([0, 16384]),
            copies_first=st.booleans(),
        ),
        seed=seeds,
    )
    def test_random_interleaving_is_clean(self, ring: Ring, seed: int) -> None:
        run = interleaved(ring, seed)
        assert run.violations == []
        assert run.finished

    @pytest.mark.parametrize(
        "ring",
        [
            Ring(stages=1, consumers=1, items=4),
            Ring(stages=1, consumers=2, items=3),
            Ring(stages=1, consumers=1, items=3, size=32),
            Ring(stages=2, consumers=1, items=3),
            Ring(stages=1, consumers=2, items=2, size=32, copies_first=True),
        ],
        ids=str,
    )
    def test_every_interleaving_is_clean(self, ring: Ring) -> None:
        for run in every_interleaving(ring):
            assert run.violations == []
            assert run.finished


WRONG_RINGS = {
    "the producer does not wait": Ring(items=3, producer_waits=False),
    "the producer of copies does not wait": Ring(items=2, size=32, producer_waits=False),
    "the producer of two stages does not wait": Ring(stages=2, items=3, producer_waits=False),
    "no wait for the second consumer": Ring(consumers=2, items=2, empty_count=1, silent=frozenset({1})),
    "no wait for the first consumer": Ring(consumers=2, items=3, empty_count=1, silent=frozenset({0})),
    "two consumers, of which one is enough": Ring(consumers=2, items=2, empty_count=1),
    "two consumers of copies, of which one is enough": Ring(consumers=2, items=2, size=32, empty_count=1),
    "the consumer releases before it has waited": Ring(items=2, hasty=frozenset({0})),
    "the consumer of one item releases before it has waited": Ring(items=1, hasty=frozenset({0})),
}


class TestWrongRing:
    @pytest.mark.parametrize("ring", WRONG_RINGS.values(), ids=WRONG_RINGS)
    def test_every_interleaving_hangs_or_is_found(self, ring: Ring) -> None:
        """Some interleaving must show a violation."""
        runs = list(every_interleaving(ring))
        assert [run for run in runs if run.finished and not run.violations] == []
        assert any(run.violations for run in runs)

    @settings(max_examples=200, deadline=None)
    @given(
        ring=st.sampled_from(list(WRONG_RINGS.values())), stages=st.integers(1, 3), more=st.integers(0, 6), seed=seeds
    )
    def test_any_length_hangs_or_is_found(self, ring: Ring, stages: int, more: int, seed: int) -> None:
        longer = Ring(
            stages,
            ring.consumers,
            stages * ring.items + more,
            ring.size,
            empty_count=ring.empty_count,
            producer_waits=ring.producer_waits,
            silent=ring.silent,
            hasty=ring.hasty,
        )
        run = interleaved(longer, seed)
        assert run.violations or not run.finished

    @settings(deadline=None)
    @given(consumers=st.integers(1, 3), stages=st.integers(1, 3), seed=seeds, data=st.data())
    def test_missing_release_hangs(self, consumers: int, stages: int, seed: int, data: st.DataObject) -> None:
        silent = frozenset({data.draw(st.integers(0, consumers - 1))})
        assert not interleaved(Ring(stages, consumers, stages + 1, silent=silent), seed).finished

    @settings(deadline=None)
    @given(consumers=st.integers(1, 3), stages=st.integers(1, 3), more=st.integers(1, 4), seed=seeds)
    def test_producer_without_waits_is_always_found(self, consumers: int, stages: int, more: int, seed: int) -> None:
        assert interleaved(Ring(stages, consumers, stages + more, 32, producer_waits=False), seed).violations


def roles(*names: str, count: int = 1) -> tuple[Any, ...]:
    """Tasks, and an mbarrier `b`."""
    run = Run()
    return *(run.task(name) for name in names), run.mbarrier("b", count)


def arrive(barrier: Mbarrier, task: Task, expect: int | None = None) -> list[str]:
    return barrier.arrive(task.now, task.release(), expect=expect)


class TestArrival:
    def test_without_knowledge_of_the_last_phase_is_early(self) -> None:
        """It comes later here, but another schedule may count it for the phase before."""
        one, other, barrier = roles("one", "other")
        assert arrive(barrier, one) == []
        (violation,) = arrive(barrier, other)
        assert "arrives on b for phase 1 without having waited for phase 0: if one came later" in violation

    def test_after_a_wait_is_not_early(self) -> None:
        one, other, barrier = roles("one", "other")
        arrive(barrier, one)
        assert barrier.wait(other.now, 0, other.known) == []
        assert arrive(barrier, other) == []

    def test_after_a_message_from_a_waiter_is_not_early(self) -> None:
        run = Run()
        one, two, three = (run.task(name) for name in ("one", "two", "three"))
        barrier, message = run.mbarrier("b", 1), run.mbarrier("message", 1)
        arrive(barrier, one)
        barrier.wait(two.now, 0, two.known)
        message.arrive(two.now, two.release())
        message.wait(three.now, 0, three.known)
        assert arrive(barrier, three) == []

    def test_without_knowledge_of_the_bytes_is_early(self) -> None:
        one, barrier = roles("one")
        arrive(barrier, one, expect=32)
        barrier.deliver(32, one.release(), "one")
        (violation,) = arrive(barrier, one, expect=32)
        assert "without having waited for phase 0: if the copies came later" in violation

    def test_overtaking_a_waiter_is_found(self) -> None:
        one, waiter, barrier = roles("one", "waiter")
        arrive(barrier, one)
        barrier.wait(waiter.now, 0, waiter.known)
        (violation,) = arrive(barrier, one)
        assert violation.startswith("phase 1 of b may complete before waiter has seen phase 0")

    def test_overtaking_a_waiter_of_a_fresh_barrier_is_found(self) -> None:
        """A wait for parity 1 passes on a fresh barrier, but not after the arrival."""
        one, waiter, barrier = roles("one", "waiter")
        assert barrier.wait(waiter.now, 1, waiter.known) == []
        (violation,) = arrive(barrier, one)
        assert violation.startswith("phase 0 of b may complete before waiter has seen that it is fresh")


class TestWait:
    def test_two_phases_late_is_found(self) -> None:
        one, late, barrier = roles("one", "late")
        for _ in range(3):
            arrive(barrier, one)
        assert barrier.phases.passes(0)
        (violation,) = barrier.wait(late.now, 0, late.known)
        assert violation.startswith("waits for phase 0 of b, but phase 2 is complete already")

    @given(st.integers(1, 6))
    def test_each_phase_in_turn_is_clean(self, phases: int) -> None:
        one, barrier = roles("one")
        for phase in range(phases):
            assert arrive(barrier, one) == []
            assert barrier.wait(one.now, phase % 2, one.known) == []
            assert one.known.finished.knows(barrier.component, phase + 1)

    def test_second_wait_for_a_phase_is_clean(self) -> None:
        one, barrier = roles("one")
        arrive(barrier, one)
        assert [barrier.wait(one.now, 0, one.known) for _ in range(2)] == [[], []]

    def test_on_a_fresh_barrier_acquires_nothing(self) -> None:
        one, other, barrier = roles("one", "other", count=2)
        arrive(barrier, other)
        before = dict(one.known.finished)
        barrier.wait(one.now, 1, one.known)
        assert one.known.finished == before

    @given(st.permutations(range(4)))
    def test_acquires_the_knowledge_of_every_arrival(self, order: list[int]) -> None:
        run = Run()
        tasks, waiter, barrier = [run.task(str(i)) for i in range(4)], run.task("waiter"), run.mbarrier("b", 4)
        moments = []
        for i in order:
            moments.append(tasks[i].now)
            barrier.arrive(tasks[i].now, tasks[i].release())
        barrier.wait(waiter.now, 0, waiter.known)
        for moment in moments:
            assert waiter.known.finished.knows(moment.component, moment.epoch)
            assert not waiter.known.finished.knows(moment.component, moment.epoch + 1)

    def test_acquires_the_knowledge_of_a_copy_at_its_start(self) -> None:
        issuer, waiter, barrier = roles("issuer", "waiter")
        arrive(barrier, waiter, expect=32)
        moment, issued = issuer.now, issuer.release()
        barrier.deliver(32, issued, "issuer")
        barrier.wait(waiter.now, 0, waiter.known)
        assert waiter.known.finished.knows(moment.component, moment.epoch)
        assert not waiter.known.finished.knows(moment.component, moment.epoch + 1)


# ---- named barriers


def rounds_of(wanted: int, threads: Sequence[int]) -> tuple[int, int]:
    """Rounds that are complete, and threads that have come in the current one: one counter, never reset."""
    return divmod(sum(threads), wanted)


class TestNamedBarrier:
    @given(
        groups=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        orders=st.lists(st.randoms(use_true_random=False), min_size=1, max_size=4),
        cut=st.integers(0, 16),
    )
    def test_round_completes_with_its_last_thread(
        self, groups: list[int], orders: list[random.Random], cut: int
    ) -> None:
        """Rounds of the same tasks, each in another order; the last round may lack some."""
        run = Run()
        barrier, wanted = run.named_barrier(1), 32 * sum(groups)
        tasks = [run.task(str(i), 32 * warps) for i, warps in enumerate(groups)]
        come: list[int] = []
        for order in [rng.sample(tasks, len(tasks)) for rng in orders][: cut + 1]:
            for task in order:
                number = barrier.rounds
                assert list(barrier.arrive(task.name, task.threads, wanted, task.release())) == []
                come.append(task.threads)
                assert (barrier.rounds, barrier.threads) == rounds_of(wanted, come)
            for task in order:
                barrier.pass_round(number, task.known)

    def test_different_counts_of_two_users_are_found(self) -> None:
        run = Run()
        one, other, barrier = run.task("one"), run.task("other"), run.named_barrier(3)
        assert list(barrier.arrive("one", 128, 384, one.release())) == []
        (error,) = barrier.arrive("other", 128, 256, other.release())
        assert error.kind == "wrong_thread_count"
        assert str(error) == "named barrier 3 takes 256 threads here and 384 elsewhere in this round"

    @pytest.mark.parametrize("counts", [(128, 256), (256, 128)])
    def test_different_counts_are_found_in_either_order(self, counts: tuple[int, int]) -> None:
        """Also if the first has completed a round on its own: the second cannot know."""
        run = Run()
        barrier = run.named_barrier(3)
        tasks = [run.task(name) for name in ("one", "other")]
        kinds = [
            error.kind
            for task, wanted in zip(tasks, counts, strict=True)
            for error in barrier.arrive(task.name, 128, wanted, task.release())
        ]
        assert "wrong_thread_count" in kinds

    def test_count_may_change_between_rounds(self) -> None:
        run = Run()
        one, other, barrier = run.task("one"), run.task("other"), run.named_barrier(3)
        for wanted in (256, 128):
            assert list(barrier.arrive("one", 128, wanted, one.release())) == []
            if wanted == 256:
                assert list(barrier.arrive("other", 128, wanted, other.release())) == []
            barrier.pass_round(barrier.rounds - 1, one.known)
        assert barrier.rounds == 2

    @pytest.mark.parametrize(
        ("threads", "wanted"),
        [(256, 128), (16, 48), (32, 100)],
        ids=["too many at once", "half a warp", "no whole warps"],
    )
    def test_invalid_thread_counts_are_found(self, threads: int, wanted: int) -> None:
        run = Run()
        one, barrier = run.task("one"), run.named_barrier(1)
        errors = list(barrier.arrive("one", threads, wanted, one.release()))
        assert errors
        assert {error.kind for error in errors} == {"wrong_thread_count"}

    def test_too_many_threads_are_found(self) -> None:
        run = Run()
        one, other, barrier = run.task("one"), run.task("other"), run.named_barrier(1)
        assert list(barrier.arrive("one", 128, 192, one.release())) == []
        (error,) = barrier.arrive("other", 128, 192, other.release())
        assert error.kind == "wrong_thread_count"
        assert str(error) == "256 threads have come to named barrier 1, which takes 192 here"

    @pytest.mark.parametrize("complete", [False, True])
    def test_second_arrival_needs_the_end_of_the_last_round(self, complete: bool) -> None:
        """Also if it is complete in this schedule."""
        run = Run()
        one, other, barrier = run.task("one", 64), run.task("other", 64), run.named_barrier(1)
        assert list(barrier.arrive("one", 64, 128, one.release())) == []
        if complete:
            assert list(barrier.arrive("other", 64, 128, other.release())) == []
        (error,) = barrier.arrive("one", 64, 128, one.release())
        assert error.kind == "barrier_reuse"
        assert "again without having seen the end of its last round there" in str(error)

    def test_late_waiter_acquires_its_own_round_only(self) -> None:
        """The waiter may continue before the next round starts, so it is not ordered after that."""
        run = Run()
        slow, both, later = (run.task(name) for name in ("slow", "both", "later"))
        barrier = run.named_barrier(1)
        first = both.now
        for task in (slow, both):
            assert list(barrier.arrive(task.name, 128, 256, task.release())) == []
        barrier.pass_round(0, both.known)
        later.known.join(both.release())  # so it may come: the first round is over
        for task in (both, later):
            assert list(barrier.arrive(task.name, 128, 256, task.release())) == []
        barrier.pass_round(0, slow.known)
        assert slow.known.finished.knows(first.component, first.epoch)
        assert not slow.known.finished.knows(first.component, first.epoch + 1)
        assert not slow.known.finished.knows(later.component, 1)

    @staticmethod
    def _meeting(tasks: int, rounds: int) -> Run:
        run = Run()
        barrier = run.named_barrier(1)

        def body(task: Task) -> Steps:
            for _ in range(rounds):
                yield from run.named(task, barrier, 128 * tasks)

        run.actors += [body(run.task(str(i))) for i in range(tasks)]
        return run

    @staticmethod
    def _exchange(rounds: int, *, wait_for_empty: bool = True) -> Run:
        """Barrier 1 is full, barrier 2 empty: each side arrives on one and waits at the other."""
        run = Run()
        full, empty = run.named_barrier(1), run.named_barrier(2)

        def producer(me: Task) -> Steps:
            for _ in range(rounds):
                if wait_for_empty:
                    yield from run.named(me, empty, 256)
                yield from run.named(me, full, 256, wait=False)

        def consumer(me: Task) -> Steps:
            for _ in range(rounds):
                if wait_for_empty:
                    yield from run.named(me, empty, 256, wait=False)
                yield from run.named(me, full, 256)

        run.actors += [producer(run.task("producer")), consumer(run.task("consumer"))]
        return run

    def test_every_interleaving_of_right_programs_is_clean(self) -> None:
        for program in (lambda: self._meeting(2, 3), lambda: self._exchange(3)):
            for run in every_interleaving(program):
                assert run.violations == []
                assert run.finished

    def test_producer_without_waits_is_found_in_every_interleaving(self) -> None:
        for run in every_interleaving(lambda: self._exchange(2, wait_for_empty=False)):
            assert run.violations


# ---- clocks

clocks = st.dictionaries(st.integers(0, 5), st.integers(1, 9)).map(Clock)
knowledge = st.builds(Knowledge, clocks, clocks)
moments = st.tuples(st.integers(0, 5), st.integers(0, 10))


def joined(*parts: Clock) -> Clock:
    result = Clock()
    for part in parts:
        result.join(part)
    return result


def told(known: Knowledge) -> tuple[dict[int, int], dict[int, int]]:
    return dict(known.finished), dict(known.fenced)


class TestClock:
    @given(clocks, clocks, moments)
    def test_join_knows_what_either_knew(self, one: Clock, two: Clock, moment: tuple[int, int]) -> None:
        assert joined(one, two).knows(*moment) == (one.knows(*moment) or two.knows(*moment))

    @given(clocks, clocks)
    def test_join_does_not_change_the_other_clock(self, one: Clock, two: Clock) -> None:
        before = dict(two)
        one.join(two)
        one[0] = 100
        assert two == before

    @given(clocks, st.integers(0, 5))
    def test_access_in_flight_is_finished_for_no_clock(self, one: Clock, component: int) -> None:
        access = Access("TMA load", Place("producer", 1), write=True, component=component, index=IN_FLIGHT)
        assert access.in_flight
        assert not access.finished(one)


class TestKnowledge:
    @given(knowledge, knowledge)
    def test_join_joins_both_clocks(self, one: Knowledge, two: Knowledge) -> None:
        expected = joined(one.finished, two.finished), joined(one.fenced, two.fenced)
        one.join(two)
        assert told(one) == expected

    @given(knowledge)
    def test_fence_copies_finished_to_fenced(self, one: Knowledge) -> None:
        finished = dict(one.finished)
        expected = joined(one.fenced, one.finished)
        one.fence()
        assert told(one) == (finished, expected)
        one.fence()
        assert told(one) == (finished, expected)

    @given(knowledge, knowledge)
    def test_copy_is_independent(self, one: Knowledge, two: Knowledge) -> None:
        snapshot, before = one.copy(), told(one)
        one.join(two)
        one.fence()
        one.finished[0] = 100
        assert told(snapshot) == before

    @given(st.lists(st.sampled_from(["release", "fence", "learn"]), max_size=12), knowledge)
    def test_release_is_a_snapshot(self, later: list[str], news: Knowledge) -> None:
        task = Run().task("one")
        moment, snapshot = task.now, task.release()
        before = told(snapshot)
        for event in later:
            if event == "release":
                task.release()
            elif event == "fence":
                task.known.fence()
            else:
                task.known.join(news)
        assert told(snapshot) == before
        assert snapshot.finished.knows(moment.component, moment.epoch)
        assert not snapshot.finished.knows(moment.component, moment.epoch + 1)

    @given(st.integers(1, 5))
    def test_task_knows_its_own_accesses(self, releases: int) -> None:
        task = Run().task("one")
        for _ in range(releases):
            task.release()
            assert task.access("local_store", write=True).finished(task.known.finished)
            assert task.now == Arrival(task.component, task.epoch, "one")
