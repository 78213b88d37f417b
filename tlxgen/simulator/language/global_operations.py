"""Operations of `tl` on the machine: program ids, and loads, stores and atomics in global memory.

Each takes effect at once. Addresses outside of all arguments' storages, and races, are findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tlxgen.simulator.dtypes import itemsize, numpy_dtype
from tlxgen.simulator.language.blocks import Block
from tlxgen.simulator.language.descriptors import Descriptor
from tlxgen.simulator.machine import global_memory

if TYPE_CHECKING:
    from tlxgen.simulator.machine.machine import Machine

_LOCKSTEP_LANES = 64  # atomics on more lanes combine data; they do not synchronise


class GlobalOperations:
    """The operations of `tl` and `tlx` that reach global memory or the scheduler."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def program_id(self, axis: int) -> int:
        """Index of the running program along an axis of the grid."""
        return self._machine.task.cta.program[axis]

    def num_programs(self, axis: int) -> int:
        """Size of the grid along an axis."""
        return self._machine.grid[axis]

    def fail(self, kind: str, message: str) -> None:
        """Records a finding."""
        self._machine.fail(kind, message)

    def block_barrier(self) -> None:
        """`tl.debug_barrier`."""
        self._machine.task.sync_threads()

    def global_load(self, addresses: np.ndarray, element: Any, mask: np.ndarray | None) -> np.ndarray:
        """Values at byte addresses; undefined in lanes that are masked out."""
        self._machine.pause("load")
        addresses = np.asarray(addresses)
        result = np.zeros(addresses.shape, numpy_dtype(element))
        for storage, lanes in self._machine.memory.split(addresses, itemsize(element), mask):
            if storage is None:
                self._refuse_addresses("load from", addresses, lanes)
                continue
            values, places = global_memory.gather(storage, addresses, element, lanes)
            access = self._machine.task.global_access("load", addresses.size, write=False)
            self._machine.access_global(storage, places if lanes is ... else places[lanes], access)
            if lanes is ...:
                result = values
            else:
                result[lanes] = values[lanes]
        return result

    def global_store(self, addresses: np.ndarray, values: np.ndarray, element: Any, mask: np.ndarray | None) -> None:
        """Writes values to byte addresses."""
        self._machine.pause("store")
        addresses = np.asarray(addresses)
        for storage, lanes in self._machine.memory.split(addresses, itemsize(element), mask):
            if storage is None:
                self._refuse_addresses("store to", addresses, lanes)
                continue
            places = global_memory.scatter(storage, addresses, values, element, lanes)
            access = self._machine.task.global_access("store", addresses.size, write=True)
            self._machine.access_global(storage, places, access)

    def global_atomic(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        element: Any,
        mask: np.ndarray | None,
        operation: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Read-modify-write that acquires and releases; returns the old values.

        On one address, one thread releases: what the other threads have done only up to their last barrier.
        """
        m = self._machine
        m.pause("atomic", always=True)
        addresses = np.asarray(addresses)
        result = np.zeros(addresses.shape, numpy_dtype(element))
        for storage, lanes in m.memory.split(addresses, itemsize(element), mask):
            if storage is None:
                self._refuse_addresses("atomic on", addresses, lanes)
                continue
            if addresses.size <= _LOCKSTEP_LANES:
                releases = m.task.known_to_one_thread() if addresses.size == 1 else m.task.known
                m.memory.synchronise(addresses if lanes is ... else addresses[lanes], m.task.known, releases)
            old, places = global_memory.combine(storage, addresses, values, element, lanes, operation)
            access = m.task.global_access("atomic", addresses.size, write=True)
            access.atomic = True
            m.access_global(storage, places, access)
            result = old if lanes is ... else np.where(lanes, old, result)
        m.task.release()
        return result

    def make_descriptor(
        self, base: Block, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], padding: str
    ) -> Descriptor:
        """A descriptor made by the kernel."""
        address, dtype = int(base.data), base.dtype.element_ty
        storage = self._machine.memory.at(address)
        if storage is None:
            raise IndexError("make_tensor_descriptor: its base is an address outside of every tensor of the launch")
        size = itemsize(dtype)
        if address % 16 or any(s * size % 16 for s in strides[:-1]) or strides[-1] != 1 or min(shape) <= 0:
            message = f"descriptor of {storage.name}: TMA wants a base and strides of whole 16 bytes, rows without gaps"
            self.fail("launch", f"{message}, and sizes above 0; got strides {list(strides)}, shape {list(shape)}")
        if max(block_shape) > 256 or block_shape[-1] * size < 16:
            message = f"descriptor of {storage.name}: boxes have sides of at most 256 and rows of at least 16 bytes"
            self.fail("launch", f"{message}, got {list(block_shape)} of {dtype}")
        return Descriptor(
            self._machine, storage, address, tuple(shape), tuple(strides), list(block_shape), dtype, padding
        )

    def _refuse_addresses(self, what: str, addresses: np.ndarray, lanes: np.ndarray) -> None:
        """Records lanes whose addresses lie in no storage."""
        outside = addresses[lanes]
        first = self._machine.memory.describe(int(outside.flat[0]))
        message = f"{what} addresses outside of every tensor of the launch, in {outside.size} of {addresses.size} lanes"
        self.fail("out_of_bounds", f"{message}; the first is {first}")
