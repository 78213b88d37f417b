"""`Language`, the simulated `triton.language`: every supported name of `tl`, and a clear error for any other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import constexpr

from tlxgen.errors import TlxgenError
from tlxgen.simulator.dtypes import Array, convert, numpy_dtype, quiet, unwrap
from tlxgen.simulator.language import assembly, mathematics, reductions, shapes, tensor_cores
from tlxgen.simulator.language.blocks import METHODS, Block, as_block, broadcast_arrays, builtin_range, maximum, minimum
from tlxgen.simulator.language.global_operations import GlobalOperations


class UnsupportedOperationError(TlxgenError, AttributeError):
    """A name of Triton that the simulator does not support."""


class Namespace:
    """A namespace with these members; any other name is an unsupported operation."""

    def __init__(self, name: str, members: Mapping[str, Any]) -> None:
        self._name = name
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOperationError(f"{self.__dict__.get('_name', 'tl')}.{name} is not supported by the simulator")


def unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `tl.constexpr` arguments replaced by their values."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, constexpr):
                args = tuple(map(unwrap, args))
                break
        if kwargs:
            kwargs = {name: unwrap(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return call


_SHAPES: dict[str, Callable[..., Any]] = {
    **{name: getattr(Block, name) for name in ("reshape", "view", "permute", "trans", "broadcast_to", "split")},
    **{name: getattr(shapes, name) for name in ("arange", "full", "full_like", "squeeze", "item")},
    **{name: getattr(shapes, name) for name in ("join", "interleave", "cat", "broadcast", "swizzle2d")},
    "zeros": lambda shape, dtype: shapes.full(shape, 0, dtype),
    "zeros_like": lambda x: shapes.full(x.shape, 0, x.dtype),
    "ravel": lambda x, can_reorder=False: x.reshape(x.numel),  # noqa: ARG005 (elements keep their order)
    "expand_dims": lambda x, axis: as_block(x).expand_dims(axis),
    "unsqueeze": lambda x, dim: x.expand_dims(dim),
    "cast": lambda x, *args, **options: as_block(x).to(*args, **options),
}

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": reductions.reduce_sum,
    "max": reductions.reduce_max,
    "min": reductions.reduce_min,
    **{name: getattr(reductions, name) for name in ("argmax", "argmin", "xor_sum", "reduce_or", "reduce")},
    **{name: getattr(reductions, name) for name in ("associative_scan", "cumsum", "cumprod", "sort", "topk")},
    **{name: getattr(reductions, name) for name in ("flip", "gather", "histogram")},
    "bitonic_merge": reductions.sort,
}

_MATHEMATICS: dict[str, Callable[..., Any]] = {
    **mathematics.ELEMENTARY,
    "abs": mathematics.absolute,
    **{name: getattr(mathematics, name) for name in ("umulhi", "fdiv")},
}

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **_MATHEMATICS,
    **{name: getattr(mathematics, name) for name in ("cdiv", "sigmoid", "softmax", "clamp", "where")},
    "dot": tensor_cores.dot,
    "maximum": maximum,
    "minimum": minimum,
    "add": lambda x, y, sanitize_overflow=True: as_block(x) + y,  # noqa: ARG005 (Triton's keyword)
    "sub": lambda x, y, sanitize_overflow=True: as_block(x) - y,  # noqa: ARG005
    "mul": lambda x, y, sanitize_overflow=True: as_block(x) * y,  # noqa: ARG005
}

METHODS.update(_REDUCTIONS | _ELEMENTWISE | {name: _SHAPES[name] for name in ("ravel", "item")})


def _static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise AssertionError(message or "static_assert")


def _nothing(*_args: Any, **_options: Any) -> None:
    """An instruction without an effect on values."""


_CONTROL: dict[str, Callable[..., Any]] = {
    "static_assert": _static_assert,
    **dict.fromkeys(("static_print", "device_print"), lambda *values, **_options: print(*values)),  # noqa: T201
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), lambda block, *_values, **_options: block),
    "range": lambda *bounds, **_options: builtin_range(*bounds),
    "static_range": lambda *bounds, **_options: range(*map(unwrap, bounds)),
    "load_tensor_descriptor": lambda descriptor, offsets: descriptor.load(offsets),
    "store_tensor_descriptor": lambda descriptor, offsets, value: descriptor.store(offsets, value),
    "to_tensor": as_block,
}

#: Types and values of options that are Triton's own.
_TRITON = (
    *("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "void", "pi32_t"),
    *("float8e4nv", "float8e5", "float8e4b8", "float8e4b15", "float8e5b16", "float16", "bfloat16", "float32"),
    *("float64", "dtype", "pointer_type", "block_type", "tuple_type", "tensor", "tensor_descriptor", "const", "core"),
    *("PropagateNan", "ReductionOrdering", "TRITON_MAX_TENSOR_NUMEL"),
)


def _namespace(name: str, functions: Mapping[str, Callable[..., Any]]) -> Namespace:
    return Namespace(name, {name: unwrapping(function) for name, function in functions.items()})


_LIBDEVICE = _namespace("tl.extra.libdevice", mathematics.LIBDEVICE)
_CUDA = {"libdevice": _LIBDEVICE, "gdc_wait": _nothing, "gdc_launch_dependents": _nothing}

#: All members of `tl` that do not depend on the machine.
_PURE: dict[str, Any] = {
    **{name: unwrapping(f) for name, f in (_SHAPES | _REDUCTIONS | _ELEMENTWISE | _CONTROL).items()},
    **{name: getattr(tl, name) for name in _TRITON},
    "constexpr": unwrap,
    "math": _namespace("tl.math", _MATHEMATICS),
    "extra": Namespace("tl.extra", {"libdevice": _LIBDEVICE, "cuda": Namespace("tl.extra.cuda", _CUDA)}),
}

_ATOMICS: dict[str, Callable[[Any, Any], Any]] = {
    "atomic_add": quiet(np.add),
    "atomic_max": quiet(np.fmax),
    "atomic_min": quiet(np.fmin),
    "atomic_and": np.bitwise_and,
    "atomic_or": np.bitwise_or,
    "atomic_xor": np.bitwise_xor,
    "atomic_xchg": lambda _old, new: new,
}


class Language(Namespace):
    """The namespace `tl` of kernels on one machine."""

    def __init__(self, operations: GlobalOperations) -> None:
        super().__init__("tl", _PURE)
        self._operations = operations
        for name, operation in _ATOMICS.items():
            setattr(self, name, functools.partial(self._atomic, operation))

    def program_id(self, axis: Any) -> Block:
        """`tl.program_id`."""
        return Block(np.int32(self._operations.program_id(int(unwrap(axis)))), tl.int32)  # type: ignore[arg-type]

    def num_programs(self, axis: Any) -> Block:
        """`tl.num_programs`."""
        return Block(np.int32(self._operations.num_programs(int(unwrap(axis)))), tl.int32)  # type: ignore[arg-type]

    def load(self, pointer: Block, mask: Any = None, other: Any = None, **_hints: Any) -> Block:
        """`tl.load` through pointers; without `other`, lanes that are masked out are undefined."""
        element = _element(pointer, "load")
        mask, other = unwrap(mask), unwrap(other)
        if mask is None:
            if other is not None:
                raise ValueError("load: `other` says what masked lanes hold, and there is no mask")
            return self._loaded(np.asarray(pointer.data), None, element)
        addresses, active = broadcast_arrays("load", pointer.data, _mask(mask))
        values = self._loaded(addresses, active, element)
        if other is None:
            return values
        return mathematics.where(Block(active[()], tl.int1), values, as_block(other).to(values.dtype))

    def _loaded(self, addresses: Array, mask: Array | None, element: tl.dtype) -> Block:
        stored = _stored(element)
        values = self._operations.global_load(addresses, stored, mask)
        return Block(np.asarray(values)[()], stored).to(element)

    def store(self, pointer: Block, value: Any, mask: Any = None, **_hints: Any) -> None:
        """`tl.store` through pointers."""
        stored = _stored(_element(pointer, "store", writes=True))
        values = as_block(value).to(stored).data
        addresses, values, active = _lanes("store", pointer, values, unwrap(mask))
        self._operations.global_store(addresses, values, stored, active)

    def _atomic(
        self, operation: Callable[[Any, Any], Any], pointer: Block, val: Any, mask: Any = None, **_semantics: Any
    ) -> Block:
        """The atomic operations that read, compute and write."""
        element = _element(pointer, "atomic", writes=True)
        values = as_block(val).to(element).data
        addresses, values, active = _lanes("atomic", pointer, values, unwrap(mask))
        old = self._operations.global_atomic(addresses, values, element, active, operation)
        return Block(np.asarray(old)[()], element)

    def atomic_cas(self, pointer: Block, cmp: Any, val: Any, **_semantics: Any) -> Block:
        """`tl.atomic_cas`, lane by lane: each has its own value to compare with."""
        element = _element(pointer, "atomic_cas", writes=True)
        addresses, expected = broadcast_arrays("atomic_cas", pointer.data, as_block(cmp).to(element).data)
        addresses, values = broadcast_arrays("atomic_cas", addresses, as_block(val).to(element).data)
        old = np.empty(addresses.shape, numpy_dtype(element))
        for lane in np.ndindex(addresses.shape):
            swap = functools.partial(_swap_if_equal, expected[lane])
            place, value = np.asarray(addresses[lane]), np.asarray(values[lane])
            old[lane] = self._operations.global_atomic(place, value, element, None, swap)
        return Block(old[()], element)

    def make_tensor_descriptor(
        self, base: Block, shape: Sequence[Any], strides: Sequence[Any], block_shape: Any, padding_option: Any = "zero"
    ) -> Any:
        """`tl.make_tensor_descriptor`."""
        sizes, steps, tile = ([int(unwrap(v)) for v in unwrap(values)] for values in (shape, strides, block_shape))
        return self._operations.make_descriptor(base, sizes, steps, tile, unwrap(padding_option))

    def debug_barrier(self) -> None:
        """`tl.debug_barrier`."""
        self._operations.block_barrier()

    def assume(self, condition: Any) -> None:
        """`tl.assume`: the compiled kernel is wrong if the condition is false."""
        if not np.all(as_block(condition).data):
            self._operations.fail("assume", "the condition of tl.assume is false for these arguments")

    def device_assert(self, condition: Any, msg: Any = "", mask: Any = None) -> None:
        """`tl.device_assert`."""
        holds = as_block(condition).to(tl.int1)
        if unwrap(mask) is not None:
            holds = holds | ~as_block(mask).to(tl.int1)
        if not np.all(holds.data):
            self._operations.fail("device_assert", str(unwrap(msg)) or "the condition of tl.device_assert is false")

    def inline_asm_elementwise(
        self,
        asm: Any,
        constraints: Any,  # noqa: ARG002
        args: Sequence[Any],
        dtype: Any,
        is_pure: Any = True,  # noqa: ARG002
        pack: Any = 1,  # noqa: ARG002
    ) -> Any:
        """`tl.inline_asm_elementwise` of registered assembly; otherwise zeros, and a finding."""
        text, dtypes = unwrap(asm), unwrap(dtype)
        operands = np.broadcast_arrays(*(as_block(arg).data for arg in args)) if args else []
        wanted = [unwrap(each) for each in dtypes] if isinstance(dtypes, (tuple, list, tl.tuple)) else [dtypes]
        meaning = assembly.lookup(text)
        if meaning is None:
            self._operations.fail(
                "unknown_instruction", f"inline assembly without a meaning, computed as zeros: {text!r}"
            )
            shape = operands[0].shape if operands else ()
            results: Any = [np.zeros(shape) for _ in wanted]
        else:
            results = meaning(*operands)
            results = results if isinstance(results, tuple) else (results,)
        blocks = tuple(
            Block(np.asarray(result).astype(numpy_dtype(each), copy=False)[()], each)
            for result, each in zip(results, wanted, strict=True)
        )
        return blocks[0] if wanted == [dtypes] else blocks


def _swap_if_equal(expected: Any, old: Array, new: Array) -> Array:
    return np.where(old == expected, new, old)


def _element(pointer: Any, what: str, writes: bool = False) -> tl.dtype:
    """The dtype that a pointer points to."""
    if not isinstance(pointer, Block) or not pointer.dtype.is_ptr():
        found = pointer.dtype if isinstance(pointer, Block) else type(pointer).__name__
        raise TypeError(f"{what}: the first argument is a pointer or a block of pointers, not {found}")
    if writes and pointer.dtype.const:
        raise ValueError(f"{what}: the pointer is const")
    return pointer.dtype.element_ty


def _stored(element: tl.dtype) -> tl.dtype:
    """The dtype of an element in memory, where an `int1` takes a byte."""
    return tl.int8 if element.is_int1() else element


def _mask(mask: Any) -> Array:
    block = as_block(mask)
    return convert(block.data, block.dtype, tl.int1)


def _lanes(what: str, pointer: Block, values: Array, mask: Any) -> tuple[Array, Array, Array | None]:
    """Addresses, values and mask, broadcast to the shape of the pointers."""
    addresses, values = broadcast_arrays(what, pointer.data, values)
    active = None
    if mask is not None:
        addresses, active = broadcast_arrays(what, addresses, _mask(mask))
        addresses, values = broadcast_arrays(what, addresses, values)
    if addresses.shape != pointer.data.shape:
        raise ValueError(f"{what}: the pointers have the shape {list(pointer.data.shape)}, not {list(addresses.shape)}")
    return addresses, values, active
