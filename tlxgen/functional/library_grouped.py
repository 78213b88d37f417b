"""What stands in a graph of `torch.compile` for grouped products and for the way back of a mixture of experts.

As in `tlxgen.functional.library`, operators choose their kernels when they run. The gradients of products are such products again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from tlxgen.devices import Hopper
from tlxgen.runtime.checks import as_given

__all__ = ["grouped_mm", "moe_combine", "scaled_grouped_mm"]


@torch.library.custom_op("tlxgen::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None, activation: str) -> Tensor:
    """See `tlxgen.functional.grouped_mm`, or `tlxgen.functional.grouped.gated_mm` with an activation; contiguous.

    Args:
        a: as the function has it, as b and offs.
        b: as a.
        offs: as a.
        activation: of the gate, which has no gradients; empty for the product alone.
    """
    from tlxgen.functional import grouped

    with torch.no_grad(), as_given(a):  # a graph may run under another autocast than it was made
        if not activation:
            return grouped.grouped_mm(a, b, offs=offs).contiguous()
        assert offs is not None
        return grouped.gated_mm(a, b, offs=offs, activation=activation).contiguous()  # type: ignore[arg-type]


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor | None, activation: str) -> Tensor:
    columns = b.shape[-1] // 2 if activation else b.shape[-1]
    if a.dim() == 3:
        return a.new_empty((a.shape[1], columns) if b.dim() == 2 else (*a.shape[:2], columns))
    if b.dim() == 3:
        return a.new_empty(a.shape[0], columns)
    assert offs is not None
    return a.new_empty(offs.shape[0], a.shape[0], columns)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's
    a, b, offs, activation = inputs
    assert not activation, "the product has gradients, and torch's activation of it"
    ctx.save_for_backward(a, b, offs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    a, b, offs = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad[:2]
    grad = _aligned(grad)
    return (
        torch.ops.tlxgen.grouped_mm(grad, b.mT, offs, "") if of_a else None,
        torch.ops.tlxgen.grouped_mm(a.mT, grad, offs, "") if of_b else None,
        None,
        None,
    )


def _aligned(grad: Tensor) -> Tensor:
    """With rows that kernels and torch take: gradients may be expanded, or have rows of any length."""
    elements = Hopper.TMA_ALIGNMENT // grad.element_size()
    columns = grad.shape[-1]
    padding = -columns % elements
    if padding:
        return F.pad(grad, (0, padding))[..., :columns]
    row, column = grad.stride()[-2:]
    # `contiguous` leaves a single row as it is, whatever its pitch.
    whole = column == 1 and row >= columns and row % elements == 0
    return grad if whole else grad.clone(memory_format=torch.contiguous_format)


grouped_mm.register_autograd(_differentiate, setup_context=_keep)


@torch.library.custom_op("tlxgen::scaled_grouped_mm", mutates_args=())
def scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    """See `tlxgen.functional.scaled_grouped_mm`; contiguous, bf16, without gradients."""
    from tlxgen.functional import scaled

    with torch.no_grad(), as_given(a):
        return scaled.product((a, b, scale_a, scale_b, offs)).contiguous()


@scaled_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, _scale_a: Tensor, _scale_b: Tensor, _offs: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]), dtype=torch.bfloat16)


@torch.library.custom_op("tlxgen::moe_combine", mutates_args=())
def moe_combine(result: Tensor, place: Tensor, weights: Tensor, ids: Tensor, experts: int, like: Tensor) -> Tensor:
    """See `tlxgen.functional.moe_combine.combine`, in the dtype of `like`; without gradients."""
    from tlxgen.functional.moe_combine import combine

    with torch.no_grad(), as_given(result):
        return combine(result, place, weights, ids, experts, like.dtype)


@moe_combine.register_fake
def _(result: Tensor, _place: Tensor, _weights: Tensor, ids: Tensor, _experts: int, like: Tensor) -> Tensor:
    return like.new_empty(ids.shape[0], result.shape[1])
