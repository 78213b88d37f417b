"""What stands in a graph of `torch.compile` for attention over packed sequences.

As in `tlxgen.functional.library`, the operator chooses its kernel when it runs, and its gradients are an operator as well, which
has no second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tlxgen.functional.library import CALLER, NOBODY, lying_like
from tlxgen.runtime.checks import as_given

__all__ = ["attention_varlen", "attention_varlen_backward"]


@torch.library.custom_op("tlxgen::attention_varlen", mutates_args=())
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    scale: float | None,
    lse_for: int,
) -> tuple[Tensor, Tensor]:
    """See `tlxgen.functional.varlen_attn`.

    Args:
        q: any dtype and device that the function takes, as k and v.
        k: as q.
        v: as q.
        ends_q: where sequences begin and end in q.
        ends_k: likewise, in k.
        max_q: rows of the longest sequence.
        max_k: its keys.
        causal: whether rows see keys up to themselves alone, aligned to the sequences' ends.
        window: how many of these; 0 for all.
        scale: as the function has it.
        lse_for: what the log-sum-exp is for: `NOBODY`, `GRADIENTS` or the `CALLER` (`tlxgen.functional.library`).

    Returns:
        out as `torch.empty_like(q)` lies, and the log-sum-exp (H, total_q), of no elements if it is for nobody.
    """
    from tlxgen.functional import varlen

    with torch.no_grad(), as_given(q):
        found = _found((q, k, v, ends_q, ends_k), (max_q, max_k), (causal, window))
        call = varlen.Call(found, scale, lse=lse_for != NOBODY, flash=False)
        out, lse = call.launch(q, k, v, ends_q, ends_k)
    return lying_like(q, out), lse


@attention_varlen.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    lse = (0,) if others[-1] == NOBODY else (q.shape[1], q.shape[0])
    return torch.empty_like(q), q.new_empty(lse, dtype=torch.float32)


@torch.library.custom_op("tlxgen::attention_varlen_backward", mutates_args=())
def attention_varlen_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, as they lie, from those of what `attention_varlen` returned, and from that."""
    from tlxgen.functional import varlen
    from tlxgen.functional import varlen_backward as backward

    tensors = (q, k, v, ends_q, ends_k)
    found = _found(tensors, (max_q, max_k), (causal, window))
    with torch.no_grad(), as_given(q):
        written = lse.shape == (q.shape[1], q.shape[0])  # not if it was for nobody
        flash = written and backward.flash_takes(found.problem, q, k, v, scale)
        call = varlen.Call(found, scale, lse=True, flash=flash)
        gradients = call.gradients(tensors, (out, lse), grad_out, grad_lse)
    of_q, of_k, of_v = (lying_like(x, gradient) for x, gradient in zip((q, k, v), gradients, strict=True))
    return of_q, of_k, of_v


@attention_varlen_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (torch.empty_like(x) for x in inputs[4:7])
    return of_q, of_k, of_v


def _found(tensors: Sequence[Tensor], longest: tuple[int, int], mask: tuple[bool, int]) -> Any:
    """The problem of a call and its kernels.

    Raises:
        InvalidProblemError: no kernel is for so many, or so large.
    """
    from tlxgen.errors import InvalidProblemError
    from tlxgen.functional import varlen

    found = varlen.find(tensors, longest, mask)
    if found is None:
        q, k, _, ends, _ = tensors
        given = f"query {tuple(q.shape)} and key {tuple(k.shape)}, {len(ends) - 1} sequences"
        most = f"of at most {longest[0]} rows and {longest[1]} keys"
        raise InvalidProblemError(f"varlen_attn: no kernel is for {given} {most}")
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, lse_for = inputs
    out, lse = output
    ctx.options = given[5:]
    ctx.set_materialize_grads(False)
    if lse_for != CALLER:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, *given[:5])


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 11
    gradients = torch.ops.tlxgen.attention_varlen_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.options)
    needed = [gradient if wanted else None for gradient, wanted in zip(gradients, ctx.needs_input_grad, strict=False)]
    return (*needed, *(None,) * 8)


attention_varlen.register_autograd(_differentiate, setup_context=_keep)
