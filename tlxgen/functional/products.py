"""`matmul` and `linear`: a kernel where one takes the call, else torch; with gradients.

    >>> from tlxgen import functional as F
    >>> y = F.linear(x, weight, bias)  # doctest: +SKIP

Gradients are products in other layouts, computed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import dispatch
from tlxgen.functional.dispatch import CallCache, LookupCache, better_than_torch
from tlxgen.ops import torch_functions
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given, transformed
from tlxgen.runtime.kernel import Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

__all__ = ["linear", "matmul"]

_DTYPES = frozenset({torch.bfloat16, torch.float16})


def matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 - torch's own name
    """`torch.matmul`: its arguments, its result, its errors, its gradients.

    Args:
        input: (..., M, K).
        other: (K, N).

    Returns:
        (..., M, N).

    A call goes to torch unchanged unless a kernel takes it: plain tensors in bf16 or fp16 on one CUDA device, `other`
    with two dimensions, no size of zero, not under functorch's transforms nor under autocast to another dtype. It also
    goes to torch where `tlxgen.get_kernel` has nothing better (`Kernel.origin` is `torch`, or `Kernel.slower`). fp32 is
    torch's, whose precision the user has set.
    """
    if not torch.compiler.is_compiling():
        kernel = _CALLS.get("matmul", (input, other))
        if kernel is not None:
            return kernel(input, other) if input.dim() == 2 else _leading(input, kernel(input.flatten(0, -2), other))
    if _takes(input, other, None):
        return _any_rank(input, other, None, "matmul", (input, other))
    return torch_functions.matmul(input, other)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's own name
    """`torch.nn.functional.linear`: input · weightᵀ + bias, the bias added in the kernel.

    Args:
        input: (..., K).
        weight: (N, K).
        bias: (N,).

    Returns:
        (..., N).

    A call goes to torch unchanged unless a kernel takes it, as of `matmul`.
    """
    given = (input, weight) if bias is None else (input, weight, bias)
    if not torch.compiler.is_compiling():
        kernel = _CALLS.get("linear", given)
        if kernel is not None:
            named = {} if bias is None else {"bias": bias}
            if input.dim() == 2:
                return kernel(input, weight.mT, **named)
            return _leading(input, kernel(input.flatten(0, -2), weight.mT, **named))
    if weight.dim() == 2 and _takes(input, weight.mT, bias):
        return _any_rank(input, weight.mT, bias, "linear", given)
    return torch_functions.linear(input, weight, bias)


def _takes(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel can read these tensors, and they are operands of one product."""
    given = (a, b) if bias is None else (a, b, bias)
    if not checks.seen(*given) or any(tensor.dtype != a.dtype for tensor in given) or checks.converted(a):
        return False
    if a.dtype not in _DTYPES or a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        return False
    if bias is not None and bias.shape != b.shape[1:]:
        return False
    return dispatch.kernels_here() if torch.compiler.is_compiling() else not transformed()


def _any_rank(a: Tensor, b: Tensor, bias: Tensor | None, function: str, given: tuple[Tensor, ...]) -> Tensor:
    """The product of a (..., M, K) and b; `function` and `given` are the key under which the call is cached."""
    rows = a if a.dim() == 2 else a.flatten(0, -2)
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.tlxgen.gemm(rows, b, bias)
    elif torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        result = _Product.apply(rows, b, bias)  # type: ignore[no-untyped-call]
    else:
        who = _find(rows, b, bias) or _by_torch
        with as_given(a):
            result = who(rows, b) if bias is None else who(rows, b, bias=bias)
        _CALLS.keep(function, given, who)
    return result if a.dim() == 2 else _leading(a, result)


def _leading(a: Tensor, result: Tensor) -> Tensor:
    """(rows, N) with the leading dimensions of a (..., M, K)."""
    return result.view(*a.shape[:-1], result.shape[1])


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """A (M, K) · B (K, N) + bias (N,), without gradients, by a kernel or by torch."""
    who = _find(a, b, bias) or _by_torch
    return who(a, b) if bias is None else who(a, b, bias=bias)


def _by_torch(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


#: (shapes, layouts, dtype, device) → the kernel, or None if torch computes.
_KERNELS: LookupCache[Kernel | None] = LookupCache()
#: Calls → a kernel, or torch's function.
_CALLS: CallCache[Callable[..., Tensor]] = CallCache("gemm")


def _find(a: Tensor, b: Tensor, bias: Tensor | None) -> Kernel | None:
    """The kernel of a call, cached; None if torch computes."""
    key = (a.shape, b.shape[1], _layout(a), _layout(b), a.dtype, a.device, bias is None, pinned("gemm"))
    return _KERNELS.get(key, lambda: _look_up(a, b, bias))


def _look_up(a: Tensor, b: Tensor, bias: Tensor | None) -> Kernel | None:
    if a.device.type != checks.DEVICE:
        return None
    options = {"layout": _layout(a) + _layout(b), "epilogue": "none" if bias is None else "bias", "dtype": a.dtype}
    try:
        problem = ops.get("gemm").problem((a.shape[0], b.shape[1], a.shape[1]), **options)
    except InvalidProblemError:
        return None
    if problem.empty:
        return None
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        return better_than_torch(kernel_for(problem))


def _layout(matrix: Tensor) -> str:
    """`t` where columns are contiguous, else `n`; for other strides the kernel falls back."""
    return "t" if matrix.stride(0) == 1 and matrix.stride(1) != 1 else "n"


class _Product(torch.autograd.Function):
    """A product recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        with as_given(a):
            return product(a, b, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        of_a, of_b, of_bias = ctx.needs_input_grad
        with as_given(a):  # matmul, so that gradients have gradients
            return (
                matmul(grad, b.mT) if of_a else None,
                matmul(a.mT, grad) if of_b else None,
                grad.sum(0) if of_bias else None,
            )


@torch.library.custom_op("tlxgen::gemm", mutates_args=())
def gemm(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """A (M, K) · B (K, N) + bias (N,), contiguous: the operator of graphs."""
    with torch.no_grad(), as_given(a):  # a graph may run under another autocast than it was traced
        return product(a, b, bias).contiguous()


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
