"""GPU models: rates, bandwidths, limits; and the GPU of this process.

Rates are dense, at the boost clock, and bandwidths as the vendor's datasheets give them (product briefs of H100, H200,
H800 and H20). Time models scale them by measured efficiencies (`tlxgen.ops.rates`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tlxgen.errors import UnsupportedDeviceError


class Hopper:
    """Constants of sm_90 (CUDA C++ Programming Guide; PTX ISA, tensor maps)."""

    TMA_ALIGNMENT = 16  # bytes: base address, every outer stride, and extents that a store must not overrun
    WARP_GROUP_THREADS = 128


class DeviceKey(BaseModel):
    """The GPU a row belongs to. SXM and PCIe parts differ by name and by SM count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str  #: slug of the marketing name, such as `h200`
    sm_count: int = Field(gt=0, lt=2**63)
    capability: str  #: compute capability, such as `9.0`


@dataclass(frozen=True)
class Gpu:
    """One GPU model. Bandwidth in bytes/s, rates in FLOP/s, clock in Hz.

    `capability` is the compute capability that decides which configs are legal; `target` is what code is compiled for.
    """

    slug: str
    sm_count: int
    capability: tuple[int, int]
    clock: float
    bandwidth: float
    l2_bytes: int
    rates: dict[str, float] = field(hash=False)
    architecture: str = ""  #: a key of `AMD`; empty for NVIDIA GPUs

    @property
    def key(self) -> DeviceKey:
        """The part of a cache key that names this GPU."""
        capability = self.architecture or "{}.{}".format(*self.capability)
        return DeviceKey(gpu=self.slug, sm_count=self.sm_count, capability=capability)

    @property
    def target(self) -> tuple[int, int] | str:
        """Compilation target (`tlxgen.codegen.compile.Architecture`)."""
        return self.architecture or self.capability


_TERA = 1e12
_MB = 1 << 20


def _hopper(slug: str, sm_count: int, clock_mhz: int, tb_per_s: float, l2_mb: int, tflops_16bit: float) -> Gpu:
    rates = {
        "e4m3": 2 * tflops_16bit,
        "bf16": tflops_16bit,
        "fp16": tflops_16bit,
        "fp32": tflops_16bit / 2,  # through TF32
    }
    return Gpu(
        slug=slug,
        sm_count=sm_count,
        capability=(9, 0),
        clock=clock_mhz * 1e6,
        bandwidth=tb_per_s * _TERA,
        l2_bytes=l2_mb * _MB,
        rates={name: rate * _TERA for name, rate in rates.items()},
    )


#: AMD architectures that plain Triton is compiled for (CDNA 3 and 4) → an NVIDIA capability with the same limits:
#: no more shared memory than the 64 and 160 KiB of LDS (CDNA 3 and CDNA 4 ISA documents), and `float8_e4m3fn` on
#: CDNA 4 only (CDNA 3 has another 8-bit format). Eight warps, the maximum of plain Triton's configs, are 512 threads.
AMD: dict[str, tuple[int, int]] = {"gfx942": (7, 5), "gfx950": (8, 9)}

#: Names that `--target` takes.
TARGETS: dict[str, Gpu] = {
    gpu.slug: gpu
    for gpu in (
        _hopper("h100", 132, 1830, 3.35, 50, 989.4),
        _hopper("h100-pcie", 114, 1755, 2.0, 50, 756.0),
        _hopper("h100-nvl", 132, 1785, 3.9, 50, 835.5),
        _hopper("h200", 132, 1830, 4.8, 50, 989.4),
        _hopper("h200-nvl", 132, 1785, 4.8, 50, 835.5),
        _hopper("gh200", 132, 1830, 4.0, 50, 989.4),
        _hopper("h800", 132, 1830, 3.35, 50, 989.4),
        _hopper("h20", 78, 1980, 4.0, 60, 148.0),
    )
}


def slug_of(name: str) -> str:
    """The slug of a marketing name as the driver reports it.

    >>> slug_of("NVIDIA H100 80GB HBM3"), slug_of("NVIDIA H200"), slug_of("NVIDIA H100 PCIe")
    ('h100', 'h200', 'h100-pcie')
    >>> slug_of("NVIDIA A100-SXM4-80GB")
    'a100-sxm4'
    """
    text = name.lower().removeprefix("nvidia").strip()
    text = re.sub(r"\b\d+\s*gb\b|\bhbm\w*\b|(?<=-)\d+gb\b", " ", text)
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def target(name: str) -> Gpu:
    """The GPU that `--target NAME` means.

    Raises:
        UnsupportedDeviceError: no such target.
    """
    try:
        return TARGETS[name.lower()]
    except KeyError:
        known = ", ".join(sorted(TARGETS))
        raise UnsupportedDeviceError(f"target {name!r} is not known; use one of {known}") from None


def detect(index: int | None = None) -> Gpu | None:
    """The NVIDIA GPU of this process (the current one, or `index`); None if there is none.

    A model missing from `TARGETS` takes the rates of the nearest Hopper part scaled by its SM count; those feed the
    analytic ranking only, never a stored number.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return _described(properties, (properties.major, properties.minor))


def present(index: int | None = None) -> Gpu | None:
    """The GPU that kernels may run on: as `detect`, or an AMD GPU whose architecture is in `AMD`.

    AMD numbers capabilities differently (gfx90a is 9.0, as Hopper is), so the architecture's name decides.
    """
    import torch

    if not (torch.version.hip and torch.cuda.is_available()):
        return detect(index)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    architecture = str(properties.gcnArchName).partition(":")[0]  # gfx942:sramecc+:xnack-
    if architecture not in AMD:
        return None
    return _described(properties, AMD[architecture], architecture)


def _described(properties: Any, capability: tuple[int, int], architecture: str = "") -> Gpu:
    """A GPU from torch's device properties."""
    slug = slug_of(properties.name)
    known = TARGETS.get(slug, TARGETS["h100"])
    scale = properties.multi_processor_count / known.sm_count
    return Gpu(
        slug=slug,
        sm_count=properties.multi_processor_count,
        capability=capability,
        clock=known.clock,
        bandwidth=known.bandwidth,
        l2_bytes=properties.L2_cache_size,
        rates={name: rate * scale for name, rate in known.rates.items()},
        architecture=architecture,
    )


def uuid() -> str:
    """The UUID of the current CUDA GPU, which identifies the card across processes."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
