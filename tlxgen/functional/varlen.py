"""`varlen_attn`, attention over packed sequences: a kernel where one takes the call, else torch; with gradients.

    >>> from tlxgen import functional as F
    >>> out = F.varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0))  # doctest: +SKIP

Imported by `tlxgen.functional` on first use: torch's function, which must be saved before a program replaces it,
imports torch's compiler, which takes more than a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from tlxgen.functional import dispatch
from tlxgen.functional import varlen_backward as backward
from tlxgen.functional.attention_call import CALLER, GRADIENTS, NOBODY
from tlxgen.functional.varlen_call import CALLS, Call, Mask, attention_varlen, find, recorded
from tlxgen.ops.attention.problem import LARGEST_HEAD
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given, transformed, transformed_in_graph

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

try:
    from torch.nn.attention.varlen import varlen_attn as _known
except ImportError:  # before torch 2.10
    _torchs: Any = None
else:
    _torchs = _known

__all__ = ["varlen_attn"]

_DTYPES = frozenset({torch.bfloat16, torch.float16})
_NUMBERS = frozenset({int, float})


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn`: its arguments, its result, its errors, its gradients.

    Args:
        query: (T_q, H, D), sequences one after the other.
        key: (T_k, KV heads, D).
        value: as `key`.
        cu_seq_q: (N + 1,), int32: where sequences begin and end in `query`, from 0 on. It stays on the device.
        cu_seq_k: likewise, in `key`.
        max_q: rows of the longest sequence, or more.
        max_k: keys of the longest sequence, or more.
        return_aux: with its `lse`, the log-sum-exp is returned as well.
        scale: of the scores; 1 / sqrt(D) by default.
        window_size: (-1, -1) for all keys; (-1, 0) for those up to the row, aligned to the sequences' ends; (W, 0) for
            W keys before that one, and itself. Others are torch's.
        enable_gqa: whether heads of `query` may share those of `key` and `value`; torch has that from 2.12 on.
        **others: what torch's function has beyond that, such as `seqused_k`, `block_table` and `num_splits`: calls with
            any of them that is not None are torch's. Torch refuses by name what it does not know.

    Returns:
        (T_q, H, D), in memory in the order of the query's dimensions; and (H, T_q) natural logarithms in float32 if
        they are asked for. A row that sees no key has 0 and plus infinity, as torch's has. What lies past the last end
        is not written.

    A call goes to torch unchanged unless a kernel takes it: plain tensors in bf16 or fp16 on one CUDA device, the head
    dimension contiguous, a multiple of 8 and at most 256, no size of zero, not under functorch's transforms; and where
    `tlxgen.get_kernel` has nothing better (`Kernel.origin` is `torch`). On CPUs, for which torch has no such function,
    torch's attention of padded sequences computes it.

    Gradients are those of torch's flash-attention backward, as torch's own function has them, from the kernel's output
    and log-sum-exp. Where it does not run (a `scale` that is not positive, a CPU), and for gradients of the
    log-sum-exp, which torch takes for zeros, and second derivatives, which it has not, sequences are computed once
    more, one after the other, by formulas in float32; that waits for the device.
    """
    mask, wants_lse = _mask(window_size), return_aux is not None and return_aux.lse
    tensors = (query, key, value, cu_seq_q, cu_seq_k)
    if mask is not None and _ours(tensors, max_q, max_k, scale) and all(other is None for other in others.values()):
        if torch.compiler.is_compiling():
            if _in_graphs(tensors, enable_gqa):
                out, lse = _in_graph(tensors, (max_q, max_k), mask, scale, wants_lse=wants_lse)
                return (out, lse) if wants_lse else out
        else:
            result = _outside(tensors, (max_q, max_k), mask, scale, gqa=enable_gqa, wants_lse=wants_lse)
            if result is not None:
                return result if wants_lse else result[0]
    # Defaults are left out: older versions of torch have fewer arguments.
    others |= {"return_aux": return_aux} if return_aux is not None else {}
    others |= {"scale": scale} if scale is not None else {}
    others |= {"window_size": window_size} if window_size != (-1, -1) else {}
    others |= {"enable_gqa": True} if enable_gqa else {}
    return _torch(*tensors, max_q, max_k, **others)


