# ruff: noqa: ARG001 (Triton's keywords, among them hints that change no value)
"""Reductions, scans and sorting, with the dtypes and the rules for ties of `triton.language`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import Array, numpy_dtype, quiet, unwrap
from tlxgen.simulator.language.blocks import Block, as_block, normalise, widened

_ADD = quiet(np.add.reduce)
_MAXIMUM, _MINIMUM = quiet(np.fmax.reduce), quiet(np.fmin.reduce)


def _sum_input(block: Block, dtype: Any) -> Block:
    """Sums of small integers are computed in 32 bits, those of bfloat16 in float32."""
    dtype = unwrap(dtype)
    if dtype is None and block.dtype.is_int() and block.dtype.int_bitwidth < 32:
        dtype = tl.int32 if block.dtype.is_int_signed() else tl.uint32
    return widened(block if dtype is None else block.to(dtype))


def _extremum_input(block: Block) -> Block:
    """Extrema are computed in 32 bits at least."""
    if block.dtype.primitive_bitwidth >= 32:
        return block
    return block.to(tl.float32 if block.dtype.is_floating() else tl.int32)


def _axis(axis: Any, rank: int) -> int:
    axis = unwrap(axis)
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a block with {rank} dimensions")
    return int(axis) % rank


def _reduced(block: Block, axis: Any, keep_dims: Any, reduce: Callable[..., Any], **options: Any) -> Block:
    """A numpy reduction over one axis, or all of them."""
    where = None if unwrap(axis) is None else _axis(axis, block.data.ndim)
    data = reduce(block.data, axis=where, keepdims=bool(unwrap(keep_dims)), **options)
    return Block(data, block.dtype)


def reduce_sum(
    x: Any, axis: Any = None, keep_dims: Any = False, dtype: Any = None, reduction_ordering: Any = None
) -> Block:
    """`tl.sum`."""
    block = _sum_input(as_block(x), dtype)
    # Without a dtype, numpy would sum 32-bit integers in 64 bits.
    return _reduced(block, axis, keep_dims, _ADD, dtype=numpy_dtype(block.dtype))


def _extremum(block: Block, axis: Any, keep_dims: Any, reduce: Any, position: Any, worst: float) -> tuple[Block, Block]:
    """The extreme values and their leftmost indices; a NaN counts only if all are NaN."""
    block = widened(block)
    where = _axis(axis, block.data.ndim)
    data = block.data
    if block.dtype.is_floating():
        data = np.where(np.isnan(data), data.dtype.type(worst), data)
    places = position(data, axis=where, keepdims=bool(unwrap(keep_dims)))
    return _reduced(block, where, keep_dims, reduce), Block(places.astype(np.int32), tl.int32)


def _extremes(reduce: Any, position: Any, worst: float) -> tuple[Callable[..., Any], Callable[..., Block]]:
    """`tl.max` and `tl.argmax`, or `tl.min` and `tl.argmin`."""

    def extreme(
        x: Any,
        axis: Any = None,
        return_indices: Any = False,
        return_indices_tie_break_left: Any = True,
        keep_dims: Any = False,
        reduction_ordering: Any = None,
    ) -> Any:
        if unwrap(return_indices):
            return _extremum(as_block(x), axis, keep_dims, reduce, position, worst)
        return _reduced(_extremum_input(as_block(x)), axis, keep_dims, reduce)

    def place(
        x: Any, axis: Any, tie_break_left: Any = True, keep_dims: Any = False, reduction_ordering: Any = None
    ) -> Block:
        return _extremum(as_block(x), axis, keep_dims, reduce, position, worst)[1]

    return extreme, place


reduce_max, argmax = _extremes(_MAXIMUM, np.argmax, -np.inf)
reduce_min, argmin = _extremes(_MINIMUM, np.argmin, np.inf)


def _bitwise(name: str, reduce: Callable[..., Any]) -> Callable[..., Block]:
    """A bitwise reduction."""

    def reduced(x: Any, axis: Any = None, keep_dims: Any = False) -> Block:
        block = as_block(x)
        if not block.dtype.is_int():
            raise TypeError(f"{name} takes integers, not {block.dtype}")
        return _reduced(block, axis, keep_dims, reduce)

    return reduced


xor_sum = _bitwise("xor_sum", np.bitwise_xor.reduce)
reduce_or = _bitwise("reduce_or", np.bitwise_or.reduce)


def _combined(
    combine: Callable[..., Any], left: Sequence[Array], right: Sequence[Array], dtypes: Sequence[tl.dtype]
) -> list[Array]:
    """The combine function on many pairs at once; it has no branches on values, since Triton calls it on scalars."""
    result = combine(*map(Block, left, dtypes), *map(Block, right, dtypes))
    results = [result] if isinstance(result, Block) else list(normalise(result))
    return [block.to(dtype).data for block, dtype in zip(results, dtypes, strict=True)]


def reduce(x: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, reduction_ordering: Any = None) -> Any:
    """`tl.reduce`: neighbours are combined until one is left; the function must be associative."""
    blocks = (x,) if isinstance(x, Block) else tuple(x)
    dtypes, rank = [block.dtype for block in blocks], blocks[0].data.ndim
    if unwrap(axis) is None:
        place, arrays = 0, [block.data.reshape(-1) for block in blocks]
    else:
        place = _axis(axis, rank)
        arrays = [np.moveaxis(block.data, place, 0) for block in blocks]
    while len(arrays[0]) > 1:
        even = len(arrays[0]) // 2 * 2
        pairs = _combined(combine_fn, [a[0:even:2] for a in arrays], [a[1:even:2] for a in arrays], dtypes)
        arrays = [np.concatenate([pair, a[even:]]) for pair, a in zip(pairs, arrays, strict=True)]
    results = [Block(a[0], dtype) for a, dtype in zip(arrays, dtypes, strict=True)]
    if unwrap(keep_dims):
        new = place if unwrap(axis) is not None else list(range(rank))
        results = [result.expand_dims(new) for result in results]
    return results[0] if isinstance(x, Block) else tuple(results)


def associative_scan(x: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
    """`tl.associative_scan`: each element combined with those before it, in a logarithmic number of steps."""
    blocks = (x,) if isinstance(x, Block) else tuple(x)
    dtypes, place = [block.dtype for block in blocks], _axis(axis, blocks[0].data.ndim)
    step = -1 if unwrap(reverse) else 1
    arrays = [np.moveaxis(block.data, place, 0)[::step] for block in blocks]
    distance = 1
    while distance < len(arrays[0]):
        later = _combined(combine_fn, [a[:-distance] for a in arrays], [a[distance:] for a in arrays], dtypes)
        arrays = [np.concatenate([a[:distance], rest]) for a, rest in zip(arrays, later, strict=True)]
        distance *= 2
    results = [Block(np.moveaxis(a[::step], 0, place), dtype) for a, dtype in zip(arrays, dtypes, strict=True)]
    return results[0] if isinstance(x, Block) else tuple(results)


def _scanned(block: Block, axis: Any, reverse: Any, scan: Any) -> Block:
    where, data = _axis(axis, block.data.ndim), block.data
    data = np.flip(data, where) if unwrap(reverse) else data
    result = scan(data, axis=where, dtype=data.dtype)
    return Block(np.flip(result, where) if unwrap(reverse) else result, block.dtype)


def cumsum(x: Any, axis: Any = 0, reverse: Any = False, dtype: Any = None) -> Block:
    """`tl.cumsum`."""
    return _scanned(_sum_input(as_block(x), dtype), axis, reverse, quiet(np.cumsum))


def cumprod(x: Any, axis: Any = 0, reverse: Any = False) -> Block:
    """`tl.cumprod`."""
    return _scanned(widened(as_block(x)), axis, reverse, quiet(np.cumprod))


def _last(block: Block, dim: Any, name: str) -> None:
    if unwrap(dim) not in {None, block.data.ndim - 1}:
        raise ValueError(f"{name} works along the last dimension only, not {unwrap(dim)}")


def sort(x: Block, dim: Any = None, descending: Any = False) -> Block:
    """`tl.sort`, along the last dimension."""
    _last(x, dim, "sort")
    data = np.sort(x.data, axis=-1)
    return Block(data[..., ::-1] if unwrap(descending) else data, x.dtype)


def topk(x: Block, k: Any, dim: Any = None, descending: Any = True) -> Block:
    """`tl.topk`: the first elements of the sorted block, in 32 bits at least if some are dropped, as Triton selects."""
    _last(x, dim, "topk")
    count = int(unwrap(k))
    ordered = sort(x if count == x.data.shape[-1] else _extremum_input(x), dim, descending)
    return Block(ordered.data[..., :count], ordered.dtype)


def flip(x: Block, dim: Any = None) -> Block:
    """`tl.flip`, along the last dimension if none is given."""
    return Block(np.flip(x.data, -1 if unwrap(dim) is None else _axis(dim, x.data.ndim)), x.dtype)


def gather(src: Block, index: Block, axis: Any) -> Block:
    """`tl.gather`."""
    return Block(np.take_along_axis(src.data, index.data, axis=_axis(axis, src.data.ndim)), src.dtype)


def histogram(x: Block, num_bins: Any, mask: Any = None) -> Block:
    """`tl.histogram`; values outside of the bins are not counted."""
    bins = int(unwrap(num_bins))
    counted = (x.data >= 0) & (x.data < bins)
    if unwrap(mask) is not None:
        counted &= np.asarray(as_block(mask).data, np.bool_)
    counts = np.bincount(x.data[counted].astype(np.int64), minlength=bins)
    return Block(counts.astype(np.int32), tl.int32)
