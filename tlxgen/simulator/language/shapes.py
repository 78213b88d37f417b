# ruff: noqa: ARG001 (Triton's keywords, among them hints that change no value)
"""Functions that create blocks, and that rearrange their elements."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import constant, numpy_dtype, unwrap
from tlxgen.simulator.language.blocks import Block, as_block, broadcast_arrays, minimum


def arange(start: Any, end: Any) -> Block:
    """`tl.arange`."""
    first, last = operator.index(start), operator.index(end)
    size = last - first
    if size <= 0 or size & (size - 1):
        raise ValueError(f"arange: the size is a power of two, not {size}")
    return Block(np.arange(first, last, dtype=np.int32), tl.int32)


def full(shape: Any, value: Any, dtype: Any) -> Block:
    """`tl.full`."""
    sizes = [operator.index(unwrap(size)) for size in unwrap(shape)]
    scalar = as_block(value).to(dtype).data if isinstance(value, Block) else constant(dtype.name)(value)
    return Block(np.full(sizes, scalar, numpy_dtype(dtype))[()], dtype)


def full_like(x: Block, value: Any, dtype: Any = None) -> Block:
    """A block of the same shape."""
    return full(x.shape, value, x.dtype if dtype is None else dtype)


def item(x: Block) -> Block:
    """`tl.item`: a block of one element as a scalar."""
    return Block(x.data.reshape(())[()], x.dtype)


def squeeze(x: Block, dim: Any) -> Block:
    """`tl.squeeze`."""
    return Block(np.squeeze(x.data, operator.index(dim)), x.dtype)


def broadcast(x: Any, other: Any) -> tuple[Block, Block]:
    """`tl.broadcast`: both with the same shape."""
    a, b = as_block(x), as_block(other)
    first, second = broadcast_arrays("broadcast", a.data, b.data)
    return Block(first[()], a.dtype), Block(second[()], b.dtype)


def _same_dtype(what: str, a: Block, b: Block) -> tl.dtype:
    if a.dtype != b.dtype:
        raise TypeError(f"{what}: the blocks have the dtypes {a.dtype} and {b.dtype}")
    return a.dtype


def join(a: Any, b: Any) -> Block:
    """`tl.join`: a new last dimension of size 2."""
    a, b = broadcast(a, b)
    return Block(np.stack([a.data, b.data], axis=-1), _same_dtype("join", a, b))


def interleave(a: Any, b: Any) -> Block:
    """`tl.interleave`: the elements in turn, along the last dimension."""
    joined = join(a, b)
    shape = joined.shape
    return joined if len(shape) == 1 else joined.reshape(*shape[:-2], 2 * shape[-2])


def cat(x: Block, other: Block, can_reorder: Any = False, dim: Any = 0) -> Block:
    """`tl.cat`; the elements keep their order, also if `can_reorder`."""
    return Block(np.concatenate([x.data, other.data], axis=operator.index(dim)), _same_dtype("cat", x, other))


def swizzle2d(i: Any, j: Any, size_i: Any, size_j: Any, size_g: Any) -> tuple[Any, Any]:
    """`tl.swizzle2d`: row and column of an index that runs by columns within groups of rows."""
    ij = i * size_j + j
    first = ij // (size_g * size_j) * size_g
    rows = minimum(size_i - first, size_g)
    ij %= size_g * size_j
    return first + ij % rows, ij // rows
