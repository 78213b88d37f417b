# ruff: noqa: ARG001 (Triton's keywords, among them hints that change no value)
"""Matrix products as tensor cores compute them: what they read of an operand, and in which dtype they add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import Array, convert, numpy_dtype, quiet, unwrap
from tlxgen.simulator.language.blocks import Block

_TF32_BITS = np.uint32(0xFFFFE000)  # sign, exponent and the upper 10 bits of a float32's mantissa


def truncate_to_tf32(data: Array) -> Array:
    """What tensor cores read of a float32: the low 13 bits of the mantissa are ignored."""
    truncated: Array = (data.view(np.uint32) & _TF32_BITS).view(np.float32)
    return truncated


def round_to_tf32(data: Array) -> Array:
    """To the nearest number with 10 bits of mantissa, ties to even: so TMA rounds on the way in (shown on an H200)."""
    bits = data.view(np.uint32)
    rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isfinite(data), (rounded & _TF32_BITS).view(np.float32), data)


@quiet  # type: ignore[untyped-decorator]
def multiply(a: Block, b: Block, acc: Array | None, dtype: tl.dtype, *, precise: bool = False) -> Array:
    """A·B, added to `acc` and rounded to `dtype`; sums are in an order of numpy's choice.

    Args:
        a: operand.
        b: operand, of the same kind.
        acc: values of the accumulator, which stay as they are.
        dtype: of the result.
        precise: whether float32 operands count with all their bits.
    """
    product = np.matmul(_factor(a, precise), _factor(b, precise))
    if dtype.is_int():
        product = product.astype(np.int32)
    if acc is not None:
        product += acc
    rounded: Array = product.astype(numpy_dtype(dtype), copy=False)
    return rounded


def _factor(block: Block, precise: bool) -> Array:
    """An operand in a dtype that BLAS multiplies, and that holds it exactly."""
    if block.dtype.is_int():
        return block.data.astype(np.float64)  # products and sums of 8-bit integers are exact
    if block.dtype.is_fp64():
        return block.data
    data = convert(block.data, block.dtype, tl.float32)
    return truncate_to_tf32(data) if block.dtype.is_fp32() and not precise else data


def _result_dtype(a: Block, b: Block, out_dtype: tl.dtype) -> tl.dtype:
    if a.dtype.is_int() != b.dtype.is_int() or (a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8())):
        raise TypeError(f"dot: the operands have the dtypes {a.dtype} and {b.dtype}")
    if a.dtype.is_int():
        if not a.dtype.is_int8():
            raise TypeError(f"dot multiplies integers of the dtype int8 only, not {a.dtype}")
        return tl.int32
    if out_dtype.is_bf16():
        raise TypeError("dot: out_dtype is float32 or float16, not bfloat16")
    if a.dtype.is_fp64():
        return tl.float64
    return tl.float32 if a.dtype.is_fp32() or a.dtype.is_bf16() else out_dtype


def dot(
    x: Block,
    other: Block,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = tl.float32,
    **hints: Any,
) -> Block:
    """`tl.dot`; float32 operands count as TF32 by default."""
    acc, precision = unwrap(acc), unwrap(input_precision)
    a_shape, b_shape = list(x.data.shape), list(other.data.shape)
    if not len(a_shape) == len(b_shape) >= 2 or a_shape[:-2] != b_shape[:-2] or a_shape[-1] != b_shape[-2]:
        raise ValueError(f"dot: the shapes {a_shape} and {b_shape} do not fit")
    if acc is not None and list(acc.data.shape) != [*a_shape[:-1], b_shape[-1]]:
        raise ValueError(f"dot: the accumulator's shape is {list(acc.data.shape)}, not {[*a_shape[:-1], b_shape[-1]]}")
    dtype = _result_dtype(x, other, unwrap(out_dtype))
    if acc is not None and acc.dtype != dtype:
        raise TypeError(f"dot: the accumulator's dtype is {acc.dtype}, not {dtype}")
    precise = unwrap(allow_tf32) is False if precision is None else precision.lower() != "tf32"
    return Block(multiply(x, other, None if acc is None else acc.data, dtype, precise=precise), dtype)
