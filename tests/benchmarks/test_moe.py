"""The benchmark of mixture-of-experts layers, as far as it runs without a card: all ways agree, and times make rows."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import moe, replays
from benchmarks.moe import LAYERS, OURS, Layer
from tlxgen import functional, ops
from tlxgen.devices import target
from tlxgen.ops import accuracy
from tlxgen.ops.grouped_gemm.problem import GroupedGemmProblem
from tlxgen.runtime import checks
from tlxgen.runtime.kernel import FallbackWarning

TINY = (
    Layer("Two", experts=4, choices=2, k=64, inner=48, tokens=37),
    Layer("Many", experts=300, choices=3, k=32, inner=16, tokens=20),
)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> None:
    monkeypatch.setattr(moe, "DEVICE", "cpu")


def given_times(_: Any) -> dict[str, list[float]]:
    """Three rounds; the sum is the fastest of torch's, and 1.5 times as slow as ours in most rounds."""
    ours = [100.0, 110.0, 100.0]
    theirs = {"index_add": [200.0] * 3, "sum": [150.0, 165.0, 900.0], "product": [180.0] * 3}
    return {OURS: ours, **theirs, **{part: [10.0, 20.0, 30.0] for part in ("routing", "first", "second", "combine")}}


@pytest.mark.parametrize("layer", TINY, ids=lambda layer: layer.name)
def test_every_way_gives_the_layer_in_float64(layer: Layer) -> None:
    given = moe.operands(layer)
    expected = moe.reference(given)
    exact = torch.zeros_like(expected)
    for token in range(layer.tokens):
        for weight, expert in zip(given.weights[token].tolist(), given.ids[token].tolist(), strict=True):
            gate, up = (given.w1[expert].double() @ given.x[token].double()).chunk(2)
            exact[token] += weight * (given.w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(expected, exact)
    calls = moe.wholes(given)
    assert list(calls) == [OURS, "index_add", "sum", "product"]
    for name, call in calls.items():
        result = call()
        assert result.dtype == torch.bfloat16, name
        assert accuracy.error(result, exact).norm < 1e-2, name
    assert set(moe.checked(layer, calls, expected)) == set(calls)


def test_the_last_part_ends_where_the_layer_does() -> None:
    given = moe.operands(TINY[0])
    parts = moe.parts(given)
    assert list(parts) == ["routing", "gather", "first", "second", "combine"]
    whole = functional.fused_moe(given.x, given.w1, given.w2, given.weights, given.ids)
    assert torch.equal(parts["combine"](), whole)
    shapes = [tuple(call().shape) for call in parts.values()]
    assert shapes == [(4,), (74, 64), (74, 48), (74, 64), (37, 64)]


def test_what_is_wrong_is_not_timed() -> None:
    given = moe.operands(TINY[0])
    expected = moe.reference(given)

    def wrong() -> Tensor:
        return moe.by_sum(given).mul_(1.1)

    for name in (OURS, "index_add"):
        with pytest.raises(AssertionError, match="37 tokens"):
            moe.checked(TINY[0], {**moe.wholes(given), name: wrong}, expected)


def test_the_ratio_is_of_pairs_and_to_the_fastest_way_in_torch() -> None:
    row = moe.entry(TINY[0], given_times(None))
    assert (row["peer"], row["ratio"], row["time_us"], row["peer_us"]) == ("sum", 1.5, 100.0, 165.0)
    assert row["torch_us"] == {"index_add": 200.0, "sum": 165.0, "product": 180.0}
    assert row["parts_us"] == dict.fromkeys(("routing", "first", "second", "combine"), 20.0)
    text = moe.line(row)
    assert all(word in text for word in ("Two", "T    37", "sum", "1.500", "combine 20"))


def test_each_layer_is_written_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": "none", "driver": "none", "cuda": "none"}
    report = SimpleNamespace(gpu=target("h200"), versions=versions)
    monkeypatch.setattr(moe, "Setup", lambda *_, **__: lambda: report)
    monkeypatch.setattr(moe, "LAYERS", TINY)
    monkeypatch.setattr(moe, "samples", given_times)
    monkeypatch.setattr("sys.argv", ["moe", "-o", str(tmp_path)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        moe.main()
    (path,) = tmp_path.glob("*-moe-h200.json")
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert "geometric mean 1.500, least 1.500 over 2 layers" in printed
    content = json.loads(path.read_text())
    assert content["rounds"] == replays.ROUNDS
    assert [row["layer"]["name"] for row in content["rows"]] == ["Two", "Many"]
    assert all(row["errors"][OURS] < 1e-2 and set(row["origins"]) == {"first", "second"} for row in content["rows"])


def test_the_products_are_those_that_the_layer_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what was compiled, and what is said of origins, is what runs."""
    from tlxgen.functional import grouped
    from tlxgen.runtime import kernel

    asked: list[GroupedGemmProblem] = []

    def kernel_for(problem: GroupedGemmProblem) -> Any:
        asked.append(problem)
        return SimpleNamespace(origin="tuned" if problem.gated else "torch", slower=False, problem=problem)

    def first(*_: Any) -> Tensor:
        return torch.zeros(74, 48, dtype=torch.bfloat16)

    monkeypatch.setattr(grouped, "kernel_for", kernel_for)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    monkeypatch.setattr(grouped, "_taking", first)
    kernel.forget()
    moe.wholes(moe.operands(TINY[0]))[OURS]()
    kernel.forget()
    assert asked == list(TINY[0].problems().values())


def test_kernels_are_compiled_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    moe.compile_all([replace(TINY[0], k=256, inner=128, tokens=512)], "h200")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(" s  " in text for text in printed)


def test_layers_fit_on_a_card_and_in_the_operator() -> None:
    for layer in LAYERS:
        bytes_of_weights = 3 * 2 * layer.experts * layer.inner * layer.k
        assert bytes_of_weights < 25e9
        for problem in layer.problems().values():
            assert ops.get("grouped_gemm").flops(problem) > 0
