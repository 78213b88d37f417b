"""TMA descriptors: boxes of a tensor in global memory, with what lies outside filled or left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tlxgen.simulator.dtypes import itemsize, numpy_dtype
from tlxgen.simulator.language.tensor_cores import round_to_tf32
from tlxgen.simulator.machine.global_memory import Storage

if TYPE_CHECKING:
    from tlxgen.simulator.language.global_operations import GlobalOperations

#: `store_reduce` and the descriptor atomics → what becomes of old and new.
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@dataclass(frozen=True)
class Descriptor:
    """A tensor as TMA sees it; strides in elements.

    Loads fill what is outside with zeros (or NaN), stores leave it alone; either way the box counts with all its bytes.
    """

    operations: GlobalOperations
    storage: Storage
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: list[int]
    dtype: Any
    padding: str = "zero"
    round_to_tf32: bool = False

    @property
    def name(self) -> str:
        """The tensor's."""
        return self.storage.name

    def inside(self, offsets: Sequence[int]) -> tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...]]:
        """The part of a box that is inside the tensor: as slices of the box, where it starts, and its shape."""
        low = [max(0, o) for o in offsets]
        high = [min(n, o + b) for n, o, b in zip(self.shape, offsets, self.block_shape, strict=True)]
        extent = tuple(max(0, h - x) for x, h in zip(low, high, strict=True))
        part = tuple(slice(x - o, x - o + n) for x, o, n in zip(low, offsets, extent, strict=True))
        return part, tuple(low), extent

    def elements(self, start: Sequence[int], extent: tuple[int, ...]) -> np.ndarray:
        """A view of the tensor's elements."""
        element = numpy_dtype(self.dtype)
        strides = tuple(s * element.itemsize for s in self.strides)
        return np.ndarray(extent, element, self.storage.bytes, self._first(start) * element.itemsize, strides)

    def places(self, start: Sequence[int], extent: tuple[int, ...]) -> np.ndarray:
        """Numbers of these elements in their storage.

        Raises:
            IndexError: they reach beyond it.
        """
        first = self._first(start)
        last = first + sum((n - 1) * s for n, s in zip(extent, self.strides, strict=True))
        if first < 0 or last >= len(self.storage.typed(self.dtype)):
            raise IndexError(f"descriptor of {self.name}: shape and strides reach beyond the tensor's storage")
        places: Any = np.int64(first)
        for axis, (n, stride) in enumerate(zip(extent, self.strides, strict=True)):
            steps = np.arange(n) * stride
            places = places + steps.reshape((n,) + (1,) * (len(extent) - 1 - axis))
        return np.asarray(places * itemsize(self.dtype) // self.storage.element_size)

    def read(self, offsets: Sequence[int]) -> np.ndarray:
        """A box."""
        element = numpy_dtype(self.dtype)
        fill = np.nan if self.padding == "nan" else 0
        box = np.full(self.block_shape, fill, element)
        part, start, extent = self.inside(offsets)
        if all(extent):
            box[part] = self.elements(start, extent)
        return round_to_tf32(box) if self.round_to_tf32 else box

    def write(self, offsets: Sequence[int], box: np.ndarray, reduction: str = "") -> None:
        """Stores a box, or reduces it into what is there."""
        part, start, extent = self.inside(offsets)
        if all(extent):
            there = self.elements(start, extent)
            new = box.reshape(self.block_shape)[part]
            there[...] = REDUCTIONS[reduction](there, new) if reduction else new

    def load(self, offsets: Sequence[Any], **_: Any) -> Any:
        """`desc.load`: a box, waited for."""
        return self.operations.descriptor_load(self, offsets)

    def store(self, offsets: Sequence[Any], value: Any, store_reduce: str = "") -> None:
        """`desc.store`: through a staging tile of the compiler's, waited for until that may be used again."""
        self.operations.descriptor_store(self, offsets, value, store_reduce)

    def atomic_add(self, offsets: Sequence[Any], value: Any) -> None:
        """`desc.atomic_add`."""
        self.operations.descriptor_store(self, offsets, value, "add")

    def _first(self, start: Sequence[int]) -> int:
        """Number of the element at `start` in the storage; addresses wrap around (`triton.tools.ragged_tma`)."""
        size = itemsize(self.dtype)
        address = self.address + size * sum(x * s for x, s in zip(start, self.strides, strict=True))
        return (address % 2**64 - self.storage.first) // size
