"""The binary operators, and how each computes on two dtypes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import SCALARS, common_dtype, constant, converter, is_pointer, pointed_size, quiet


@dataclass(frozen=True, eq=False)
class Operation:
    """A binary operator. `boolean` computes it on `int1`, where that differs: arithmetic modulo two."""

    symbol: str
    compute: Callable[[Any, Any], Any]
    boolean: Callable[[Any, Any], Any] | None = None
    compares: bool = False
    integers_only: bool = False
    divides: bool = False


@quiet  # type: ignore[untyped-decorator]
def _truncated_quotient(a: Any, b: Any) -> Any:
    """Division of integers as in C. A divisor of zero, undefined there, gives zero."""
    if a.ndim or b.ndim:
        return (a - np.fmod(a, b)) // b
    dividend, divisor = int(a), int(b)
    if not divisor:
        return a.dtype.type(0)
    if divisor == -1:
        return -a  # wraps around for the smallest integer
    quotient = abs(dividend) // abs(divisor)
    return a.dtype.type(quotient if (dividend < 0) == (divisor < 0) else -quotient)


ADD = Operation("+", quiet(operator.add), boolean=operator.xor)
SUBTRACT = Operation("-", quiet(operator.sub), boolean=operator.xor)
MULTIPLY = Operation("*", quiet(operator.mul), boolean=operator.and_)
TRUE_DIVIDE = Operation("/", quiet(operator.truediv), divides=True)
FLOOR_DIVIDE = Operation("//", _truncated_quotient, integers_only=True, divides=True)
REMAINDER = Operation("%", quiet(np.fmod), divides=True)
AND = Operation("&", operator.and_, integers_only=True)
OR = Operation("|", operator.or_, integers_only=True)
XOR = Operation("^", operator.xor, integers_only=True)
SHIFT_LEFT = Operation("<<", operator.lshift, integers_only=True)
SHIFT_RIGHT = Operation(">>", operator.rshift, integers_only=True)
LESS = Operation("<", operator.lt, compares=True)
LESS_EQUAL = Operation("<=", operator.le, compares=True)
GREATER = Operation(">", operator.gt, compares=True)
GREATER_EQUAL = Operation(">=", operator.ge, compares=True)
EQUAL = Operation("==", operator.eq, compares=True)
NOT_EQUAL = Operation("!=", operator.ne, compares=True)
MINIMUM = Operation("minimum", quiet(np.fmin))
MAXIMUM = Operation("maximum", quiet(np.fmax))
MINIMUM_OR_NAN = Operation("minimum", quiet(np.minimum))
MAXIMUM_OR_NAN = Operation("maximum", quiet(np.maximum))


class Plan(NamedTuple):
    """How an operation computes on two dtypes."""

    compute: Callable[[Any, Any], Any]
    result: tl.dtype
    number: Callable[[Any], Any]
    convert_a: Callable[[Any], Any] | None
    convert_b: Callable[[Any], Any] | None


@functools.cache
def plan(operation: Operation, a: str, a_weak: bool, b: str, b_weak: bool) -> Plan | None:
    """The plan for two dtypes, given by name; None where one is a pointer."""
    if is_pointer(a) or is_pointer(b):
        return None
    dtype = common_dtype(a, a_weak, b, b_weak, operation.divides)
    if operation is TRUE_DIVIDE and dtype.is_int():
        dtype = tl.float32
    if operation.integers_only and not dtype.is_int():
        raise TypeError(f"the operator {operation.symbol} takes integers, not {a} and {b}")
    if dtype.is_int1() and operation in {FLOOR_DIVIDE, REMAINDER, SHIFT_LEFT, SHIFT_RIGHT}:
        raise TypeError(f"the operator {operation.symbol} does not take int1")
    return Plan(
        compute=operation.boolean if operation.boolean and dtype.is_int1() else operation.compute,
        result=tl.int1 if operation.compares else dtype,
        number=constant(dtype.name),
        convert_a=None if a == dtype.name else converter(a, dtype.name),
        convert_b=None if b == dtype.name else converter(b, dtype.name),
    )


@functools.cache
def byte_offsets(pointer: str, integer: str) -> Callable[[Any], Any] | None:
    """The function from offsets in elements to bytes; None unless the dtypes are a pointer and an integer."""
    if not is_pointer(pointer) or integer not in SCALARS or not SCALARS[integer].is_int():
        return None
    shift = pointed_size(pointer).bit_length() - 1

    def scaled(data: Any) -> Any:
        offsets = data.astype(np.int64)
        offsets <<= shift  # which wraps around without a warning
        return offsets

    return scaled
