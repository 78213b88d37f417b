"""The last round of a product's tiles, split along K: who works on what, and in the simulator what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.emitted_walk import Walk
from tests.support.simulated import launch
from tlxgen import devices, ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config
from tlxgen.ops import accuracy, last_round
from tlxgen.ops.gemm.problem import GemmProblem
from tlxgen.ops.gemm.time_model import LEAST_STEPS
from tlxgen.simulator.check import check
from tlxgen.space import search_space
from tlxgen.space.candidates import candidates

GEMM = ops.get("gemm")
H200 = devices.target("h200")


def problem(*shape: int, **options: Any) -> GemmProblem:
    made = GEMM.problem(shape or (16, 1280, 8192), **{"layout": "nt", **options})
    assert isinstance(made, GemmProblem)
    return made


def config(made: GemmProblem, **params: Any) -> Config:
    """The model's favourite that splits its last round."""
    wanted = {"tail": "split", **params}
    return next(
        one for one in candidates(made, H200, ("gemm_tma_cooperative",)) if wanted.items() <= one.params.items()
    )


def source(*shape: int, params: dict[str, Any] | None = None, **options: Any) -> KernelSource:
    made = problem(*shape, **options)
    return emit(GEMM, made, config(made, **(params or {})))


def result(
    kernel: KernelSource, made: GemmProblem, num_sms: int, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Of a simulated launch; its counters, and its inputs."""
    inputs = dict(GEMM.inputs(made, "cpu", 0))
    out = GEMM.output(made, inputs).fill_(float("nan"))
    args = launch(GEMM, kernel, inputs, out, num_sms=num_sms, seed=seed)
    (counters,) = (arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)
    return out, counters, inputs


NARROW = {"block_m": 64, "block_n": 64, "block_k": 64, "pieces": 8}
KERNEL = source(params=NARROW)
MODULE = loader.load(KERNEL)
WALK = Walk(KERNEL.text)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 140))
def test_every_step_of_every_tile_is_worked_on_once(tiles: int, steps: int, num_sms: int) -> None:
    made = problem(64, 64 * tiles, 64 * steps)
    inputs = GEMM.inputs(made, "meta", 0)
    grid, args = GEMM.arguments(MODULE, inputs, GEMM.output(made, inputs), num_sms=num_sms)
    partial, counters, (*_, whole_tiles, sharers) = *args[3:5], args[5:]
    assert grid[0] <= num_sms
    taken_for_granted = last_round.split(tiles, steps, num_sms, MODULE.PIECES, LEAST_STEPS, even=True)
    assert taken_for_granted == (tiles - whole_tiles, sharers), "by the time model"

    numbers = WALK.pieces_by_tile(grid[0], tiles, whole_tiles, sharers, steps, MODULE.PIECES)
    assert counters.numel() == len(numbers), "one for each"
    for found in numbers.values():
        assert (max(found) + 1) * MODULE.BLOCK_M * MODULE.BLOCK_N <= partial.numel(), "there is room for all of them"


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(2, 5),
    st.sampled_from([{}, {"epilogue": "bias+relu"}, {"epilogue": "residual"}, {"out_dtype": "fp32"}, {"layout": "nn"}]),
)
def test_pieces_add_up_to_the_library_s_result(
    rows: int, columns: int, depth: int, num_sms: int, options: dict[str, Any]
) -> None:
    made = problem(rows, 16 * columns, 16 * depth, **options)
    kernel = source(params=NARROW, **options)
    out, counters, inputs = result(kernel, made, num_sms)
    reason = accuracy.why_wrong(out, GEMM.reference(made, inputs), GEMM.eager(made, inputs))
    assert reason is None, reason
    assert not counters.any(), "the next launch finds them as this one did"


def test_whoever_comes_last_the_result_is_the_same_to_the_bit() -> None:
    made = problem(40, 128, 1800)
    results = [result(KERNEL, made, 5, seed)[0] for seed in range(6)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("shape", "params", "options"),
    [
        ((16, 4096, 14336), {"block_k": 128}, {}),
        ((16, 1280, 8192), {"block_m": 64, "block_n": 256}, {"epilogue": "bias+gelu"}),
        ((512, 7168, 8192), {"block_m": 128, "block_n": 256}, {"epilogue": "residual", "layout": "nn"}),
        ((512, 7168, 8192), {"block_m": 192}, {"out_dtype": "fp32", "layout": "tn"}),
        ((200, 4096, 4096), {"block_n": 256}, {"dtype": "fp32"}),
    ],
    ids=str,
)
def test_is_clean_for_every_tile(shape: tuple[int, ...], params: dict[str, Any], options: dict[str, Any]) -> None:
    report = check(source(*shape, params=params, **options), 3)
    assert report.clean, report.findings[0]


def test_rounds_that_are_almost_full_are_left_whole() -> None:
    made = problem(128, 132 * 128, 4096)
    legal = [one for one in candidates(made, H200, ("gemm_tma_cooperative",)) if one.params["block_m"] == 128]
    tails = {
        block_n: {one.params["tail"] for one in legal if one.params["block_n"] == block_n} for block_n in (64, 128)
    }
    assert tails == {64: {"whole"}, 128: {"whole"}}
    assert config(problem(128, 4096, 4096)).params["tail"] == "split"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 1000), st.integers(1, 1500))
def test_a_config_that_splits_does_so_and_no_two_launch_alike(rows: int, columns: int, depth: int) -> None:
    made = problem(rows, 16 * columns, 16 * depth)
    seen = set()
    for one in search_space.legal_configs(GEMM, made, H200, ("gemm_tma_cooperative",)):
        p: dict[str, Any] = dict(one.params)
        if p["tail"] == "split":
            tiles = -(-made.M // p["block_m"]) * -(-made.N // p["block_n"])
            steps = -(-made.K // p["block_k"])
            found = last_round.split(tiles, steps, H200.sm_count, p.pop("pieces"), LEAST_STEPS, even=True)
            assert found.tiles, one.short
            launch = (found, *sorted(p.items()))
            assert launch not in seen, one.short
            seen.add(launch)


def test_nobody_has_two_pieces_where_few_would_be_idle() -> None:
    made = problem(16, 32 * 64, 4096)  # 32 tiles on 132 multiprocessors
    inputs = GEMM.inputs(made, "meta", 0)
    module = loader.load(source(params=NARROW))
    grid, _ = GEMM.arguments(module, inputs, GEMM.output(made, inputs), num_sms=132)
    assert grid[0] == 128, "four for each"
