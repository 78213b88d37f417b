"""TMA descriptors: loads and stores of boxes of a tensor in global memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tlxgen.simulator.dtypes import itemsize, numpy_dtype
from tlxgen.simulator.language.blocks import Block
from tlxgen.simulator.language.tensor_cores import round_to_tf32
from tlxgen.simulator.machine.global_memory import Storage

if TYPE_CHECKING:
    from tlxgen.simulator.machine.accesses import Access
    from tlxgen.simulator.machine.machine import Machine

#: `store_reduce` → the result of an old and a new value.
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
    """A tensor map; strides in elements.

    Loads fill elements outside of the tensor with zeros (or NaN), stores skip them; a box always counts all its bytes.
    """

    machine: Machine
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
        """Name of the tensor."""
        return self.storage.name

    def inside(self, offsets: Sequence[int]) -> tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...]]:
        """The part of a box that is inside the tensor: slices of the box, start in the tensor, shape."""
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
        """Numbers of these elements in the storage.

        Raises:
            IndexError: they reach beyond the storage.
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
        """The values of a box."""
        element = numpy_dtype(self.dtype)
        fill = np.nan if self.padding == "nan" else 0
        box = np.full(self.block_shape, fill, element)
        part, start, extent = self.inside(offsets)
        if all(extent):
            box[part] = self.elements(start, extent)
        return round_to_tf32(box) if self.round_to_tf32 else box

    def write(self, offsets: Sequence[int], box: np.ndarray, reduction: str = "") -> None:
        """Writes a box, or combines it with the old values."""
        part, start, extent = self.inside(offsets)
        if all(extent):
            there = self.elements(start, extent)
            new = box.reshape(self.block_shape)[part]
            there[...] = REDUCTIONS[reduction](there, new) if reduction else new

    def note(self, offsets: Sequence[int], access: Access) -> None:
        """Records the running task's access to a box, and its races."""
        _, start, extent = self.inside(offsets)
        if all(extent):
            self.machine.access_global(self.storage, self.places(start, extent), access)

    def load(self, offsets: Sequence[Any], **_: Any) -> Block:
        """`desc.load`: a box; returns when it has come."""
        self.machine.pause("desc.load")
        where = [int(o) for o in offsets]
        self.note(where, self.machine.task.access("TMA load", write=False))
        return Block(self.read(where), self.dtype)

    def store(self, offsets: Sequence[Any], value: Any, store_reduce: str = "") -> None:
        """`desc.store`: returns when the compiler's staging tile has been read; the write ends with the kernel."""
        self.machine.pause("desc.store")
        where = [int(o) for o in offsets]
        self.note(where, self.machine.task.async_access("TMA store", write=True, atomic=bool(store_reduce)))
        self.write(where, value.to(self.dtype).data, store_reduce)

    def atomic_add(self, offsets: Sequence[Any], value: Any) -> None:
        """`desc.atomic_add`."""
        self.store(offsets, value, "add")

    def _first(self, start: Sequence[int]) -> int:
        """Number of the element at `start` in the storage; addresses wrap around (`triton.tools.ragged_tma`)."""
        size = itemsize(self.dtype)
        address = self.address + size * sum(x * s for x, s in zip(start, self.strides, strict=True))
        return (address % 2**64 - self.storage.first) // size
