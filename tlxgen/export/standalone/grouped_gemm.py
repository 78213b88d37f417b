"""`grouped_gemm`: one product for each expert of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .dispatch import dtype_name, run

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
_GATED = {"swiglu": "silu", "geglu": "gelu"}


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Tensor | None = None,
    rows: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    group_sizes: str = "dirichlet",
) -> Tensor:
    """activation(A[e] B[e] + bias[e]) for every expert e.

    | a | b | result | tokens of expert e |
    |---|---|---|---|
    | (tokens, K) | (E, K, N) | (tokens, N) | rows of a from offs[e - 1] to offs[e] |
    | (E, N, K) | (K, tokens) | (N, tokens) | columns of b |
    | (K, tokens) | (tokens, N) | (E, K, N) | columns of a, rows of b: what is summed over |
    | (E, M, K) | (E, K, N) | (E, M, N) | all rows of a[e]; without offs |

    Args:
        a: see above; with `rows` any number of rows.
        b: see above.
        offs: (E,), int32: where each expert's tokens end, not decreasing.
        rows: (tokens,), int32: which row of a each token is.
        scale_a: (tokens,), float32: scale of each row of a, for 8-bit floats.
        scale_b: (E, N), float32: scale of each column of b, for 8-bit floats.
        bias: (E, N).
        activation: `relu`, `gelu` (the exact form) or `silu`; `swiglu` or `geglu`, whose result has N / 2 columns.
        out_dtype: of the result; that of a by default, bfloat16 of 8-bit floats.
        group_sizes: distribution of tokens, as in the table; it selects a kernel, the result does not depend on it.

    Returns:
        As above. Rows that no expert owns are not written by kernels, and zero by torch, which waits for the device.
    """
    if activation is not None and activation not in (*_ACTIVATIONS, *_GATED):
        raise ValueError(f"activation is {activation!r}; use one of {', '.join((*_ACTIVATIONS, *_GATED))}")
    form = "gather" if rows is not None else f"{a.dim()}d{b.dim()}d"
    sizes = _sizes(form, a, b, offs, rows)
    if sizes is None:
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}: see `grouped_gemm.__doc__`")
    small = a.element_size() == 1
    out_dtype = (torch.bfloat16 if small else a.dtype) if out_dtype is None else out_dtype
    parts = [part for part in ("bias" if bias is not None else None, activation) if part]
    problem = {
        **sizes,
        "dtype": dtype_name(a.dtype),
        "out_dtype": dtype_name(out_dtype),
        "form": form,
        "layout": _layout(a) + _layout(b),
        "epilogue": "+".join(parts) or "none",
        "max_rows": 0,
        "group_sizes": "even" if form == "3d3d" else group_sizes,
    }
    given = {"a": a, "b": b, "rows": rows, "offs": offs, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    tensors: dict[str, Any] = {name: value for name, value in given.items() if value is not None}

    def fits() -> bool:
        others = [value for name, value in tensors.items() if name not in ("a", "b")]
        return (
            a.dtype == b.dtype
            and small == (scale_a is not None) == (scale_b is not None)
            and all(value.dtype == torch.int32 for value in (offs, rows) if value is not None)
            and all(map(_lies_well, (a, b)))
            and all(value.is_contiguous() for value in others)
        )

    def otherwise() -> Tensor:
        return _by_torch(form, tensors, activation, out_dtype)

    result: Tensor = run("grouped_gemm", problem, tensors, fits=fits, otherwise=otherwise)
    return result


def _sizes(form: str, a: Tensor, b: Tensor, offs: Tensor | None, rows: Tensor | None) -> dict[str, int] | None:
    """Sizes as in the table; None if the shapes make no product."""
    if form == "3d3d":
        fits = offs is None and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
        return {"E": len(b), "ROWS": a.shape[0] * a.shape[1], "N": b.shape[2], "K": b.shape[1]} if fits else None
    if offs is None:
        return None
    if form in ("2d3d", "gather"):
        fits = b.dim() == 3 and b.shape[:2] == (len(offs), a.shape[1])
        tokens = a.shape[0] if rows is None else len(rows)
        return {"E": len(b), "ROWS": tokens, "N": b.shape[2], "K": b.shape[1]} if fits else None
    if form == "3d2d":
        fits = a.shape[0] == len(offs) and a.shape[2] == b.shape[0]
        return {"E": len(a), "ROWS": b.shape[1], "N": a.shape[1], "K": a.shape[2]} if fits else None
    if form == "2d2d" and a.shape[1] == b.shape[0]:
        return {"E": len(offs), "ROWS": b.shape[0], "N": b.shape[1], "K": a.shape[0]}
    return None


def _layout(matrix: Tensor) -> str:
    """`t` where columns are contiguous, else `n`."""
    return "t" if matrix.stride(-2) == 1 and matrix.stride(-1) != 1 else "n"


def _lies_well(matrix: Tensor) -> bool:
    """Whether matrices are dense and aligned, as in the tuned problem."""
    return (matrix.is_contiguous() or matrix.mT.is_contiguous()) and matrix.data_ptr() % 16 == 0


def _by_torch(form: str, tensors: dict[str, Any], activation: str | None, out_dtype: torch.dtype) -> Tensor:
    """One product after another."""
    a, b, bias = tensors["a"], tensors["b"], tensors.get("bias")
    if "rows" in tensors:
        a = a[tensors["rows"]]
    if "scale_a" in tensors:
        a, b = a.float() * tensors["scale_a"][:, None], b.float() * tensors["scale_b"][:, None]
    ends = None if form == "3d3d" else tensors["offs"].tolist()
    shapes = {"3d2d": (*a.shape[1:2], b.shape[-1]), "2d2d": (len(ends or ()), a.shape[0], b.shape[-1])}
    columns = b.shape[-1] // 2 if activation in _GATED else b.shape[-1]
    out: Tensor = a.new_zeros(shapes.get(form, (*a.shape[:-1], columns)), dtype=out_dtype)
    for expert, x, y, z in _experts("2d3d" if form == "gather" else form, a, b, out, ends):
        product = (x @ y).float()
        product = product if bias is None else product + bias[expert].float()
        z.copy_(_activated(product, activation))
    return out


def _activated(product: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return product
    if activation in _ACTIVATIONS:
        return _ACTIVATIONS[activation](product)
    gate, up = product.chunk(2, -1)
    result: Tensor = _ACTIVATIONS[_GATED[activation]](gate) * up
    return result


def _experts(
    form: str, a: Tensor, b: Tensor, out: Tensor, ends: list[int] | None
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Each expert's number and its parts of A, B and the result."""
    if ends is None:
        yield from ((expert, a[expert], b[expert], out[expert]) for expert in range(len(b)))
        return
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if form == "2d3d":
            yield expert, a[start:end], b[expert], out[start:end]
        elif form == "3d2d":
            yield expert, a[expert], b[:, start:end], out[:, start:end]
        else:
            yield expert, a[:, start:end], b[start:end], out[expert]
