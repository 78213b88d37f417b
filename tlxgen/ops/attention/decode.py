"""Attention of few rows over many keys: what the `attention_decode` template takes, and the problems that try it.

The rows of all heads that share keys lie in one tile of 64; CTAs share the keys of each (batch, KV head).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tlxgen.config import Config
from tlxgen.devices import Gpu, Hopper
from tlxgen.ops.attention import time_model
from tlxgen.ops.base import Case, Resources
from tlxgen.problem import ITEM_BYTES

if TYPE_CHECKING:
    from tlxgen.ops.attention.problem import AttentionProblem

TILE_ROWS = 64  # that one wgmma takes

# Of one multiprocessor (CUDA C++ Programming Guide, technical specifications): what CTAs share.
_REGISTER_FILE = 1 << 16
_SHARED_MEMORY = 228 << 10  # bytes
_SHARED_RESERVED = 1 << 10  # bytes of it that each CTA takes beside its own

#: By head dimension in shared memory: registers of a thread on average, and those of the consumer's threads.
#: 128 on average let two CTAs share a multiprocessor; an output of 256 columns does not fit beside another.
_REGISTERS = {64: (128, 208), 128: (128, 208), 256: (160, 240)}
_STEP = 4 * Hopper.WARP_GROUP_THREADS  # elements of the output: 16 bytes of fp32 a thread
_COMBINED_FLOATS = 64 * Hopper.WARP_GROUP_THREADS  # of partial results that are under way together, in registers

_FEW_SPLITS = 8  # that small problems can afford to give many blocks each


def rows(problem: AttentionProblem) -> int:
    """Rows of q that share the keys of one KV head."""
    return problem.S * (problem.H // problem.kv_heads)


def seen_keys(problem: AttentionProblem) -> int:
    """How many keys at least one row sees: the kernels read no others."""
    if problem.causal == "top-left":
        return min(problem.S, problem.kv_len)
    if problem.window:
        return min(problem.kv_len, problem.S - 1 + problem.window)
    return problem.kv_len


def resources(problem: AttentionProblem, config: Config, head: int) -> Resources:
    """The tile of Q, the rings of K and V, barriers; where warps exchange what they combine, 2 KB for that."""
    item = ITEM_BYTES[problem.dtype]
    block_n, kv_stages, splits = (int(config.params[name]) for name in ("block_n", "kv_stages", "splits"))
    exchange = 4 * _STEP if splits > _COMBINED_FLOATS // _STEP or (splits > 1 and problem.lse) else 0
    barriers = 4 * kv_stages
    return Resources(
        shared_bytes=(TILE_ROWS + 2 * kv_stages * block_n) * head * item + exchange + 8 * barriers + 768,
        mbarriers=barriers,
        threads=2 * Hopper.WARP_GROUP_THREADS,
        accumulator_registers=(head + block_n) * TILE_ROWS // Hopper.WARP_GROUP_THREADS,
    )


def predict_us(problem: AttentionProblem, config: Config, gpu: Gpu, head: int) -> float:
    """See `tlxgen.ops.attention.time_model.attention_decode_us`."""
    taken = resources(problem, config, head)
    by_registers = _REGISTER_FILE // (_REGISTERS[head][0] * taken.threads)
    by_memory = _SHARED_MEMORY // (taken.shared_bytes + _SHARED_RESERVED)
    return time_model.attention_decode_us(problem, config, gpu, seen_keys(problem), min(by_registers, by_memory))


def context(problem: AttentionProblem, config: Config, head: int) -> dict[str, Any]:
    """What the template needs beside what all attention templates do."""
    average, consumer = _REGISTERS[head]
    return {
        "padded": head != problem.D,
        "split": int(config.params["splits"]) > 1,
        "maxnreg": average,
        "shares": average <= 128,
        "registers": consumer,
    }


def small_cases(problem: AttentionProblem, config: Config) -> Sequence[Case[AttentionProblem]]:
    """One key; as many blocks as splits, fewer, more, a ring that wraps; tails; full tiles; rows that see nothing."""
    n, splits, kv = (int(config.params[name]) for name in ("block_n", "splits", "kv_stages"))
    few = min(splits, 3)
    # Blocks of a split: the ring wraps twice, where that does not take too many.
    each = 2 * kv + 1 if splits <= _FEW_SPLITS else 2
    shapes = [  # B, KV heads, group, S, KV length
        (1, 1, 1, 1, 1),
        (1, 1, 4, 2, n),
        (1, 2, 2, 3, few * n + 5),
        (2, 1, 8, 1, (few + 1) * n - 1),
        (1, 1, 16, 4, splits * n + 1),
        (1, 1, 1, 7, splits * each * n - 9),
        (1, 1, 4, 16, 11),
    ]
    made = []
    for batch, kv_heads, group, length, keys in shapes:
        sizes = {"B": batch, "H": kv_heads * group, "kv_heads": kv_heads, "S": length, "kv_len": keys}
        made.append(Case(problem.model_copy(update=sizes), num_sms=1))
    return made
