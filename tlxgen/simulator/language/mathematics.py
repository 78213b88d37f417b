# ruff: noqa: ARG001 (Triton's keywords, among them hints that change no value)
"""Elementwise functions; transcendental ones may differ from the GPU in the last bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import common_dtype, convert, numpy_dtype, quiet, unwrap
from tlxgen.simulator.language.blocks import Block, as_block, maximum, minimum, widened
from tlxgen.simulator.language.reductions import reduce_max, reduce_sum


def _special(name: str) -> Callable[..., Any]:
    """A function of `scipy.special`, imported when it is called."""

    def call(x: Any) -> Any:
        from scipy import special

        return getattr(special, name)(x)

    return call


def common(*blocks: Block) -> tl.dtype:
    """The dtype that all of the blocks are promoted to."""
    names = [block.dtype.name for block in blocks]
    return functools.reduce(
        lambda dtype, name: common_dtype(dtype.name, False, name, False), names[1:], blocks[0].dtype
    )


def _floating(name: str, function: Callable[..., Any], result: tl.dtype | None = None) -> Callable[..., Block]:
    """A function of floats; halves are computed in float32 and rounded once."""
    compute = quiet(function)

    def apply(*operands: Any) -> Block:
        blocks = [as_block(operand) for operand in operands]
        dtype = common(*blocks)
        if not dtype.is_floating():
            raise TypeError(f"{name} takes floats, not {dtype}")
        wide = dtype if dtype.primitive_bitwidth >= 32 else tl.float32
        try:
            data = compute(*(convert(block.data, block.dtype, wide) for block in blocks))
        except ValueError:
            shapes = " and ".join(str(list(block.data.shape)) for block in blocks)
            raise ValueError(f"{name}: the shapes {shapes} do not broadcast") from None
        if result is not None:
            return Block(data.astype(numpy_dtype(result)), result)
        return Block(convert(data, wide, dtype), dtype)

    apply.__name__ = name
    return apply


def _rsqrt(x: Any) -> Any:
    return 1 / np.sqrt(x)


def _fused(x: Any, y: Any, z: Any) -> Any:
    """In float64, which holds the product of two float32 exactly."""
    return (x.astype(np.float64) * y + z).astype(x.dtype)


_ELEMENTARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "floor", "ceil")},
    "erf": _special("erf"),
    "rsqrt": _rsqrt,
}

#: The elementary functions of `tl` and `tl.math`, by name.
ELEMENTARY: dict[str, Callable[..., Block]] = {
    **{name: _floating(name, function) for name, function in _ELEMENTARY.items()},
    "sqrt_rn": _floating("sqrt_rn", np.sqrt),
    "div_rn": _floating("div_rn", np.divide),
    "fma": _floating("fma", _fused),
}

_NUMPY_NAMES = ("tan", "sinh", "cosh", "tanh", "expm1", "log1p", "log10", "trunc", "rint", "cbrt", "hypot", "copysign")
_LIBDEVICE: dict[str, Callable[..., Any]] = {
    **_ELEMENTARY,
    **{name: getattr(np, name) for name in _NUMPY_NAMES},
    **{name: getattr(np, f"arc{name[1:]}") for name in ("asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh")},
    **{f"fast_{name}f": _ELEMENTARY[name] for name in ("sin", "cos", "log2", "exp")},
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "fast_exp10f": lambda x: np.power(x.dtype.type(10), x),
    "fast_logf": np.log,
    "fast_log10f": np.log10,
    "fast_tanf": np.tan,
    "fast_tanhf": np.tanh,
    "fast_powf": np.power,
    "fast_dividef": np.divide,
    "pow": np.power,
    "erfc": _special("erfc"),
    "fma": _fused,
    "fma_rn": _fused,
    "fmod": np.fmod,
    "remainder": lambda x, y: x - y * np.rint(x / y),
    "round": lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x)),
    "nearbyint": np.rint,
    "nextafter": np.nextafter,
    "saturatef": lambda x: np.fmin(np.fmax(x, 0), 1),
    "rcp_rn": lambda x: 1 / x,
    "sqrt_rn": np.sqrt,
    "rsqrt_rn": _rsqrt,
    "div_rn": np.divide,
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "mul_rn": np.multiply,
}
_PREDICATES: dict[str, tuple[Callable[..., Any], tl.dtype]] = {
    "isnan": (np.isnan, tl.int1),
    "isinf": (np.isinf, tl.int1),
    "finitef": (np.isfinite, tl.int32),
    "isfinited": (np.isfinite, tl.int32),
    "signbit": (np.signbit, tl.int32),
}


def absolute(x: Any) -> Block:
    """`tl.abs`."""
    return abs(as_block(x))


#: The functions of `libdevice`, by name.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    **{name: _floating(name, function) for name, function in _LIBDEVICE.items()},
    **{name: _floating(name, function, result) for name, (function, result) in _PREDICATES.items()},
    "abs": absolute,
}


def cdiv(x: Any, div: Any) -> Any:
    """`tl.cdiv`; of constants, a constant."""
    return (x + (div - 1)) // div


def sigmoid(x: Any) -> Block:
    """`tl.sigmoid`."""
    return 1 / (1 + ELEMENTARY["exp"](-as_block(x)))


def softmax(x: Block, dim: Any = None, keep_dims: Any = False, ieee_rounding: Any = False) -> Block:
    """`tl.softmax`, along the first dimension if none is given."""
    axis = 0 if unwrap(dim) is None else dim
    numerator = ELEMENTARY["exp"](x - reduce_max(x, axis, keep_dims=keep_dims))
    return fdiv(numerator, reduce_sum(numerator, axis, keep_dims=keep_dims))


def fdiv(x: Any, y: Any, ieee_rounding: Any = False) -> Block:
    """`tl.fdiv`."""
    a, b = as_block(x), as_block(y)
    if not (a.dtype.is_floating() and b.dtype.is_floating()):
        raise TypeError(f"fdiv takes floats, not {a.dtype} and {b.dtype}")
    return a / b


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Block:  # noqa: A002 (Triton's names)
    """`tl.clamp`; a NaN becomes the lower bound, unless it propagates."""
    x, low, high = (widened(as_block(value)) for value in (x, min, max))
    dtype = common(x, low, high)
    if not dtype.is_floating():
        raise TypeError(f"clamp takes floats, not {dtype}")
    return minimum(maximum(x.to(dtype), low.to(dtype), propagate_nan), high.to(dtype), propagate_nan)


def where(condition: Any, x: Any, y: Any) -> Block:
    """`tl.where`; a Python number takes the other side's dtype, as in arithmetic."""
    chosen = as_block(condition).to(tl.int1).data
    x, y = unwrap(x), unwrap(y)
    a, b = as_block(x), as_block(y)
    dtype = a.dtype  # of pointers too
    if dtype != b.dtype:
        dtype = common_dtype(dtype.name, not isinstance(x, Block), b.dtype.name, not isinstance(y, Block))
    try:
        data = np.where(chosen, a.to(dtype).data, b.to(dtype).data)
    except ValueError:
        shapes = [list(each.shape) for each in (chosen, a.data, b.data)]
        raise ValueError(f"where: the shapes {shapes} do not broadcast") from None
    return Block(data[()], dtype)


def umulhi(x: Any, y: Any) -> Block:
    """`tl.umulhi`: the upper half of the product of unsigned integers."""
    x, y = as_block(x), as_block(y)
    dtype = common(x, y)
    bits = dtype.int_bitwidth
    if not dtype.is_int() or bits < 32:
        raise TypeError(f"umulhi takes integers of 32 or 64 bits, not {dtype}")
    # Python's integers hold the product of any two.
    a, b = (np.asarray(block.to(dtype).data.view(f"u{bits // 8}")).astype(object) for block in (x, y))
    upper = np.asarray((a * b) >> bits).astype(f"u{bits // 8}")
    return Block(upper.view(numpy_dtype(dtype))[()], dtype)
