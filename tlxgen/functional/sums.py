"""`add`: a kernel where one takes the call, else torch; with gradients.

>>> from tlxgen import functional as F
>>> z = F.add(x, y)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import dispatch
from tlxgen.functional.dispatch import LookupCache, better_than_torch
from tlxgen.ops import torch_functions
from tlxgen.runtime import checks
from tlxgen.runtime.checks import transformed
from tlxgen.runtime.kernel import Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

__all__ = ["add"]

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def add(input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:  # noqa: A002 - torch's own name
    """`torch.add`: its arguments but `out`, its result, its errors, its gradients.

    Args:
        input: any shape.
        other: whatever shape and dtype torch lets be added to that; a number as well.
        alpha: `other` is multiplied by it.

    Returns:
        input + alpha · other.

    A call goes to torch unchanged unless a kernel takes it: plain contiguous tensors of one shape and one dtype, bf16,
    fp16 or fp32, on one CUDA device, not empty, `alpha` 1, not under functorch's transforms. It also goes to torch
    where `tlxgen.get_kernel` has nothing better (`Kernel.origin` is `torch`, or `Kernel.slower`).

    In graphs of `torch.compile` an operator stands for what a kernel takes, which a compiler cannot fuse with its
    neighbours, as it would torch's own sum.
    """
    if type(alpha) is int and alpha == 1 and _takes(input, other):
        if torch.compiler.is_compiling():
            whole: Tensor = vector_add(input, other)
            return whole
        kernel = _find(input)
        if kernel is not None:
            if torch.is_grad_enabled() and (input.requires_grad or other.requires_grad):
                recorded: Tensor = _Sum.apply(input, other)  # type: ignore[no-untyped-call]
                return recorded
            return _launch(kernel, input, other)
    return torch_functions.add(input, other, alpha=alpha)


def total(x: Tensor, y: Tensor) -> Tensor:
    """The sum of tensors of one shape and dtype, without gradients, by a kernel or by torch."""
    kernel = _find(x) if checks.seen(x, y) and x.is_contiguous() and y.is_contiguous() else None
    return torch_functions.add(x, y) if kernel is None else _launch(kernel, x, y)


def _takes(x: Any, y: Any) -> bool:
    """Whether a kernel can read these tensors, and they have one shape and dtype."""
    if not checks.seen(x, y) or x.dtype != y.dtype or x.dtype not in _DTYPES:
        return False
    if x.shape != y.shape or not (x.is_contiguous() and y.is_contiguous()):
        return False
    return dispatch.kernels_here() if torch.compiler.is_compiling() else not transformed()


def _launch(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
    if x.dim() == 1:
        return kernel(x, y)
    # Autograd forbids in-place changes of a view that a custom function returns.
    whole: Tensor = torch.ops.aten._unsafe_view(kernel(x.view(-1), y.view(-1)), x.shape)  # noqa: SLF001 - no view to it
    return whole


#: (length, dtype, device) → the kernel, or None if torch computes.
_KERNELS: LookupCache[Kernel | None] = LookupCache()


def _find(x: Tensor) -> Kernel | None:
    """The kernel of a call, cached; None if torch computes."""
    key = (x.numel(), x.dtype, x.device, pinned("vector_add"))
    return _KERNELS.get(key, lambda: _look_up(x))


def _look_up(x: Tensor) -> Kernel | None:
    try:
        problem = ops.get("vector_add").problem((x.numel(),), dtype=x.dtype)
    except InvalidProblemError:
        return None
    if problem.empty:
        return None
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return better_than_torch(kernel_for(problem))


class _Sum(torch.autograd.Function):
    """A sum recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG004 - torch's
        return total(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(grad if needed else None for needed in ctx.needs_input_grad)


@torch.library.custom_op("tlxgen::vector_add", mutates_args=())
def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """X + y, of one shape and dtype, contiguous: the operator of graphs. Differentiable to any order."""
    with torch.no_grad():
        return total(x, y).contiguous()


@vector_add.register_fake
def _(x: Tensor, _y: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves nothing: gradients of a sum need no operand."""


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for needed in ctx.needs_input_grad)


vector_add.register_autograd(_differentiate, setup_context=_keep)
