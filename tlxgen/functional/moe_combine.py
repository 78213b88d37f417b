"""The last step of a mixture of experts: weighted sum of each token's rows of the second product.

A kernel in plain Triton (`tlxgen.functional.moe_combine_kernel`) reads every row once. Torch's operations, which read
and write rows several times, are the fallback.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlxgen import devices
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given, transformed
from tlxgen.runtime.selection import FallbackWarning, has_triton

if TYPE_CHECKING:
    from tlxgen.functional.moe_combine_kernel import Launch

__all__ = ["combine"]

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_WEIGHTS = _DTYPES | {torch.float64}
_IDS = frozenset({torch.int32, torch.int64})
_AMPERE = (8, 0)  # the first with bf16

#: Launches whose binaries are loaded.
_LOADED: set[Hashable] = set()
_MOST_LOADED = 4096
#: Devices for which compiling failed.
_UNABLE: set[int] = set()


def combine(result: Tensor, place: Tensor, weights: Tensor, ids: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """Row t is the sum over j of weights[t, j] · result[place[t k + j]], where ids[t, j] is in [0, experts).

    Args:
        result: (T k, K).
        place: (T k,), integers, contiguous.
        weights: (T, k), any floating dtype.
        ids: (T, k), int32 or int64.
        experts: number of experts here. Choices outside count as zero, whatever `result` and `weights` hold.
        dtype: of what is returned.

    Returns:
        (T, K), rounded once, of a sum in float32; the same bits at every call.

    Torch's operations compute it under `torch.compile`, where gradients are wanted, on devices other than CUDA's, and
    without triton; and while a CUDA graph is captured before the kernel has been loaded by a call outside.
    """
    if not torch.compiler.is_compiling() and dtype in _DTYPES and _takes(result, place, weights, ids):
        out = _launched(result, place, weights, ids, experts, dtype)
        if out is not None:
            return out
    return _by_torch(result, place, weights, ids, experts, dtype)


def _by_torch(result: Tensor, place: Tensor, weights: Tensor, ids: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    known = (ids >= 0) & (ids < experts)
    parts = result[place].unflatten(0, ids.shape).masked_fill(~known[..., None], 0.0)  # type: ignore[no-untyped-call]
    shares = weights.float().masked_fill(~known, 0.0)
    total: Tensor = (parts.float() * shares[..., None]).sum(1)
    return total.to(dtype)


def _takes(*tensors: Tensor) -> bool:
    """Whether the kernel can read these tensors, and no gradient is recorded."""
    result, place, weights, ids = tensors
    if not checks.seen(*tensors) or result.dtype not in _DTYPES:
        return False
    if weights.dtype not in _WEIGHTS or ids.dtype not in _IDS or not place.is_contiguous():
        return False
    if torch.is_grad_enabled() and (result.requires_grad or weights.requires_grad):
        return False
    return not transformed() and _compiles_for(result.device.index)


@cache
def _compiles_for(index: int | None) -> bool:
    """Whether Triton can compile for the device."""
    gpu = devices.detect(index)
    return gpu is not None and gpu.capability >= _AMPERE and has_triton()


def _launched(
    result: Tensor, place: Tensor, weights: Tensor, ids: Tensor, experts: int, dtype: torch.dtype
) -> Tensor | None:
    """The kernel's result; None if it cannot be compiled, or not during a graph capture."""
    out = result.new_empty((ids.shape[0], result.shape[1]), dtype=dtype)
    if not out.numel():
        return out
    from tlxgen.functional import moe_combine_kernel

    rows = result if result.stride(1) == 1 else result.contiguous()
    launch = moe_combine_kernel.launch(rows, place, weights, ids, out, experts)
    device = result.device.index
    loaded = _what_is_loaded(launch, device)
    with torch.cuda.device_of(result):  # type: ignore[no-untyped-call]
        if loaded not in _LOADED and (device in _UNABLE or _is_capturing()):
            return None
        try:
            launch()
        except Exception as error:  # noqa: BLE001 - any error of the compiler: torch computes
            _UNABLE.add(device)
            text = f"fused_moe: the combining kernel cannot be launched, torch computes: {error}"
            warnings.warn(text, FallbackWarning, stacklevel=4)
            return None
    if len(_LOADED) >= _MOST_LOADED:  # strides may differ with every call
        _LOADED.clear()
    _LOADED.add(loaded)
    return out


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured, during which no binary can be loaded."""
    return torch.cuda.is_current_stream_capturing()


def _what_is_loaded(launch: Launch, device: int) -> Hashable:
    """Key of the binary: dtypes, alignments, numbers and constants."""
    tensors, numbers = launch.args[:5], launch.args[5:]
    lie = [(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]
    return device, *lie, *numbers, *launch.constants.values()


@torch.library.custom_op("tlxgen::moe_combine", mutates_args=())
def combine_in_graph(result: Tensor, place: Tensor, weights: Tensor, ids: Tensor, experts: int, like: Tensor) -> Tensor:
    """See `tlxgen.functional.moe_combine.combine`, in the dtype of `like`; without gradients."""
    with torch.no_grad(), as_given(result):
        return combine(result, place, weights, ids, experts, like.dtype)


@combine_in_graph.register_fake
def _(result: Tensor, _place: Tensor, _weights: Tensor, ids: Tensor, _experts: int, like: Tensor) -> Tensor:
    return like.new_empty(ids.shape[0], result.shape[1])
