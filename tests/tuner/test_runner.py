"""The card's owner may die at any job: what had passed comes back, what killed it does not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.errors import TuningError
from tlxgen.space.candidates import candidates
from tlxgen.tuner.measure import PEER, DeviceReport, Forget, Gate, Measure, Setup, Verdict
from tlxgen.tuner.process import ChildDiedError, ChildTimeoutError
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings

PROBLEM = ops.get("vector_add").problem((4096,))
SOURCES = [emit(ops.get("vector_add"), PROBLEM, config) for config in candidates(PROBLEM, devices.target("h200"))[:5]]


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


@dataclass
class FakeChild:
    """Answers jobs as the real child would; `kills` says which candidates end it, and at which job."""

    kills: dict[str, type] = field(default_factory=dict)
    alive: bool = False
    known: set[str] = field(default_factory=set)
    starts: int = 0
    full: bool = False
    on_measure: Callable[[tuple[str, ...]], None] = lambda names: None

    def call(self, job: Any, timeout: float) -> Any:
        if isinstance(job, Setup):
            self.alive, self.known, self.starts = True, set(), self.starts + 1
            if self.full:
                raise OutOfMemoryError("tried to allocate 2 TiB")
            return DeviceReport(devices.target("h200"), {}, 0.0, 1.0)
        assert self.alive, "a job for a dead child"
        if isinstance(job, Gate):
            if self.kills.get(job.name) is Gate:
                self.alive = False
                raise ChildTimeoutError("no result")
            self.known.add(job.name)
            return Verdict("ok", error=0.0, launch_us=1.0)
        if isinstance(job, Measure):
            assert set(job.names) <= self.known, "a candidate that this child never saw"
            try:
                self.on_measure(job.names)
            except ChildDiedError:
                self.alive = False
                raise
            if any(self.kills.get(name) is Measure for name in job.names):
                self.alive = False
                raise ChildDiedError("exit status 3", 3)
            return {name: [1.0] * job.rounds for name in (*job.names, PEER)}
        assert isinstance(job, Forget)
        if Forget in self.kills.values():
            self.alive = False
            raise ChildDiedError("exit status -9", -9)
        self.known -= set(job.names)
        return None

    def kill(self) -> None:
        self.alive = False


def card(child: FakeChild, names: str = "abcde") -> Runner:
    card = Runner("vector_add", PROBLEM, seed=0, child=child)  # type: ignore[arg-type]
    for name, source in zip(names, SOURCES, strict=False):
        card.gate(name, source)
    return card


def source_of(name: str) -> KernelSource:
    return SOURCES["abcde".index(name)]


def test_a_hang_at_the_gate_costs_that_candidate_alone() -> None:
    child = FakeChild(kills={"c": Gate})
    held = card(child, "abc")
    assert held.gate("c", source_of("c")).status == "hang"
    assert held.gate("d", source_of("d")).status == "ok"
    assert set(held.measure(["a", "b", "d"], 3)) == {"a", "b", "d", PEER}


def test_a_death_while_timing_is_found() -> None:
    held = card(FakeChild(kills={"d": Measure}))
    assert set(timings(held.measure(list("abcde"), 2))) == set("abce")
    assert {name: fault.status for name, fault in held.faults.items()} == {"d": "launch_failed"}


def test_several_that_die_while_timing_are_all_found() -> None:
    held = card(FakeChild(kills={"a": Measure, "d": Measure, "e": Measure}))
    assert set(timings(held.measure(list("abcde"), 2))) == {"b", "c"}


@pytest.mark.parametrize("hanging", ["a", "c", "e", "bd"])
def test_a_hang_while_timing_costs_its_limit_twice(hanging: str) -> None:
    """Once among all, whom it keeps from ending, and once alone."""
    child = FakeChild()

    def hang(names: tuple[str, ...]) -> None:
        if set(names) & set(hanging):
            waited.append(names)
            child.alive = False
            raise ChildTimeoutError("no result")

    waited: list[tuple[str, ...]] = []
    child.on_measure = hang
    held = card(child)
    assert set(held.measure(list("abcde"), 2)) == {*"abcde", PEER} - set(hanging)
    assert {name: fault.status for name, fault in held.faults.items()} == dict.fromkeys(hanging, "hang")
    assert waited == [tuple("abcde"), *((name,) for name in hanging)]


def test_one_that_does_not_come_back_is_not_looked_for() -> None:
    """It passed the gate, and fails it in the child that takes the place of the one which another has ended."""
    child = FakeChild(kills={"b": Measure})
    held = card(child)

    def change(names: tuple[str, ...]) -> None:
        child.kills["c"] = Gate

    child.on_measure = change
    assert set(held.measure(list("abcde"), 2)) == {*"ade", PEER}
    assert {name: fault.status for name, fault in held.faults.items()} == {"b": "launch_failed", "c": "hang"}
    assert child.starts == 4, "the first, and one after each death: among all, at c's gate, of b alone"


def test_one_that_passed_and_kills_the_next_child_is_dropped() -> None:
    child = FakeChild()
    held = card(child)
    child.kills = {"b": Gate}
    child.alive = False
    assert set(held.measure(list("abcde"), 2)) == {*"acde", PEER}
    assert "b" not in held.sources


def test_what_is_forgotten_is_not_loaded_into_a_new_child() -> None:
    child = FakeChild()
    held = card(child)
    held.forget(list("abcd"))
    child.alive = False
    assert set(held.measure(["e"], 2)) == {"e", PEER}
    assert child.known == {"e"}


def test_a_child_that_somebody_kills_while_timing_costs_nothing() -> None:
    deaths = iter([True])

    def kill(names: tuple[str, ...]) -> None:
        if next(deaths, False):
            raise ChildDiedError("exit status -9", -signal.SIGKILL)

    held = card(FakeChild(on_measure=kill))
    assert set(held.measure(list("abcde"), 2)) == {*"abcde", PEER}
    assert held.faults == {}


def test_those_that_die_together_and_live_alone_are_given_up() -> None:
    """Else the search for a culprit would go on for ever."""

    def die(names: tuple[str, ...]) -> None:
        if len(names) == 5:
            raise ChildDiedError("exit status -9", -signal.SIGKILL)

    child = FakeChild(on_measure=die)
    held = card(child)
    assert held.measure(list("abcde"), 2) == {}
    assert {fault.status for fault in held.faults.values()} == {"killed"}
    assert held.gate("a", source_of("a")).status == "ok"
    assert child.starts <= 4


def test_one_that_has_no_room_while_timing_is_found() -> None:
    def allocate(names: tuple[str, ...]) -> None:
        if "b" in names:
            raise OutOfMemoryError("tried to allocate 2 TiB")

    held = card(FakeChild(on_measure=allocate))
    assert set(held.measure(list("abcde"), 2)) == {*"acde", PEER}
    assert {name: fault.status for name, fault in held.faults.items()} == {"b": "out_of_memory"}


def test_a_death_while_forgetting_harms_nobody() -> None:
    child = FakeChild()
    held = card(child)
    child.kills = {"a": Forget}
    held.forget(["a", "b"])
    child.kills = {}
    assert set(held.measure(list("abcde"), 2)) == {*"cde", PEER}


def test_a_full_card_ends_the_run_and_is_nobodys_fault() -> None:
    with pytest.raises(TuningError, match="too little free memory for vector_add 4096 bf16"):
        Runner("vector_add", PROBLEM, seed=0, child=FakeChild(full=True)).setup()  # type: ignore[arg-type]


def test_one_fast_sample_does_not_change_the_time() -> None:
    found = timings({PEER: [100.0] * 5, "a": [90.0, 90.0, 9.0, 90.0, 90.0]})["a"]
    assert found.time_us == 90.0


def test_a_clock_that_jumps_between_rounds_does_not_change_the_ratio() -> None:
    """Three rounds on a fast clock, two on a slow one, and an outlier that puts the peer's median among the slow."""
    clock = [1.0, 1.0, 1.0, 1.3, 1.3]
    kernel = [90.0 * slow for slow in clock]
    peer = [100.0 * slow for slow in clock]
    peer[2] *= 1.2  # an outlier that moves the peer's median to the slow clock
    found = timings({PEER: peer, "a": kernel})["a"]
    assert found.relative == pytest.approx(0.9)
    assert found.peer_us == 120.0
    assert found.time_us == pytest.approx(108.0)
