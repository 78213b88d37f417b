"""Kernels with several async tasks: captured values, replicas, registers and named barriers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.simulator.cases import COLUMNS, PUT, ROWS, Case, Defect, boxes, each, numbers

PING_PONG = Case(
    PUT
    + """
@triton.jit
def kernel(out, ROUNDS):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(ROUNDS):
                if i > 0:
                    tlx.named_barrier_wait(9, 256)
                tlx.local_store(tile[0], tl.full((16, 64), 1, tl.float32) * i)  # write
                tlx.named_barrier_arrive(10, 256)  # there
        with tlx.async_task(num_warps=4):
            for i in range(ROUNDS):
                tlx.named_barrier_wait(10, 256)  # take
                values = tlx.local_load(tile[0])  # read
                tlx.named_barrier_arrive(9, 256)  # back
                put(out, i * 16, values, 64)
""",
    output=(5 * ROWS, COLUMNS),
    expected=lambda: torch.arange(5.0).repeat_interleave(ROWS)[:, None].expand(-1, COLUMNS),
    constants={"ROUNDS": 5},
)

REPLICAS = Case(
    PUT
    + """
@triton.jit
def consume(tile, full, phase):
    tlx.barrier_wait(full, phase)  # wait
    return tlx.local_load(tile)  # read

@triton.jit
def kernel(x, out, tiles):
    ring = tlx.local_alloc((16, 64), tl.float32, 2)
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2)
    step = 0
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                for half in tl.static_range(2):
                    tlx.barrier_wait(empty[half], (step & 1) ^ 1)
                    tlx.barrier_expect_bytes(full[half], 4096)
                    tlx.async_descriptor_load(x, ring[half], [tile * 32 + 16 * half, 0], full[half])  # load
                step += 1
        with tlx.async_task(num_warps=4, replicate=2):
            me = tlx.async_task_replica_id()
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                values = consume(ring[me], full[me], step & 1)
                tlx.barrier_arrive(empty[me])
                if me == 0:
                    values = values * 2
                put(out, tile * 32 + 16 * me, values, 64)
                step += 1
""",
    inputs=lambda: [boxes(numbers(6 * 32, COLUMNS), ROWS, COLUMNS)],
    output=(6 * 32, COLUMNS),
    expected=lambda x: (x.view(6, 2, ROWS, COLUMNS) * torch.tensor([2.0, 1.0]).view(1, 2, 1, 1)).view(x.shape),
    grid=(1,),
    constants={"tiles": 6},
)

OPTIONAL_TASK = Case(
    """
@triton.jit
def kernel(out, FLAG: tl.constexpr):
    ready = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if FLAG:
                tlx.barrier_wait(ready[0], 0)
            tl.store(out, 1.0)
        if FLAG:
            with tlx.async_task(num_warps=1):
                tlx.barrier_arrive(ready[0])
""",
    output=(1,),
    expected=lambda: torch.ones(1),
)

CAPTURED = Case(
    """
@triton.jit
def kernel(out):
    places = tl.arange(0, 64)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out + tl.arange(0, 64), 1.0)
        with tlx.async_task(num_warps=4):  # task
            tl.store(out + 64 + places, 2.0)  # use
"""
)

SAME_NAME = Case(
    """
@triton.jit
def kernel(out):
    places = tl.arange(0, 64)
    tl.store(out + places, 1.0)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            places = 64 + tl.arange(0, 64)
            tl.store(out + places, 2.0)
        with tlx.async_task(num_warps=4):
            places = 128 + tl.arange(0, 64)
            tl.store(out + places, 3.0)
    tl.store(out + 192 + places, 4.0)
""",
    output=(256,),
    expected=lambda: torch.arange(1.0, 5).repeat_interleave(64),
)

TWO_GROUPS = Case(
    """