def _torch(*args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
    if _torchs is None:
        raise NotImplementedError(f"varlen_attn: torch {torch.__version__} has none, and no kernel takes this call")
    result: Tensor | tuple[Tensor, Tensor] = _torchs(*args, **named)
    return result


def _mask(window_size: Any) -> Mask | None:
    """Torch's window as (causal, keys); None if kernels do not support it."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        return None
    left, right = window_size
    if right == -1:
        return (False, 0) if left == -1 else None
    if right != 0 or left < -1:
        return None
    return True, left + 1


def _ours(tensors: Sequence[Any], max_q: Any, max_k: Any, scale: Any) -> TypeGuard[tuple[Tensor, ...]]:
    """Whether the arguments are five tensors and plain numbers."""
    return (
        all(isinstance(tensor, Tensor) for tensor in tensors)
        and isinstance(max_q, int)
        and isinstance(max_k, int)
        and (scale is None or (type(scale) in _NUMBERS and -math.inf < scale < math.inf))
    )


def _fit(tensors: Sequence[Tensor], gqa: bool) -> bool:
    """Whether shapes and dtypes are supported; the Problem checks limits."""
    q, k, v, ends_q, ends_k = tensors
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES and ends_q.dtype == ends_k.dtype == torch.int32):
        return False
    if (q.dim(), k.dim(), ends_q.dim()) != (3, 3, 1) or k.shape != v.shape or ends_q.shape != ends_k.shape:
        return False
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if head_dim != k.shape[2] or head_dim % 8 or head_dim > LARGEST_HEAD or ends_q.shape[0] < 2:
        return False
    return bool(heads % kv_heads == 0 if gqa else heads == kv_heads)


def _outside(
    tensors: tuple[Tensor, ...],
    longest: tuple[int, int],
    mask: Mask,
    scale: float | None,
    *,
    gqa: bool,
    wants_lse: bool,
) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp (empty unless wanted); None if torch computes."""
    options = (longest, mask, scale, gqa, wants_lse)
    cached = CALLS.get(options, tensors)
    if cached is not None:
        return cached.launch(*tensors)
    if not _plain(tensors) or not _fit(tensors, gqa):
        return None
    found = find(tensors, longest, mask)
    if found is None:
        return None
    q, k, v = tensors[:3]
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    flash = grad and backward.flash_takes(found.problem, q, k, v, scale)
    call = Call(found, scale, lse=wants_lse or flash, flash=flash)
    if found.kernel(q, lse=call.lse).origin == "torch" and q.device.type == checks.DEVICE and not _only_here(q):
        return None
    with as_given(q):
        if grad:
            return recorded(call, tensors, wants_lse=wants_lse)
        result = call.launch(*tensors)
    CALLS.keep(options, tensors, call)
    return result


def _plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a kernel, or on a CPU torch's padded attention, can read these tensors."""
    if transformed() or not (_ordinary(tensors) if _only_here(tensors[0]) else checks.seen(*tensors)):
        return False
    return all(tensor.dim() > 0 and tensor.stride(-1) == 1 for tensor in tensors[:3])


def _ordinary(tensors: tuple[Tensor, ...]) -> bool:
    """As `checks.seen`, on a CPU."""
    return checks.plain(tensors) and all(
        tensor.device == tensors[0].device and not tensor.is_nested and tensor.layout is torch.strided
        for tensor in tensors
    )


def _only_here(q: Tensor) -> bool:
    """Whether torch's function does not support the device."""
    return q.device.type == "cpu"


def _in_graphs(tensors: tuple[Tensor, ...], gqa: bool) -> bool:
    """Whether the operator may replace torch's in a graph, by what is known while tracing."""
    device = tensors[0].device.type
    if any(tensor.device.type != device for tensor in tensors) or transformed_in_graph():
        return False
    here = device == "cpu" or (device == checks.DEVICE and dispatch.kernels_here())
    return here and _fit(tensors, gqa)


def _in_graph(
    tensors: tuple[Tensor, ...], longest: tuple[int, int], mask: Mask, scale: float | None, *, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    """The operator `tlxgen::attention_varlen`, with the log-sum-exp if gradients or the caller need it."""
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors[:3])
    lse_for = CALLER if wants_lse else GRADIENTS if grad else NOBODY
    result: tuple[Tensor, Tensor] = attention_varlen(*tensors, *longest, *mask, scale, lse_for)
    return result
