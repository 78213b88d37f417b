"""The part of TLX that moves data: ordinary accesses to shared memory, TMA, cp.async, and copies between CTAs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tlxgen.simulator.dtypes import itemsize, unwrap
from tlxgen.simulator.language.blocks import Block, as_block
from tlxgen.simulator.language.descriptors import Descriptor
from tlxgen.simulator.language.global_operations import GlobalOperations
from tlxgen.simulator.language.namespace import UnsupportedOperationError
from tlxgen.simulator.machine import global_memory
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.barriers import Mbarrier
from tlxgen.simulator.machine.clocks import IN_FLIGHT
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.machine.shared_memory import Tile
from tlxgen.simulator.tlx.allocation import AllocationOperations


class Token:
    """What cp.async gives back; order is kept by groups, so it says nothing."""


class DescriptorSlots:
    """Places in global memory that hold descriptors; `slots[i]` is the place `i` further on, as of a pointer."""

    def __init__(self, slots: list[Descriptor | None], first: int) -> None:
        self._slots = slots
        self._first = first

    def __getitem__(self, index: Any) -> DescriptorSlots:
        return DescriptorSlots(self._slots, self._first + int(index))

    @property
    def descriptor(self) -> Descriptor | None:
        """What was made here."""
        return self._slots[self._first]

    @descriptor.setter
    def descriptor(self, made: Descriptor) -> None:
        self._slots[self._first] = made


class CopyOperations(AllocationOperations):
    """Everything that reads or writes a tile."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._global = GlobalOperations(machine)

    # ---- ordinary accesses

    def local_load(self, src: Tile, token: Any = None, layout: Any = None, relaxed: Any = False) -> Block:
        """Shared memory to registers."""
        m = self._machine
        m.pause(f"local_load {src.name}")
        m.touch(src, m.task.access("local_load", write=False), m.task.known)
        return Block(src.array.copy(), src.dtype)

    def local_store(self, dst: Tile, src: Any) -> None:
        """Registers to shared memory."""
        m = self._machine
        values = as_block(src).to(dst.dtype).data
        if values.shape != dst.shape:
            raise ValueError(f"local_store of {list(values.shape)} into {dst.name}, which is {list(dst.shape)}")
        m.pause(f"local_store {dst.name}")
        m.touch(dst, m.task.access("local_store", write=True), m.task.known)
        dst.array[...] = values
        dst.mark_written()

    def local_gather(self, src: Tile, indices: Any, axis: Any, token: Any = None) -> Block:
        """Elements of a tile by index along an axis."""
        return Block(np.take_along_axis(self.local_load(src).data, self._indices(indices), int(axis)), src.dtype)

    def local_scatter(self, dst: Tile, src: Any, indices: Any, axis: Any, token: Any = None) -> None:
        """Elements of a tile by index along an axis, written."""
        m = self._machine
        where = self._indices(indices)
        m.pause(f"local_scatter {dst.name}")
        m.touch(dst, m.task.access("local_scatter", write=True), m.task.known)
        np.put_along_axis(dst.array, where, as_block(src).to(dst.dtype).data, int(axis))
        dst.mark_written()

    def fence(self, scope: Any) -> None:
        """`async_shared`: what this task knows to be written becomes visible to TMA and wgmma."""
        m = self._machine
        m.pause(f"fence {scope}")
        if unwrap(scope) == "async_shared":
            m.task.known.fence()
            m.task.release()  # what is written from here on is later than the fence

    def fence_async_shared(self) -> None:
        """The older name."""
        self.fence("async_shared")

    # ---- TMA and bulk copies

    def async_descriptor_load(
        self,
        desc: Descriptor,
        result: Tile,
        offsets: Sequence[Any],
        barrier: Mbarrier,
        pred: Any = None,
        cache_modifier: str = "",
        eviction_policy: str = "",
        multicast_targets: Sequence[Any] = (),
        two_ctas: Any = False,
    ) -> None:
        """A box to shared memory, here or in several CTAs of the cluster; its bytes arrive on the barrier."""
        m = self._machine
        m.pause(f"async_descriptor_load {desc.name} to {result.name}")
        if not is_true(pred):
            return
        where = [int(o) for o in offsets]
        _check_box(desc, result)
        self._global.note_box(desc, where, m.task.access("TMA load", write=False))
        for rank in [int(r) for r in multicast_targets] or [m.task.cta.rank]:
            self._copy(
                "TMA load", self.peer_tile(result, rank), lambda: desc.read(where), self.peer_barrier(barrier, rank)
            )

    def async_descriptor_store(
        self, desc: Descriptor, source: Tile, offsets: Sequence[Any], eviction_policy: str = "", store_reduce: str = ""
    ) -> None:
        """Shared memory to a box, or combined with it; reads until the wait, writes until the kernel's end."""
        m = self._machine
        m.pause(f"async_descriptor_store {source.name} to {desc.name}")
        where = [int(o) for o in offsets]
        _check_box(desc, source)
        written = m.task.access("TMA store", write=True)
        written.index, written.generic, written.atomic = IN_FLIGHT, False, bool(store_reduce)
        self._global.note_box(desc, where, written)
        self._store("TMA store", source, lambda: desc.write(where, source.array, store_reduce))

    def async_store(self, dst_global_ptr: Block, src_smem: Tile, size: Any) -> None:
        """A run of bytes from shared memory to global memory."""
        m = self._machine
        m.pause(f"async_store {src_smem.name}")
        addresses = _run(dst_global_ptr, int(size), src_smem)
        pieces = list(m.memory.split(addresses, src_smem.array.itemsize, None))
        if len(pieces) != 1 or pieces[0][0] is None:
            raise IndexError(f"async_store of {src_smem.name} to addresses outside of every tensor of the launch")
        storage = pieces[0][0]
        written = m.task.access("bulk store", write=True)
        written.index, written.generic = IN_FLIGHT, False
        self._global.note_elements(storage, (addresses - storage.first) // storage.element_size, written)

        def write() -> None:
            values = src_smem.array.reshape(-1)[: len(addresses)]
            global_memory.scatter(storage, addresses, values, src_smem.dtype, ...)

        self._store("bulk store", src_smem, write)

    def async_descriptor_store_wait(self, pendings: Any) -> None:
        """Until all but `pendings` stores have read their tiles."""
        m = self._machine
        m.pause("async_descriptor_store_wait")
        m.task.stores.wait(self.constant(pendings, "pendings"), m.task.known)

    def async_descriptor_prefetch_tensor(self, *_: Any, **__: Any) -> None:
        """Only faster."""

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Only faster."""

    # ---- cp.async

    def async_load(
        self,
        src: Block,
        result: Tile,
        mask: Any = None,
        other: Any = None,
        cache_modifier: str = "",
        eviction_policy: str = "",
        is_volatile: Any = False,
        bulk: Any = False,
        bulk_size: Any = None,
        barrier: Mbarrier | None = None,
    ) -> Token:
        """Through pointers, an element each; with `bulk` one run of bytes, whose arrival a barrier tells."""
        if bulk:
            self._bulk_load(src, result, result.nbytes if bulk_size is None else int(bulk_size), barrier)
            return Token()
        m, task = self._machine, self._machine.task
        addresses = np.asarray(src.data)
        lanes = None if mask is None else np.broadcast_to(as_block(mask).data, addresses.shape)
        values = self._global.global_load(addresses, src.dtype.element_ty, lanes)
        if lanes is not None:
            filler = as_block(0 if other is None else other).to(src.dtype.element_ty).data
            values = np.where(lanes, values, filler)
        access = task.access("cp.async", write=True)
        access.index = IN_FLIGHT
        m.touch(result, access, task.known, poison=True)

        def work() -> None:
            result.array[...] = values
            result.mark_written()

        task.uncommitted.append(work)
        task.uncommitted_accesses.append(access)
        return Token()

    def async_load_commit_group(self, tokens: Sequence[Any] = ()) -> Token:
        """The copies so far become a group, which ends as a whole."""
        m, task = self._machine, self._machine.task
        m.pause("async_load_commit_group")
        copies, accesses = task.uncommitted, task.uncommitted_accesses
        task.uncommitted, task.uncommitted_accesses = [], []

        def work() -> None:
            for copy in copies:
                copy()

        number = task.copies.issue(work, task.place)
        for access in accesses:
            access.component, access.index = task.copies.component, number
        m.complete_later(lambda: task.copies.finish(number), task.place)
        return Token()

    def async_load_wait_group(self, pendings: Any, tokens: Sequence[Any] = ()) -> Token:
        """Until at most `pendings` groups are under way."""
        m = self._machine
        m.pause("async_load_wait_group")
        m.task.copies.wait(self.constant(pendings, "pendings"), m.task.known)
        return Token()

    # ---- other CTAs of the cluster

    def remote_shmem_store(self, dst: Tile, src: Any, remote_cta_rank: Any) -> None:
        """An ordinary store to the same place in another CTA."""
        m = self._machine
        m.pause(f"remote_shmem_store {dst.name}")
        peer = self.peer_tile(dst, int(remote_cta_rank))
        access = m.task.access("remote store", write=True)
        m.touch(peer, access, m.task.known)
        peer.cta.remote_accesses.append((access, "a remote store"))
        peer.array[...] = as_block(src).to(dst.dtype).data
        peer.mark_written()

    def async_remote_shmem_store(self, dst: Tile, src: Any, remote_cta_rank: Any, barrier: Mbarrier) -> None:
        """`st.async`: registers to another CTA, which learns of it through bytes on its own barrier."""
        self._machine.pause(f"async_remote_shmem_store {dst.name}")
        values, rank = as_block(src).to(dst.dtype).data.copy(), int(remote_cta_rank)
        _check_size(dst, values.nbytes)
        self._copy("remote store", self.peer_tile(dst, rank), lambda: values, self.peer_barrier(barrier, rank))

    def async_remote_shmem_copy(self, dst: Tile, src: Tile, remote_cta_rank: Any, barrier: Mbarrier) -> None:
        """`cp.async.bulk` from shared memory to another CTA's."""
        m, rank = self._machine, int(remote_cta_rank)
        m.pause(f"async_remote_shmem_copy {dst.name}")
        m.require_fence(src, "remote copy")
        peer = self.peer_barrier(barrier, rank)
        reading = m.task.access("remote copy", write=False)
        reading.index, reading.generic = IN_FLIGHT, False
        m.touch(src, reading, m.task.known)
        m.task.cta.remote_accesses.append((reading, "a remote copy, which reads its shared memory,"))
        _check_size(dst, src.nbytes)

        def read() -> Any:
            reading.component, reading.index = peer.component, peer.phases.completed + 1
            return src.array

        self._copy("remote copy", self.peer_tile(dst, rank), read, peer)

    # ---- what they share

    def _copy(self, what: str, tile: Tile, read: Callable[[], Any], barrier: Mbarrier) -> None:
        """Writes a tile at some later time, and tells the barrier."""
        m, task = self._machine, self._machine.task
        access = task.access(what, write=True)
        access.index, access.generic = IN_FLIGHT, False
        m.touch(tile, access, task.known, poison=True)
        if tile.cta is not task.cta:
            tile.cta.remote_accesses.append((access, f"a {what}"))
        barrier.in_flight += 1
        tile.cta.in_flight += 1
        issuer, started = task.release(), m.steps

        def complete() -> None:
            tile.array[...] = read().reshape(tile.shape)
            tile.mark_written()
            tile.cta.in_flight -= 1
            access.component, access.index = barrier.component, barrier.phases.completed + 1
            if m.timeline is not None:
                m.timeline.copy(task, f"{what} to {tile.name}", started, m.steps)
            m.deliver(barrier, tile.nbytes, issuer, access.place)

        m.complete_later(complete, access.place)

    def _store(self, what: str, tile: Tile, write: Callable[[], None]) -> None:
        """Reads a tile at some later time."""
        m, task = self._machine, self._machine.task
        m.require_fence(tile, what)
        read = Access(what, task.place, write=False, component=task.stores.component, index=task.stores.issued + 1)
        read.generic = False
        m.touch(tile, read, task.known)
        number = task.stores.issue(write, task.place)
        m.complete_later(lambda: task.stores.finish(number), task.place)

    def _bulk_load(self, src: Block, tile: Tile, size: int, barrier: Mbarrier | None) -> None:
        m = self._machine
        m.pause(f"bulk async_load to {tile.name}")
        if barrier is None:
            raise ValueError(f"async_load(bulk=True) to {tile.name} needs a barrier, on which its bytes arrive")
        if size != tile.nbytes:
            raise UnsupportedOperationError(
                f"a bulk async_load of {size} bytes to {tile.name}, which has {tile.nbytes}"
            )
        addresses = _run(src, size, tile)
        if int(addresses[0]) % 16 or size % 16:
            m.fail("error", f"bulk async_load to {tile.name}: it moves whole 16 bytes, from an address that 16 divides")
        values = self._global.global_load(addresses, tile.dtype, None)
        self._copy("bulk copy", tile, lambda: values, barrier)

    def _indices(self, indices: Any) -> Any:
        block = self.local_load(indices) if isinstance(indices, Tile) else as_block(indices)
        return np.asarray(block.data).astype(np.int64)


def is_true(pred: Any) -> bool:
    """A predicate; none at all means always."""
    return pred is None or bool(pred)


def _check_box(desc: Descriptor, tile: Tile) -> None:
    if [n for n in desc.block_shape if n != 1] != [n for n in tile.shape if n != 1] or desc.dtype != tile.dtype:
        boxes = f"{desc.dtype} {desc.block_shape}"
        raise ValueError(f"{tile.name} is {tile.dtype} {list(tile.shape)}, boxes of {desc.name} are {boxes}")


def _check_size(tile: Tile, size: int) -> None:
    if tile.nbytes != size:
        raise ValueError(f"a remote copy of {size} bytes into {tile.name}, which has {tile.nbytes}")


def _run(pointer: Block, size: int, tile: Tile) -> Any:
    """Addresses of consecutive elements, `size` bytes in all."""
    step = itemsize(tile.dtype)
    first = int(np.asarray(pointer.data).reshape(-1)[0])
    return first + step * np.arange(size // step, dtype=np.int64)
