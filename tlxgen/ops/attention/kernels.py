"""Tiles, resources, template variables and layout checks that both attention operators use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tlxgen.config import Config
from tlxgen.devices import Hopper
from tlxgen.ops.base import Resources
from tlxgen.problem import ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    import torch

    from tlxgen.ops.attention.problem import AttentionProblem
    from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem

_WG_M = 64  # rows of one consumer warp group

_EXCHANGE_BYTES = 384  # shared memory through which a consumer's threads agree that a piece of a tile is stored

#: Pieces of a tile of the last round, at most.
MOST_PIECES = 8

#: Parts in which the output goes through shared memory of its own, one after the other.
_STAGED_PARTS = {"own": 1, "half": 2}


def tile_rows(config: Config) -> int:
    """Rows of q of one tile."""
    p = config.params
    return int(p["consumers"]) * _WG_M if "consumers" in p else int(p["block_m"])


def vanilla_resources(config: Config, head: int, item: int) -> Resources:
    """Resources of plain Triton; shared memory is an estimate of what its pipeline keeps of q, k and v."""
    p, rows = config.params, tile_rows(config)
    threads = 32 * int(p["num_warps"])
    tiles = (rows + 2 * int(p["num_stages"]) * int(p["block_n"])) * head * item
    return Resources(tiles + 1024, 0, threads, rows * head // threads)


def tma_resources(config: Config, head: int, item: int) -> Resources:
    """Resources of the TMA kernels: tiles of Q, the rings of K and V, the staging of the output, barriers."""
    p, rows = config.params, tile_rows(config)
    consumers, block_n, q_stages, kv_stages = (int(p[n]) for n in ("consumers", "block_n", "q_stages", "kv_stages"))
    staged = rows // _STAGED_PARTS[str(p["staging"])] if p["staging"] != "q" else 0
    exchange = _EXCHANGE_BYTES * consumers if _splits(config) else 0
    barriers = 2 * q_stages * consumers + 4 * kv_stages + (q_stages if _draws(config) else 0)
    return Resources(
        shared_bytes=(q_stages * rows + staged + 2 * kv_stages * block_n) * head * item
        + exchange
        + 8 * barriers
        + 1024,
        mbarriers=barriers,
        threads=(1 + consumers) * Hopper.WARP_GROUP_THREADS,
        accumulator_registers=(head + block_n) * _WG_M // Hopper.WARP_GROUP_THREADS,
    )


def context(problem: AttentionProblem | AttentionVarlenProblem, head: int) -> dict[str, Any]:
    """Variables of every attention template."""
    return {
        "torch_dtype": str(torch_dtype(problem.dtype)).removeprefix("torch."),
        "item_bytes": ITEM_BYTES[problem.dtype],
        "head": head,
        "packed": problem.operator == "attention_varlen",
        "causal": problem.causal != "none",
        "bottom_right": problem.causal == "bottom-right",
        "window": problem.window > 0,
        "softcap": problem.softcap > 0,
        "has_lse": problem.lse,
    }


def tma_context(config: Config, dtype: str) -> dict[str, Any]:
    """Variables of `attention_tma` and `attention_varlen` beside those of `context`."""
    p = config.params
    return {
        "own_staging": p["staging"] != "q",
        "halves": p["staging"] == "half",
        "lane_sums": p["sums"] == "lanes",
        "dynamic": _draws(config),
        "order": p.get("order"),
        "lazy": p["rescale"] == "lazy",
        "own_ranges": p["ranges"] == "own",
        "split_tail": _splits(config),
        "most_pieces": MOST_PIECES,
        "two_entries": p["carry"] != "wide",
        "ptx_dtype": {"bf16": "bf16", "fp16": "f16"}[dtype],
        "turn": 9,  # named barriers 0 to 8 belong to the compiler
    }


def why_unreadable(tensors: Iterable[tuple[str, torch.Tensor]], through_tma: Iterable[str]) -> str | None:
    """Why kernels cannot read the layout of tensors (..., D), or None.

    Args:
        tensors: names and tensors; D must be contiguous.
        through_tma: names of those whose base address and other strides must be multiples of 16 bytes.
    """
    for name, tensor in tensors:
        if tensor.stride(-1) != 1:
            return f"{name} has stride {tensor.stride(-1)} along the head dimension; the kernel reads unit strides"
        if name not in through_tma:
            continue
        pitches = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        if tensor.data_ptr() % Hopper.TMA_ALIGNMENT or any(p % Hopper.TMA_ALIGNMENT or p <= 0 for p in pitches):
            return f"{name} is not aligned for TMA: base address and strides {pitches} (bytes) must be multiples of 16"
    return None


def _draws(config: Config) -> bool:
    """Whether programs draw tiles at run time; packed sequences have no other schedule."""
    return config.params.get("schedule", "dynamic") == "dynamic"


def _splits(config: Config) -> bool:
    """Whether tiles of the last round are split."""
    return config.params.get("tail") == "split"
