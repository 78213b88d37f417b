"""Time model of vector_add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.ops.rates import BANDWIDTH, FILL_US, LATENCY_US, LAUNCH_US

if TYPE_CHECKING:
    from tlxgen.ops.base import Resources


def stream_us(bytes_moved: float, resources: Resources, config: Config, gpu: Gpu) -> float:
    """Microseconds of a kernel that streams through memory: bytes over bandwidth, or over what is in flight."""
    p = config.params
    in_flight = gpu.sm_count * resources.shared_bytes * int(p.get("ctas_per_sm", 1))
    bandwidth = gpu.bandwidth * BANDWIDTH
    if in_flight:
        bandwidth = min(bandwidth, in_flight / (LATENCY_US * 1e-6))
    split = resources.mbarriers > 0  # a second warp group: measured later to start, and 3 to 5 % slower on long vectors
    return LAUNCH_US + (FILL_US if split else 0.0) + (1.04 if split else 1.0) * bytes_moved / bandwidth * 1e6
