"""Meanings of inline assembly: a Python function for each text, registered beside the kernel that uses it.

>>> import numpy as np
>>> @register("ex2.approx.ftz.f32 $0, $1;")
... def exp2(x):
...     return np.exp2(x)

The assembly of tlxgen's own templates is registered here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import Array, convert

F = TypeVar("F", bound=Callable[..., Any])

_MEANINGS: dict[str, Callable[..., Any]] = {}


def register(text: str) -> Callable[[F], F]:
    """Decorates the meaning of a piece of assembly: from the operands' arrays to an array, or a tuple of them.

    White space does not count; everything else in the text does.
    """

    def keep(function: F) -> F:
        _MEANINGS[_key(text)] = function
        return function

    return keep


def lookup(text: str) -> Callable[..., Any] | None:
    """The function that was registered for a text."""
    return _MEANINGS.get(_key(text))


def _key(text: str) -> str:
    return " ".join(text.split())


def _multiply_unless_one(values: int) -> str:
    """In place: `values` values of a thread times their factors, unless all factors of its warp are 1."""
    first = 2 * values
    tests = (
        "{ .reg .pred some;\n"
        f"setp.neu.f32 some, ${first}, 0f3F800000;\n"
        f"setp.neu.or.f32 some, ${first + 2}, 0f3F800000, some;\n"
        "vote.sync.any.pred some, some, 0xffffffff;\n"
    )
    return tests + "".join(f"@some mul.f32 ${i}, ${i}, ${i + first};\n" for i in range(values)) + "}"


@register(_multiply_unless_one(32))
@register(_multiply_unless_one(64))
def _product(values: Array, factors: Array) -> Array:
    return values * factors


def _pairs(low: Array, high: Array, dtype: tl.dtype) -> Array:
    bits = [convert(part, tl.float32, dtype).view(np.uint16).astype(np.uint32) for part in (low, high)]
    return (bits[0] | bits[1] << np.uint32(16)).view(np.int32)


@register("cvt.rn.bf16x2.f32 $0, $2, $1;")
def _bf16_pairs(low: Array, high: Array) -> Array:
    return _pairs(low, high, tl.bfloat16)


@register("cvt.rn.f16x2.f32 $0, $2, $1;")
def _fp16_pairs(low: Array, high: Array) -> Array:
    return _pairs(low, high, tl.float16)
