"""What stands in a graph of `torch.compile` for a call: operators of `torch.library`, with shapes and gradients.

    torch.compile(model, fullgraph=True)  # keeps the kernels of tlxgen.functional, and the configs that were tuned

An operator chooses its kernel when it runs, as the function does outside of graphs, and computes what that computes.
Outside of graphs the functions do without the operators, whose way through torch's dispatcher costs more than a launch.

The gradients are operators as well, so that a backward graph is whole. They have no second derivatives.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tlxgen.ops.attention import flash
from tlxgen.ops.attention.problem import Causal
from tlxgen.runtime.checks import as_given, transformed_in_graph

__all__ = ["CALLER", "GRADIENTS", "NOBODY", "attention", "attention_backward", "gemm", "kernels_here"]

#: What a log-sum-exp may be for.
NOBODY, GRADIENTS, CALLER = range(3)


@torch.library.custom_op("tlxgen::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: str, window: int, softcap: float, scale: float | None, lse_for: int
) -> tuple[Tensor, Tensor]:
    """See `tlxgen.functional.attention`, for q (B, H, S, D), k and v (B, KV heads, KV length, D).

    Args:
        q: any dtype and device that the function takes, as k and v.
        k: as q.
        v: as q.
        causal: as the function has it, as window, softcap and scale.
        window: as causal.
        softcap: as causal.
        scale: as causal.
        lse_for: what the log-sum-exp is for: `NOBODY`, `GRADIENTS` or the `CALLER`.

    Returns:
        out as `torch.empty_like(q)` lies, and the log-sum-exp (B, H, S), of no elements if it is for nobody. If it is
        for gradients and torch computes the output, it is zeros: the gradients do without.
    """
    from tlxgen.functional import sdpa

    found = _found(q, k, v, causal, window, softcap)
    computed = lse_for == CALLER or (lse_for == GRADIENTS and found.kernel(q, lse=True).origin != "torch")
    with torch.no_grad(), as_given(q):
        call = sdpa._Call(found, q, k, v, scale, return_lse=computed)  # noqa: SLF001 - its other half
        out, lse = call(q, k, v)
    return lying_like(q, out), lse if computed else _no_lse(q, lse_for)


@attention.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _no_lse(q, lse_for=others[-1])


def _no_lse(q: Tensor, lse_for: int) -> Tensor:
    return q.new_zeros((0,) if lse_for == NOBODY else q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tlxgen::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: str,
    window: int,
    softcap: float,
    scale: float | None,
    lse_for: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, as they lie, from those of what `attention` returned, and from that."""
    from tlxgen.functional import attention_backward as backward

    found = _found(q, k, v, causal, window, softcap)
    written = lse_for == CALLER or (lse_for == GRADIENTS and found.kernel(q, lse=True).origin != "torch")
    with torch.no_grad(), as_given(q):
        if written and grad_out is not None and grad_lse is None and flash.takes(found.problem, q, k, v, scale):
            gradients = backward.by_flash(found.problem, (q, k, v, out), lse, grad_out, scale)
        else:  # autograd is out of reach within an operator, and with it torch's own attention's gradients
            gradients = backward.by_formula(found.problem, (q, k, v), grad_out, grad_lse, scale)
    of_q, of_k, of_v = (
        torch.zeros_like(x) if gradient is None else lying_like(x, gradient)
        for x, gradient in zip((q, k, v), gradients, strict=True)
    )
    return of_q, of_k, of_v


@attention_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (torch.empty_like(x) for x in inputs[2:5])
    return of_q, of_k, of_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    if ctx.options[-1] != CALLER:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 8
    gradients = torch.ops.tlxgen.attention_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.options)
    needed = [gradient if wanted else None for gradient, wanted in zip(gradients, ctx.needs_input_grad, strict=False)]
    return (*needed, None, None, None, None, None)


attention.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op("tlxgen::gemm", mutates_args=())
def gemm(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """A (M, K) · B (K, N), and a bias (N,) for all rows; contiguous."""
    from tlxgen.functional import products

    with torch.no_grad(), as_given(a):  # a graph may run, or its backward, under another autocast than it was made
        return products.product(a, b, bias).contiguous()


@gemm.register_fake
def _(a: Tensor, b: Tensor, _bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _keep_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:  # noqa: ARG001 - torch's
    a, b, _ = inputs
    ctx.save_for_backward(a, b)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    of_a, of_b, of_bias = ctx.needs_input_grad
    return (
        torch.ops.tlxgen.gemm(grad, b.mT, None) if of_a else None,
        torch.ops.tlxgen.gemm(a.mT, grad, None) if of_b else None,
        grad.sum(0) if of_bias else None,
    )


gemm.register_autograd(_differentiate_product, setup_context=_keep_operands)


def kernels_here() -> bool:
    """Whether this machine has kernels at all; without, and under transforms, graphs keep torch's own operators."""
    from tlxgen.runtime import kernel, selection

    if transformed_in_graph():
        return False
    return kernel._current_device() is not None and selection.has_triton()  # noqa: SLF001 - the same question


kernels_here._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - as `torch.compiler.assume_constant_result` does, which would import the compiler


def _found(q: Tensor, k: Tensor, v: Tensor, causal: str, window: int, softcap: float) -> Any:
    """The problem of a call and its kernels.

    Raises:
        InvalidProblemError: no kernel is for such tensors or options.
    """
    from tlxgen.errors import InvalidProblemError
    from tlxgen.functional import sdpa

    found = sdpa._find(q, k, v, cast("Causal", causal), window, softcap, gqa=True)  # noqa: SLF001 - as above
    if isinstance(found, str):
        raise InvalidProblemError(found)
    return found


def lying_like(x: Tensor, result: Tensor) -> Tensor:
    """The result in memory as `torch.empty_like(x)` is, which graphs rely on."""
    strides = torch.empty_like(x, device="meta").stride()
    if result.stride() == strides:
        return result
    return torch.empty_like(x).copy_(result)
