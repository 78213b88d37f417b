"""`Tlx`, the simulated `triton.language.extra.tlx`: tasks, barriers, clusters, descriptors and products.

Sources of the rules: the lowering of fbtriton 3.7 (BarrierOpToLLVM, LoadStoreOpToLLVM, DotOpToLLVM/WGMMA,
ConvertWarpSpecializeToLLVM, ProxyFenceInsertion) and the PTX ISA; docs/simulator.md lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import tlx as real_tlx

from tlxgen.simulator.dtypes import itemsize, unwrap
from tlxgen.simulator.language.blocks import Block, as_block
from tlxgen.simulator.language.descriptors import Descriptor
from tlxgen.simulator.language.namespace import UnsupportedOperationError
from tlxgen.simulator.machine.barriers import Mbarrier
from tlxgen.simulator.machine.shared_memory import Tile
from tlxgen.simulator.tlx.copies import CopyOperations, DescriptorSlots, is_true
from tlxgen.simulator.tlx.warp_groups import AsyncTasks
from tlxgen.simulator.tlx.wgmma import Product, accumulator_dtype

_NAMED_BARRIERS = 16  # of the hardware, for each CTA
_COMPILER_BARRIERS = 2  # that warp specialisation takes, and one more for each partition


class Tlx(CopyOperations):
    """TLX's operations for Hopper."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(real_tlx, name, None)
        if isinstance(real, type):  # used in annotations and isinstance
            return real
        raise UnsupportedOperationError(f"tlx.{name} is not supported by the simulator")

    # ---- tasks

    def async_tasks(self, **_: Any) -> AsyncTasks:
        """The group that the transformed `with tlx.async_tasks()` registers its tasks with."""
        return AsyncTasks(self._machine)

    def async_task_replica_id(self) -> int:
        """The replica's number, a constant."""
        return self._machine.task.replica

    def thread_id(self, axis: Any) -> Block:
        """Numbers of all threads of the task, for predicates; a branch on them is refused: a task moves as one."""
        if int(unwrap(axis)):
            return as_block(0)
        return Block(np.arange(self._machine.task.threads, dtype=np.int32), tl.int32)

    # ---- mbarriers

    def barrier_expect_bytes(self, bar: Mbarrier, size: Any, pred: Any = None) -> None:
        """Bytes that the current phase takes, and one arrival."""
        m = self._start(f"barrier_expect_bytes {bar.name}")
        if is_true(pred):
            m.arrive(bar, 1, expect=self.constant(size, "the number of bytes"))

    def barrier_wait(self, bar: Mbarrier, phase: Any, pred: Any = None) -> None:
        """Waits until the phase of this parity is complete."""
        parity = int(phase)
        m = self._start(f"barrier_wait {bar.name}")
        if parity not in (0, 1):
            m.fail("error", f"barrier_wait on {bar.name}: a phase is 0 or 1, not {parity}")
        if is_true(pred):
            m.wait(bar, parity % 2)

    def barrier_arrive(
        self, bar: Mbarrier, arrive_count: Any = 1, remote_cta_rank: Any = None, pred: Any = None
    ) -> None:
        """An arrival of the task, or of each of its threads on a warp barrier."""
        m = self._start(f"barrier_arrive {bar.name}")
        threads = _arriving(pred, m.task.threads, first_only=not bar.per_thread)
        if not threads:
            return
        count = self.constant(arrive_count, "arrive_count") * threads
        if remote_cta_rank is not None:
            bar = self._remote_barrier(bar, int(remote_cta_rank))
        m.arrive(bar, count)

    def _remote_barrier(self, barrier: Mbarrier, rank: int) -> Mbarrier:
        """A barrier of another CTA, which may not end before this arrival."""
        peer = self.peer_barrier(barrier, rank)
        task = self._machine.task
        cta = task.cta.cluster.ctas[rank]
        if cta is not task.cta:
            cta.remote_accesses.append((task.access("arrival", write=True), "an arrival"))
        return peer

    # ---- named barriers and clusters

    def named_barrier_wait(self, bar: Any, arrive_count: Any) -> None:
        """`barrier.cta.sync`."""
        self._named_barrier(int(bar), int(arrive_count), wait=True)

    def named_barrier_arrive(self, bar: Any, arrive_count: Any) -> None:
        """`barrier.cta.arrive`."""
        self._named_barrier(int(bar), int(arrive_count), wait=False)

    def _named_barrier(self, number: int, wanted: int, *, wait: bool) -> None:
        m = self._start(f"named_barrier_{'wait' if wait else 'arrive'} {number}")
        first_free = _COMPILER_BARRIERS + m.task.cta.partitions
        if not first_free <= number < _NAMED_BARRIERS:
            numbers = f"there are {_NAMED_BARRIERS}, and the compiler itself uses 0 to {first_free - 1}"
            m.fail("out_of_budget", f"named barrier {number}: {numbers}")
        m.named_barrier(number, m.task.threads, wanted, wait=wait)

    def cluster_cta_rank(self) -> Block:
        """Rank of this CTA in its cluster."""
        return as_block(self._machine.task.cta.rank)

    def cluster_size_1d(self) -> Block:
        """Number of CTAs of a cluster."""
        return as_block(len(self._machine.task.cta.cluster.ctas))

    def cluster_barrier(self) -> None:
        """Waits for all threads of the cluster."""
        self._start("cluster_barrier").cluster_barrier()

    def fence_mbarrier_init_cluster(self) -> None:
        """Nothing to do: `peer_barrier` waits for the other CTA's allocation."""

    # ---- descriptors

    def make_tensor_descriptor(
        self,
        desc_ptr: DescriptorSlots | None,
        base: Block,
        shape: Sequence[Any],
        strides: Sequence[Any],
        block_shape: Sequence[Any],
        padding_option: Any = "zero",
    ) -> Descriptor:
        """A descriptor made by the kernel; with `desc_ptr` it is also stored there."""
        shape, strides, box = ([int(n) for n in values] for values in (shape, strides, block_shape))
        made = self._global.make_descriptor(base, shape, strides, box, unwrap(padding_option))
        if desc_ptr is not None:
            desc_ptr.descriptor = made
        return made

    def allocate_tensor_descriptor(self, num: Any) -> DescriptorSlots:
        """Slots for descriptors in global memory."""
        return DescriptorSlots([None] * self.constant(num, "the number of descriptors"), 0)

    def reinterpret_tensor_descriptor(self, desc_ptr: DescriptorSlots, block_shape: Any, dtype: Any) -> Descriptor:
        """The descriptor in a slot."""
        if desc_ptr.descriptor is None:
            raise ValueError("reinterpret_tensor_descriptor of a slot in which no descriptor was made")
        return desc_ptr.descriptor

    # ---- products

    def async_dot(
        self,
        A: Tile | Block,  # noqa: N803 - TLX's name
        B: Tile,  # noqa: N803 - TLX's name
        acc: Any = None,
        use_acc: Any = None,
        pred: Any = None,
        mBarriers: Sequence[Any] = (),  # noqa: N803 - TLX's name
        two_ctas: Any = False,
        force_async: Any = False,
        input_precision: Any = None,
        out_dtype: Any = None,
    ) -> Product:
        """Issues a wgmma group, which reads shared memory until it is waited for."""
        a, b = A, B
        m = self._start("async_dot")
        task = m.task
        rows, depth = (int(n) for n in a.shape)
        if depth != b.shape[0]:
            raise ValueError(f"async_dot of [{rows}, {depth}] and {list(b.shape)}")
        for operand in (a, b):
            if isinstance(operand, Tile):
                m.access_shared(operand, task.queued_read("wgmma", task.dots))
        product = Product(m, accumulator_dtype(a), (rows, b.shape[1]), task.dots.issued + 1)
        before = None if acc is None else as_block(acc)
        if before is not None and before.shape != product.shape:
            raise ValueError(f"async_dot adds {list(product.shape)} to {list(before.shape)}")
        if isinstance(a, Product):
            a = Block(a.data, a.dtype)
        task.dots.issue(lambda: product.finish(a, b, before), task.place)
        return product

    def async_dot_wait(self, pendings: Any, inp: Any) -> Any:
        """Waits until at most `pendings` products are under way; returns the value, usable unless it is one of them."""
        m = self._start("async_dot_wait")
        m.task.dots.wait(self.constant(pendings, "pendings"), m.task.known)
        if isinstance(inp, Product) and inp.waited:
            return Block(inp.data, inp.dtype)
        return inp

    # ---- dtypes, clock and layouts

    def dtype_of(self, v: Any) -> Any:
        """Element type of a descriptor, pointer, tensor or buffer."""
        dtype = v.dtype
        return dtype.element_ty if isinstance(dtype, tl.pointer_type) else dtype

    def size_of(self, dtype: Any) -> int:
        """Bytes of an element."""
        return itemsize(unwrap(dtype))

    def get_fp8_format_name(self, dtype: Any) -> str:
        """The format's name in PTX."""
        return {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}[unwrap(dtype).name]

    def clock64(self) -> Block:
        """Steps of the scheduler: monotonic, without a unit."""
        return Block(np.asarray(self._machine.steps, np.int64), tl.int64)

    def require_layout(self, x: Any, layout: Any) -> Any:
        """Ignored: the simulator has no layouts."""
        return x

    def dump_layout(self, x: Any) -> None:
        """Ignored: the simulator has no layouts."""

    def assert_same_layout(self, lhs: Any, rhs: Any) -> None:
        """Ignored: the simulator has no layouts."""


def _arriving(pred: Any, threads: int, *, first_only: bool) -> int:
    """Number of threads that arrive: all for which the predicate is true, or at most the first."""
    if pred is None:
        return 1 if first_only else threads
    values = np.broadcast_to(np.asarray(as_block(pred).data), (threads,))
    return int(values[0]) if first_only else int(values.sum())
