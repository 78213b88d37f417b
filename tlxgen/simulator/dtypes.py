"""Triton's dtypes in numpy: array dtypes, type promotion and conversions.

A dtype is looked up by its name: hashing a `tl.dtype` runs Python code, which is too slow for scalar arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language.core import constexpr
from triton.language.semantic import TritonSemantic

#: The values of a block; a numpy scalar, which has the same methods, if the block has no dimensions.
Array: TypeAlias = np.ndarray[Any, Any]

#: Decorates functions that may overflow: numpy's error settings belong to a context, and each greenlet has its own. A
#: decorator costs a third of a `with`.
quiet: Any = np.errstate(all="ignore")

SCALARS: dict[str, tl.dtype] = {
    dtype.name: dtype
    for dtype in (
        *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
        *(tl.float8e4nv, tl.float8e5, tl.float16, tl.bfloat16, tl.float32, tl.float64),
    )
}

_NUMPY: dict[str, np.dtype[Any]] = {
    "int1": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in SCALARS if name.lstrip("u") in {"int8", "int16", "int32", "int64"}},
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}

_LARGEST_FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

_SEMANTIC = TritonSemantic(None)  # its typing rules need no builder


def unwrap(value: Any) -> Any:
    """The Python value in a `tl.constexpr`, anything else unchanged."""
    return value.value if isinstance(value, constexpr) else value


def is_pointer(name: str) -> bool:
    """Whether a dtype of this name is a pointer."""
    return name.startswith(("pointer<", "const_pointer<"))


def numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """The dtype of the arrays that hold `dtype`; pointers are absolute byte addresses."""
    return _numpy_dtype(dtype.name)


def itemsize(dtype: tl.dtype) -> int:
    """Bytes of an element in memory; an `int1` takes one, a pointer eight."""
    return _numpy_dtype(dtype.name).itemsize


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    if is_pointer(name):
        return np.dtype(np.int64)
    if name not in _NUMPY:
        raise TypeError(f"no numpy dtype holds {name}")
    return _NUMPY[name]


@functools.cache
def pointed_size(pointer: str) -> int:
    """Bytes of the elements that pointers of the named dtype point to; an `int1` takes one."""
    return _numpy_dtype(pointer[pointer.index("<") + 1 : -1]).itemsize


def number_dtype(value: Any) -> tl.dtype | None:
    """Triton's type of a Python number, None for any other value."""
    kind = type(value)
    if kind is int and -(2**31) <= value < 2**31:
        return tl.int32
    if isinstance(value, (bool, int, float)):
        return _SEMANTIC.to_tensor_type(value)
    return None


@functools.cache
def common_dtype(a: str, a_weak: bool, b: str, b_weak: bool, divides: bool = False) -> tl.dtype:
    """Triton's promotion of two named dtypes; a Python number is weak: it adapts to the other's dtype."""
    if a not in SCALARS or b not in SCALARS:
        raise TypeError(f"{a} and {b} have no common dtype")
    return SCALARS[_SEMANTIC.computation_type_impl(SCALARS[a], a_weak, SCALARS[b], b_weak, divides).name]


@functools.cache
def constant(name: str) -> Callable[[Any], Any]:
    """The function from a Python number to a numpy scalar of the named dtype."""
    kind = _numpy_dtype(name).type
    if name == "int1" or name not in SCALARS or SCALARS[name].is_floating():
        return quiet(kind)  # type: ignore[no-any-return]

    def integer(value: int) -> Any:
        try:
            return kind(value)
        except OverflowError:
            raise ValueError(f"the number {value} is out of range for {name}") from None

    return integer


def convert(data: Array, source: tl.dtype, target: tl.dtype) -> Array:
    """The values in another dtype: floats round to nearest even, floats become integers by truncation."""
    converted: Array = converter(source.name, target.name)(data)
    return converted


@functools.cache
def converter(source: str, target: str) -> Callable[[Any], Any]:
    """The function that converts arrays of one named dtype to another."""
    kind = _numpy_dtype(target)
    if _numpy_dtype(source) == kind:
        return _unchanged
    if source.startswith("fp8"):
        return _after(functools.partial(_decode, _float8_values(source)), converter("fp32", target))
    if source == "bf16":
        return _after(bfloat16_to_float32, converter("fp32", target))
    if target.startswith("fp8"):
        return _after(converter(source, "fp32"), functools.partial(_to_float8, kind))

    @quiet  # type: ignore[untyped-decorator]
    def cast(data: Any) -> Any:
        return data.astype(kind)

    return cast  # type: ignore[no-any-return]


def _unchanged(data: Any) -> Any:
    return data


def _after(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The composition of two conversions."""
    return first if second is _unchanged else second if first is _unchanged else lambda data: second(first(data))


def bfloat16_to_float32(data: Array) -> Array:
    """Exact: bfloat16 is the upper half of a float32."""
    bits = data.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


@functools.cache
def _float8_values(name: str) -> Array:
    """The 256 values of an 8-bit float: looking them up is several times as fast as converting."""
    return np.arange(256, dtype=np.uint8).view(_numpy_dtype(name)).astype(np.float32)


def _decode(values: Array, data: Array) -> Array:
    decoded: Array = values[data.view(np.uint8)]
    return decoded


@quiet  # type: ignore[untyped-decorator]
def _to_float8(kind: np.dtype[Any], data: Array) -> Array:
    """Saturates like the instruction `cvt.rn.satfinite`: infinities too become the largest finite value."""
    largest = np.float32(_LARGEST_FLOAT8[kind.name])
    return np.clip(data, -largest, largest).astype(kind)


def round_to_zero(data: Array, source: tl.dtype, target: tl.dtype) -> Array:
    """The conversion between floats that rounds toward zero."""
    nearest = convert(data, source, target)
    grew = np.abs(convert(nearest, target, source)) > np.abs(data)
    bits = nearest.view(f"u{nearest.dtype.itemsize}")
    # A float's magnitude and its bits have the same order: one less is the next value toward zero.
    rounded: Array = (bits - grew.astype(bits.dtype)).view(nearest.dtype)
    return rounded


def bitcast(data: Array, source: tl.dtype, target: tl.dtype) -> Array:
    """The same bits as another dtype of the same width."""
    if is_pointer(source.name) or is_pointer(target.name):
        return convert(data, source, target)
    if source.primitive_bitwidth != target.primitive_bitwidth:
        raise ValueError(f"cannot bitcast {source}, which has {source.primitive_bitwidth} bits, to {target}")
    return data.view(numpy_dtype(target))
