"""Grouped products of 8-bit floats in place of torch's: the best kernel where one takes the call, else torch.

>>> from tlxgen import functional as F
>>> out = F.scaled_grouped_mm(tokens, weights.mT, scale_a, scale_b, offs=offs)  # doctest: +SKIP
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlxgen import eligible, ops
from tlxgen.calls import transformed, untraced
from tlxgen.errors import InvalidProblemError
from tlxgen.lookups import Lookups
from tlxgen.pinning import pinned
from tlxgen.runtime import Kernel, get_kernel

__all__ = ["scaled_grouped_mm"]

_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32, torch.float32, torch.int32)


@untraced
def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = True,
) -> Tensor:
    """`torch._scaled_grouped_mm` of tokens by the weights of their experts, a scale for each row and column.

    Args:
        mat_a: (tokens, K), float8_e4m3fn, rows contiguous.
        mat_b: (E, K, N), float8_e4m3fn, columns contiguous: `weights.mT` of (E, N, K).
        scale_a: (tokens,), float32.
        scale_b: (E, N), float32.
        offs: (E,), int32: where each expert's tokens end, not decreasing. Nothing waits for the device.
        out_dtype: bfloat16, as torch has it.
        use_fast_accum: whether sums along K are tensor cores' own, with fewer bits than float32 has. Unlike in torch
            this is the default, since kernels have no others; False is torch's to compute.

    Returns:
        (tokens, N). What lies past the last end is not written. No gradients, as in torch.

    A call goes to torch unchanged unless a kernel takes it: plain tensors as above on one CUDA device, none of size
    zero, not under functorch's transforms. It also goes to torch where `tlxgen.get_kernel` has nothing better.
    """
    given = (mat_a, mat_b, scale_a, scale_b, offs)
    if use_fast_accum and out_dtype == torch.bfloat16 and _plain(given):
        kernel = _find(given)
        if kernel is not None:
            return kernel(mat_a, mat_b, scale_a=scale_a, scale_b=scale_b, offs=offs)
    result: Tensor = torch._scaled_grouped_mm(  # noqa: SLF001 - its oldest name
        mat_a, mat_b, scale_a, scale_b, offs=offs, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
    return result


def _plain(given: tuple[Tensor, ...]) -> bool:
    """Whether kernels see all that there is to these tensors, and they are what kernels are for."""
    return eligible.seen(*given) and tuple(tensor.dtype for tensor in given) == _DTYPES and not transformed()


#: By shapes, devices and pins: the kernel, or None where torch is to compute. Strides are the kernel's to judge.
_FOUND: Lookups[Kernel | None] = Lookups()


def _find(given: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of a call, looked up the first time only."""
    a, b, scale_a, scale_b, offs = given
    if a.dim() != 2 or b.dim() != 3 or (scale_a.shape, scale_b.shape) != (a.shape[:1], (b.shape[0], b.shape[2])):
        return None
    if b.shape[:2] != (len(offs), a.shape[1]) or not _k_contiguous(a, b):
        return None
    key = (a.shape, b.shape, offs.shape, a.device, pinned("grouped_gemm"))
    return _FOUND.get(key, lambda: _look_up(a, b))


def _k_contiguous(a: Tensor, b: Tensor) -> bool:
    return a.stride(1) == 1 and b.stride(1) == 1


def _look_up(a: Tensor, b: Tensor) -> Kernel | None:
    experts, k, n = b.shape
    try:
        problem = ops.get("grouped_gemm").problem((experts, len(a), n, k), dtype=a.dtype)
    except InvalidProblemError:
        return None
    if problem.empty:
        return None
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        kernel = get_kernel("grouped_gemm", problem)
    return None if kernel.origin == "torch" else kernel
