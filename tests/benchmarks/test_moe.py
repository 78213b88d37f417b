"""Benchmark of mixture-of-experts layers on the CPU: all ways agree; ratios and results file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import moe, replays
from benchmarks.moe import LAYERS, OURS, Layer
from tlxgen import functional, ops
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
    """Three rounds; `sum` is the fastest way in torch, and 1.5 times as slow as ours in most rounds."""
    ours = [100.0, 110.0, 100.0]
    theirs = {"index_add": [200.0] * 3, "sum": [150.0, 165.0, 900.0], "product": [180.0] * 3}
    return {OURS: ours, **theirs, **{part: [10.0, 20.0, 30.0] for part in ("routing", "first", "second", "combine")}}


@pytest.mark.parametrize("layer", TINY, ids=lambda layer: layer.name)
def test_every_way_computes_the_layer(layer: Layer) -> None:
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


def test_parts_add_up_to_the_layer() -> None:
    given = moe.operands(TINY[0])
    parts = moe.parts(given)
    assert list(parts) == ["routing", "gather", "first", "second", "combine"]
    whole = functional.fused_moe(given.x, given.w1, given.w2, given.weights, given.ids)
    assert torch.equal(parts["combine"](), whole)
    shapes = [tuple(call().shape) for call in parts.values()]
    assert shapes == [(4,), (74, 64), (74, 48), (74, 64), (37, 64)]


def test_wrong_results_are_refused() -> None:
    given = moe.operands(TINY[0])
    expected = moe.reference(given)

    def wrong() -> Tensor:
        return moe.by_sum(given).mul_(1.1)

    for name in (OURS, "index_add"):
        with pytest.raises(AssertionError, match="37 tokens"):
            moe.checked(TINY[0], {**moe.wholes(given), name: wrong}, expected)


def test_the_ratio_is_to_the_fastest_way_in_torch_in_the_same_rounds() -> None:
    row = moe.ratios(TINY[0], given_times(None))
    assert (row["peer"], row["ratio"], row["time_us"], row["peer_us"]) == ("sum", 1.5, 100.0, 165.0)
    assert row["torch_us"] == {"index_add": 200.0, "sum": 165.0, "product": 180.0}
    assert row["parts_us"] == dict.fromkeys(("routing", "first", "second", "combine"), 20.0)
    text = moe.line(row)
    assert all(word in text for word in ("Two", "T    37", "sum", "1.500", "combine 20"))


def test_each_layer_is_written_and_printed(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    monkeypatch.setattr(moe, "LAYERS", TINY)
    monkeypatch.setattr(moe, "samples", given_times)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        written = run(moe)
    assert "-moe-h200.json" in written["file"]
    assert "geometric mean 1.500, least 1.500 of 2" in written["printed"]
    assert written["rounds"] == replays.ROUNDS
    assert [row["layer"]["name"] for row in written["rows"]] == ["Two", "Many"]
    assert all(row["errors"][OURS] < 1e-2 and set(row["origins"]) == {"first", "second"} for row in written["rows"])


def test_origins_are_those_of_the_problems_that_the_layer_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(grouped, "_launch_and_cache", first)
    kernel.forget()
    moe.wholes(moe.operands(TINY[0]))[OURS]()
    kernel.forget()
    assert asked == list(TINY[0].problems().values())


def test_layers_fit_on_a_gpu_and_in_the_operator() -> None:
    for layer in LAYERS:
        bytes_of_weights = 3 * 2 * layer.experts * layer.inner * layer.k
        assert bytes_of_weights < 25e9
        for problem in layer.problems().values():
            assert ops.get("grouped_gemm").flops(problem) > 0
