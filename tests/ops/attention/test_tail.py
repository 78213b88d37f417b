"""Attention's last round of tiles, split over the keys: the pieces, and results in the simulator."""

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
from tlxgen.ops.attention.kernels import MOST_PIECES
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.simulator.check import check
from tlxgen.space.candidates import candidates

ATTENTION = ops.get("attention")
H200 = devices.target("h200")


def problem(shape: tuple[int, int, int, int], **options: Any) -> AttentionProblem:
    made = ATTENTION.problem(shape, **options)
    assert isinstance(made, AttentionProblem)
    return made


def config(made: AttentionProblem, **params: Any) -> Config:
    """The model's favourite that splits its last round."""
    legal = candidates(made, H200, ("attention_tma",))
    wanted = {"tail": "split", **params}
    return next(one for one in legal if wanted.items() <= one.params.items())


def source(shape: tuple[int, int, int, int] = (4, 32, 4096, 64), **options: Any) -> KernelSource:
    made = problem(shape, **options)
    return emit(ATTENTION, made, config(made))


def result(
    kernel: KernelSource, made: AttentionProblem, num_sms: int, seed: int = 1
) -> tuple[torch.Tensor, Any, dict[str, Any]]:
    """Of a simulated launch; its counters, and its inputs."""
    inputs = dict(ATTENTION.inputs(made, "cpu", 0))
    out = ATTENTION.output(made, inputs).fill_(float("nan"))
    args = launch(ATTENTION, kernel, inputs, out, num_sms=num_sms, seed=seed)
    (counters,) = (arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)
    return out, counters, inputs


KERNEL = source()
MODULE = loader.load(KERNEL)
WALK = Walk(KERNEL.text)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 140))
def test_every_block_of_every_tile_is_computed_once(tiles: int, blocks: int, num_sms: int) -> None:
    made = problem((1, tiles, 1, 64), kv_heads=1, kv_len=blocks * 128)
    inputs = ATTENTION.inputs(made, "meta", 0)
    grid, args = ATTENTION.arguments(MODULE, inputs, ATTENTION.output(made, inputs), num_sms=num_sms)
    partial, counters, (_, whole_tiles, sharers) = *args[4:6], args[7:10]
    rows = partial.numel() // (MODULE.HEAD + 2)
    assert grid[0] <= num_sms
    taken_for_granted = last_round.split(tiles, blocks, num_sms, MOST_PIECES)
    assert taken_for_granted == (tiles - whole_tiles, sharers), "by the time model"

    numbers = WALK.pieces_by_tile(grid[0], tiles, whole_tiles, sharers, blocks, MODULE.PIECES)
    assert counters.numel() == len(numbers) * MODULE.BLOCK_M // MODULE.WG_M, "one for each consumer of each"
    for found in numbers.values():
        assert (max(found) + 1) * MODULE.BLOCK_M <= rows, "there is room for all of them"


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 200),
    st.integers(1, 700),
    st.integers(2, 5),
    st.sampled_from([{}, {"lse": True}, {"softcap": 20.0, "lse": True}, {"dtype": "fp16"}]),
)
def test_pieces_add_up_to_the_result(heads: int, rows: int, keys: int, num_sms: int, options: dict[str, Any]) -> None:
    made = problem((1, heads, rows, 64), kv_len=keys, **options)
    kernel = source(**options)
    out, counters, inputs = result(kernel, made, num_sms)
    reason = accuracy.why_wrong(out, ATTENTION.reference(made, inputs), ATTENTION.eager(made, inputs))
    assert reason is None, reason
    assert not counters.any(), "the next launch finds them as this one did"


def test_result_is_bitwise_equal_in_every_order_of_arrival() -> None:
    made, kernel = problem((1, 2, 130, 64), kv_len=900), source()
    results = [result(kernel, made, 5, seed)[0] for seed in range(6)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("D", "params"),
    [
        (40, {}),
        (64, {"carry": "pairs", "rescale": "lazy", "consumers": 2}),
        (128, {"staging": "q"}),
        (128, {"sums": "rows"}),
        (256, {}),
        (256, {"staging": "q"}),
    ],
)
def test_is_clean_with_every_staging(D: int, params: dict[str, Any]) -> None:  # noqa: N803 - the field's name
    made = problem((1, 2, 1000, D), lse=True)
    report = check(emit(ATTENTION, made, config(made, **params)), 4)
    assert report.clean, report.findings[0]


def test_tail_is_split_without_a_mask_only() -> None:
    made = problem((4, 32, 4096, 64), causal="bottom-right")
    assert {one.params["tail"] for one in candidates(made, H200, ("attention_tma",))} == {"whole"}


@pytest.mark.parametrize(("heads", "num_sms"), [(6, 3), (132, 132), (130, 132)])
def test_full_or_almost_full_last_round_stays_whole(heads: int, num_sms: int) -> None:
    """Nothing could be won; and without pieces there is nothing to be put together."""
    made = problem((1, heads, 64, 64), kv_heads=1, kv_len=1000)
    inputs = ATTENTION.inputs(made, "meta", 0)
    grid, args = ATTENTION.arguments(MODULE, inputs, ATTENTION.output(made, inputs), num_sms=num_sms)
    partial, counters, (tiles, whole_tiles, sharers) = *args[4:6], args[7:10]
    assert (partial.numel(), counters.numel(), sharers) == (0, 0, 0)
    assert whole_tiles == tiles == heads
    assert grid[0] == min(heads, num_sms)
