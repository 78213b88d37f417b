"""What stands in a graph of `torch.compile` for sums.

As in `tlxgen.functional.library`, the operator chooses its kernel when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["vector_add"]


@torch.library.custom_op("tlxgen::vector_add", mutates_args=())
def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """Sum of x and y, of one shape and one dtype; contiguous. Gradients are those of the sum, to any order."""
    from tlxgen.functional import sums

    with torch.no_grad():
        return sums.total(x, y).contiguous()


@vector_add.register_fake
def _(x: Tensor, _y: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Nothing: the gradients need nothing of it."""


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for needed in ctx.needs_input_grad)


vector_add.register_autograd(_differentiate, setup_context=_keep)
