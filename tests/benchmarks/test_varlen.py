"""The benchmark of packed sequences, as far as it runs without a card: equal work, right results, ratios of rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import replays, varlen
from benchmarks.varlen import FIXED, FLASH_3, VARLEN, Work, works
from tlxgen import ops
from tlxgen.devices import target
from tlxgen.problem import Problem
from tlxgen.runtime.selection import select

pytestmark = pytest.mark.filterwarnings("ignore::tlxgen.runtime.kernel.FallbackWarning")

TINY = (33, 0, 70, 5)
FA3 = """
import torch

def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    from benchmarks import varlen
    lengths = tuple(cu_seqlens_q.diff().tolist())
    assert max_seqlen_q == max_seqlen_k == max(lengths) and torch.equal(cu_seqlens_q, cu_seqlens_k)
    parts = zip(*(one.split(lengths) for one in (q, k, v)))
    return torch.cat([varlen.alone(own, causal) for own in parts if len(own[0])]), None
"""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> None:
    monkeypatch.setattr(varlen, "DEVICE", "cpu")
    monkeypatch.setattr(varlen, "HEADS", 2)
    monkeypatch.setattr(varlen, "FLASH_3_MODULES", ())


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FlashAttention-3's interface, computed by torch."""
    (tmp_path / "stub_fa3_of_varlen.py").write_text(FA3)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(varlen, "FLASH_3_MODULES", ("no_such_module", "stub_fa3_of_varlen"))


def given_times(everybody: dict[str, Any]) -> dict[str, list[float]]:
    """Three rounds, in the last of which the card was slow for the batch."""
    times = {VARLEN: [100.0, 110.0, 100.0], FIXED: [95.0, 104.5, 500.0], FLASH_3: [80.0, 88.0, 80.0]}
    return {name: times[name] for name in everybody}


def test_work_is_the_same_on_both_sides() -> None:
    assert len(works()) == 12
    assert {(work.spread, work.head, work.causal) for work in works()} == {
        (spread, head, causal) for spread in varlen.SPREADS for head in (64, 128) for causal in (False, True)
    }
    for work in works():
        assert work.flops[VARLEN] == pytest.approx(work.flops[FIXED], rel=0.03)
        assert (work.batch.B, work.batch.H, work.batch.D) == (work.packed.B, work.packed.H, work.packed.D)
        pairs = sum(n * n for n in work.lengths) / (2 if work.causal else 1)
        assert work.flops[VARLEN] == pytest.approx(4 * work.packed.H * work.head * pairs, rel=0.002)


def test_spreads_are_even_uneven_and_extreme() -> None:
    equal, drawn, long = varlen.SPREADS.values()
    assert len(set(equal)) == 1
    assert len(set(drawn)) == len(drawn)
    assert max(long) == max(drawn) == 8192 > 2 * max(equal) - 1
    assert min(long) * 16 == max(long)


def test_the_batch_of_equal_sequences_is_those_sequences() -> None:
    work = Work("equal", (128,) * 3, 64, causal=True)
    assert (work.batch.B, work.batch.S, work.batch.kv_len) == (3, 128, 128)
    assert work.flops[VARLEN] == work.flops[FIXED]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head", [64, 128])
def test_results_are_those_of_torch(head: int, causal: bool, fa3: None) -> None:
    given = varlen.operands(Work("tiny", TINY, head, causal))
    everybody = varlen.calls(given)
    assert list(everybody) == [VARLEN, FIXED, FLASH_3]
    exact = ops.get("attention_varlen").reference(
        given.work.packed,
        dict(zip(("q", "k", "v"), given.packed, strict=True))
        | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), given.ends),
    )
    torch.testing.assert_close(varlen.in_torch(given, VARLEN, torch.float32).double(), exact, rtol=1e-4, atol=1e-5)
    errors = varlen.checked(given, everybody)
    assert set(errors) == set(everybody)
    assert all(error < 1e-2 for error in errors.values())


