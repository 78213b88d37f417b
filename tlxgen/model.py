"""Analytic times: which configs deserve to be tried first, and the default where nothing was measured.

A model of a handful of terms, each a fact of the hardware or a rate that was measured once: rounds of tiles over the
multiprocessors (wave quantisation), the tensor cores' rate by tile form, shared-memory and L2 traffic, bytes in flight
(pipeline depth), fill and drain of the pipeline, and the roofline's bytes. It ranks; its microseconds are never stored
as measured.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.problem import ITEM_BYTES

if TYPE_CHECKING:
    from tlxgen.ops.base import Resources
    from tlxgen.ops.gemm import GemmProblem

#: Changes whenever predicted times do.
VERSION = "model-1"

_LAUNCH_US = 2.0  # a kernel between two others in a graph
_SUSTAINED = 0.70  # of the datasheet's rate, under the power limit on random data
_BANDWIDTH = 0.87  # of the datasheet's, measured by copies
_L2_BYTES_PER_CLOCK = 64  # from L2 to one multiprocessor
_FILL_US = 1.2  # first TMA bytes to first product
_LATENCY_US = 1.0  # of one stage under load: what has to be in flight
_STORE_BYTES_PER_CLOCK = 32  # registers to shared memory to L2, one multiprocessor


def gemm_us(problem: GemmProblem, config: Config, gpu: Gpu, bytes_moved: float) -> float:
    """Microseconds of one GEMM."""
    p = {name: int(value) for name, value in config.params.items() if not isinstance(value, str)}
    block_m, block_n, block_k = p["block_m"], p["block_n"], p["block_k"]
    item, out_item = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
    tiles = math.ceil(problem.M / block_m) * math.ceil(problem.N / block_n)
    steps = math.ceil(problem.K / block_k)
    rounds = math.ceil(tiles / gpu.sm_count)

    rate = gpu.rates[problem.dtype] * _SUSTAINED / gpu.sm_count * 1e-6  # FLOP/us of one multiprocessor
    products = 2.0 * block_m * block_n * block_k / (rate * _efficiency(config, block_m, block_n))
    clock = gpu.clock * 1e-6
    stage_bytes = (block_m + block_n) * block_k * item
    traffic = stage_bytes / (_L2_BYTES_PER_CLOCK * clock)
    starved = _LATENCY_US / p["num_stages"] if "tma" in config.template else 1.3 * _LATENCY_US / p["num_stages"]
    step = max(products, traffic, starved)
    store = block_m * block_n * out_item / (_STORE_BYTES_PER_CLOCK * clock)

    loops = rounds * steps * step
    # The last tile's store is always seen; others only where nobody multiplies meanwhile.
    hidden = config.template == "gemm_tma_pingpong"
    stores = store if hidden else rounds * store
    memory = bytes_moved / (gpu.bandwidth * _BANDWIDTH) * 1e6
    early = 0.8 if config.params.get("pdl", "off") != "off" else 0.0
    return _LAUNCH_US - early + _FILL_US + max(loops, memory) + stores


def _efficiency(config: Config, block_m: int, block_n: int) -> float:
    """The tensor cores' rate against the best form's."""
    if config.template == "gemm_tma_pingpong":
        return 1.0 if block_m * block_n == 128 * 128 else 0.93
    if config.template == "gemm_tma_cooperative":
        consumers = int(config.params["consumers"])
        by_tile = {(128, 256): 0.98, (256, 128): 0.975, (192, 128): 0.97, (128, 128): 0.95, (64, 256): 0.90}
        return by_tile.get((block_m, block_n), 0.85 if consumers > 1 else 0.82)
    if config.template == "gemm_cp_async":
        return 0.75 if block_m * block_n >= 128 * 128 else 0.6
    return 0.68 if block_m * block_n >= 128 * 128 else 0.55


def stream_us(bytes_moved: float, resources: Resources, config: Config, gpu: Gpu) -> float:
    """Microseconds of a kernel that streams through memory: bytes over bandwidth, or over what is in flight."""
    p = config.params
    in_flight = gpu.sm_count * resources.shared_bytes * int(p.get("ctas_per_sm", 1))
    bandwidth = gpu.bandwidth * _BANDWIDTH
    if in_flight:
        bandwidth = min(bandwidth, in_flight / (_LATENCY_US * 1e-6))
    return _LAUNCH_US + _FILL_US + bytes_moved / bandwidth * 1e6
