"""`Runner` with a child that dies at any job: good candidates are kept, the culprit is dropped. Also `timings`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.errors import TuningError
from tlxgen.space.candidates import candidates
from tlxgen.tuner.measure import PEER, DeviceReport, Forget, Gate, Measure, Setup, Verdict
from tlxgen.tuner.process import ChildDiedError, ChildTimeoutError
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings

PROBLEM = ops.get("vector_add").problem((4096,))
CONFIGS = candidates(PROBLEM, devices.target("h200"))[:5]
SOURCES = {name: emit(ops.get("vector_add"), PROBLEM, config) for name, config in zip("abcde", CONFIGS, strict=True)}
TIMEOUT, DIED = ChildTimeoutError("no result"), ChildDiedError("exit status 3", 3)
KILLED = ChildDiedError("exit status -9", -signal.SIGKILL)


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@dataclass
class FakeChild:
    """Answers jobs as the real child would, but for the errors that a test wants."""

    on_measure: Callable[[tuple[str, ...]], None] = lambda names: None
    hangs_at_gate: str = ""
    alive: bool = False
    known: set[str] = field(default_factory=set)
    starts: int = 0
    full: bool = False
    dies_at_forget: bool = False

    def call(self, job: Any, timeout: float) -> Any:
        try:
            return self.answer(job)
        except (ChildTimeoutError, ChildDiedError):
            self.alive = False
            raise

    def answer(self, job: Any) -> Any:
        if isinstance(job, Setup):
            self.alive, self.known, self.starts = True, set(), self.starts + 1
            if self.full:
                raise OutOfMemoryError("tried to allocate 2 TiB")
            return DeviceReport(devices.target("h200"), {}, 0.0, 1.0)
        assert self.alive, "a job for a dead child"
        if isinstance(job, Gate):
            if job.name in self.hangs_at_gate:
                raise TIMEOUT
            self.known.add(job.name)
            return Verdict("ok", error=0.0, launch_us=1.0)
        if isinstance(job, Measure):
            assert set(job.names) <= self.known, "a candidate that this child has not gated"
            self.on_measure(job.names)
            return {name: [1.0] * job.rounds for name in (*job.names, PEER)}
        assert isinstance(job, Forget)
        if self.dies_at_forget:
            raise KILLED
        self.known -= set(job.names)
        return None

    def kill(self) -> None:
        self.alive = False


def fails_with(error: Exception, culprits: str) -> Callable[[Sequence[str]], None]:
    def on_measure(names: Sequence[str]) -> None:
        if set(names) & set(culprits):
            raise error

    return on_measure


def runner_of(child: FakeChild, names: str = "abcde") -> Runner:
    runner = Runner("vector_add", PROBLEM, seed=0, child=child)  # type: ignore[arg-type]
    for name in names:
        runner.gate(name, SOURCES[name])
    return runner


def faults(runner: Runner) -> dict[str, str]:
    return {name: fault.status for name, fault in runner.faults.items()}


def test_hang_at_the_gate_costs_that_candidate_only() -> None:
    runner = runner_of(FakeChild(hangs_at_gate="c"), "abc")
    assert runner.gate("c", SOURCES["c"]).status == "hang"
    assert runner.gate("d", SOURCES["d"]).status == "ok"
    assert set(runner.measure(["a", "b", "d"], 3)) == {"a", "b", "d", PEER}


@pytest.mark.parametrize(
    ("error", "status"),
    [(DIED, "launch_failed"), (TIMEOUT, "hang"), (OutOfMemoryError("tried to allocate 2 TiB"), "out_of_memory")],
    ids=["death", "hang", "out of memory"],
)
@pytest.mark.parametrize("culprits", ["a", "c", "e", "bd", "ade"])
def test_failure_while_timing_costs_the_culprits_only(error: Exception, status: str, culprits: str) -> None:
    runner = runner_of(FakeChild(fails_with(error, culprits)))
    assert set(runner.measure(list("abcde"), 2)) == {*"abcde", PEER} - set(culprits)
    assert faults(runner) == dict.fromkeys(culprits, status)


@pytest.mark.parametrize("culprits", ["a", "c", "e", "bd"])
def test_hang_while_timing_costs_the_limit_twice(culprits: str) -> None:
    """Once among all candidates, and once alone."""
    waited: list[tuple[str, ...]] = []

    def hang(names: tuple[str, ...]) -> None:
        if set(names) & set(culprits):
            waited.append(names)
            raise TIMEOUT

    runner_of(FakeChild(hang)).measure(list("abcde"), 2)
    assert waited == [tuple("abcde"), *((name,) for name in culprits)]


def test_candidate_that_fails_its_second_gate_is_not_timed_alone() -> None:
    child = FakeChild()
    runner = runner_of(child)

    def die(names: tuple[str, ...]) -> None:
        child.hangs_at_gate = "c"
        if "b" in names:
            raise DIED

    child.on_measure = die
    assert set(runner.measure(list("abcde"), 2)) == {*"ade", PEER}
    assert faults(runner) == {"b": "launch_failed", "c": "hang"}
    assert child.starts == 4, "the first, and after each death: among all, at c's gate, of b alone"


def test_candidate_that_kills_the_next_child_is_dropped() -> None:
    child = FakeChild()
    runner = runner_of(child)
    child.hangs_at_gate, child.alive = "b", False
    assert set(runner.measure(list("abcde"), 2)) == {*"acde", PEER}
    assert "b" not in runner.sources


def test_forgotten_candidates_are_not_gated_again() -> None:
    child = FakeChild()
    runner = runner_of(child)
    runner.forget(list("abcd"))
    child.alive = False
    assert set(runner.measure(["e"], 2)) == {"e", PEER}
    assert child.known == {"e"}


def test_death_while_forgetting_costs_no_other_candidate() -> None:
    child = FakeChild(dies_at_forget=True)
    runner = runner_of(child)
    runner.forget(["a", "b"])
    assert set(runner.measure(list("abcde"), 2)) == {*"cde", PEER}


def test_kill_from_outside_costs_no_candidate() -> None:
    deaths = iter([True])

    def kill(names: tuple[str, ...]) -> None:
        if next(deaths, False):
            raise KILLED

    runner = runner_of(FakeChild(kill))
    assert set(runner.measure(list("abcde"), 2)) == {*"abcde", PEER}
    assert runner.faults == {}


def test_candidates_that_fail_together_but_not_alone_are_given_up() -> None:
    """Else the search for a culprit would not end."""

    def die(names: tuple[str, ...]) -> None:
        if len(names) == 5:
            raise KILLED

    child = FakeChild(die)
    runner = runner_of(child)
    assert runner.measure(list("abcde"), 2) == {}
    assert set(faults(runner).values()) == {"killed"}
    assert runner.gate("a", SOURCES["a"]).status == "ok"
    assert child.starts <= 4


def test_full_gpu_is_an_error_of_the_run() -> None:
    with pytest.raises(TuningError, match="too little free memory for vector_add 4096 bf16"):
        Runner("vector_add", PROBLEM, seed=0, child=FakeChild(full=True)).setup()  # type: ignore[arg-type]


def test_one_fast_sample_does_not_change_the_time() -> None:
    assert timings({PEER: [100.0] * 5, "a": [90.0, 90.0, 9.0, 90.0, 90.0]})["a"].time_us == 90.0


def test_clock_that_jumps_between_rounds_does_not_change_the_ratio() -> None:
    clock = [1.0, 1.0, 1.0, 1.3, 1.3]
    peer = [100.0 * slow for slow in clock]
    peer[2] *= 1.2  # an outlier that moves the peer's median to the slow clock
    found = timings({PEER: peer, "a": [90.0 * slow for slow in clock]})["a"]
    assert found.relative == pytest.approx(0.9)
    assert [found.peer_us, found.time_us] == pytest.approx([120.0, 108.0])
