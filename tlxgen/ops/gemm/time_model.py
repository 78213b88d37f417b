"""Time model of GEMM: rounds of tiles over the multiprocessors, at the tensor cores' rate for the tile shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.ops.last_round import Split, split
from tlxgen.ops.rates import (
    BANDWIDTH,
    FILL_US,
    L2_BYTES_PER_CLOCK,
    LATENCY_US,
    LAUNCH_US,
    STORE_BYTES_PER_CLOCK,
    SUSTAINED,
)
from tlxgen.problem import ITEM_BYTES

if TYPE_CHECKING:
    from tlxgen.ops.gemm.problem import GemmProblem


#: Steps of K of a piece of a tile, on average at least.
LEAST_STEPS = 4

_EARLY_START_US = {"off": 0.0, "early": 0.9, "late": 0.85}  # what programmatic dependent launch saves ...
_EARLY_PINGPONG_US = -1.5  # ... and costs a ping-pong kernel of several rounds (measured up to 13 % at 2048 cubed)

#: Rate of the tensor cores by tile, relative to `SUSTAINED`; templates differ in what they overlap.
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
}
_PIECES_US = 5.5  # of a product, beside what follows (H200)
_PIECES_BYTES_PER_CLOCK = 16  # of one multiprocessor, from registers to L2 and back (H200)


_OTHER_TILES = {
    "gemm_tma_pingpong": 0.67,
    "gemm_tma_cooperative": 0.67,
    "gemm_cp_async": 0.5,
    "gemm_vanilla": 0.4,
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
    if config.params.get("tail") == "split" and (last := _last_round(p["pieces"], tiles, steps, gpu)).tiles:
        rounds = tiles // gpu.sm_count + last.rounds
        held = min(block_m, 16 * math.ceil(problem.M / 16)) * block_n * 4
        pieces = _PIECES_US + (2 + 1 / last.rounds) * held / (_PIECES_BYTES_PER_CLOCK * clock)

    efficiency = _EFFICIENCY[config.template].get((block_m, block_n), _OTHER_TILES[config.template])
    rate = gpu.rates[problem.dtype] * SUSTAINED * efficiency / gpu.sm_count * 1e-6  # FLOP/us of one multiprocessor
    products = 2.0 * block_m * block_n * block_k / rate
    traffic = (block_m + block_n) * block_k * item / (L2_BYTES_PER_CLOCK * clock)
    arrival = LATENCY_US / p["num_stages"]  # a stage is loaded that many steps ahead
    step = max(products, traffic, arrival) + 0.01 * arrival  # stalls grow before they dominate
    reuse = 1.0 + 0.001 * abs(math.log2(p["group_m"] / 8))

    store = block_m * block_n * out_item / (STORE_BYTES_PER_CLOCK * clock)
    # In ping-pong the other consumer multiplies meanwhile: only the last store counts.
    stores = store * (1 if config.template == "gemm_tma_pingpong" else math.ceil(rounds))
    memory = bytes_moved / (gpu.bandwidth * BANDWIDTH) * 1e6
    saved = _EARLY_START_US[str(config.params.get("pdl", "off"))]
    if saved and rounds > 1 and config.template == "gemm_tma_pingpong":
        saved = _EARLY_PINGPONG_US
    loops = rounds * steps * step * reuse
    return LAUNCH_US + FILL_US - saved + max(loops, memory) + stores + pieces


def _last_round(pieces: int, tiles: int, steps: int, gpu: Gpu) -> Split:
    return split(tiles, steps, gpu.sm_count, pieces, LEAST_STEPS, even=True)
