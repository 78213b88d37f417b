"""Torch's original functions, saved before a program replaces them by those of `tlxgen.functional`.

    torch.nn.functional.scaled_dot_product_attention = tlxgen.functional.scaled_dot_product_attention

A replacement that passes a call on to torch calls these; calling the patched name would recurse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["add", "grouped_mm", "linear", "matmul", "scaled_dot_product_attention"]

add = torch.add
matmul = torch.matmul
#: Public since torch 2.10; None before torch 2.8, which has none.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_attention: Any = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(*tensors: Any, **options: Any) -> Tensor:
    """Torch's function, with a result for a batch of 0 too.

    On Hopper torch 2.11 tries cuDNN first, which returns None for a batch of 0.
    """
    result: Tensor | None = _attention(*tensors, **options)
    if result is not None:
        return result
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        nothing: Tensor = _attention(*tensors, **options)
    return nothing
