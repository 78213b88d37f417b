"""`fused_moe`, a mixture-of-experts feed-forward layer: sort tokens by expert, two grouped products, combine.

    >>> from tlxgen import functional as F
    >>> out = F.fused_moe(x, w1, w2, topk_weights, topk_ids)  # doctest: +SKIP

The products are kernels of tlxgen. Without gradients the activation is fused into the first, and the weighted sum is a
kernel too (`tlxgen.functional.moe_combine`). Torch sorts. Nothing waits for the device, so CUDA graphs may capture the
layer. Gradients are autograd's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tlxgen.errors import InvalidProblemError
from tlxgen.functional.grouped import gated_mm, grouped_mm
from tlxgen.functional.moe_combine import combine, combine_in_graph
from tlxgen.functional.moe_routing import route
from tlxgen.runtime.checks import transformed_in_graph

__all__ = ["fused_moe"]


def fused_moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: Literal["silu", "gelu"] = "silu",
) -> Tensor:
    """Sum over a token's experts e of weight · (act(x Gₑᵀ) · (x Uₑᵀ)) Dₑᵀ.

    Args:
        x: (T, K) tokens, bf16 or fp16.
        w1: (E, 2 I, K): G, the gate, in the first I rows of each expert, U in the others.
        w2: (E, K, I): D.
        topk_weights: (T, k), any floating dtype: how much each of a token's experts counts.
        topk_ids: (T, k), integers: which experts they are. What is not in [0, E), as where experts are spread over
            devices, counts nothing.
        activation: of the gate: silu, or gelu by the error function.

    Returns:
        (T, K), in the dtype of x. What act(x Gₑᵀ) · (x Uₑᵀ) and the second product give is rounded to that dtype; with
        gradients, both factors are as well. The sum is float32.

    Raises:
        InvalidProblemError: shapes or dtypes do not fit together, or the activation is not known.
    """
    reason = _why_no_layer(x, w1, w2, topk_weights, topk_ids)
    if reason is None and activation not in ("silu", "gelu"):
        reason = f"activation {activation!r} is not known; use silu or gelu"
    if reason:
        raise InvalidProblemError(f"fused_moe: {reason}")
    experts = w1.shape[0]
    routing = route(topk_ids, experts)
    # A copy costs less than a gathering kernel loses by loading with cp.async, in small tiles, instead of TMA.
    tokens = x[routing.rows]
    if torch.is_grad_enabled() and x.requires_grad:  # rows past the last end have no gradient
        tokens = torch.where((routing.keys < experts)[:, None], tokens, 0.0)
    hidden = gated_mm(tokens, w1.mT, offs=routing.offs, activation=activation)
    result = grouped_mm(hidden, w2.mT, offs=routing.offs)
    if torch.compiler.is_compiling() and not (transformed_in_graph() or _differentiable(result, topk_weights)):
        total: Tensor = combine_in_graph(result, routing.place, topk_weights, routing.ids, experts, x)
        return total
    return combine(result, routing.place, topk_weights, routing.ids, experts, x.dtype)


def _differentiable(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _why_no_layer(x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> str | None:
    """Why these tensors make no layer, or None; the products check strides and devices."""
    shapes = f"x {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}"
    if (x.dim(), w1.dim(), w2.dim()) != (2, 3, 3) or w1.shape[1] % 2:
        return f"{shapes}: it takes x (T, K), w1 (E, 2 I, K), w2 (E, K, I)"
    experts, inner, k = w1.shape[0], w1.shape[1] // 2, w1.shape[2]
    if x.shape[1] != k or tuple(w2.shape) != (experts, k, inner):
        return f"{shapes}: it takes x (T, K), w1 (E, 2 I, K), w2 (E, K, I)"
    if not x.dtype == w1.dtype == w2.dtype:
        return f"x is {x.dtype}, w1 {w1.dtype}, w2 {w2.dtype}; they must have one dtype"
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        routing = f"topk_weights {tuple(topk_weights.shape)}, topk_ids {tuple(topk_ids.shape)}"
        return f"{routing}: they must both be (T, k), with T = {x.shape[0]}"
    if topk_ids.is_floating_point() or topk_ids.is_complex() or topk_ids.dtype == torch.bool:
        return f"topk_ids is {topk_ids.dtype}; it must hold integers"
    return None
