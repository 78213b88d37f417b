"""`Block`, the value that kernels compute with: a numpy array, or numpy scalar, and its Triton dtype."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import (
    SCALARS,
    Array,
    bitcast,
    constant,
    convert,
    is_pointer,
    number_dtype,
    pointed_size,
    quiet,
    round_to_zero,
    unwrap,
)
from tlxgen.simulator.language import arithmetic
from tlxgen.simulator.language.arithmetic import Operation, byte_offsets, plan

#: Functions of `tl` that blocks have as methods; `namespace` fills it.
METHODS: dict[str, Callable[..., Any]] = {}


class Shape(tuple[int, ...]):
    """A shape, which kernels concatenate with lists as well as with tuples."""

    __slots__ = ()

    def __add__(self, other: Any) -> Shape:
        return Shape((*self, *other))

    def __radd__(self, other: Any) -> Shape:
        return Shape((*other, *self))


def binary(operation: Operation, a: Any, b: Any) -> Any:
    """The operation on two blocks, or on a block and a number; NotImplemented if one is neither."""
    a_weak, b_weak = not isinstance(a, Block), not isinstance(b, Block)
    if a_weak:
        a = unwrap(a)
    elif b_weak:
        b = unwrap(b)
    a_dtype = number_dtype(a) if a_weak else a.dtype
    b_dtype = number_dtype(b) if b_weak else b.dtype
    if a_dtype is None or b_dtype is None:
        return NotImplemented
    if operation.compares and (a_weak or b_weak):  # a number that is compared has a type of its own
        a, b, a_weak, b_weak = as_block(a), as_block(b), False, False
    known = plan(operation, a_dtype.name, a_weak, b_dtype.name, b_weak)
    if known is None:
        return _pointer_operation(operation, as_block(a), as_block(b))
    x = known.number(a) if a_weak else a.data if known.convert_a is None else known.convert_a(a.data)
    y = known.number(b) if b_weak else b.data if known.convert_b is None else known.convert_b(b.data)
    try:
        return Block(known.compute(x, y), known.result)
    except ValueError:
        _refuse_shapes(operation.symbol, x, y)


def _refuse_shapes(what: str, *arrays: Array) -> NoReturn:
    shapes = " and ".join(str(list(array.shape)) for array in arrays)
    raise ValueError(f"{what}: the shapes {shapes} do not broadcast") from None


def broadcast_arrays(what: str, *arrays: Array) -> tuple[Array, ...]:
    """The arrays with one shape; `what` is for the error."""
    if all(array.shape == arrays[0].shape for array in arrays):
        return tuple(map(np.asarray, arrays))
    try:
        return tuple(np.broadcast_arrays(*arrays))
    except ValueError:
        _refuse_shapes(what, *arrays)


def _pointer_operation(operation: Operation, a: Block, b: Block) -> Block:
    """Pointers move by elements; their difference is a number of elements; they compare as addresses."""
    if operation is arithmetic.ADD and not is_pointer(a.dtype.name):
        a, b = b, a
    scaled = byte_offsets(a.dtype.name, b.dtype.name)
    if scaled is not None and operation in {arithmetic.ADD, arithmetic.SUBTRACT}:
        offsets = scaled(b.data)
        try:
            return Block(operation.compute(a.data, offsets), a.dtype)
        except ValueError:
            _refuse_shapes(operation.symbol, a.data, offsets)
    if operation.compares:
        return binary(operation, Block(a.data, tl.int64), Block(b.data, tl.int64))  # type: ignore[no-any-return]
    if operation is not arithmetic.SUBTRACT or a.dtype.name != b.dtype.name:
        raise TypeError(f"the operator {operation.symbol} does not take {a.dtype} and {b.dtype}")
    return Block((a.data - b.data) // pointed_size(a.dtype.name), tl.int64)


def _operators(operation: Operation) -> tuple[Callable[[Any, Any], Block], Callable[[Any, Any], Block]]:
    """The operator's method of the left operand and that of the right."""

    def left(self: Any, other: Any) -> Block:
        return binary(operation, self, other)  # type: ignore[no-any-return]

    def right(self: Any, other: Any) -> Block:
        return binary(operation, other, self)  # type: ignore[no-any-return]

    return left, right


