"""What the assembly in tlxgen's own templates means."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import Array, convert
from tlxgen.simulator.language.assembly import meaning, register

__all__ = ["meaning", "multiply_unless_one"]  # `meaning` knows those below, and what others have registered


def multiply_unless_one(values: int) -> str:
    """In place: `values` values of a thread times their factors, unless those of all its warp are 1."""
    first = 2 * values
    tests = (
        "{ .reg .pred some;\n"
        f"setp.neu.f32 some, ${first}, 0f3F800000;\n"
        f"setp.neu.or.f32 some, ${first + 2}, 0f3F800000, some;\n"
        "vote.sync.any.pred some, some, 0xffffffff;\n"
    )
    return tests + "".join(f"@some mul.f32 ${i}, ${i}, ${i + first};\n" for i in range(values)) + "}"


@register(multiply_unless_one(32))
@register(multiply_unless_one(64))
def _product(values: Array, factors: Array) -> Array:
    return values * factors


def _in_pairs(low: Array, high: Array, dtype: tl.dtype) -> Array:
    bits = [convert(part, tl.float32, dtype).view(np.uint16).astype(np.uint32) for part in (low, high)]
    return (bits[0] | bits[1] << np.uint32(16)).view(np.int32)


@register("cvt.rn.bf16x2.f32 $0, $2, $1;")
def _bf16_in_pairs(low: Array, high: Array) -> Array:
    return _in_pairs(low, high, tl.bfloat16)


@register("cvt.rn.f16x2.f32 $0, $2, $1;")
def _fp16_in_pairs(low: Array, high: Array) -> Array:
    return _in_pairs(low, high, tl.float16)
