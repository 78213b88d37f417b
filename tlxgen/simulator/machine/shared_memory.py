"""Shared memory of a CTA: allocations, tiles (views of them), and the accesses to their bytes.

A tile is a numpy view of its allocation's bytes, so transposed, sliced, reshaped and reinterpreted views overlap
exactly where the bytes do. Memory starts as NaN in every float type, and a copy under way makes its target NaN again,
so that a race shows in the result too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tlxgen.simulator.dtypes import itemsize, numpy_dtype
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.clocks import Knowledge

#: Bytes that sm_90 gives to one CTA.
CTA_BYTES = 232_448

_POISON = 0xFF
_ALIGNMENT = 1024  # of a swizzled tile


@dataclass
class Allocation:
    """Bytes of one CTA; several `local_alloc` share them only by `reuse`."""

    number: int
    name: str
    size: int
    bytes: np.ndarray = field(init=False)
    written: np.ndarray = field(init=False)
    accesses: list[tuple[Tile, Access]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bytes = np.full(self.size, _POISON, np.uint8)
        self.written = np.zeros(self.size, np.bool_)

    @property
    def address(self) -> int:
        """Address of the first byte, in this process."""
        return int(self.bytes.__array_interface__["data"][0])


class Tile:
    """A view of an allocation: the result of `local_alloc(...)[i]`, `local_trans`, `local_slice` and the like."""

    __slots__ = ("allocation", "array", "cta", "dense", "dtype", "first", "last", "name", "written")

    def __init__(self, allocation: Allocation, array: np.ndarray, dtype: Any, name: str, cta: Any) -> None:
        self.allocation = allocation
        self.array = array
        self.dtype = dtype
        self.name = name
        self.cta = cta
        offset = int(array.__array_interface__["data"][0]) - allocation.address
        self.first = offset
        self.last = offset + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
        self.dense = self.last - self.first == array.nbytes
        self.written = np.ndarray(array.shape, np.bool_, allocation.written, offset, array.strides)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self.array.shape

    @property
    def nbytes(self) -> int:
        """Size of the tile in bytes."""
        return int(self.array.nbytes)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"{self.name} is one tile already: local_slice takes a part of it")

    def view(self, array: np.ndarray, dtype: Any = None) -> Tile:
        """Another view of some of the same bytes."""
        return Tile(self.allocation, array, dtype or self.dtype, self.name, self.cta)

    def reinterpret(self, dtype: Any, shape: Sequence[int]) -> Tile:
        """The same bytes with another dtype and shape.

        Raises:
            ValueError: the tile is not contiguous, or the new view has another number of bytes.
        """
        element = numpy_dtype(dtype)
        if math.prod(shape) * element.itemsize != self.nbytes:
            raise ValueError(f"{self.name}: {self.nbytes} bytes cannot become {tuple(shape)} of {dtype}")
        if not self.array.flags.c_contiguous:
            raise ValueError(f"{self.name}: a view that is not contiguous cannot be reinterpreted")
        return self.view(np.ndarray(tuple(shape), element, self.allocation.bytes, self.first), dtype)

    def peer(self, allocation: Allocation, cta: Any) -> Tile:
        """The same view in another CTA of the cluster."""
        array = np.ndarray(self.array.shape, self.array.dtype, allocation.bytes, self.first, self.array.strides)
        return Tile(allocation, array, self.dtype, self.name, cta)

    def overlaps(self, other: Tile) -> bool:
        """Whether the two views share a byte."""
        if self.first >= other.last or other.first >= self.last:
            return False
        if self.dense and other.dense:
            return True
        return bool(np.shares_memory(self.array, other.array))

    def covers(self, other: Tile) -> bool:
        """Whether every byte of `other` is one of this view's."""
        return self.dense and self.first <= other.first and other.last <= self.last

    def mark_written(self) -> None:
        """Marks the tile's bytes as written."""
        self._fill(self.allocation.written, True)

    def poison(self) -> None:
        """Makes every element NaN, as long as a copy into the tile is under way."""
        self._fill(self.allocation.bytes, _POISON)

    def _fill(self, table: np.ndarray, value: Any) -> None:
        """Sets the table's entries for the tile's bytes; a reinterpretation may be wider than an element."""
        if self.dense:
            table[self.first : self.last] = value
            return
        for byte in range(self.array.itemsize):
            np.ndarray(self.array.shape, table.dtype, table, self.first + byte, self.array.strides)[...] = value

    def conflicts(self, access: Access, known: Knowledge) -> Iterator[Access]:
        """Yields earlier accesses that conflict with this one and are not known to be finished; records this one."""
        remaining = []
        for tile, old in self.allocation.accesses:
            if not tile.overlaps(self):
                remaining.append((tile, old))
                continue
            finished = old.finished(known.finished)
            if not finished and access.conflicts(old):
                yield old
            superseded = finished and (access.write or not old.write) and self.covers(tile)
            same = old.component == access.component and not old.write and not access.write
            if not (superseded and (access.write or same)):
                remaining.append((tile, old))
        remaining.append((self, access))
        self.allocation.accesses = remaining

    def unfenced(self, known: Knowledge) -> Iterator[Access]:
        """Yields generic writes to these bytes that no fence has made visible to the asynchronous proxy."""
        for tile, old in self.allocation.accesses:
            seen = old.finished(known.finished) and not old.finished(known.fenced)
            if seen and old.write and old.generic and tile.overlaps(self):
                yield old


class Buffers:
    """The result of `local_alloc`: `num` tiles of one shape, one after another."""

    def __init__(self, allocation: Allocation, shape: Sequence[int], dtype: Any, num: int, cta: Any) -> None:
        self.allocation = allocation
        self.dtype = dtype
        self.shape = list(shape)
        size = math.prod(shape) * itemsize(dtype)
        arrays = [np.ndarray(tuple(shape), numpy_dtype(dtype), allocation.bytes, i * size) for i in range(num)]
        self.tiles = [Tile(allocation, a, dtype, f"{allocation.name}[{i}]", cta) for i, a in enumerate(arrays)]

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: Any) -> Tile:
        number = int(index)
        if not 0 <= number < len(self.tiles):
            name = self.allocation.name
            raise IndexError(f"{name} has {len(self.tiles)} buffers, there is no {name}[{number}]")
        return self.tiles[number]


def padded(size: int) -> int:
    """Bytes that an allocation takes of the CTA's budget: large ones are aligned like swizzled tiles."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT if size >= _ALIGNMENT else size
