"""TLX's accesses to shared memory: synchronous ones, TMA, cp.async, and copies between CTAs."""

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
from tlxgen.simulator.machine.barriers import Mbarrier
from tlxgen.simulator.machine.clocks import IN_FLIGHT
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.machine.shared_memory import Tile
from tlxgen.simulator.tlx.allocation import AllocationOperations


class Token:
    """The result of cp.async; without content, since groups keep the order."""


class DescriptorSlots:
    """A pointer to slots for descriptors in global memory; `slots[i]` points `i` slots further."""

    def __init__(self, slots: list[Descriptor | None], first: int) -> None:
        self._slots = slots
        self._first = first

    def __getitem__(self, index: Any) -> DescriptorSlots:
        return DescriptorSlots(self._slots, self._first + int(index))

    @property
    def descriptor(self) -> Descriptor | None:
        """The descriptor in this slot."""
        return self._slots[self._first]

    @descriptor.setter
    def descriptor(self, made: Descriptor) -> None:
        self._slots[self._first] = made


class CopyOperations(AllocationOperations):
    """Operations that read or write tiles."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._global = GlobalOperations(machine)

    # ---- synchronous accesses

    def local_load(self, src: Tile, token: Any = None, layout: Any = None, relaxed: Any = False) -> Block:
        """Shared memory to registers."""
        m = self._start(f"local_load {src.name}")
        m.access_shared(src, m.task.access("local_load", write=False))
        return Block(src.array.copy(), src.dtype)

    def local_store(self, dst: Tile, src: Any) -> None:
        """Registers to shared memory."""
        values = as_block(src).to(dst.dtype).data
        if values.shape != dst.shape:
            raise ValueError(f"local_store of {list(values.shape)} into {dst.name}, which is {list(dst.shape)}")
        m = self._start(f"local_store {dst.name}")
        m.access_shared(dst, m.task.access("local_store", write=True))
        dst.array[...] = values
        dst.mark_written()

    def local_gather(self, src: Tile, indices: Any, axis: Any, token: Any = None) -> Block:
        """Elements of a tile by index along an axis."""
        return Block(np.take_along_axis(self.local_load(src).data, self._indices(indices), int(axis)), src.dtype)

    def local_scatter(self, dst: Tile, src: Any, indices: Any, axis: Any, token: Any = None) -> None:
        """Writes elements of a tile by index along an axis."""
        where = self._indices(indices)
        m = self._start(f"local_scatter {dst.name}")
        m.access_shared(dst, m.task.access("local_scatter", write=True))
        np.put_along_axis(dst.array, where, as_block(src).to(dst.dtype).data, int(axis))
        dst.mark_written()

    def fence(self, scope: Any) -> None:
        """`async_shared`: writes that this task knows of become visible to TMA and wgmma."""
        m = self._start(f"fence {scope}")
        if unwrap(scope) == "async_shared":
            m.task.known.fence()
            m.task.release()  # what is written from here on is later than the fence

    def fence_async_shared(self) -> None:
        """Older name of `fence("async_shared")`."""
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
        """Copies a box to shared memory, here or in several CTAs of the cluster; its bytes arrive on the barrier."""
        m = self._start(f"async_descriptor_load {desc.name} to {result.name}")
        if not is_true(pred):
            return
        where = [int(o) for o in offsets]
        _check_box(desc, result)
        desc.note(where, m.task.access("TMA load", write=False))
        for rank in [int(r) for r in multicast_targets] or [m.task.cta.rank]:
            self._copy(
                "TMA load", self.peer_tile(result, rank), lambda: desc.read(where), self.peer_barrier(barrier, rank)
            )

    def async_descriptor_store(
        self, desc: Descriptor, source: Tile, offsets: Sequence[Any], eviction_policy: str = "", store_reduce: str = ""
    ) -> None:
        """Copies shared memory to a box, or combines them; reads until the wait, writes until the kernel's end."""
        m = self._start(f"async_descriptor_store {source.name} to {desc.name}")
        where = [int(o) for o in offsets]
        _check_box(desc, source)
        desc.note(where, m.task.async_access("TMA store", write=True, atomic=bool(store_reduce)))
        self._store("TMA store", source, lambda: desc.write(where, source.array, store_reduce))

    def async_store(self, dst_global_ptr: Block, src_smem: Tile, size: Any) -> None:
        """Copies consecutive bytes from shared memory to global memory."""
        m = self._start(f"async_store {src_smem.name}")
        addresses = _consecutive(dst_global_ptr, int(size), src_smem)
        pieces = list(m.memory.split(addresses, src_smem.array.itemsize, None))
        if len(pieces) != 1 or pieces[0][0] is None:
            raise IndexError(f"async_store of {src_smem.name} to addresses outside of every tensor of the launch")
        storage = pieces[0][0]
        elements = (addresses - storage.first) // storage.element_size
        m.access_global(storage, elements, m.task.async_access("bulk store", write=True))

        def write() -> None:
            values = src_smem.array.reshape(-1)[: len(addresses)]
            global_memory.scatter(storage, addresses, values, src_smem.dtype, ...)

        self._store("bulk store", src_smem, write)

    def async_descriptor_store_wait(self, pendings: Any) -> None:
        """Waits until all but `pendings` stores have read their tiles."""
        m = self._start("async_descriptor_store_wait")
        m.task.stores.wait(self.constant(pendings, "pendings"), m.task.known)

    def async_descriptor_prefetch_tensor(self, *_: Any, **__: Any) -> None:
        """Ignored: changes only the speed."""

    prefetch = async_descriptor_prefetch_tensor

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
        """Copies elements through pointers; with `bulk`, consecutive bytes, which arrive on a barrier."""
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
        m.access_shared(result, access, poison=True)

        def work() -> None:
            result.array[...] = values
            result.mark_written()

        task.uncommitted.append(work)
        task.uncommitted_accesses.append(access)
        return Token()

    def async_load_commit_group(self, tokens: Sequence[Any] = ()) -> Token:
        """Makes a group of the copies so far."""
        m = self._start("async_load_commit_group")
        task = m.task
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
        """Waits until at most `pendings` groups are under way."""
        m = self._start("async_load_wait_group")
        m.task.copies.wait(self.constant(pendings, "pendings"), m.task.known)
        return Token()

    # ---- other CTAs of the cluster

    def remote_shmem_store(self, dst: Tile, src: Any, remote_cta_rank: Any) -> None:
        """A synchronous store to the same tile of another CTA."""
        m = self._start(f"remote_shmem_store {dst.name}")
        peer = self.peer_tile(dst, int(remote_cta_rank))
        access = m.task.access("remote store", write=True)
        m.access_shared(peer, access)
        peer.cta.remote_accesses.append((access, "a remote store"))
        peer.array[...] = as_block(src).to(dst.dtype).data
        peer.mark_written()

    def async_remote_shmem_store(self, dst: Tile, src: Any, remote_cta_rank: Any, barrier: Mbarrier) -> None:
        """`st.async`: copies registers to another CTA; the bytes arrive on that CTA's barrier."""
        self._start(f"async_remote_shmem_store {dst.name}")
        values, rank = as_block(src).to(dst.dtype).data.copy(), int(remote_cta_rank)
        _check_size(dst, values.nbytes)
        self._copy("remote store", self.peer_tile(dst, rank), lambda: values, self.peer_barrier(barrier, rank))

    def async_remote_shmem_copy(self, dst: Tile, src: Tile, remote_cta_rank: Any, barrier: Mbarrier) -> None:
        """`cp.async.bulk` from shared memory to another CTA's."""
        rank = int(remote_cta_rank)
        m = self._start(f"async_remote_shmem_copy {dst.name}")
        m.require_fence(src, "remote copy")
        peer = self.peer_barrier(barrier, rank)
        reading = m.task.async_access("remote copy", write=False)
        m.access_shared(src, reading)
        m.task.cta.remote_accesses.append((reading, "a remote copy, which reads its shared memory,"))
        _check_size(dst, src.nbytes)

        def read() -> Any:
            reading.component, reading.index = peer.component, peer.phases.completed + 1
            return src.array

        self._copy("remote copy", self.peer_tile(dst, rank), read, peer)

    # ---- shared by several operations

    def _copy(self, what: str, tile: Tile, read: Callable[[], Any], barrier: Mbarrier) -> None:
        """Writes a tile at a later time; its bytes arrive on the barrier."""
        m, task = self._machine, self._machine.task
        access = task.async_access(what, write=True)
        m.access_shared(tile, access, poison=True)
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
        """Reads a tile at a later time, and writes it to global memory by `write`."""
        m, task = self._machine, self._machine.task
        m.require_fence(tile, what)
        m.access_shared(tile, task.queued_read(what, task.stores))
        number = task.stores.issue(write, task.place)
        m.complete_later(lambda: task.stores.finish(number), task.place)

    def _bulk_load(self, src: Block, tile: Tile, size: int, barrier: Mbarrier | None) -> None:
        m = self._start(f"bulk async_load to {tile.name}")
        if barrier is None:
            raise ValueError(f"async_load(bulk=True) to {tile.name} needs a barrier, on which its bytes arrive")
        if size != tile.nbytes:
            raise UnsupportedOperationError(
                f"a bulk async_load of {size} bytes to {tile.name}, which has {tile.nbytes}"
            )
        addresses = _consecutive(src, size, tile)
        if int(addresses[0]) % 16 or size % 16:
            m.fail("error", f"bulk async_load to {tile.name}: it moves whole 16 bytes, from an address that 16 divides")
        values = self._global.global_load(addresses, tile.dtype, None)
        self._copy("bulk copy", tile, lambda: values, barrier)

    def _indices(self, indices: Any) -> Any:
        block = self.local_load(indices) if isinstance(indices, Tile) else as_block(indices)
        return np.asarray(block.data).astype(np.int64)


def is_true(pred: Any) -> bool:
    """The value of a predicate; None means true."""
    return pred is None or bool(pred)


def _check_box(desc: Descriptor, tile: Tile) -> None:
    if [n for n in desc.block_shape if n != 1] != [n for n in tile.shape if n != 1] or desc.dtype != tile.dtype:
        boxes = f"{desc.dtype} {desc.block_shape}"
        raise ValueError(f"{tile.name} is {tile.dtype} {list(tile.shape)}, boxes of {desc.name} are {boxes}")


def _check_size(tile: Tile, size: int) -> None:
    if tile.nbytes != size:
        raise ValueError(f"a remote copy of {size} bytes into {tile.name}, which has {tile.nbytes}")


def _consecutive(pointer: Block, size: int, tile: Tile) -> Any:
    """Addresses of consecutive elements, `size` bytes in all."""
    step = itemsize(tile.dtype)
    first = int(np.asarray(pointer.data).reshape(-1)[0])
    return first + step * np.arange(size // step, dtype=np.int64)
