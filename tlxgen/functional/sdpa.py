"""`scaled_dot_product_attention` and `attention`: a kernel where one takes the call, else torch; with gradients.

    >>> from tlxgen import functional as F
    >>> out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # doctest: +SKIP

A call is looked up in a cache by its options, shapes and layouts; how it is computed is in
`tlxgen.functional.attention_call`.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from tlxgen.errors import InvalidProblemError, LaunchError
from tlxgen.functional import dispatch
from tlxgen.functional.attention_call import (
    CALLER,
    CALLS,
    GRADIENTS,
    NOBODY,
    Call,
    Found,
    find,
    with_dims_of,
    with_four_dims,
)
from tlxgen.ops import torch_functions
from tlxgen.ops.attention.problem import LARGEST_HEAD, Causal
from tlxgen.runtime import checks
from tlxgen.runtime.checks import transformed, transformed_in_graph

__all__ = ["attention", "scaled_dot_product_attention"]

_DTYPES = frozenset({torch.bfloat16, torch.float16})
_NUMBERS = frozenset({int, float})
_TRANSFORMED = "attention: kernels know neither functorch's transforms nor forward-mode differentiation"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: its arguments, its result, its errors, its gradients.

    A call goes to torch unchanged unless a kernel takes it: tensors on one CUDA device, in bf16 or fp16, with head
    dimension contiguous, a multiple of 8 and at most 256; no mask, no dropout; plain tensors, not under functorch's
    transforms. It also goes to torch where `tlxgen.get_kernel` has nothing better (`Kernel.origin` is `torch`).

    Args:
        query: (..., H, L, E), with any number of leading dimensions, or none.
        key: (..., H, S, E); with `enable_gqa` a number of heads that divides H.
        value: as `key`.
        attn_mask: as in torch.
        dropout_p: as in torch.
        is_causal: row i sees keys up to i: aligned top-left.
        scale: of the scores; 1 / sqrt(E) by default.
        enable_gqa: whether heads of `query` may share those of `key` and `value`.

    Returns:
        (..., H, L, E), in memory in the order of the query's dimensions.

    Gradients are those of torch's flash-attention backward, on the kernel's output and log-sum-exp. Calls that need
    gradients which it does not have (causal, and not as many keys as queries) go to torch, but for a `scale` that is
    not positive: those gradients, and all second derivatives of what a kernel computed, are by formulas in float32.
    """
    if torch.compiler.is_compiling():
        causal: Causal = "top-left" if is_causal else "none"
        if (
            attn_mask is None
            and dropout_p == 0.0
            and _in_graph(query, key, value, gqa=enable_gqa)
            and (_lse_for(query, key, value, causal, 0.0, scale) != NOBODY or not _recorded(query, key, value))
        ):
            return _attention_in_graph(query, key, value, causal, 0, 0.0, scale)[0]
        return torch_functions.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if (
        attn_mask is None
        and dropout_p == 0.0
        and (is_causal is True or is_causal is False)
        and (enable_gqa is True or enable_gqa is False)
        and (scale is None or (type(scale) in _NUMBERS and -math.inf < scale < math.inf))
    ):
        options, tensors = ("torch", is_causal, enable_gqa, scale), (query, key, value)
        cached = CALLS.get(options, tensors)
        if cached is not None:
            return cached.again(query, key, value)[0]
        if _plain(query, key, value):
            found = find(query, key, value, "top-left" if is_causal else "none", 0, 0.0, gqa=enable_gqa)
            if isinstance(found, Found):
                q, k, v = map(with_four_dims, tensors)
                call = Call(found, q, k, v, scale)
                if not call.torch:
                    out = with_dims_of(query, call(q, k, v)[0])
                    if not call.grad:
                        CALLS.keep(options, tensors, call)
                    return out
    return torch_functions.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    window: int = ...,
    softcap: float = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    window: int = ...,
    softcap: float = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = "none",
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + mask) v, with all that `tlxgen.ops.attention.problem.AttentionProblem` knows.

    Args:
        q: (..., H, S, D), bf16 or fp16, with any number of leading dimensions, or none; D a multiple of 8 up to 256.
        k: (..., KV heads, KV length, D); KV heads divides H.
        v: as k.
        causal: where the diagonal ends: `bottom-right`, as FlashAttention has it, `top-left`, as torch has it.
        window: keys that a row sees, itself included; with `causal` only, 0 for all.
        softcap: scores become softcap · tanh(score / softcap); 0 for none.
        scale: of the scores, any finite number; 1 / sqrt(D) by default.
        return_lse: also return each row's log-sum-exp.

    Returns:
        out as q, and with `return_lse` also (..., H, S) natural logarithms in float32. A row that sees no key has 0 and
        minus infinity.

    Raises:
        InvalidProblemError: no kernel is for such tensors or options.
        LaunchError: `scale` is no finite number, or functorch or forward-mode differentiation is under way.

    Torch computes for tensors that are not on a CUDA device. Gradients are those of torch's flash-attention backward
    where it takes the problem: on CUDA, `scale` positive, no softcap, nothing causal that is aligned top-left unless it
    is square. Otherwise torch's attention is differentiated if it has the problem, once more computed if need be; the
    rest, second derivatives, and gradients of the log-sum-exp are by formulas in float32 from q, k and v. Rows that see
    no key give and get none.
    """
    if not (scale is None or (type(scale) in _NUMBERS and -math.inf < scale < math.inf)):
        raise LaunchError(f"attention: scale is {scale!r}; it must be a finite number")
    if torch.compiler.is_compiling():
        if transformed_in_graph():
            raise LaunchError(_TRANSFORMED)
        out, lse = _attention_in_graph(q, k, v, causal, window, softcap, scale, return_lse=return_lse)
        return (out, lse) if return_lse else out
    options, tensors = ("ours", causal, window, type(window), softcap, type(softcap), scale, return_lse), (q, k, v)
    cached = CALLS.get(options, tensors)
    if cached is not None:
        again = cached.again(q, k, v)
        return again if return_lse else again[0]  # type: ignore[return-value] # the log-sum-exp is there if it was asked for
    found = find(q, k, v, causal, window, softcap, gqa=True)
    if isinstance(found, str):
        raise InvalidProblemError(found)
    if transformed():
        raise LaunchError(_TRANSFORMED)
    like = q
    q, k, v = map(with_four_dims, (q, k, v))
    call = Call(found, q, k, v, scale, return_lse=return_lse)
    out, lse = call(q, k, v)
    if not (call.grad or call.torch):
        CALLS.keep(options, tensors, call)
    return (with_dims_of(like, out), with_dims_of(like, lse)) if return_lse else with_dims_of(like, out)


def _plain(*tensors: Tensor) -> bool:
    """Whether a kernel can read these tensors: plain ones, no functorch transform, head dimension contiguous."""
    if not checks.seen(*tensors) or checks.converted(tensors[0]):
        return False
    return all(tensor.dim() >= 3 and tensor.stride(-1) == 1 for tensor in tensors) and not transformed()


def _in_graph(q: Tensor, k: Tensor, v: Tensor, *, gqa: bool) -> bool:
    """Whether the operator may replace torch's in a graph, by what is known while tracing."""
    if not (q.device.type == k.device.type == v.device.type == checks.DEVICE and q.dtype == k.dtype == v.dtype):
        return False
    if not dispatch.kernels_here():
        return False
    if (
        q.dtype not in _DTYPES
        or q.dim() < 3
        or k.dim() != q.dim()
        or k.shape != v.shape
        or q.shape[:-3] != k.shape[:-3]
    ):
        return False
    heads, kv_heads, head_dim = q.shape[-3], k.shape[-3], q.shape[-1]
    if head_dim != k.shape[-1] or head_dim % 8 or head_dim > LARGEST_HEAD:
        return False
    if heads % kv_heads if gqa else heads != kv_heads:
        return False
    return not checks.converted(q)


def _attention_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    window: int,
    softcap: float,
    scale: float | None,
    *,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator `tlxgen::attention`, with the log-sum-exp if gradients or the caller need it."""
    lse_for = CALLER if return_lse else _lse_for(q, k, v, causal, softcap, scale)
    out, lse = torch.ops.tlxgen.attention(
        with_four_dims(q), with_four_dims(k), with_four_dims(v), causal, window, softcap, scale, lse_for
    )
    return with_dims_of(q, out), with_dims_of(q, lse) if return_lse else lse


def _lse_for(q: Tensor, k: Tensor, v: Tensor, causal: Causal, softcap: float, scale: float | None) -> int:
    """What the log-sum-exp is for: gradients, if they are recorded and torch's flash backward may compute them."""
    aligned = causal != "top-left" or q.shape[-2] == k.shape[-2]
    flash = aligned and not softcap and (scale is None or scale > 0)
    return GRADIENTS if flash and _recorded(q, k, v) else NOBODY


def _recorded(*tensors: Tensor) -> bool:
    """Whether autograd records any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
