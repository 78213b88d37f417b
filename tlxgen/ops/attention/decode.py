"""Resources, template variables and small cases of `attention_decode`: few rows over many keys.

The rows of all heads that share keys are one tile of 64; CTAs share the keys of each (batch, KV head).
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

TILE_ROWS = 64  # as one wgmma takes

# Shared by the CTAs of one multiprocessor (CUDA C++ Programming Guide, technical specifications).
_REGISTER_FILE = 1 << 16
_SHARED_MEMORY = 228 << 10  # bytes
_SHARED_RESERVED = 1 << 10  # bytes that each CTA takes beside what it allocates

#: Registers of a thread by head dimension in shared memory: the average (`maxnreg`), and those of the consumer.
#: 128 on average let two CTAs share a multiprocessor; outputs of 256 columns leave room for one.
_REGISTERS = {64: (128, 208), 128: (128, 208), 256: (160, 240)}
_STEP = 4 * Hopper.WARP_GROUP_THREADS  # elements of the output that are combined at a time: 16 bytes a thread
_COMBINED_FLOATS = 64 * Hopper.WARP_GROUP_THREADS  # partial results that are held in registers at a time

_FEW_SPLITS = 8  # up to so many, small cases give each split many blocks


def rows(problem: AttentionProblem) -> int:
    """Rows of q that share the keys of one KV head."""
    return problem.S * (problem.H // problem.kv_heads)


def seen_keys(problem: AttentionProblem) -> int:
    """Number of keys that at least one row sees; the kernels read no others."""
    if problem.causal == "top-left":
        return min(problem.S, problem.kv_len)
    if problem.window:
        return min(problem.kv_len, problem.S - 1 + problem.window)
    return problem.kv_len


def resources(problem: AttentionProblem, config: Config, head: int) -> Resources:
    """The tile of Q, the rings of K and V, barriers, and 2 KB if warps exchange partial results."""
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
    """Variables of the template beside those of all attention templates."""
    average, consumer = _REGISTERS[head]
    return {
        "padded": head != problem.D,
        "split": int(config.params["splits"]) > 1,
        "maxnreg": average,
        "shares": average <= 128,
        "registers": consumer,
    }


def small_cases(problem: AttentionProblem, config: Config) -> Sequence[Case[AttentionProblem]]:
    """One key; as many blocks as splits, fewer, more, a ring that wraps; tails; full tiles; rows that see no key."""
    n, splits, kv = (int(config.params[name]) for name in ("block_n", "splits", "kv_stages"))
    few = min(splits, 3)
    # Blocks of a split: with few splits, enough for the ring to wrap twice.
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
