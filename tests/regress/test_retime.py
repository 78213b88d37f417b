"""Rows on a GPU whose times are recorded: noise is green, a slower or wrong kernel red."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.recorded import RecordedCard
from tests.support.tuned_rows import FACTS, GEMM, RATIO, row
from tlxgen import ops
from tlxgen.db.record import TunedRecord
from tlxgen.devices import target
from tlxgen.errors import TuningError
from tlxgen.regress import retime
from tlxgen.regress.findings import Outcome, Row
from tlxgen.tuner.measure import PEER, DeviceReport, Gate, Measure, Setup, Verdict
from tlxgen.tuner.process import ChildDiedError, ChildTimeoutError
from tlxgen.tuner.runner import Runner


def on_gpu(card: Any, record: TunedRecord = GEMM) -> Outcome:
    return retime.retime(Outcome(row(record), facts=FACTS), lambda problem: card)


def recorded(slowdown: float = 1.0, **options: Any) -> RecordedCard:
    return RecordedCard({GEMM.config: slowdown * GEMM.time_us}, GEMM.peer_us or 0.0, **options)


def test_stored_speed_is_green() -> None:
    card = recorded()
    outcome = on_gpu(card)
    assert outcome.findings == ()
    assert outcome.retimed is not None
    assert outcome.retimed.ratio == pytest.approx(RATIO, rel=0.01)
    assert outcome.retimed.rounds == 31
    assert not card.child.alive


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_green(seed: int) -> None:
    card = recorded(noise=0.03)
    card.rng.seed(seed)
    assert not on_gpu(card).red


def test_slower_kernel_is_measured_twice_and_red() -> None:
    measured = []
    outcome = on_gpu(recorded(1.05, on_measure=lambda: measured.append(1)))
    (finding,) = outcome.findings
    assert (finding.check, finding.red, len(measured)) == ("time", True, 2)
    assert f"stored {RATIO:.3f}" in finding.what
    assert "torch 2.11.0+cu130 → recorded" in finding.what
    assert "tlxgen tune gemm 4096 4096 14336" in finding.remedy
    assert outcome.retimed is not None
    assert outcome.retimed.rounds == 62


def test_slower_measurement_that_is_not_confirmed_is_green() -> None:
    card = recorded()
    measured: list[int] = []

    def throttle() -> None:
        measured.append(1)
        card.times[GEMM.config] = GEMM.time_us * (1.2 if len(measured) == 1 else 1.0)

    card.on_measure = throttle
    assert not on_gpu(card).red
    assert len(measured) == 2


def test_gpu_that_is_slow_with_the_library_too_is_green() -> None:
    card = recorded(1.5)
    card.peer_us *= 1.5
    assert on_gpu(card).findings == ()


def test_fall_within_the_margin_is_green() -> None:
    outcome = on_gpu(recorded(1.01, noise=0.0))
    assert outcome.findings == ()
    assert outcome.retimed is not None
    assert outcome.retimed.margin == pytest.approx(0.02 * RATIO)


def test_margin_follows_the_formula() -> None:
    """Ratios of 1.00 to 1.30, whose interquartile range is 0.16."""
    spread = GEMM.model_copy(update={"spread_us": 0.1 * GEMM.time_us})
    times = [100.0 / (1 + i / 100) for i in range(31)]
    card: Any = SimpleNamespace(measure=lambda names, rounds: {"row": times, "peer": [100.0] * 31})
    found = retime._measured(card, spread, 1.0, 31)
    assert found is not None
    assert found.margin == pytest.approx(3 * 1.2533 / 1.349 / 31**0.5 * (0.16**2 + 0.1**2) ** 0.5, rel=1e-3)


def test_times_that_scatter_too_much_are_a_remark() -> None:
    (finding,) = on_gpu(recorded(noise=0.3)).findings
    assert (finding.check, finding.red) == ("time", False)
    assert "scatter" in finding.what


@pytest.mark.parametrize(
    ("status", "check", "remedy"),
    [
        ("wrong_result", "numerics", "tlxgen check gemm"),
        ("unstable_result", "numerics", "tlxgen check gemm"),
        ("hang", "card", "tlxgen check gemm"),
        ("launch_failed", "card", "tlxgen check gemm"),
        ("out_of_memory", "card", "run again"),
    ],
)
def test_kernel_that_fails_the_gate_is_not_timed(status: str, check: str, remedy: str) -> None:
    measured: list[int] = []
    verdicts = {GEMM.config: Verdict(status, "relative norm\n0.7")}
    (finding,) = on_gpu(recorded(verdicts=verdicts, on_measure=lambda: measured.append(1))).findings
    assert (finding.check, finding.red, measured) == (check, True, [])
    assert finding.what == f"{status}: relative norm 0.7"
    assert remedy in finding.remedy


def test_kernel_that_fails_while_timed_is_red() -> None:
    card = recorded(falls=True)
    (finding,) = on_gpu(card).findings
    assert (finding.check, "repeated launches" in finding.what) == ("card", True)


@pytest.mark.parametrize("error", [TuningError("too little memory"), ChildDiedError("exit status 1")])
def test_gpu_that_cannot_be_set_up_is_red(error: Exception) -> None:
    card = recorded(broken=error)
    (finding,) = on_gpu(card).findings
    assert (finding.check, finding.what) == ("card", str(error))
    assert not card.child.alive


@dataclass
class Child:
    """Answers a runner's jobs; with `dies`, timing ends it."""

    time_us: float
    dies: bool
    alive: bool = False

    def call(self, job: Any, timeout: float) -> Any:
        self.alive = True
        if isinstance(job, Setup):
            return DeviceReport(target("h200"), {}, 0.0, 1.0)
        if isinstance(job, Gate):
            return Verdict("ok", error=0.0, launch_us=1.0)
        assert isinstance(job, Measure)
        if self.dies:
            self.kill()
            raise ChildTimeoutError("no result")
        return {**{name: [self.time_us] * job.rounds for name in job.names}, PEER: [GEMM.peer_us] * job.rounds}

    def kill(self) -> None:
        self.alive = False


@pytest.mark.parametrize(("slow", "dies", "check"), [(1.0, False, None), (1.1, False, "time"), (1.0, True, "card")])
def test_with_the_tuners_own_runner(slow: float, dies: bool, check: str | None) -> None:
    child: Any = Child(slow * GEMM.time_us, dies)
    outcome = on_gpu(Runner("gemm", ops.get("gemm").problem(GEMM.key.problem), seed=0, child=child))
    assert [finding.check for finding in outcome.findings] == ([] if check is None else [check])
    assert not child.alive


@pytest.mark.parametrize("change", [{"protocol": "graph-1"}, {"origin": "predicted"}, {"peer_us": None}])
def test_row_without_a_comparable_ratio_is_gated_only(change: dict[str, Any]) -> None:
    measured: list[int] = []
    card = recorded(on_measure=lambda: measured.append(1))
    outcome = on_gpu(card, GEMM.model_copy(update=change))
    assert (outcome.findings, outcome.retimed, measured, card.gated) == ((), None, [], [GEMM.config])


def test_only_rows_of_the_gpus_model_are_timed() -> None:
    assert retime.is_of(target("h200"), row(GEMM))
    assert not retime.is_of(target("h100"), row(GEMM))
    assert not retime.is_of(None, row(GEMM))
    assert not retime.is_of(target("h200"), Row(Path("h200.jsonl"), 1, "line 1", trouble="{"))
