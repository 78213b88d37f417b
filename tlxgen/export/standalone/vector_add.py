"""`vector_add`: x + y."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dispatch import dtype_name, run

if TYPE_CHECKING:
    from torch import Tensor


def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """The sum of two vectors (n,) of one dtype."""
    if x.shape != y.shape or x.dtype != y.dtype or x.dim() != 1:
        return x + y
    result: Tensor = run(
        "vector_add",
        {"n": x.numel(), "dtype": dtype_name(x.dtype)},
        {"x": x, "y": y},
        fits=lambda: all(v.is_contiguous() and v.data_ptr() % 16 == 0 for v in (x, y)),
        otherwise=lambda: x + y,
    )
    return result