@triton.jit
def kernel(out):
    tile = tlx.local_alloc((64,), tl.float32, 1)
    ready = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(ready[0], 0)
        with tlx.async_task(num_warps=4):
            tlx.local_store(tile[0], tl.full((64,), 1, tl.float32))
            tlx.barrier_arrive(ready[0])
            tlx.local_store(tile[0], tl.full((64,), 2, tl.float32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(ready[0])
            tl.store(out + tl.arange(0, 64), tlx.local_load(tile[0]))
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(ready[0], 1)
            tl.store(out + 64 + tl.arange(0, 64), tlx.local_load(tile[0]))
""",
    output=(128,),
    expected=lambda: torch.full((128,), 2.0),
)

#: Beside the default task one warp: the compiler adds partitions of two warps and one, which use barriers 2 to 4.
SMALL_TASK = Case(
    """
@triton.jit
def kernel(out, ID: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(ID, 160)
        with tlx.async_task(num_warps=1):
            tlx.named_barrier_arrive(ID, 160)
""",
    expected=lambda: torch.zeros(ROWS, COLUMNS),
)

#: The compiler's named barriers are those of the largest group of tasks, not of all groups together.
FOUR_GROUPS = Case(
    """
@triton.jit
def kernel(out):
    for _ in tl.static_range(4):
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tlx.named_barrier_wait(6, 384)
            with tlx.async_task(num_warps=4, replicate=2):
                tlx.named_barrier_arrive(6, 384)
""",
    expected=lambda: torch.zeros(ROWS, COLUMNS),
)

#: A named barrier may take another count once the round before is known to be complete.
TWO_COUNTS = Case(
    """
@triton.jit
def kernel(out):
    a = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(9, 256)
            tlx.barrier_arrive(a[0])
            tlx.named_barrier_wait(9, 384)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_wait(9, 256)
            tlx.named_barrier_wait(9, 384)
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(a[0], 0)  # order
            tlx.named_barrier_wait(9, 384)
""",
    output=(1,),
    expected=lambda: torch.zeros(1),
)

#: The compiler silently omits setmaxnreg where the sum does not fit; the simulator reports it.
REGISTERS = Case(
    """
@triton.jit
def kernel(out_ptr, N: tl.constexpr, REGISTERS: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out_ptr, 1.0)
        with tlx.async_task(num_warps=4, replicate=N, registers=REGISTERS):
            tl.store(out_ptr + 1 + tlx.async_task_replica_id(), 2.0)
""",
    output=(4,),
    expected=lambda: torch.tensor([1.0, 2.0, 2.0, 2.0]),
)


def ping_pong(old: str, new: str) -> Case:
    """The ping-pong kernel with all occurrences of a text replaced."""
    return replace(PING_PONG, text=PING_PONG.text.replace(old, new))


CORRECT = {
    "ping-pong, odd number of rounds": PING_PONG,
    "ping-pong, even number of rounds": replace(
        PING_PONG.also(ROUNDS=4),
        output=(4 * ROWS, COLUMNS),
        expected=lambda: PING_PONG.expected()[: 4 * ROWS],  # type: ignore[misc]
    ),
    "named barrier above the compiler's": SMALL_TASK.also(ID=5),
    "named barriers of several groups": FOUR_GROUPS,
    "named barrier with two counts": TWO_COUNTS,
    **{f"replicas on {n} programs": replace(REPLICAS, grid=(n,)) for n in (1, 2, 4, 5, 8)},
    **{f"optional task, {flag}": OPTIONAL_TASK.also(FLAG=flag) for flag in (True, False)},
    "tensor with the name of the kernel's": SAME_NAME,
    "second group of tasks relies on the first": TWO_GROUPS,
    **{
        f"{registers} registers in {replicas} replicas": replace(
            REGISTERS.also(N=replicas, REGISTERS=registers),
            output=(1 + replicas,),
            expected=lambda replicas=replicas: torch.tensor([1.0] + [2.0] * replicas),
        )
        for replicas, registers in ((1, 240), (2, 240), (2, 232), (3, 160))
    },
}  # fmt: skip

DEFECTS = {
    **{
        f"wrong count in {mark}": PING_PONG.but(f"{call}, 256)  # {mark}", f"{call}, 128)  # {mark}").shows(
            "wrong_thread_count"
        )
        for mark, call in (("there", "arrive(10"), ("take", "wait(10"), ("back", "arrive(9"))
    },
    "count that is no multiple of a warp": ping_pong("256", "250").shows("wrong_thread_count"),
    "one role too few": ping_pong("256", "384")
        .shows("deadlock", saying="named barrier 10 (256 of 384 threads are there)"),
    "no wait for the buffer": PING_PONG.but("if i > 0:\n                    tlx.named_barrier_wait(9, 256)")
    .without("back")
    .shows("data_race", "write", "read"),
    **{
        f"named barrier {number} is the compiler's": ping_pong("(10, 256)", f"({number}, 256)").shows(
            "out_of_budget", "there"
        )
        for number in (0, 1, 2, 16)
    },
    **{
        f"named barrier {number} is a partition's": SMALL_TASK.also(ID=number).shows("out_of_budget")
        for number in (2, 3, 4)
    },
    "named barrier with two counts, unordered": TWO_COUNTS.without("order").shows("wrong_thread_count barrier_reuse"),
    "helper without a wait": REPLICAS.without("wait").shows("data_race", "load", "read"),
    "replica reads another one's tile": REPLICAS.but("consume(ring[me]", "consume(ring[0]")
        .shows("data_race", "load", "read"),
    "replicas store to one place": REPLICAS.but("tile * 32 + 16 * me", "tile * 32").shows("data_race"),
    "tensor of the kernel is read": CAPTURED.shows("capture", "task", saying="places"),
    "tensor of the kernel is changed": CAPTURED.but(
        "tl.store(out + 64 + places, 2.0)  # use",
        "for _ in range(2):\n                places += 64\n            tl.store(out + places, 3.0)",
    ).shows("capture", "task", saying="places"),
    "registers in steps other than 8": REGISTERS.also(N=1, REGISTERS=28).shows("out_of_budget"),
}  # fmt: skip


@each(CORRECT)
def test_correct_kernel_is_exact_and_clean_in_every_schedule(case: Case) -> None:
    case.check()


@each(DEFECTS)
def test_defect_is_found_in_every_schedule(case: Defect) -> None:
    case.check()


@pytest.mark.parametrize("registers", [168, 232])
def test_registers_that_do_not_fit_are_the_only_finding(registers: int) -> None:
    machine, _, _ = REGISTERS.also(N=3, REGISTERS=registers).run()
    assert [finding.kind for finding in machine.findings] == ["out_of_budget"]
