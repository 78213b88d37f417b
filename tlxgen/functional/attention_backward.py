"""Gradients of attention, from what its forward kernel has left behind.

`by_flash` hands the kernel's output and log-sum-exp to torch's flash-attention backward. What that does not take is
computed once more: through `scaled_dot_product_attention` where torch has the problem (`by_recomputing`), else by the
formulas (`by_formula`), which autograd can differentiate again.

Shapes are those of `tlxgen.ops.attention.operator`: q (B, H, S, D), k and v (B, KV heads, KV length, D).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tlxgen.ops.attention.flash import readable, window
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.ops.torch_functions import scaled_dot_product_attention

#: Gradients of q, k and v; None for those that nobody asked for.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

_SCORES = 2**25  # scores of one block of the formulas, of which about six such arrays live at a time


def is_sdpa(problem: AttentionProblem) -> bool:
    """Whether torch's `scaled_dot_product_attention` has a way to ask for the problem."""
    if problem.causal == "bottom-right" and problem.kv_len != problem.S:
        return False
    return not (problem.window or problem.softcap)


def sdpa_differentiates(problem: AttentionProblem, scale: float | None) -> bool:
    """Whether torch's attention has the problem's gradients; its fused kernels hide scores before they scale them."""
    return is_sdpa(problem) and (scale is None or scale > 0)


def sdpa(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """The problem through torch."""
    gqa = problem.kv_heads != problem.H
    return scaled_dot_product_attention(q, k, v, is_causal=problem.causal != "none", scale=scale, enable_gqa=gqa)


def by_flash(
    problem: AttentionProblem,
    tensors: Sequence[Tensor],
    lse: Tensor,
    grad_out: Tensor,
    scale: float | None,
) -> Gradients:
    """Gradients from q, k, v and out (`tensors`), and from each row's natural log-sum-exp (B, H, S) in float32."""
    q, k, v, out, grad_out = (readable(tensor).transpose(1, 2) for tensor in (*tensors, grad_out))
    if problem.kv_len < problem.S:  # of rows that see nothing: exp(-inf - lse) is to be 0
        lse = lse.masked_fill(torch.isneginf(lse), float("inf"))
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    gradients = torch.ops.aten._flash_attention_backward(  # noqa: SLF001 - there is no other way to it
        *(grad_out, q, k, v, out, lse),
        *(None, None),  # where sequences begin, if they had different lengths
        *(problem.S, problem.kv_len),
        *(0.0, problem.causal != "none"),
        *(unused, unused),
        scale=scale,
        **window(problem),
    )
    grad_q, grad_k, grad_v = (gradient.transpose(1, 2) for gradient in gradients)
    return grad_q, grad_k, grad_v


def by_recomputing(
    problem: AttentionProblem,
    tensors: Sequence[Tensor],
    grad_out: Tensor,
    scale: float | None,
    needed: Sequence[bool],
) -> Gradients:
    """Gradients of q, k, v through torch's own attention, of those that are needed."""
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True))
        out = sdpa(problem, q, k, v, scale)
    gradients = iter(torch.autograd.grad(out, [x for x in (q, k, v) if x.requires_grad], grad_out))
    grad_q, grad_k, grad_v = (next(gradients) if need else None for need in needed)
    return grad_q, grad_k, grad_v


def by_formula(
    problem: AttentionProblem,
    tensors: Sequence[Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    scale: float | None,
) -> Gradients:
    """Gradients of q, k, v in float32, a block of scores at a time, from those of out and of the log-sum-exp.

    With P the weights, dP = dO Vᵀ and dS = P ∘ (dP - rowsum(P ∘ dP) + dL): dQ = scale · dS K, dK = scale · dSᵀ Q,
    dV = Pᵀ dO (FlashAttention, arXiv:2205.14135, appendix B.2); dL is the gradient of the log-sum-exp, and a softcap
    multiplies dS by 1 - tanh².
    """
    q, k, v = tensors
    if problem.empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grad_out = torch.zeros_like(q) if grad_out is None else grad_out
    grad_lse = grad_out.new_zeros(q.shape[:3]) if grad_lse is None else grad_lse
    scale = problem.D**-0.5 if scale is None else float(scale)
    # One entry for each KV head of each batch, so that the heads that share it lie beside each other.
    shared, group = problem.B * problem.kv_heads, problem.H // problem.kv_heads
    q, grad_out = (x.reshape(shared, group, problem.S, problem.D) for x in (q, grad_out))
    k, v = (x.reshape(shared, 1, problem.kv_len, problem.D) for x in (k, v))
    grad_lse = grad_lse.reshape(shared, group, problem.S, 1)
    grad_q, grad_k, grad_v = [], [], []
    for heads in _slices(shared, _SCORES // (group * problem.S * problem.kv_len)):
        keys, values = k[heads].float(), v[heads].float()
        rows_of_q, of_keys, of_values = [], torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _slices(problem.S, _SCORES // (group * problem.kv_len)):
            block = [x[heads, :, rows].float() for x in (q, grad_out, grad_lse)]
            of_rows, more_keys, more_values = _block(problem, (keys, values), block, scale, rows.start)
            rows_of_q.append(of_rows.to(q.dtype))
            of_keys, of_values = of_keys + more_keys, of_values + more_values
        grad_q.append(torch.cat(rows_of_q, 2))
        grad_k.append(of_keys.to(k.dtype))
        grad_v.append(of_values.to(v.dtype))
    shapes = (tensor.shape for tensor in tensors)
    of_q, of_k, of_v = (torch.cat(x).reshape(next(shapes)) for x in (grad_q, grad_k, grad_v))
    return of_q, of_k, of_v


def _slices(length: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    return (slice(first, min(length, first + step)) for first in range(0, length, step))


def _block(
    problem: AttentionProblem, keys: Sequence[Tensor], rows: Sequence[Tensor], scale: float, first_row: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What rows from `first_row` on give to the gradients of q, k and v.

    Args:
        problem: what is computed.
        keys: k and v, (heads, 1, KV length, D).
        rows: q and the gradients of out and log-sum-exp, (heads, group, rows, D or 1).
        scale: of the scores.
        first_row: counted in the whole problem.
    """
    (k, v), (q, grad_out, grad_lse) = keys, rows
    scores = q @ k.mT * scale
    squeezed = torch.tanh(scores / problem.softcap) if problem.softcap else None
    weights = _weights(problem, scores if squeezed is None else squeezed * problem.softcap, first_row)
    grad_weights = grad_out @ v.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True) + grad_lse)
    if squeezed is not None:
        grad_scores = grad_scores * (1 - squeezed * squeezed)
    grad_scores = grad_scores * scale
    grad_k, grad_v = ((x.mT @ y).sum(1, keepdim=True) for x, y in ((grad_scores, q), (weights, grad_out)))
    return grad_scores @ k, grad_k, grad_v


def _weights(problem: AttentionProblem, scores: Tensor, first_row: int) -> Tensor:
    """Softmax over the keys that a row sees; zeros, and no NaN in any derivative, where it sees none."""
    if problem.causal == "none":
        return torch.softmax(scores, -1)
    rows = torch.arange(first_row, first_row + scores.shape[-2], device=scores.device)[:, None] + problem.diagonal
    keys = torch.arange(problem.kv_len, device=scores.device)[None, :]
    hidden = keys > rows
    if problem.window:
        hidden = hidden | (keys <= rows - problem.window)
    blind = hidden.all(-1, keepdim=True)
    seen = scores.masked_fill(hidden & ~blind, float("-inf"))
    return torch.softmax(seen, -1).masked_fill(blind, 0.0)
