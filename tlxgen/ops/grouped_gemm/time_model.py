"""Time model of grouped GEMM."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.ops.rates import (
    BANDWIDTH,
    EXPOSED,
    FILL_US,
    L2_BYTES_PER_CLOCK,
    LATENCY_US,
    LAUNCH_US,
    STORE_BYTES_PER_CLOCK,
    SUSTAINED,
)
from tlxgen.problem import ITEM_BYTES

#: Rate of the tensor cores by tile, against `SUSTAINED`: as GEMM's; nothing was fitted for grouped products.
_EFFICIENCY: dict[str, dict[tuple[int, int], float]] = {
    "grouped_gemm_tma": {(128, 256): 1.0, (256, 128): 0.98, (128, 128): 0.99, (64, 256): 0.97, (64, 128): 0.88},
    "grouped_gemm_vanilla": {(128, 128): 0.6, (64, 128): 0.55},
}
_OTHER_TILES = {"grouped_gemm_tma": 0.67, "grouped_gemm_vanilla": 0.4}
_VANILLA_STREAM = 0.8  # plain Triton's share of the bandwidth that a TMA producer reaches; not measured


def grouped_gemm_us(
    products: Sequence[tuple[int, int, int]], dtype: str, out_item: int, config: Config, gpu: Gpu, bytes_moved: float
) -> float:
    """Microseconds of one grouped GEMM: the tiles of all experts, distributed over the multiprocessors in turn.

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
    rate = gpu.rates[dtype] * SUSTAINED * efficiency / gpu.sm_count * 1e-6  # FLOP/us of one multiprocessor
    arrival = LATENCY_US / p["num_stages"]
    traffic = (block_m + block_n) * block_k * item / (L2_BYTES_PER_CLOCK * clock)
    step = max(2.0 * block_m * block_n * block_k / rate, traffic, arrival) + 0.01 * arrival
    # The multiprocessor with the most tiles ends last; an average tile has an average number of steps.
    rounds = math.ceil(tiles / gpu.sm_count)
    store = block_m * block_n * out_item / (STORE_BYTES_PER_CLOCK * clock)
    loops = rounds * steps / max(1, tiles) * step + (rounds - 1) * store
    # One tile at a time, weights have left L2 when the next tokens want them.
    memory = max(bytes_moved, reads) / (gpu.bandwidth * BANDWIDTH) * 1e6
    memory /= _VANILLA_STREAM if config.template == "grouped_gemm_vanilla" else 1.0
    # Few tiles of little depth leave gaps that the memory cannot fill.
    return LAUNCH_US + FILL_US + max(loops, memory) + EXPOSED * min(loops, memory) + store
