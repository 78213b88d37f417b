"""TLX's allocation of shared memory and barriers, and views of them, also in other CTAs of the cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from triton.language.extra import tlx as real_tlx

from tlxgen.simulator.dtypes import itemsize, unwrap
from tlxgen.simulator.language.blocks import Block
from tlxgen.simulator.language.namespace import UnsupportedOperationError
from tlxgen.simulator.machine.barriers import Mbarrier, Phases
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.machine.shared_memory import CTA_BYTES, Allocation, Buffers, Tile, padded
from tlxgen.simulator.machine.tasks import Cta, Wait

_MAX_COUNT = 2**20 - 1  # of arrivals that an mbarrier can count


class Barriers(Sequence[Mbarrier]):
    """The result of `alloc_barriers`."""

    def __init__(self, barriers: list[Mbarrier], name: str) -> None:
        self._barriers = barriers
        self._name = name

    def __len__(self) -> int:
        return len(self._barriers)

    def __getitem__(self, index: Any) -> Any:
        number = int(index)
        if not 0 <= number < len(self._barriers):
            raise IndexError(f"{self._name} has {len(self._barriers)} barriers, there is no {self._name}[{number}]")
        return self._barriers[number]


class StorageAlias:
    """`storage_alias_spec`: one piece of shared memory for several allocations."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.allocation: Allocation | None = None

    def set_buffer_overlap(self, *_: Any) -> None:
        """Ignored: the compiler places the users, here they all start at the first byte."""


