"""`scaled_grouped_mm`, grouped products of 8-bit floats: a kernel where one takes the call, else torch.

>>> from tlxgen import functional as F
>>> out = F.scaled_grouped_mm(tokens, weights.mT, scale_a, scale_b, offs=offs)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import dispatch
from tlxgen.functional.dispatch import LookupCache, better_than_torch
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given, transformed
from tlxgen.runtime.kernel import Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

__all__ = ["scaled_grouped_mm"]

_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32, torch.float32, torch.int32)


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
        if not torch.compiler.is_compiling():
            return product(given)
        if dispatch.kernels_here() and _fits(given):
            whole: Tensor = scaled_grouped_mm_in_graph(*given)
            return whole
    return _torch(given, offs=offs, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


def product(given: tuple[Tensor, ...]) -> Tensor:
    """The product of tensors that kernels can read, by a kernel or by torch."""
    a, b, scale_a, scale_b, offs = given
    kernel = _find(given)
    if kernel is None:
        return _torch(given, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)
    return kernel(a, b, scale_a=scale_a, scale_b=scale_b, offs=offs)


def _torch(given: tuple[Tensor, ...], **named: Any) -> Tensor:
    a, b, scale_a, scale_b, _ = given
    result: Tensor = torch._scaled_grouped_mm(a, b, scale_a, scale_b, **named)  # noqa: SLF001 - its oldest name
    return result


def _plain(given: tuple[Tensor, ...]) -> bool:
    """Whether a kernel can read these tensors, and their dtypes are supported."""
    if not checks.seen(*given) or tuple(tensor.dtype for tensor in given) != _DTYPES:
        return False
    return torch.compiler.is_compiling() or not transformed()


def _fits(given: tuple[Tensor, ...]) -> bool:
    """Whether shapes and strides are those of one product."""
    a, b, scale_a, scale_b, offs = given
    if a.dim() != 2 or b.dim() != 3 or offs.dim() != 1:
        return False
    if (scale_a.shape, scale_b.shape) != (a.shape[:1], (b.shape[0], b.shape[2])):
        return False
    return b.shape[:2] == (offs.shape[0], a.shape[1]) and a.stride(1) == 1 and b.stride(1) == 1


#: (shapes, device, pin) → the kernel, or None if torch computes. The kernel checks strides.
_KERNELS: LookupCache[Kernel | None] = LookupCache()


def _find(given: tuple[Tensor, ...]) -> Kernel | None:
    """The kernel of a call, cached; None if torch computes."""
    if not _fits(given):
        return None
    a, b, *_, offs = given
    key = (a.shape, b.shape, offs.shape, a.device, pinned("grouped_gemm"))
    return _KERNELS.get(key, lambda: _look_up(a, b))


def _look_up(a: Tensor, b: Tensor) -> Kernel | None:
    experts, k, n = b.shape
    try:
        problem = ops.get("grouped_gemm").problem((experts, len(a), n, k), dtype=a.dtype)
    except InvalidProblemError:
        return None
    if problem.empty:
        return None
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        return better_than_torch(kernel_for(problem))


@torch.library.custom_op("tlxgen::scaled_grouped_mm", mutates_args=())
def scaled_grouped_mm_in_graph(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    """See `tlxgen.functional.scaled_grouped_mm`; contiguous, bf16, without gradients."""
    with torch.no_grad(), as_given(a):
        return product((a, b, scale_a, scale_b, offs)).contiguous()


@scaled_grouped_mm_in_graph.register_fake
def _(a: Tensor, b: Tensor, _scale_a: Tensor, _scale_b: Tensor, _offs: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]), dtype=torch.bfloat16)