class Block:
    """A block of values, or one value if it has no dimensions. Values are never changed in place.

    Operands are read through `data` only, so a subclass may make it a property; it then does not call `__init__`, which
    assigns it.
    """

    __slots__ = ("data", "dtype")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # a numpy scalar on the left leaves the operator to the block

    def __init__(self, data: Array, dtype: tl.dtype) -> None:
        self.data = data
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Block({self.data}, {self.type})"

    @property
    def shape(self) -> Shape:
        """The sizes of the dimensions."""
        return Shape(self.data.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.data.shape)

    @property
    def type(self) -> Any:
        """The dtype of a scalar, the block type of a block."""
        shape = self.data.shape
        return tl.block_type(self.dtype, list(shape)) if shape else self.dtype

    @property
    def T(self) -> Block:  # noqa: N802 (Triton's name)
        """The last two dimensions swapped."""
        return self.trans()

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(f"a block has no attribute {name!r}")
        return functools.partial(METHODS[name], self)

    def _scalar(self) -> Any:
        data = self.data
        if data.ndim:
            raise TypeError(f"a block of shape {list(data.shape)} is no single value")
        return data

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    def __float__(self) -> float:
        return float(self._scalar())

    def __index__(self) -> int:
        if not self.dtype.is_int():
            raise TypeError(f"a value of type {self.dtype} is no index")
        return int(self._scalar())

    __add__, __radd__ = _operators(arithmetic.ADD)
    __sub__, __rsub__ = _operators(arithmetic.SUBTRACT)
    __mul__, __rmul__ = _operators(arithmetic.MULTIPLY)
    __truediv__, __rtruediv__ = _operators(arithmetic.TRUE_DIVIDE)
    __floordiv__, __rfloordiv__ = _operators(arithmetic.FLOOR_DIVIDE)
    __mod__, __rmod__ = _operators(arithmetic.REMAINDER)
    __and__, __rand__ = _operators(arithmetic.AND)
    __or__, __ror__ = _operators(arithmetic.OR)
    __xor__, __rxor__ = _operators(arithmetic.XOR)
    __lshift__, __rlshift__ = _operators(arithmetic.SHIFT_LEFT)
    __rshift__, __rrshift__ = _operators(arithmetic.SHIFT_RIGHT)
    __lt__, __gt__ = _operators(arithmetic.LESS)[0], _operators(arithmetic.GREATER)[0]
    __le__, __ge__ = _operators(arithmetic.LESS_EQUAL)[0], _operators(arithmetic.GREATER_EQUAL)[0]
    __eq__, __ne__ = _operators(arithmetic.EQUAL)[0], _operators(arithmetic.NOT_EQUAL)[0]  # type: ignore[assignment]

    def __neg__(self) -> Block:
        return binary(arithmetic.SUBTRACT, 0, self)  # type: ignore[no-any-return]  # Triton too: -0.0 from no zero

    def __pos__(self) -> Block:
        return self

    def __invert__(self) -> Block:
        if not self.dtype.is_int():
            raise TypeError(f"the operator ~ takes integers, not {self.dtype}")
        return Block(np.invert(self.data), self.dtype)

    def __abs__(self) -> Block:
        return Block(quiet(np.abs)(self.data), self.dtype)

    def __not__(self) -> Block:
        """Triton's `not`, element by element."""
        return ~self.to(tl.int1)

    def logical_and(self, other: Any) -> Block:
        """Triton's `and`: both sides are computed."""
        return self.to(tl.int1) & as_block(other).to(tl.int1)

    def logical_or(self, other: Any) -> Block:
        """Triton's `or`: both sides are computed."""
        return self.to(tl.int1) | as_block(other).to(tl.int1)

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Block:
        """The values, or with `bitcast` the bits, as another dtype."""
        dtype, rounding = unwrap(dtype).scalar, unwrap(fp_downcast_rounding)
        if dtype.name == self.dtype.name:
            return self
        if unwrap(bitcast):
            return Block(_bitcast(self.data, self.dtype, dtype), dtype)
        if rounding not in {None, "rtne", "rtz"}:
            raise ValueError(f"the rounding mode {rounding!r} is not one of rtne, rtz")
        cast = round_to_zero if rounding == "rtz" else convert
        return Block(cast(self.data, self.dtype, dtype), dtype)

    cast = to

    def __getitem__(self, index: Any) -> Block:
        items = tuple(map(unwrap, index)) if isinstance(index, tuple) else (unwrap(index),)
        for item in items:
            if item is not None and item != slice(None):
                raise ValueError(f"a block is indexed with None and full slices only, not {item!r}")
        if sum(item is not None for item in items) > self.data.ndim:
            raise ValueError(f"too many slices for a block of shape {list(self.data.shape)}")
        return Block(self.data[items], self.dtype)

    def reshape(self, *shape: Any, can_reorder: Any = False) -> Block:  # noqa: ARG002 (elements keep their order)
        """The same elements, in row-major order, in another shape."""
        sizes = _integers(shape)
        if math.prod(sizes) != self.numel:
            raise ValueError(f"reshape: {list(self.data.shape)} and {sizes} differ in the number of elements")
        return Block(self.data.reshape(sizes)[()], self.dtype)

    def view(self, *shape: Any) -> Block:
        """The same as `reshape`."""
        return self.reshape(*shape)

    def permute(self, *dims: Any) -> Block:
        """The dimensions in another order."""
        order = _integers(dims)
        if sorted(order) != list(range(self.data.ndim)):
            raise ValueError(f"permute: {order} is no order of {self.data.ndim} dimensions")
        return Block(self.data.transpose(order), self.dtype)

    def trans(self, *dims: Any) -> Block:
        """The dimensions in another order; the last two swapped if none is given."""
        if dims:
            return self.permute(*dims)
        if self.data.ndim < 2:
            raise ValueError(f"trans: a block of shape {list(self.data.shape)} has no two dimensions to swap")
        return Block(self.data.swapaxes(-1, -2), self.dtype)

    def broadcast_to(self, *shape: Any) -> Block:
        """Dimensions of size 1 repeated; a scalar repeated to any shape."""
        sizes, own = _integers(shape), self.data.shape
        if own and (len(own) != len(sizes) or any(a not in {1, b} for a, b in zip(own, sizes, strict=True))):
            raise ValueError(f"broadcast_to: {list(own)} does not broadcast to {sizes}")
        return Block(np.broadcast_to(self.data, sizes)[()], self.dtype)

    def expand_dims(self, axis: Any) -> Block:
        """New dimensions of size 1 at these places of the result."""
        axes = _integers((axis,))
        return Block(np.expand_dims(self.data, tuple(axes)), self.dtype)

    def split(self) -> tuple[Block, Block]:
        """The two halves along a last dimension of size 2."""
        if self.data.shape[-1:] != (2,):
            raise ValueError(f"split: the last dimension of {list(self.data.shape)} is not 2")
        return Block(self.data[..., 0], self.dtype), Block(self.data[..., 1], self.dtype)


