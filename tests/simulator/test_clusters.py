"""Kernels in clusters: multicast, copies and stores to another CTA's shared memory, and defects of each."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.simulator.cases import CLUSTER, COLUMNS, PUT, ROWS, Case, Defect, boxes, each, numbers

MULTICAST = Case(
    PUT
    + """
@triton.jit
def kernel(x, out, TILES):
    rank = tlx.cluster_cta_rank()
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    empty = tlx.alloc_barriers(1, arrive_count=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(TILES):
                tlx.barrier_wait(full[0], i & 1)
                values = tlx.local_load(tile[0])  # read
                for peer in tl.static_range(2):
                    tlx.barrier_arrive(empty[0], remote_cta_rank=peer)  # release
                put(out, (rank * TILES + i) * 16, values, 64)
        with tlx.async_task(num_warps=1):
            for i in range(TILES):
                tlx.barrier_expect_bytes(full[0], 4096)  # expect
                tlx.barrier_wait(empty[0], (i & 1) ^ 1)  # handshake
                half = tlx.local_slice(tile[0], [8 * rank, 0], [8, 64])
                tlx.async_descriptor_load(x, half, [16 * i + 8 * rank, 0], full[0], multicast_targets=[0, 1])  # load
                tlx.barrier_wait(full[0], i & 1)
            tlx.barrier_wait(empty[0], (TILES & 1) ^ 1)  # farewell
""",
    inputs=lambda: [boxes(numbers(3 * ROWS, COLUMNS), 8, COLUMNS)],
    output=(6 * ROWS, COLUMNS),
    expected=lambda x: torch.cat([x, x]),
    grid=(2,),
    constants={"TILES": 3},
    options=CLUSTER,
)

REMOTE = Case(
    """
@triton.jit
def kernel(out):
    rank = tlx.cluster_cta_rank()
    mine = tlx.local_alloc((64,), tl.float32, 1)
    inbox = tlx.local_alloc((64,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 256)
    tlx.local_store(mine[0], tl.full((64,), 1, tl.float32) + rank)  # write
    tlx.fence("async_shared")  # fence
    tlx.async_remote_shmem_copy(inbox[0], mine[0], rank ^ 1, full[0])  # send
    tlx.barrier_wait(full[0], 0)  # wait
    values = tlx.local_load(inbox[0])  # read
    tlx.cluster_barrier()  # farewell
    tl.store(out + rank * 64 + tl.arange(0, 64), values)
""",
    output=(128,),
    expected=lambda: torch.tensor([2.0, 1.0]).repeat_interleave(64),
    grid=(2,),
    options=CLUSTER,
)

COPY = "tlx.async_remote_shmem_copy(inbox[0], mine[0], rank ^ 1, full[0])"
VALUES = "tl.full((64,), 1, tl.float32) + rank, rank ^ 1"
ASYNC_STORE = REMOTE.but(COPY, f"tlx.async_remote_shmem_store(inbox[0], {VALUES}, full[0])").without("fence")
REMOTE_STORE = (
    REMOTE.but(COPY, f"tlx.remote_shmem_store(inbox[0], {VALUES})")
    .but("tlx.barrier_wait(full[0], 0)", "tlx.cluster_barrier()")
    .but("    tlx.barrier_expect_bytes(full[0], 256)\n", "")
)

ONE_CTA_LATE = Case(
    """
@triton.jit
def kernel(x, out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    if tlx.cluster_cta_rank() == 1:
        tlx.barrier_expect_bytes(full[0], 4096)
        tlx.async_descriptor_load(x, tile[0], [0, 0], full[0])
        tlx.barrier_wait(full[0], 0)
    tlx.cluster_barrier()
    tl.store(out + tlx.cluster_cta_rank(), 1.0)
""",
    inputs=lambda: [boxes(numbers(ROWS, COLUMNS), ROWS, COLUMNS)],
    output=(2,),
    expected=lambda _: torch.ones(2),
    grid=(2,),
    options=CLUSTER,
)

ONE_CTA_MISSING = Case(
    """
@triton.jit
def kernel(out):
    if tlx.cluster_cta_rank() == 0:
        tlx.cluster_barrier()  # meet
""",
    grid=(2,),
    options=CLUSTER,
)

CORRECT = {
    "multicast": MULTICAST,
    "multicast in two clusters": replace(
        MULTICAST.but("rank * TILES + i", "tl.program_id(0) * TILES + i"),
        grid=(4,),
        output=(12 * ROWS, COLUMNS),
        expected=lambda x: torch.cat([x] * 4),
    ),
    "cluster barrier with one late CTA": ONE_CTA_LATE,
    "remote copy": REMOTE,
    "asynchronous remote store": ASYNC_STORE,
    "remote store": REMOTE_STORE,
}  # fmt: skip

TASKS = "    with tlx.async_tasks():"

DEFECTS = {
    "multicast: no handshake": MULTICAST.without("handshake").shows("data_race", "load", "read"),
    "grid is no multiple of the cluster": replace(MULTICAST, grid=(3,))
        .shows("launch", saying="no multiple of the cluster's 2 CTAs"),
    "multicast: no wait for the last arrivals": MULTICAST.without("farewell")
        .shows("unfinished_at_exit", "release", saying="must wait for the last"),
    "cluster barrier before async tasks": MULTICAST.but(TASKS, f"    tlx.cluster_barrier()\n{TASKS}")
        .shows("deadlock", saying="these tasks never arrived"),
    "cluster barrier after async tasks": replace(MULTICAST, text=MULTICAST.text + "    tlx.cluster_barrier()  # meet\n")
        .shows("deadlock", "meet", saying="never arrive on the barrier of the cluster"),
    "multicast: half the bytes expected": MULTICAST.but("4096", "2048").shows("wrong_byte_count data_race"),
    "multicast to itself only": MULTICAST.but("[0, 1])  # load", "[rank])  # load").shows("deadlock"),
    "cluster barrier with a missing CTA": ONE_CTA_MISSING
        .shows("deadlock", "meet", saying="the barrier of the cluster"),
    "remote copy: no fence": REMOTE.without("fence").shows("missing_fence", "send", "write"),
    "remote copy: no wait": REMOTE.without("wait").shows("data_race unwritten_shared"),
    "remote copy: no wait before the end": REMOTE.without("farewell")
        .shows("unfinished_at_exit", "send", saying="must wait for the last"),
    "remote copy: other size": REMOTE.but("mine = tlx.local_alloc((64,)", "mine = tlx.local_alloc((32,)")
    .but("tl.full((64,), 1", "tl.full((32,), 1")
    .shows("error", "send"),
    "remote copy: no such CTA": REMOTE.but("rank ^ 1", "rank + 1")
        .shows("out_of_bounds", "send", saying="there is no CTA 2"),
    "asynchronous remote store: no wait": ASYNC_STORE.without("wait").shows("data_race unwritten_shared"),
    "remote store: no barrier": REMOTE_STORE.without("wait").shows("data_race", "send", "read"),
}  # fmt: skip


@each(CORRECT)
def test_correct_kernel_is_exact_and_clean_in_every_schedule(case: Case) -> None:
    case.check()


@each(DEFECTS)
def test_defect_is_found_in_every_schedule(case: Defect) -> None:
    case.check()
