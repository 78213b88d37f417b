"""Time models of attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tlxgen.config import Config, Value
from tlxgen.devices import Gpu
from tlxgen.ops.attention import balance
from tlxgen.ops.attention.kernels import MOST_PIECES
from tlxgen.ops.last_round import Split, split
from tlxgen.ops.rates import BANDWIDTH, EXPOSED, FILL_US, L2_BYTES_PER_CLOCK, LATENCY_US, LAUNCH_US
from tlxgen.problem import ITEM_BYTES

if TYPE_CHECKING:
    from tlxgen.ops.attention.problem import AttentionProblem


_STREAM_BYTES_PER_CLOCK = 32  # from memory to one multiprocessor, at most; not measured
_LARGE_HEAD = 128  # head dimension beyond which registers hold 64 keys a step
_DRAW_US = 0.3  # to draw a tile (H200)
_PIECES_US = 25.0  # to store the pieces of a tile and combine them: 20 to 33 for heads of 128 (H200)
_VANILLA_ATTENTION = 0.6  # plain Triton's share of a TMA kernel's rate; not measured

_USUAL: dict[str, Value] = {
    "q_stages": 2,
    "staging": "own",
    "sums": "lanes",
    "carry": "narrow",
    "overlap": "softmax",
    "ranges": "tile",
}
_CAUSAL: dict[str, Value] = {**_USUAL, "rescale": "lazy", "schedule": "dynamic", "head_group": 16, "pingpong": "off"}
_LARGE: dict[str, Value] = {
    **_USUAL,
    "q_stages": 1,
    "first_load": "k",
    "staging": "half",
    "sums": "rows",
    "rescale": "exact",
    "pingpong": "off",
}

#: By head dimension and whether causal: the share of the datasheet's rate that the best config of 4096 rows reached on
#: an H200, and its parameters. A config counts as 2 % slower for each that differs.
_ATTENTION: dict[tuple[int, bool], tuple[float, dict[str, Value]]] = {
    (64, False): (0.51, {**_USUAL, "consumers": 3, "kv_stages": 4, "head_group": 4, "pingpong": "values"}),
    (64, True): (0.47, {**_CAUSAL, "kv_stages": 4}),
    (128, False): (0.67, {**_USUAL, "carry": "pairs", "rescale": "lazy", "head_group": 4, "pingpong": "off"}),
    (128, True): (0.62, {**_CAUSAL, "q_stages": 1, "first_load": "k"}),
    (256, False): (0.71, {**_LARGE, "head_group": 1}),
    (256, True): (0.65, {**_LARGE, "schedule": "dynamic", "head_group": 16}),
}


def attention_us(problem: AttentionProblem, config: Config, gpu: Gpu, flops: float, bytes_moved: float) -> float:
    """Microseconds of one call: rounds of row tiles, at the rate that the best kernels reached."""
    p = config.params
    vanilla = config.template.endswith("vanilla")
    rows = int(p["block_m"]) if vanilla else 64 * int(p["consumers"])
    tiles = math.ceil(problem.S / rows) * problem.B * problem.H
    rounds = tiles / gpu.sm_count
    pieces_us = 0.0
    if problem.causal != "none":
        waste = balance.waste(problem, config, rows, gpu.sm_count)
    elif p.get("tail") == "split" and (last := _last_round(problem, config, tiles, gpu)).tiles:
        waste, pieces_us = (tiles // gpu.sm_count + last.rounds) / rounds, _PIECES_US
    else:
        waste = math.ceil(rounds) / rounds
    waste *= math.ceil(problem.S / rows) * rows / problem.S  # tiles are computed whole
    head = next(size for size in (64, 128, 256) if size >= problem.D)
    share, best = _ATTENTION[head, problem.causal != "none"]
    if problem.window and head <= _LARGE_HEAD:  # `narrow` is not legal with a window
        best = {**best, "carry": "pairs"}
    if p.get("schedule") == "static" and problem.causal != "none":  # `balance.waste` counts its effect
        best = {name: value for name, value in best.items() if name != "head_group"}
    share *= _VANILLA_ATTENTION if vanilla else 1.0
    share *= 1.0 if int(p["block_n"]) == (64 if head > _LARGE_HEAD else 128) else 0.8
    share *= 1.0 if best.get("consumers", 2) == p.get("consumers", 2) else 0.92  # three share each block of keys
    share *= 0.98 ** sum(name in p and p[name] != value for name, value in best.items())
    products = flops / (gpu.rates[problem.dtype] * share) * 1e6
    memory = bytes_moved / (gpu.bandwidth * BANDWIDTH) * 1e6
    beside = pieces_us + (math.ceil(rounds) * _DRAW_US if p.get("schedule") == "dynamic" else 0.0)
    loops = products * waste
    return LAUNCH_US + FILL_US + max(loops, memory) + EXPOSED * min(loops, memory) + beside


def _last_round(problem: AttentionProblem, config: Config, tiles: int, gpu: Gpu) -> Split:
    blocks = math.ceil(problem.kv_len / int(config.params["block_n"]))
    return split(tiles, blocks, gpu.sm_count, MOST_PIECES)


def attention_decode_us(problem: AttentionProblem, config: Config, gpu: Gpu, keys: int, resident: int) -> float:
    """Microseconds of one call of `attention_decode`: what a CTA reads, over its share of the bandwidth, in rounds.

    Args:
        problem: sizes and dtype.
        config: a config of `attention_decode`.
        gpu: the device.
        keys: keys that are read of each head.
        resident: CTAs that share a multiprocessor.
    """
    item = ITEM_BYTES[problem.dtype]
    block_n, kv_stages = int(config.params["block_n"]), int(config.params["kv_stages"])
    blocks = math.ceil(keys / block_n)
    splits = min(int(config.params["splits"]), blocks)
    ctas = problem.B * problem.kv_heads * splits
    slots = gpu.sm_count * resident
    block_bytes = 2 * block_n * problem.D * item
    # Bytes/us of one CTA: of the memory, of its multiprocessor, and of its own ring, a part of which is being read.
    together = min(ctas, slots)
    shares = (
        gpu.bandwidth * BANDWIDTH * 1e-6 / together,
        _STREAM_BYTES_PER_CLOCK * gpu.clock * 1e-6 / math.ceil(together / gpu.sm_count),
        (kv_stages - 0.5) * block_bytes / LATENCY_US,
    )
    walk = math.ceil(blocks / splits) * block_bytes / min(shares)
    rounds = math.ceil(ctas / slots)
    starts = (rounds - 1) * 2 * LATENCY_US / resident  # another CTA of the multiprocessor reads meanwhile
    partials = splits * problem.S * (problem.H // problem.kv_heads) * problem.D * 4
    combine = LATENCY_US + partials / (L2_BYTES_PER_CLOCK * gpu.clock * 1e-6) if splits > 1 else 0.0
    return LAUNCH_US + FILL_US + rounds * walk + starts + combine
