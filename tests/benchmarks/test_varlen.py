"""Benchmark of packed sequences: equal work on both sides, ratios of rates, results file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable

from benchmarks import varlen
from benchmarks.varlen import BATCH, SPREADS, VARLEN, Work
from tlxgen import ops
from tlxgen.devices import target
from tlxgen.problem import Problem
from tlxgen.runtime import selection
from tlxgen.runtime.selection import Choice, select
from tlxgen.tuner.timing import Timing

WORKS = [Work(spread, head, causal) for spread in SPREADS for head in (64, 128) for causal in (False, True)]

Run = Callable[..., dict[str, Any]]


def timing(us: float, peer_us: float = 100.0) -> Timing:
    return Timing(us, 0.0, peer_us, (us,), (peer_us,))


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_both_sides_do_the_same_work(work: Work) -> None:
    assert work.flops[VARLEN] == pytest.approx(work.flops[BATCH], rel=0.03)
    assert (work.batch.B, work.batch.H, work.batch.D) == (work.packed.B, work.packed.H, work.packed.D)
    pairs = sum(n * n for n in work.lengths) / (2 if work.causal else 1)
    assert work.flops[VARLEN] == pytest.approx(4 * work.packed.H * work.head * pairs, rel=0.002)


def test_spreads_are_equal_uneven_and_dominated_by_one() -> None:
    lengths = {spread: sorted(Work(spread, 64, causal=False).lengths) for spread in SPREADS}
    assert len(set(lengths["equal"])) == 1
    assert len(set(lengths["drawn"])) == len(lengths["drawn"])
    assert lengths["drawn"][-1] == lengths["one long"][-1] == 8192
    assert sum(lengths["one long"][:-1]) < 8192 / 2


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_hopper_has_kernels_for_both_sides(work: Work) -> None:
    for problem in (work.packed, work.batch):
        config = select(problem, target("h200"), note_miss=False).config
        assert config is not None
        assert config.template != ops.get(problem.operator).templates[-1]


def test_ratios_are_of_rates_in_the_same_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPREADS, "equal", (2, 120, 60))  # the batch has 64 rows in place of 60
    work = Work("equal", 64, causal=False)
    looks = [
        {VARLEN: timing(100.0), BATCH: timing(95.0), "fa3": timing(80.0)},
        {VARLEN: timing(110.0, 110.0), BATCH: timing(104.5), "fa3": timing(88.0, 110.0)},
        {VARLEN: timing(100.0, 300.0), BATCH: timing(500.0), "fa3": timing(80.0, 300.0)},
    ]
    row = varlen.rates(work, looks)
    assert row["ratio"] == round(0.95 * (60 / 64) ** 2, 4)
    assert row["others"] == {"fa3": 0.8, "varlen_attn": 1.0}
    assert row["time_us"] == {VARLEN: 100.0, BATCH: 104.5}
    assert row["tflops"][VARLEN] == round(work.flops[VARLEN] / 100.0 * 1e-6, 1)
    text = varlen.line({**row, "origins": {VARLEN: "tuned", BATCH: "nearest"}})
    assert all(word in text for word in ("equal", "D  64", "full", "fa3 0.800", "tuned/nearest"))


class TestScript:
    @pytest.fixture(autouse=True)
    def _kernels(self, monkeypatch: pytest.MonkeyPatch, stub_gpu: None) -> None:
        """A packed kernel takes 120 us, the batch 114 us."""

        def select(problem: Problem, *_: Any, **__: Any) -> Choice:
            return Choice("tuned", stub_card.config({"attention_varlen": 120, "attention": 114}[problem.operator]))

        monkeypatch.setattr(varlen, "Child", stub_card.StubChild)
        monkeypatch.setattr(selection, "select", select)

    def test_each_case_is_checked_and_written(self, run: Run) -> None:
        written = run(varlen)
        assert "-varlen-h200.json" in written["file"]
        assert "of 12" in written["printed"]
        assert [row["spread"] for row in written["rows"]] == [*SPREADS] * 4
        assert all(set(row["origins"]) == set(row["errors"]) == {VARLEN, BATCH} for row in written["rows"])

    def test_slow_packed_sequences_end_in_an_error(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(varlen, "AT_LEAST", 1.1)
        assert len(run(varlen, "--only", "equal", ends=r"4 below 1\.1 of the batch's speed")["rows"]) == 4