@pytest.mark.parametrize("name", [VARLEN, FIXED])
def test_what_is_wrong_is_not_timed(name: str) -> None:
    given = varlen.operands(Work("tiny", TINY, 64, causal=True))
    everybody = varlen.calls(given)
    right: Callable[[], Tensor] = everybody[name]
    with pytest.raises(AssertionError, match=f"{name}: relative error"):
        varlen.checked(given, {**everybody, name: lambda: right() * 1.1})


def test_what_is_compared_are_rates_pair_by_pair() -> None:
    work = Work("tiny", (60, 60), 64, causal=False)  # of 64 in the batch, which is more work
    row = varlen.entry(work, given_times({VARLEN: None, FIXED: None, FLASH_3: None}))
    assert row["ratio"] == round(0.95 * (60 / 64) ** 2, 4)
    assert row["to_fa3"] == 0.8
    assert row["time_us"] == {VARLEN: 100.0, FIXED: 104.5, FLASH_3: 80.0}
    assert row["tflops"][VARLEN] == round(work.flops[VARLEN] / 100.0 * 1e-6, 1)
    text = varlen.line({**row, "origins": {VARLEN: "tuned", FIXED: "nearest"}})
    assert all(word in text for word in ("tiny", "D  64", "full", "of fa3 0.800", "tuned/nearest"))


class TestScript:
    @pytest.fixture(autouse=True)
    def _tiny(self, monkeypatch: pytest.MonkeyPatch) -> None:
        report = SimpleNamespace(gpu=target("h200"), versions={"torch": "none", "driver": "none", "cuda": "none"})
        monkeypatch.setattr(varlen, "Setup", lambda *_, **__: lambda: report)
        monkeypatch.setattr(varlen, "SPREADS", {"even": (64, 64), "odd": (64, 64, 64)})
        monkeypatch.setattr(varlen, "samples", given_times)

    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
        """What was to be compiled ahead."""
        found: list[Problem] = []
        monkeypatch.setattr(varlen, "compile_served", lambda problems, _: found.extend(problems))
        return found

    def test_writes_and_prints_each_work(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        compiled: list[Problem],
    ) -> None:
        monkeypatch.setattr("sys.argv", ["varlen", "-o", str(tmp_path)])
        varlen.main()
        (path,) = tmp_path.glob("*-varlen-h200.json")
        printed = capsys.readouterr().out
        assert str(path) in printed
        assert "geometric mean 0.950, least 0.950 of 8" in printed
        content = json.loads(path.read_text())
        assert content["rounds"] == replays.ROUNDS
        assert [row["spread"] for row in content["rows"]] == ["even", "odd"] * 4
        assert all(set(row["origins"]) == set(row["errors"]) == {VARLEN, FIXED} for row in content["rows"])
        assert [problem.model_dump() for problem in compiled] == [
            row[which] for row in content["rows"] for which in ("problem", "batch")
        ]

    def test_fails_where_packed_sequences_are_too_slow(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: list[Problem]
    ) -> None:
        monkeypatch.setattr(varlen, "samples", lambda _: {VARLEN: [100.0], FIXED: [80.0]})
        monkeypatch.setattr("sys.argv", ["varlen", "-o", str(tmp_path), "--only", "odd"])
        with pytest.raises(SystemExit, match=r"4 below 0\.9 of the batch's speed"):
            varlen.main()
        assert list(tmp_path.glob("*-varlen-h200.json"))

    def test_compiles_and_no_more(self, monkeypatch: pytest.MonkeyPatch, compiled: list[Problem]) -> None:
        monkeypatch.setattr("sys.argv", ["varlen", "--compile"])
        monkeypatch.setattr(varlen, "measure", None)
        varlen.main()
        assert len(compiled) == 16


def test_hopper_has_kernels_for_all_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "HEADS", 32)
    for work in works():
        for problem in (work.packed, work.batch):
            config = select(problem, target("h200"), note_miss=False).config
            assert config is not None
            assert config.template != ops.get(problem.operator).templates[-1]