_bitcast = bitcast  # `to` has an argument of this name


def _integers(values: tuple[Any, ...]) -> list[int]:
    """Sizes or axes, given one by one or as one sequence."""
    if len(values) == 1:
        only = unwrap(values[0])
        values = tuple(only) if isinstance(only, (tuple, list, tl.tuple)) else (only,)
    return [operator.index(unwrap(value)) for value in values]


def as_block(value: Any) -> Block:
    """A block unchanged, a number as a scalar of Triton's type for it."""
    if isinstance(value, Block):
        return value
    value = unwrap(value)
    dtype = number_dtype(value)
    if dtype is None:
        raise TypeError(f"{value!r} is neither a block nor a number")
    return Block(constant(dtype.name)(value), SCALARS[dtype.name])


def normalise(value: Any) -> Any:
    """The value of a variable after an assignment: numbers become run-time scalars, also in tuples and lists."""
    kind = type(value)
    if kind is int or kind is float or kind is bool:
        return as_block(value)
    if kind is tuple or kind is list:
        return kind(map(normalise, value))
    return value


def widened(block: Block) -> Block:
    """A bfloat16 block as float32, in which Triton compares it."""
    return block.to(tl.float32) if block.dtype.is_bf16() else block


def _extremum(operation: Operation, with_nan: Operation) -> Callable[..., Block]:
    """`tl.minimum` or `tl.maximum`; a number where the other is NaN, unless NaN propagates."""

    def apply(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Block:
        chosen = with_nan if unwrap(propagate_nan) == tl.PropagateNan.ALL else operation
        return binary(chosen, widened(as_block(x)), widened(as_block(y)))  # type: ignore[no-any-return]

    return apply


minimum = _extremum(arithmetic.MINIMUM, arithmetic.MINIMUM_OR_NAN)
maximum = _extremum(arithmetic.MAXIMUM, arithmetic.MAXIMUM_OR_NAN)


def _builtin(constants: Callable[..., Any], blocks: Callable[[Any, Any], Block]) -> Callable[..., Any]:
    """`min` or `max` in a kernel; of constants alone, a constant."""

    def apply(*values: Any) -> Any:
        if any(isinstance(value, Block) for value in values):
            return functools.reduce(blocks, values)
        return constants(map(unwrap, values))

    return apply


builtin_min, builtin_max = _builtin(min, minimum), _builtin(max, maximum)


def builtin_abs(value: Any) -> Any:
    """`abs` in a kernel."""
    return abs(unwrap(value))


def builtin_range(*bounds: Any) -> Iterator[Block]:
    """`range` in a kernel: run-time scalars, of 64 bits if a bound has 64."""
    wide = any(isinstance(bound, Block) and bound.dtype.primitive_bitwidth == 64 for bound in bounds)
    dtype, kind = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for value in range(*(operator.index(unwrap(bound)) for bound in bounds)):
        yield Block(kind(value), dtype)  # type: ignore[arg-type]
