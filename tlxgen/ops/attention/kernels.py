"""What the kernels of both attention operators have in common: tiles, resources, what templates are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

#: setmaxnreg of each consumer warp group, by their number (`tlxgen.ops.gemm.operator`).
_REGISTERS = {2: 240, 3: 160}

#: What they give up of these to a role that stores the output.
_STORE_REGISTERS = 8

#: What the threads of a consumer tell each other through shared memory where tiles come in pieces.
_TOLD_BYTES = 384

#: Pieces that a tile of the last round is split into, at most.
MOST_PIECES = 8

#: Parts of the output that go through shared memory of their own one after the other.
_STAGED_PARTS = {"own": 1, "half": 2}


def padded(head_dim: int) -> int:
    """The head dimension in shared memory: a power of two, and as wide as one wgmma wants."""
    return max(64, 1 << (head_dim - 1).bit_length())


def tile_rows(config: Config) -> int:
    """Rows of q of one tile."""
    p = config.params
    return int(p["consumers"]) * _WG_M if "consumers" in p else int(p["block_m"])


def vanilla_resources(config: Config, head: int, item: int) -> Resources:
    """Of plain Triton: about what its pipeline keeps of q, k and v."""
    p, rows = config.params, tile_rows(config)
    threads = 32 * int(p["num_warps"])
    tiles = (rows + 2 * int(p["num_stages"]) * int(p["block_n"])) * head * item
    return Resources(tiles + 1024, 0, threads, rows * head // threads)


def tma_resources(config: Config, head: int, item: int) -> Resources:
    """Tiles of Q, the rings of K and V, the staging of the output, barriers."""
    p, rows = config.params, tile_rows(config)
    consumers, block_n, q_stages, kv_stages = (int(p[n]) for n in ("consumers", "block_n", "q_stages", "kv_stages"))
    staged = rows // _STAGED_PARTS[str(p["staging"])] if p["staging"] != "q" else 0
    told = _TOLD_BYTES * consumers if _splits(config) else 0
    barriers = 2 * q_stages * consumers + 4 * kv_stages + (q_stages if _draws(config) else 0)
    barriers += 2 * consumers if _stores(config) else 0
    return Resources(
        shared_bytes=(q_stages * rows + staged + 2 * kv_stages * block_n) * head * item + told + 8 * barriers + 1024,
        mbarriers=barriers,
        threads=(1 + consumers + _stores(config))
        * Hopper.WARP_GROUP_THREADS,  # registers are given to four warps at a time
        accumulator_registers=(head + block_n) * _WG_M // Hopper.WARP_GROUP_THREADS,
    )


def context(problem: AttentionProblem | AttentionVarlenProblem, head: int) -> dict[str, Any]:
    """What every template is told."""
    return {
        "torch_dtype": str(torch_dtype(problem.dtype)).removeprefix("torch."),
        "head": head,
        "causal": problem.causal != "none",
        "bottom_right": problem.causal == "bottom-right",
        "window": problem.window > 0,
        "softcap": problem.softcap > 0,
        "has_lse": problem.lse,
    }


def tma_context(config: Config, head: int, dtype: str) -> dict[str, Any]:
    """What `attention_tma`, and the template that extends it, are told beside."""
    p, item = config.params, ITEM_BYTES[dtype]
    return {
        "block_m": tile_rows(config),
        "registers": _REGISTERS[int(p["consumers"])] - (_STORE_REGISTERS if _stores(config) else 0),
        "store_role": _stores(config),
        "own_staging": p["staging"] != "q",
        "halves": p["staging"] == "half",
        "out_columns": head // 2 if p["staging"] == "half" else head,
        "lane_sums": p["sums"] == "lanes",
        "dynamic": _draws(config),
        "single": p.get("schedule") == "single",
        "order": p.get("order"),
        "coprime": p.get("programs") == "coprime",
        "lazy": p["rescale"] == "lazy",
        "own_ranges": p["ranges"] == "own",
        "split_tail": _splits(config),
        "most_pieces": MOST_PIECES,
        "two_entries": p["carry"] != "wide" and p["unroll"] == 1,
        "ptx_dtype": {"bf16": "bf16", "fp16": "f16"}[dtype],
        "rescaled_values": head * _WG_M // Hopper.WARP_GROUP_THREADS,  # of the output, in one thread
        "q_bytes": _WG_M * head * item,
        "kv_bytes": int(p["block_n"]) * head * item,
        "turn": 9,  # named barriers 0 to 8 belong to the compiler
    }


def why_unreadable(tensors: Iterable[tuple[str, torch.Tensor]], through_tma: Iterable[str]) -> str | None:
    """Why kernels cannot take tensors (..., D) as they lie, or None: D contiguous, and what TMA asks of the rest."""
    for name, tensor in tensors:
        if tensor.stride(-1) != 1:
            return f"{name} has stride {tensor.stride(-1)} along the head dimension; the kernel reads unit strides"
        if name not in through_tma:
            continue
        pitches = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        if tensor.data_ptr() % Hopper.TMA_ALIGNMENT or any(p % Hopper.TMA_ALIGNMENT or p <= 0 for p in pitches):
            return f"{name} is not aligned for TMA: base address and strides {pitches} (bytes) must be multiples of 16"
    return None


def without_idle_window(data: Mapping[str, Any], rows: str, keys: str) -> dict[str, Any]:
    """Fields of a problem with a window of as many keys as any row has before it taken for what it is: none.

    Args:
        data: the fields.
        rows: name of the one that no row's number reaches.
        keys: name of the one that no key's number reaches.
    """
    causal, window = data.get("causal"), data.get("window")
    longest = data.get(keys if causal == "bottom-right" else rows)
    idle = type(window) is int and type(longest) is int and window >= longest > 0
    return {**data, "window": 0} if idle and causal in ("bottom-right", "top-left") else dict(data)


def _draws(config: Config) -> bool:
    """Whether tiles are drawn at run time, as they always are where that is no parameter."""
    return config.params.get("schedule", "dynamic") == "dynamic"


def _splits(config: Config) -> bool:
    """Whether tiles of the last round come in pieces."""
    return config.params.get("tail") == "split"


def _stores(config: Config) -> bool:
    """Whether a role of its own stores the output."""
    return config.params.get("store") == "role"