class AllocationOperations:
    """Allocation and views."""

    storage_kind = real_tlx.storage_kind

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def local_alloc(
        self,
        shape: Any,
        dtype: Any,
        num: Any,
        storage: Any = None,
        reuse: Any = None,
        layout: Any = None,
        name: str = "",
    ) -> Buffers:
        """Buffers in shared memory."""
        if storage not in (None, real_tlx.storage_kind.smem):
            raise UnsupportedOperationError(f"tlx.local_alloc in {storage}: Hopper has shared memory only")
        sides = [self.constant(n, "a side of a buffer") for n in shape]
        if any(n & (n - 1) or n <= 0 for n in sides):
            self._machine.fail("error", f"local_alloc of {name}: sides must be powers of two, got {sides}")
        count = self.constant(num, "the number of buffers")
        dtype = unwrap(dtype)
        allocation = self._allocate(math.prod(sides) * itemsize(dtype) * count, name, reuse)
        return Buffers(allocation, sides, dtype, count, self._machine.task.cta)

    def storage_alias_spec(self, storage: Any = None, buffer_size_bytes: Any = None) -> StorageAlias:
        """A piece of shared memory for several `local_alloc(..., reuse=spec)`."""
        return StorageAlias(unwrap(buffer_size_bytes))

    def reuse_group(self, *_: Any, **__: Any) -> None:
        """See `StorageAlias.set_buffer_overlap`."""

    def alloc_barriers(self, num_barriers: Any, arrive_count: Any = 1, name: str = "") -> Barriers:
        """Barriers (mbarriers) whose phases take `arrive_count` arrivals."""
        return self._barriers(num_barriers, self.constant(arrive_count, "arrive_count"), name, per_thread=False)

    def alloc_warp_barrier(
        self, num_barriers: Any, num_warps: Any = 1, num_arrivals: Any = 1, name: str = ""
    ) -> Barriers:
        """Barriers (mbarriers) on which each thread arrives for itself."""
        count = 32 * self.constant(num_warps, "num_warps") * self.constant(num_arrivals, "num_arrivals")
        return self._barriers(num_barriers, count, name, per_thread=True)

    def local_view(self, local_allocated_buffers: Any, buffer_idx: Any) -> Any:
        """`buffers[index]`."""
        return local_allocated_buffers[buffer_idx]

    def local_slice(self, buffer: Tile, offset: Sequence[Any], shape: Sequence[Any]) -> Tile:
        """A part of a tile."""
        starts, sides = [int(o) for o in offset], [int(n) for n in shape]
        for start, side, whole in zip(starts, sides, buffer.shape, strict=True):
            if start < 0 or start + side > whole:
                raise IndexError(f"local_slice of {buffer.name}: {starts} + {sides} is outside of {list(buffer.shape)}")
        return buffer.view(buffer.array[tuple(slice(s, s + n) for s, n in zip(starts, sides, strict=True))])

    def local_trans(self, input: Tile, dims: Sequence[int] = (1, 0)) -> Tile:  # noqa: A002 - TLX's name
        """Axes in another order."""
        return input.view(input.array.transpose([int(d) for d in dims]))

    def local_reshape(self, src: Tile, shape: Sequence[Any]) -> Tile:
        """The same elements in another shape."""
        return src.reinterpret(src.dtype, [int(n) for n in shape])

    def local_reinterpret(self, src: Any, dtype: Any, shape: Sequence[Any] | None = None) -> Any:
        """The same bytes as another dtype; in another shape hardware would swizzle them differently."""
        if isinstance(src, Buffers):
            return [self.local_reinterpret(one, dtype, shape) for one in src.tiles]
        return src.reinterpret(unwrap(dtype), src.shape if shape is None else [int(n) for n in shape])

    def remote_view(self, local_allocated_buffer: Mbarrier, remote_cta_rank: Any) -> Mbarrier:
        """The same barrier of another CTA of the cluster."""
        return self.peer_barrier(local_allocated_buffer, int(remote_cta_rank))

    def _start(self, what: str) -> Machine:
        """Starts an operation that other tasks can observe; returns the machine."""
        self._machine.pause(what)
        return self._machine

    def constant(self, value: Any, what: str) -> int:
        """A number that must be known at compile time."""
        value = unwrap(value)
        if isinstance(value, Block):
            self._machine.fail("error", f"{what} must be a constant (tl.constexpr): it is known at run time only")
        return int(value)

    def peer_barrier(self, barrier: Mbarrier, rank: int) -> Mbarrier:
        """The same barrier of another CTA; waits until that CTA has allocated it."""
        own = self._machine.task.cta.barriers
        group, place = next((g, i) for g, bs in enumerate(own) for i, b in enumerate(bs) if b is barrier)
        return self._peer(rank, lambda cta: len(cta.barriers) > group).barriers[group][place]

    def peer_tile(self, tile: Tile, rank: int) -> Tile:
        """The same tile of another CTA; waits until that CTA has allocated it."""
        number = tile.allocation.number
        cta = self._peer(rank, lambda cta: len(cta.allocations) > number)
        return tile if cta is tile.cta else tile.peer(cta.allocations[number], cta)

    def _peer(self, rank: int, ready: Callable[[Cta], bool]) -> Cta:
        m = self._machine
        ctas = m.task.cta.cluster.ctas
        if not 0 <= rank < len(ctas):
            raise IndexError(f"there is no CTA {rank} in a cluster of {len(ctas)}")
        m.block(Wait(lambda: ready(ctas[rank]), lambda: f"waits for CTA {rank} to make the same allocations"))
        return ctas[rank]

    def _allocate(self, size: int, name: str, reuse: Any) -> Allocation:
        m, cta = self._machine, self._machine.task.cta
        shared: Allocation | None = reuse.allocation if reuse is not None else None
        if shared is not None:
            if size > shared.size:
                m.fail("out_of_budget", f"{name} needs {size} bytes and reuses {shared.name}, which has {shared.size}")
                raise ValueError(f"{name} does not fit into {shared.name}")
            return shared
        wanted = max(size, reuse.size or 0) if isinstance(reuse, StorageAlias) else size
        allocation = Allocation(len(cta.allocations), name or f"buffer {len(cta.allocations)}", wanted)
        cta.allocations.append(allocation)
        if isinstance(reuse, StorageAlias):
            reuse.allocation = allocation
        self._take(cta, padded(wanted))
        return allocation

    def _barriers(self, num: Any, count: int, name: str, *, per_thread: bool) -> Barriers:
        m, cta = self._machine, self._machine.task.cta
        number = self.constant(num, "the number of barriers")
        name = name or f"barrier {len(cta.barriers)}"
        if not 1 <= count <= _MAX_COUNT:
            m.fail("error", f"{name}: an mbarrier counts 1 to {_MAX_COUNT} arrivals, not {count}")
        line = m.line()
        made = [Mbarrier(m.new_component(), f"{name}[{i}]", line, Phases(count), per_thread) for i in range(number)]
        cta.barriers.append(made)
        self._take(cta, 8 * number)
        return Barriers(made, name)

    def _take(self, cta: Cta, size: int) -> None:
        before, cta.shared_bytes = cta.shared_bytes, cta.shared_bytes + size
        if before <= CTA_BYTES < cta.shared_bytes:
            message = f"{cta.shared_bytes} bytes of shared memory are allocated up to here, and a CTA has {CTA_BYTES}"
            self._machine.fail("out_of_budget", message)
