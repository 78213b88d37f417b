"""Analytic times: which configs deserve to be tried first, and the default where nothing was measured.

A model of a handful of terms, each a fact of the hardware or a rate that was measured once: rounds of tiles over the
multiprocessors (wave quantisation), the tensor cores' rate by tile form, shared-memory and L2 traffic, bytes in flight
(pipeline depth), fill and drain of the pipeline, and the roofline's bytes. It ranks; its microseconds are never stored
as measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tlxgen.config import Config, Value
from tlxgen.devices import Gpu
from tlxgen.problem import ITEM_BYTES

if TYPE_CHECKING:
    from tlxgen.last_round import Split
    from tlxgen.ops.attention import AttentionProblem
    from tlxgen.ops.base import Resources
    from tlxgen.ops.gemm import GemmProblem

#: Changes whenever predicted times do.
VERSION = "model-4"

# Fitted to every legal config of nine shapes on an H200 (benchmarks/results/2026-11-29-exhaustive-gemm-h200.json).
_SUSTAINED = 0.70  # of the datasheet's rate, under the power limit on random data
_BANDWIDTH = 0.87  # of the datasheet's, measured by copies
_LAUNCH_US = 1.4  # a kernel between two others in a graph
_FILL_US = 0.8  # first TMA bytes to first product
_LATENCY_US = 1.5  # from asking for a stage to having it, under load
_L2_BYTES_PER_CLOCK = 58  # from L2 to one multiprocessor
_STREAM_BYTES_PER_CLOCK = 32  # from memory to one multiprocessor, at most; not measured
_STORE_BYTES_PER_CLOCK = 128  # registers through shared memory towards L2, one multiprocessor
_EARLY_START_US = {"off": 0.0, "early": 0.9, "late": 0.85}  # what programmatic dependent launch saves ...
_EARLY_PINGPONG_US = -1.5  # ... and costs a ping-pong kernel of several rounds (measured up to 13 % at 2048 cubed)

#: Rate of the tensor cores by tile, against `_SUSTAINED`; templates differ in what they can overlap.
_EFFICIENCY: dict[str, dict[tuple[int, int], float]] = {
    "gemm_tma_pingpong": {(128, 128): 1.02, (64, 256): 0.97, (64, 128): 0.88, (128, 64): 0.67},
    "gemm_tma_cooperative": {
        (128, 256): 1.01,
        (256, 128): 1.0,
        (128, 128): 0.98,
        (192, 128): 0.95,
        (64, 256): 0.95,
        (64, 128): 0.90,
    },
    "gemm_cp_async": {(128, 256): 0.92, (128, 128): 0.63, (64, 256): 0.63},
    "gemm_vanilla": {(128, 256): 0.90, (128, 128): 0.66, (64, 256): 0.66, (64, 128): 0.62},
    # As gemm's; nothing was fitted for grouped products.
    "grouped_gemm_tma": {(128, 256): 1.0, (256, 128): 0.98, (128, 128): 0.99, (64, 256): 0.97, (64, 128): 0.88},
    "grouped_gemm_vanilla": {(128, 128): 0.6, (64, 128): 0.55},
}
_LARGE_HEAD = 128  # head dimension beyond which registers hold 64 keys a step
_VANILLA_STREAM = 0.8  # plain Triton's share of the bandwidth that a TMA producer reaches; not measured
_EXPOSED = 0.1  # of the shorter of arithmetic and memory traffic, what the longer does not hide; not measured
_TILE_US = {"dynamic": 0.3, "single": 3.0}  # what drawing a tile takes, and what a program of its own (H200)
_GEMM_PIECES_US = 5.5  # of a product, beside what follows (H200)
_PIECES_BYTES_PER_CLOCK = 16  # of one multiprocessor, from registers to L2 and back (H200)
_PIECES_US = 25.0  # to leave pieces of a tile of attention and put them together: 20 to 33 for heads of 128 (H200)
_VANILLA_ATTENTION = 0.6  # plain Triton's share of a TMA kernel's rate; not measured

#: By head dimension and whether causal: the share of the datasheet's rate that the best config of 4096 rows reached on
#: an H200, and its parameters. A config counts as 2 % slower for each that differs.
_USUAL: dict[str, Value] = {
    "q_stages": 2,
    "staging": "own",
    "sums": "lanes",
    "carry": "narrow",
    "overlap": "softmax",
    "ranges": "tile",
    "store": "consumers",
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
_ATTENTION: dict[tuple[int, bool], tuple[float, dict[str, Value]]] = {
    (64, False): (0.51, {**_USUAL, "consumers": 3, "kv_stages": 4, "head_group": 4, "pingpong": "values"}),
    (64, True): (0.47, {**_CAUSAL, "kv_stages": 4}),
    (128, False): (0.67, {**_USUAL, "carry": "pairs", "rescale": "lazy", "head_group": 4, "pingpong": "off"}),
    (128, True): (0.62, {**_CAUSAL, "q_stages": 1, "first_load": "k"}),
    (256, False): (0.71, {**_LARGE, "head_group": 1}),
    (256, True): (0.65, {**_LARGE, "schedule": "dynamic", "head_group": 16}),
}

_OTHER_TILES = {
    "gemm_tma_pingpong": 0.67,
    "gemm_tma_cooperative": 0.67,
    "gemm_cp_async": 0.5,
    "gemm_vanilla": 0.4,
    "grouped_gemm_tma": 0.67,
    "grouped_gemm_vanilla": 0.4,
}


def gemm_us(problem: GemmProblem, config: Config, gpu: Gpu, bytes_moved: float) -> float:
    """Microseconds of one GEMM."""
    p = {name: int(value) for name, value in config.params.items() if not isinstance(value, str)}
    block_m, block_n, block_k = p["block_m"], p["block_n"], p["block_k"]
    item, out_item = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
    clock = gpu.clock * 1e-6  # cycles/us
    tiles = math.ceil(problem.M / block_m) * math.ceil(problem.N / block_n)
    steps = math.ceil(problem.K / block_k)
    rounds: float = math.ceil(tiles / gpu.sm_count)
    pieces = 0.0
    if config.params.get("tail") == "split" and (last := _gemm_last_round(p["pieces"], tiles, steps, gpu)).tiles:
        rounds = tiles // gpu.sm_count + last.rounds
        held = min(block_m, 16 * math.ceil(problem.M / 16)) * block_n * 4
        pieces = _GEMM_PIECES_US + (2 + 1 / last.rounds) * held / (_PIECES_BYTES_PER_CLOCK * clock)

    efficiency = _EFFICIENCY[config.template].get((block_m, block_n), _OTHER_TILES[config.template])
    rate = gpu.rates[problem.dtype] * _SUSTAINED * efficiency / gpu.sm_count * 1e-6  # FLOP/us of one multiprocessor
    products = 2.0 * block_m * block_n * block_k / rate
    traffic = (block_m + block_n) * block_k * item / (_L2_BYTES_PER_CLOCK * clock)
    arrival = _LATENCY_US / p["num_stages"]  # a stage is asked for that many steps ahead
    step = max(products, traffic, arrival) + 0.01 * arrival  # stalls grow before they dominate
    reuse = 1.0 + 0.001 * abs(math.log2(p["group_m"] / 8))

    store = block_m * block_n * out_item / (_STORE_BYTES_PER_CLOCK * clock)
    # In ping-pong the other consumer multiplies meanwhile: only the last store is seen.
    stores = store * (1 if config.template == "gemm_tma_pingpong" else math.ceil(rounds))
    memory = bytes_moved / (gpu.bandwidth * _BANDWIDTH) * 1e6
    saved = _EARLY_START_US[str(config.params.get("pdl", "off"))]
    if saved and rounds > 1 and config.template == "gemm_tma_pingpong":
        saved = _EARLY_PINGPONG_US
    loops = rounds * steps * step * reuse
    return _LAUNCH_US + _FILL_US - saved + max(loops, memory) + stores + pieces


def _gemm_last_round(pieces: int, tiles: int, steps: int, gpu: Gpu) -> Split:
    from tlxgen.last_round import split
    from tlxgen.ops.gemm import LEAST_STEPS

    return split(tiles, steps, gpu.sm_count, pieces, LEAST_STEPS, even=True)


def grouped_gemm_us(
    products: Sequence[tuple[int, int, int]], dtype: str, out_item: int, config: Config, gpu: Gpu, bytes_moved: float
) -> float:
    """Microseconds of one grouped GEMM: the tiles of all experts, dealt to the multiprocessors in turn.

    Args:
        products: M, N and K of each expert.
        dtype: of the operands.
        out_item: bytes that are stored for one element of the product.
        config: of one of the operator's templates.
        gpu: what on.
        bytes_moved: by the roofline.
    """
    p = {name: int(value) for name, value in config.params.items() if not isinstance(value, str)}
    block_m, block_n, block_k = p["block_m"], p["block_n"], p["block_k"]
    item, clock = ITEM_BYTES[dtype], gpu.clock * 1e-6  # cycles/us
    tiles = steps = reads = 0
    for m, n, k in products:
        own = math.ceil(m / block_m) * math.ceil(n / block_n)
        tiles += own
        steps += own * max(1, math.ceil(k / block_k))
        reads += math.ceil(m / block_m) * n * k * item if p["group"] == 1 else 0
    efficiency = _EFFICIENCY[config.template].get((block_m, block_n), _OTHER_TILES[config.template])
    rate = gpu.rates[dtype] * _SUSTAINED * efficiency / gpu.sm_count * 1e-6  # FLOP/us of one multiprocessor
    arrival = _LATENCY_US / p["num_stages"]
    traffic = (block_m + block_n) * block_k * item / (_L2_BYTES_PER_CLOCK * clock)
    step = max(2.0 * block_m * block_n * block_k / rate, traffic, arrival) + 0.01 * arrival
    # The multiprocessor with the most tiles ends last; an average tile has an average number of steps.
    rounds = math.ceil(tiles / gpu.sm_count)
    store = block_m * block_n * out_item / (_STORE_BYTES_PER_CLOCK * clock)
    loops = rounds * steps / max(1, tiles) * step + (rounds - 1) * store
    # One tile at a time, weights have left L2 when the next tokens want them.
    memory = max(bytes_moved, reads) / (gpu.bandwidth * _BANDWIDTH) * 1e6
    memory /= _VANILLA_STREAM if config.template == "grouped_gemm_vanilla" else 1.0
    # Few tiles of little depth leave gaps that the memory cannot fill.
    return _LAUNCH_US + _FILL_US + max(loops, memory) + _EXPOSED * min(loops, memory) + store


def stream_us(bytes_moved: float, resources: Resources, config: Config, gpu: Gpu) -> float:
    """Microseconds of a kernel that streams through memory: bytes over bandwidth, or over what is in flight."""
    p = config.params
    in_flight = gpu.sm_count * resources.shared_bytes * int(p.get("ctas_per_sm", 1))
    bandwidth = gpu.bandwidth * _BANDWIDTH
    if in_flight:
        bandwidth = min(bandwidth, in_flight / (_LATENCY_US * 1e-6))
    split = resources.mbarriers > 0  # a second warp group: measured later to start, and 3 to 5 % slower on long vectors
    return _LAUNCH_US + (_FILL_US if split else 0.0) + (1.04 if split else 1.0) * bytes_moved / bandwidth * 1e6


def attention_us(problem: AttentionProblem, config: Config, gpu: Gpu, flops: float, bytes_moved: float) -> float:
    """Microseconds of one attention: rounds of row tiles, at the rate of products and exponentials together."""
    p = config.params
    vanilla = config.template.endswith("vanilla")
    rows = int(p["block_m"]) if vanilla else 64 * int(p["consumers"])
    tiles = math.ceil(problem.S / rows) * problem.B * problem.H
    rounds = tiles / gpu.sm_count
    pieces_us = 0.0
    if problem.causal != "none":
        from tlxgen import balance  # which nothing else at run time has a need of

        waste = balance.waste(problem, config, rows, gpu.sm_count)
    elif p.get("tail") == "split" and (last := _last_round(problem, config, tiles, gpu)).tiles:
        waste, pieces_us = (tiles // gpu.sm_count + last.rounds) / rounds, _PIECES_US
    else:
        waste = math.ceil(rounds) / rounds
    waste *= math.ceil(problem.S / rows) * rows / problem.S  # tiles are worked on whole
    head = next(size for size in (64, 128, 256) if size >= problem.D)
    share, best = _ATTENTION[head, problem.causal != "none"]
    if problem.window and head <= _LARGE_HEAD:  # which rules single halves out
        best = {**best, "carry": "pairs"}
    if p.get("schedule") == "static" and problem.causal != "none":  # whose balance decides about them
        best = {name: value for name, value in best.items() if name != "head_group"}
    share *= _VANILLA_ATTENTION if vanilla else 1.0
    share *= 1.0 if int(p["block_n"]) == (64 if head > _LARGE_HEAD else 128) else 0.8
    share *= 1.0 if best.get("consumers", 2) == p.get("consumers", 2) else 0.92  # three share each block of keys
    share *= 0.98 ** sum(name in p and p[name] != value for name, value in best.items())
    products = flops / (gpu.rates[problem.dtype] * share) * 1e6
    memory = bytes_moved / (gpu.bandwidth * _BANDWIDTH) * 1e6
    beside = pieces_us + math.ceil(rounds) * _TILE_US.get(str(p.get("schedule")), 0.0)
    loops = products * waste
    return _LAUNCH_US + _FILL_US + max(loops, memory) + _EXPOSED * min(loops, memory) + beside


def _last_round(problem: AttentionProblem, config: Config, tiles: int, gpu: Gpu) -> Split:
    from tlxgen.last_round import split
    from tlxgen.ops.attention_kernels import MOST_PIECES

    blocks = math.ceil(problem.kv_len / int(config.params["block_n"]))
    return split(tiles, blocks, gpu.sm_count, MOST_PIECES)


def attention_decode_us(problem: AttentionProblem, config: Config, gpu: Gpu, keys: int, resident: int) -> float:
    """Microseconds of one attention of few rows: what a CTA reads, over its share of the bandwidth, round by round.

    Args:
        problem: what is computed.
        config: of `attention_decode`.
        gpu: what on.
        keys: that are read of each head.
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
        gpu.bandwidth * _BANDWIDTH * 1e-6 / together,
        _STREAM_BYTES_PER_CLOCK * gpu.clock * 1e-6 / math.ceil(together / gpu.sm_count),
        (kv_stages - 0.5) * block_bytes / _LATENCY_US,
    )
    walk = math.ceil(blocks / splits) * block_bytes / min(shares)
    rounds = math.ceil(ctas / slots)
    starts = (rounds - 1) * 2 * _LATENCY_US / resident  # another CTA of the multiprocessor reads meanwhile
    partials = splits * problem.S * (problem.H // problem.kv_heads) * problem.D * 4
    combine = _LATENCY_US + partials / (_L2_BYTES_PER_CLOCK * gpu.clock * 1e-6) if splits > 1 else 0.0
    return _LAUNCH_US + _FILL_US + rounds * walk + starts + combine
