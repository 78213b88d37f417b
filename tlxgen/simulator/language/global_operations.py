"""What `tl` asks of the machine: the running program's place in the grid, and operations on global memory.

Each is done at once, at the address that the kernel computed; what no argument's storage holds, and what another access
is not ordered with, becomes a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tlxgen.simulator.dtypes import itemsize, numpy_dtype
from tlxgen.simulator.language.blocks import Block
from tlxgen.simulator.language.descriptors import Descriptor
from tlxgen.simulator.machine import global_memory
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.clocks import IN_FLIGHT, Knowledge
from tlxgen.simulator.machine.global_memory import Storage

if TYPE_CHECKING:
    from tlxgen.simulator.machine.machine import Machine

_LOCKSTEP_LANES = 64  # atomics on more lanes than these add up data; they synchronise nobody


class GlobalOperations:
    """`tlxgen.simulator.language.namespace.Runtime` on a machine; TLX's copies use it too."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def program_id(self, axis: int) -> int:
        """Place of the running program in the grid."""
        return self._machine.task.cta.program[axis]

    def num_programs(self, axis: int) -> int:
        """Size of the grid."""
        return self._machine.grid[axis]

    def fail(self, kind: str, message: str) -> None:
        """Records a finding."""
        self._machine.fail(kind, message)

    def block_barrier(self) -> None:
        """`tl.debug_barrier`."""
        self._machine.task.meet()

    def asm_meaning(self, text: str) -> Callable[..., Any] | None:
        """What a piece of inline assembly computes."""
        return self._machine.assembly(text)

    # ---- through pointers

    def global_load(self, addresses: np.ndarray, element: Any, mask: np.ndarray | None) -> np.ndarray:
        """Values at byte addresses; lanes that are masked out hold anything."""
        self._machine.pause("load")
        addresses = np.asarray(addresses)
        result = np.zeros(addresses.shape, numpy_dtype(element))
        for storage, lanes in self._machine.memory.split(addresses, itemsize(element), mask):
            if storage is None:
                self._refuse_addresses("load from", addresses, lanes)
                continue
            values, places = global_memory.gather(storage, addresses, element, lanes)
            access = self._access("load", addresses, write=False)
            self.note_elements(storage, places if lanes is ... else places[lanes], access)
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
            self.note_elements(storage, places, self._access("store", addresses, write=True))

    def global_atomic(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        element: Any,
        mask: np.ndarray | None,
        operation: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Read-modify-write; the old values. Acquires and releases, so other CTAs may be waited for.

        On one address one thread does so, which speaks for the others only if they have met.
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
                told = m.task.told_by_one() if addresses.size == 1 else m.task.known
                m.memory.synchronise(addresses if lanes is ... else addresses[lanes], m.task.known, told)
            old, places = global_memory.combine(storage, addresses, values, element, lanes, operation)
            access = self._access("atomic", addresses, write=True)
            access.atomic = True
            self.note_elements(storage, places, access)
            result = old if lanes is ... else np.where(lanes, old, result)
        m.task.release()
        return result

    # ---- through descriptors

    def make_descriptor(
        self, base: Block, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], padding: str
    ) -> Descriptor:
        """A descriptor that the kernel makes itself."""
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
        return Descriptor(self, storage, address, tuple(shape), tuple(strides), list(block_shape), dtype, padding)

    def descriptor_load(self, descriptor: Descriptor, offsets: Sequence[Any]) -> Block:
        """`desc.load`."""
        self._machine.pause("desc.load")
        where = [int(o) for o in offsets]
        self.note_box(descriptor, where, self._machine.task.access("TMA load", write=False))
        return Block(descriptor.read(where), descriptor.dtype)

    def descriptor_store(self, descriptor: Descriptor, offsets: Sequence[Any], value: Any, reduction: str) -> None:
        """`desc.store`: the task goes on when the staging tile has been read; the write itself ends with the kernel."""
        self._machine.pause("desc.store")
        where = [int(o) for o in offsets]
        access = self._machine.task.access("TMA store", write=True)
        access.index, access.generic, access.atomic = IN_FLIGHT, False, bool(reduction)
        self.note_box(descriptor, where, access)
        descriptor.write(where, value.to(descriptor.dtype).data, reduction)

    # ---- races

    def note_box(self, descriptor: Descriptor, offsets: Sequence[int], access: Access) -> None:
        """Records what a box touches."""
        _, start, extent = descriptor.inside(offsets)
        if all(extent):
            self.note_elements(descriptor.storage, descriptor.places(start, extent), access)

    def note_elements(self, storage: Storage, places: Any, access: Access) -> None:
        """Records that the running task touches elements, given by their numbers in the storage."""
        known: Knowledge = self._machine.task.known
        for old in self._machine.memory.note(storage, places, access, known.finished):
            message = f"{access.what} of {storage.name}, while nothing orders {old} before it"
            self._machine.fail("data_race", message, access.place, old.place)

    def _access(self, what: str, addresses: np.ndarray, *, write: bool) -> Access:
        """Of one thread where there is one address to come to, of all threads by themselves where there are more."""
        task = self._machine.task
        if addresses.size == 1:
            return task.access_of_one(what, write=write)
        task.part()
        return task.access(what, write=write)

    def _refuse_addresses(self, what: str, addresses: np.ndarray, lanes: np.ndarray) -> None:
        """A finding for lanes whose addresses lie in no storage."""
        outside = addresses[lanes]
        first = self._machine.memory.describe(int(outside.flat[0]))
        message = f"{what} addresses outside of every tensor of the launch, in {outside.size} of {addresses.size} lanes"
        self.fail("out_of_bounds", f"{message}; the first is {first}")
