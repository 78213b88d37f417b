"""`gemm`: activation(scale · A B + bias) + residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dispatch import dtype_name, run

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(scale · A B + bias) + residual.

    Args:
        a: (M, K).
        b: (K, N).
        bias: (N,), in the dtype of A.
        residual: (M, N), in the dtype of the result.
        scale: a number.
        activation: `relu`, `gelu` (the exact form) or `silu`.
        out_dtype: of the result; that of A by default.

    Returns:
        (M, N).
    """
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use one of {', '.join(_ACTIVATIONS)}")
    out_dtype = a.dtype if out_dtype is None else out_dtype

    def otherwise() -> Tensor:
        product = torch.mm(a, b) if out_dtype == a.dtype else _wide(a, b)
        product = product if scale is None else product * scale
        product = product if bias is None else product + bias
        product = product if activation is None else _ACTIVATIONS[activation](product)
        product = product if residual is None else product + residual
        return product.to(out_dtype)

    if a.layout is not torch.strided or b.layout is not torch.strided:
        return otherwise()
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        return otherwise()  # torch raises
    m, k, n = *a.shape, b.shape[1]
    if (bias is not None and (bias.shape != (n,) or bias.dtype != a.dtype)) or (
        residual is not None and (residual.shape != (m, n) or residual.dtype != out_dtype)
    ):
        return otherwise()
    given = {"scale": scale, "bias": bias, activation: activation, "residual": residual}
    parts = [str(part) for part, value in given.items() if value is not None]
    problem = {
        "M": m,
        "N": n,
        "K": k,
        "dtype": dtype_name(a.dtype),
        "out_dtype": dtype_name(out_dtype),
        "layout": _layout(a) + _layout(b),
        "epilogue": "+".join(parts) or "none",
    }
    tensors: dict[str, Any] = {"a": a, "b": b, "bias": bias, "residual": residual, "scale": scale}
    tensors = {name: value for name, value in tensors.items() if value is not None}

    def fits() -> bool:
        return (
            _lies_well(a)
            and _lies_well(b)
            and (bias is None or bias.is_contiguous())
            and (residual is None or (residual.is_contiguous() and residual.data_ptr() % 16 == 0))
        )

    result: Tensor = run("gemm", problem, tensors, fits=fits, otherwise=otherwise)
    return result


def _layout(matrix: Tensor) -> str:
    """`t` where columns are contiguous, else `n`."""
    return "t" if matrix.stride(0) == 1 and matrix.stride(1) != 1 else "n"


def _lies_well(matrix: Tensor) -> bool:
    """Whether a matrix is dense and aligned, as in the tuned problem."""
    return (matrix.is_contiguous() or matrix.mT.is_contiguous()) and matrix.data_ptr() % 16 == 0


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """The product in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
