"""Global memory: the storages of a launch's tensors, and the accesses to their elements.

Addresses are real, so pointers can be computed, stored in tables and loaded again. Every access is checked against the
storages, and one outside of all of them is a finding.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tlxgen.simulator.dtypes import itemsize, numpy_dtype
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.clocks import Clock, Knowledge


class Storage:
    """One tensor's storage, and for each element the group of its last writes and that of its last reads."""

    def __init__(self, name: str, data: np.ndarray, element_size: int) -> None:
        self.name = name
        self.bytes = data
        self.first = int(data.__array_interface__["data"][0])
        self.last = self.first + data.nbytes
        self.element_size = element_size
        elements = -(-data.nbytes // element_size)
        self.writers = np.zeros(elements, np.int32)
        self.readers = np.zeros(elements, np.int32)

    def typed(self, dtype: Any) -> np.ndarray:
        """The storage as elements of a dtype."""
        element = numpy_dtype(dtype)
        return self.bytes[: self.bytes.nbytes // element.itemsize * element.itemsize].view(element)


class GlobalMemory:
    """The storages of one launch, by address, and the log of accesses that their elements refer to."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.log: list[Access] = []
        self._starts: list[int] = []
        self._released: dict[int, Knowledge] = {}  # address → what the next atomic there acquires
        self._groups: list[tuple[int, ...]] = [()]  # numbers in the log; what a storage's elements refer to
        self._group_numbers: dict[tuple[int, ...], int] = {(): 0}

    def register(self, tensor: Any, name: str) -> Storage:
        """Adds a CPU tensor's storage, unless another tensor has added it already."""
        import torch

        raw = tensor.untyped_storage()
        known = self.at(raw.data_ptr())
        if known is not None:
            return known
        data = torch.empty(0, dtype=torch.uint8).set_(raw).numpy()
        storage = Storage(name, data, tensor.element_size())
        place = bisect.bisect(self._starts, storage.first)
        self._starts.insert(place, storage.first)
        self.storages.insert(place, storage)
        return storage

    def at(self, address: int) -> Storage | None:
        """The storage that contains an address."""
        place = bisect.bisect(self._starts, address) - 1
        if place >= 0 and address < self.storages[place].last:
            return self.storages[place]
        return None

    def split(self, addresses: np.ndarray, size: int, mask: np.ndarray | None) -> Iterator[tuple[Storage | None, Any]]:
        """Yields each storage with the lanes whose addresses it contains; None for lanes outside of all storages.

        Lanes are a mask, or `...` for all. `size` is the bytes of an element.
        """
        active = addresses if mask is None else addresses[mask]
        if not active.size:
            return
        low, high = int(active.min()), int(active.max()) + size
        storage = self.at(low)
        if storage is not None and high <= storage.last:
            yield storage, ... if mask is None else mask
            return
        places = np.searchsorted(self._starts, addresses, side="right") - 1
        ends = np.array([0] + [s.last for s in self.storages])[places + 1]
        inside = (places >= 0) & (addresses + size <= ends)
        meant = np.ones(addresses.shape, np.bool_) if mask is None else mask
        for place in np.unique(places[inside & meant]):
            yield self.storages[int(place)], inside & meant & (places == place)
        if (meant & ~inside).any():
            yield None, meant & ~inside

    def describe(self, address: int) -> str:
        """The position of an address outside of all storages, relative to the nearest."""
        if not self.storages:
            return f"address {address:#x}, and no tensor was given"
        nearest = min(self.storages, key=lambda storage: max(storage.first - address, address - storage.last))
        if address < nearest.first:
            return f"{nearest.first - address} bytes before the start of {nearest.name}"
        if address < nearest.last:
            return f"{nearest.last - address} bytes before the end of {nearest.name}, which are no whole element"
        return f"{address - nearest.last} bytes past the end of {nearest.name}"

    def synchronise(self, addresses: np.ndarray, known: Knowledge, releases: Knowledge) -> None:
        """An atomic releases `releases`, and `known` acquires what earlier ones on the same addresses have released."""
        for address in np.unique(addresses).tolist():
            released = self._released.setdefault(address, Knowledge())
            released.join(releases)  # a part of `known`, so the next line acquires nothing new from it
            known.join(released)

    def note(self, storage: Storage, where: Any, access: Access, known: Clock) -> Iterator[Access]:
        """Records an access to elements; yields earlier ones that conflict and are not known to be finished."""
        groups = _distinct(storage.writers[where])
        if access.write:
            groups += _distinct(storage.readers[where])
        for number in sorted({number for group in groups for number in self._groups[group]}):
            old = self.log[number]
            if access.conflicts(old) and not old.finished(known):
                yield old
        self.log.append(access)
        table = storage.writers if access.write else storage.readers
        if access.write and not access.atomic:
            table[where] = self._number((len(self.log) - 1,))
        else:
            table[where] = self._with_newest(table[where], access, known)

    def _with_newest(self, groups: np.ndarray, access: Access, known: Clock) -> np.ndarray:
        """The groups plus the newest access, minus accesses that it supersedes: who knows it knows them too."""
        distinct = _distinct(groups)
        joined = []
        for group in distinct:
            rest = [n for n in self._groups[group] if not _supersedes(access, self.log[n], known)]
            joined.append(self._number((*rest, len(self.log) - 1)))
        return np.array(joined, np.int32)[np.searchsorted(distinct, groups)]

    def _number(self, group: tuple[int, ...]) -> int:
        if group not in self._group_numbers:
            self._group_numbers[group] = len(self._groups)
            self._groups.append(group)
        return self._group_numbers[group]


def _supersedes(access: Access, old: Access, known: Clock) -> bool:
    return old.finished(known) or (old.component == access.component and old.index <= access.index)


def _distinct(groups: np.ndarray) -> list[int]:
    """Sorted distinct numbers."""
    if groups.size and groups.min() == groups.max():
        return [int(groups.flat[0])]
    return [int(group) for group in np.unique(groups)]


def gather(storage: Storage, addresses: np.ndarray, dtype: Any, lanes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values at addresses of one storage, and their element numbers; masked lanes get the first element."""
    size = itemsize(dtype)
    offsets = addresses - storage.first
    if lanes is not ...:
        offsets = np.where(lanes, offsets, 0)
    values = storage.typed(dtype)[offsets // size]
    return values, offsets // storage.element_size


def scatter(storage: Storage, addresses: np.ndarray, values: np.ndarray, dtype: Any, lanes: Any) -> np.ndarray:
    """Writes values to addresses of one storage; returns their element numbers."""
    size = itemsize(dtype)
    if lanes is not ...:
        addresses, values = addresses[lanes], np.broadcast_to(values, lanes.shape)[lanes]
    offsets = addresses - storage.first
    storage.typed(dtype)[offsets // size] = values
    return np.asarray(offsets // storage.element_size)


def combine(
    storage: Storage,
    addresses: np.ndarray,
    values: np.ndarray,
    dtype: Any,
    lanes: Any,
    operation: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Read-modify-write, lane by lane as atomics do; returns the old values and the element numbers."""
    size = itemsize(dtype)
    typed = storage.typed(dtype)
    meant = np.ones(addresses.shape, np.bool_) if lanes is ... else lanes
    old = np.zeros(addresses.shape, typed.dtype)
    offsets = (addresses - storage.first) // size
    values = np.broadcast_to(values, addresses.shape)
    for lane in np.argwhere(meant):
        lane_index = tuple(lane)
        place = int(offsets[lane_index])
        old[lane_index] = typed[place]
        typed[place] = operation(typed[place : place + 1], values[lane_index][None])[0]
    places = np.asarray((addresses - storage.first) // storage.element_size)
    return old, places if lanes is ... else places[meant]
