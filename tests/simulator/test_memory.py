"""Kernels that access shared and global memory: TMA, cp.async, views, pointers and atomics, and defects of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.simulator.cases import COLUMNS, PUT, ROWS, SCHEDULES, Case, Defect, boxes, each, numbers, protocol, zeros

STORE = Case(
    """
@triton.jit
def kernel(out, TILES):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    for i in range(TILES):
        tlx.local_store(tile[0], tl.full((16, 64), 1, tl.float32) * (i + 1))  # write
        tlx.fence("async_shared")  # fence
        tlx.async_descriptor_store(out, tile[0], [i * 16, 0])  # store
        tlx.async_descriptor_store_wait(0)  # wait
""",
    output=(3 * ROWS, COLUMNS),
    expected=lambda: torch.arange(1.0, 4).repeat_interleave(ROWS)[:, None].expand(-1, COLUMNS),
    into=lambda out: boxes(out, ROWS, COLUMNS),
    constants={"TILES": 3},
)

DESCRIPTOR_STORE = replace(
    STORE,
    text="""
@triton.jit
def kernel(out, TILES):
    for i in range(TILES):
        out.store([i * 16, 0], tl.full((16, 64), 1, tl.float32) * (i + 1))  # store
""",
)
REDUCTION = replace(
    STORE.but("out, tile[0], [i * 16, 0])", 'out, tile[0], [i * 16, 0], store_reduce="add")'),
    grid=(5,),
    expected=lambda: 5 * STORE.expected(),  # type: ignore[misc]
)
BULK_STORE = replace(
    STORE.but(
        "tlx.async_descriptor_store(out, tile[0], [i * 16, 0])", "tlx.async_store(out + i * 1024, tile[0], 4096)"
    ),
    into=lambda out: out,
)

ONE_LOAD = Case(
    PUT
    + """
@triton.jit
def kernel(x, out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 16 * 64 * 4)
    tlx.async_descriptor_load(x, tile[0], [16, 0], full[0])  # load
    tlx.barrier_wait(full[0], 0)  # wait
    put(out, 0, tlx.local_load(tile[0]), 64)  # read
""",
    inputs=lambda: [boxes(numbers(3 * ROWS, COLUMNS), ROWS, COLUMNS)],
    expected=lambda x: x[ROWS : 2 * ROWS],
)


def load_by_pointer(*edits: tuple[str, str]) -> Case:
    """The load from a pointer instead of a descriptor of the host."""
    case = replace(ONE_LOAD, inputs=lambda: [numbers(3 * ROWS, COLUMNS)])
    for old, new in edits:
        case = case.but(old, new)
    return case


def padded(padding: str, filler: float) -> Case:
    """A load of which only five rows are inside the tensor."""

    def expected(x: torch.Tensor) -> torch.Tensor:
        result = torch.full((ROWS, COLUMNS), filler)
        result[:5] = x[ROWS:]
        return result

    inputs = [boxes(numbers(ROWS + 5, COLUMNS), ROWS, COLUMNS, padding=padding)]
    return replace(ONE_LOAD, inputs=lambda: inputs, expected=expected)


KERNEL_DESCRIPTORS = {
    maker: load_by_pointer(
        (
            "    full =",
            f"    desc = {maker}(x, [48, 64], [64, 1], [16, 64])  # make\n    full =".replace("None(x", "None, x"),
        ),
        ("load(x, tile", "load(desc, tile"),
    )
    for maker in ("tl.make_tensor_descriptor", "tlx.make_tensor_descriptor(None")
}
STORED_DESCRIPTOR = load_by_pointer(
    (
        "    full =",
        """    places = tlx.allocate_tensor_descriptor(2)
    tlx.make_tensor_descriptor(places[1], x, [48, 64], [64, 1], [16, 64])  # make
    desc = tlx.reinterpret_tensor_descriptor(places[1], [16, 64], tl.float32)  # take
    full =""",
    ),
    ("load(x, tile", "load(desc, tile"),
)
BULK_LOAD = load_by_pointer(
    (
        "async_descriptor_load(x, tile[0], [16, 0], full[0])",
        "async_load(x + 1024, tile[0], bulk=True, barrier=full[0])",
    )
)
EXPECT = "    tlx.barrier_expect_bytes(full[0], 16 * 64 * 4)\n"

UNWRITTEN = Case(
    PUT
    + """
@triton.jit
def kernel(out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    put(out, 0, tlx.local_load(tile[0]), 64)  # read
"""
)

VIEWS = Case(
    PUT
    + """
@triton.jit
def kernel(out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    done = tlx.alloc_barriers(1, arrive_count=2)
    left = tlx.local_slice(tile[0], [0, 0], [16, 32])
    right = tlx.local_slice(tile[0], [0, 32], [16, 32])
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(left, tl.full((16, 32), 1, tl.float32))  # left
            tlx.barrier_arrive(done[0])
        with tlx.async_task(num_warps=4):
            tlx.local_store(right, tl.full((16, 32), 2, tl.float32))  # right
            tlx.barrier_arrive(done[0])
            tlx.barrier_wait(done[0], 0)
            put(out, 0, tlx.local_load(tile[0]), 64)  # read
""",
    expected=lambda: torch.tensor([1.0, 2.0]).repeat_interleave(32).expand(16, -1),
)

ALIAS = Case(
    PUT
    + """
@triton.jit
def kernel(out):
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    wide = tlx.local_alloc((16, 64), tl.float32, 1, reuse=spec)
    narrow = tlx.local_alloc((16, 64), tl.float16, 1, reuse=spec)
    ready = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(wide[0], tl.full((16, 64), 7, tl.float32))  # write wide
            put(out, 0, tlx.local_load(wide[0]), 64)  # read wide
            tlx.barrier_arrive(ready[0])
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(ready[0], 0)  # wait
            tlx.local_store(narrow[0], tl.full((16, 64), 3, tl.float16))  # write narrow
            put(out, 16, tlx.local_load(narrow[0]).to(tl.float32), 64)
""",
    output=(2 * ROWS, COLUMNS),
    expected=lambda: torch.tensor([7.0, 3.0]).repeat_interleave(ROWS)[:, None].expand(-1, COLUMNS),
)

REUSED_BUFFER = ALIAS.but("tl.float32, 1, reuse=spec)", "tl.float32, 1)").but(
    "tl.float16, 1, reuse=spec", "tl.float16, 1, reuse=wide"
)

SAME_BYTES = Case(
    """
@triton.jit
def kernel(x, out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    r = tl.arange(0, 16)[:, None]
    c = tl.arange(0, 64)[None, :]
    tlx.local_store(tile[0], tl.load(x + r * 64 + c))
    turned = tlx.local_load(tlx.local_trans(tile[0]))
    tl.store(out + tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :], turned)
    flat = tlx.local_load(tlx.local_reshape(tile[0], [1024]))
    tl.store(out + 1024 + tl.arange(0, 1024), flat)
    bits = tlx.local_load(tlx.local_reinterpret(tile[0], tl.int32))
    tl.store(out + 2048 + r * 64 + c, bits.to(tl.float32, bitcast=True))
""",
    inputs=lambda: [numbers(ROWS, COLUMNS)],
    output=(3 * 1024,),
    expected=lambda x: torch.cat([x.T.reshape(-1), x.reshape(-1), x.reshape(-1)]),
)

BUDGET = Case(
    """
@triton.jit
def kernel(out, N: tl.constexpr):
    tile = tlx.local_alloc((64, 64), tl.float32, N)  # allocate
""",
    expected=lambda: torch.zeros(ROWS, COLUMNS),
)

MASKED = Case(
    """
@triton.jit
def kernel(x, out, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    values = tl.load(x + i, mask=i < N, other=7)  # load
    tl.store(out + i, values + 1, mask=i < N)  # store
""",
    inputs=lambda: [numbers(100)],
    output=(100,),
    expected=lambda x: x + 1,
    grid=(4,),
    constants={"N": 100, "B": 32},
)

CP_ASYNC = Case(
    """
@triton.jit
def kernel(x, out, TILES, STAGES: tl.constexpr):
    ring = tlx.local_alloc((64,), tl.float32, STAGES)
    i = tl.arange(0, 64)
    for k in tl.static_range(STAGES - 1):
        tlx.async_load(x + k * 64 + i, ring[k], mask=(k < TILES) & (i < 64))
        tlx.async_load_commit_group()
    for k in range(TILES):
        tlx.async_load_wait_group(STAGES - 2)  # wait
        values = tlx.local_load(ring[k % STAGES])  # read
        ahead = k + STAGES - 1
        tlx.async_load(x + ahead * 64 + i, ring[ahead % STAGES], mask=(i < 64) & (ahead < TILES), other=0)  # load
        tlx.async_load_commit_group()  # commit
        tl.store(out + k * 64 + i, values)
    tlx.async_load_wait_group(0)  # drain
""",
    inputs=lambda: [numbers(5 * 64)],
    output=(5 * 64,),
    expected=lambda x: x,
    constants={"TILES": 5, "STAGES": 3},
)

CP_ASYNC_PUBLISHED = protocol(
    """tlx.barrier_wait(a[0], 0)
values = tlx.local_load(tile[0])  # read
tlx.barrier_arrive(b[0])
tlx.barrier_wait(b[0], 0)""",
    """tlx.async_load(out + tl.arange(0, 64) % 2, tile[0])  # load
tlx.async_load_commit_group()
tlx.async_load_wait_group(0)  # wait
tlx.barrier_arrive(a[0])
tlx.barrier_wait(b[0], 0)""",
)

SPLIT = Case(
    """
@triton.jit
def kernel(parts, count, out):
    me = tl.program_id(0)
    others = tl.num_programs(0) - 1
    i = tl.arange(0, 64)
    if me == others:
        while tl.atomic_add(count, 0) < others:  # spin
            pass
        total = tl.zeros((64,), tl.float32)
        for k in range(others):
            total += tl.load(parts + k * 64 + i)  # gather
        tl.store(out + i, total)
    else:
        tl.store(parts + me * 64 + i, i + me)  # part
        tl.debug_barrier()  # of all threads
        tl.atomic_add(count, 1)  # ready
""",
    inputs=lambda: [torch.zeros(3 * 64), torch.zeros(1, dtype=torch.int32)],
    output=(64,),
    expected=lambda *_: 3.0 + 3 * torch.arange(64.0),
    grid=(4,),
)

COUNTED_READ = Case(
    """
@triton.jit
def kernel(count, out):
    i = tl.arange(0, 64)
    x = tl.load(out + i)  # read
    tl.debug_barrier()
    if tl.atomic_add(count, 1) == 1:
        tl.store(out + i, x + 1.0)  # overwritten
""",
    inputs=zeros(1),
    output=(64,),
    grid=(2,),
)

#: One thread's atomics release what that thread has done: a counter that goes back to zero, a number beside a flag.
ONE_THREAD = Case(
    """
@triton.jit
def kernel(drawn, count, number, out):
    index = tl.program_id(0)
    while index < 5:
        tl.store(out + index * 64 + tl.arange(0, 64), index)
        turn = tl.atomic_add(drawn, 1)
        if turn == 4:
            tl.store(drawn, 0)
        index = turn + tl.num_programs(0)
    tl.store(number + tl.program_id(0), 7)
    if tl.atomic_add(count, 1) == 1:
        tl.store(out + 320, tl.load(number) + tl.load(number + 1))
""",
    inputs=zeros(1, 1, 2),
    output=(321,),
    expected=lambda *_: torch.cat([torch.arange(5.0).repeat_interleave(64), torch.tensor([14.0])]),
    grid=(2,),
)

ATOMIC_ADD = Case(
    """
@triton.jit
def kernel(out):
    tl.atomic_add(out + tl.arange(0, 64), 1.0 + tl.program_id(0))  # add
""",
    output=(64,),
    expected=lambda: torch.full((64,), 15.0),
    grid=(5,),
)


def one_box_and_counter() -> list[Any]:
    return [boxes(torch.ones(ROWS, COLUMNS), ROWS, COLUMNS), *zeros(1)()]


#: The program that polls must not keep a late copy of the other one from finishing.
POLLED_COPY = Case(
    """
@triton.jit
def kernel(x, count, out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    if tl.program_id(0) == 0:
        while tl.atomic_add(count, 0) < 1:
            pass
        tl.store(out, 2 * tl.load(out))
    else:
        tlx.barrier_expect_bytes(full[0], 4096)
        tlx.async_descriptor_load(x, tile[0], [0, 0], full[0])
        tlx.barrier_wait(full[0], 0)
        tl.store(out, tl.sum(tlx.local_load(tile[0])))
        tl.atomic_add(count, 1)
""",
    inputs=one_box_and_counter,
    output=(1,),
    expected=lambda *_: torch.full((1,), 2.0 * ROWS * COLUMNS),
    grid=(2,),
)

#: The wait is over when the tile has been read; the box may be written later than the atomic.
TMA_STORE_AND_ATOMIC = Case(
    """
@triton.jit
def kernel(count, out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    if tl.program_id(0) == 0:
        while tl.atomic_add(count, 0) < 1:
            pass
        again = out.load([0, 0])  # read
    else:
        tlx.local_store(tile[0], tl.zeros((16, 64), tl.float32))
        tlx.fence("async_shared")
        tlx.async_descriptor_store(out, tile[0], [0, 0])  # store
        tlx.async_descriptor_store_wait(0)
        tl.atomic_add(count, 1)
""",
    inputs=zeros(1),
    grid=(2,),
    into=lambda out: boxes(out, 16, 64),
)

TWO_READERS = Case(
    """
@triton.jit
def kernel(count, out):
    if tl.program_id(0) == 2:
        while tl.atomic_add(count, 0) < 1:
            pass
        tl.store(out, 5.0)  # write
    else:
        value = tl.load(out)  # read
        if tl.program_id(0) == 0:
            tl.atomic_add(count, 1)
""",
    inputs=zeros(1),
    grid=(3,),
)

CORRECT = {
    "TMA store": STORE,
    "TMA store skips what is outside the tensor": replace(
        STORE,
        output=(2 * ROWS + 3, COLUMNS),
        expected=lambda: STORE.expected()[: 2 * ROWS + 3],  # type: ignore[misc]
    ),
    "store of a descriptor": DESCRIPTOR_STORE,
    "TMA reduction of several CTAs": REDUCTION,
    "bulk store": BULK_STORE,
    "TMA load": ONE_LOAD,
    "TMA load filled with zeros": padded("zero", 0.0),
    "TMA load filled with NaN": padded("nan", float("nan")),
    "TMA load from outside the tensor": replace(
        ONE_LOAD.but("[16, 0]", "[-64, 640]"), expected=lambda x: torch.zeros(ROWS, COLUMNS)
    ),
    "TMA load before its bytes are expected": ONE_LOAD.but(EXPECT, "").but(
        "    tlx.barrier_wait", f"{EXPECT}    tlx.barrier_wait"
    ),
    **KERNEL_DESCRIPTORS,
    "descriptor in global memory": STORED_DESCRIPTOR,
    "bulk load": BULK_LOAD,
    "views of disjoint columns": VIEWS,
    "views of the same bytes": SAME_BYTES,
    "storage alias": ALIAS,
    "reused buffer": REUSED_BUFFER,
    "largest shared memory": BUDGET.also(N=14),
    "masked pointers": MASKED,
    "two programs read one element": replace(
        MASKED.but("tl.load(x + i, mask=i < N, other=7)", "tl.load(x + i % 2)"),
        expected=lambda x: x[:2].repeat(50) + 1,
    ),
    "dependent launch": replace(
        MASKED.but(
            "    values =", "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n    values ="
        ),
        options={"launch_pdl": True},
    ),
    **{f"cp.async ring of {stages} stages": CP_ASYNC.also(STAGES=stages) for stages in (2, 3, 4, 8)},
    "cp.async published by an arrival": CP_ASYNC_PUBLISHED,
    "program waits by atomics": SPLIT,
    "program waits by compare and swap": SPLIT.but(
        "while tl.atomic_add(count, 0) < others", "while tl.atomic_cas(count, others, others) != others"
    ),
    "atomics of one thread": ONE_THREAD,
    "atomic sum": ATOMIC_ADD,
    "program polls while a copy is late": POLLED_COPY,
}  # fmt: skip

LOOSE_STORE = STORE.but("tlx.async_descriptor_store_wait(0)  # wait", "tlx.async_descriptor_store_wait(1)")
BARRIER = "tl.debug_barrier()  # of all threads"
SPIN = "while tl.atomic_add(count, 0) < others:  # spin\n            pass"
PART, READY = "tl.store(parts + me * 64 + i, i + me)  # part", "tl.atomic_add(count, 1)  # ready"
READ = "values = tlx.local_load(ring[k % STAGES])  # read"

DEFECTS = {
    "TMA store: no fence": STORE.without("fence").shows("missing_fence", "store", "write", role="kernel"),
    "TMA store: fence after the first write only": STORE.but(
        'tlx.fence("async_shared")', 'if i == 0:\n            tlx.fence("async_shared")'
    ).shows("missing_fence", "store", "write"),
    "TMA store: tile written again": LOOSE_STORE.shows("early_release", "write", "store"),
    "TMA store: no wait at the end": LOOSE_STORE.shows("unfinished_at_exit", "store", saying="TMA store"),
    "TMA store: one box twice": STORE.but("[i * 16, 0]", "[0, 0]").shows("data_race", "store"),
    "TMA store: read of global memory": STORE.but("# wait", "# wait\n    again = out.load([0, 0])  # read")
        .shows("data_race", "read", "store"),
    "store of a descriptor: one box twice": DESCRIPTOR_STORE.but("[i * 16, 0]", "[0, 0]").shows("data_race", "store"),
    "TMA stores of several CTAs": REDUCTION.but(', store_reduce="add"', "").shows("data_race", "store"),
    "bulk store: no fence": BULK_STORE.without("fence").shows("missing_fence", "store", "write"),
    "bulk store: one place twice": BULK_STORE.but("i * 1024", "0").shows("data_race", "store"),
    "TMA load: no wait": ONE_LOAD.without("wait").shows("data_race", "read", "load", role="kernel"),
    "TMA load: tile larger than the box": ONE_LOAD.but("local_alloc((16, 64)", "local_alloc((32, 64)")
        .shows("error", "load"),
    "TMA load: nobody waits": ONE_LOAD.without("wait").without("read").shows("unfinished_at_exit roles_out_of_step"),
    **{
        f"{maker}: stride": case.but("[64, 1], [16, 64]", "[63, 1], [16, 64]").shows(
            "launch", "make", saying="16 bytes"
        )
        for maker, case in KERNEL_DESCRIPTORS.items()
    },
    "descriptor in global memory: none there": STORED_DESCRIPTOR.but(
        "reinterpret_tensor_descriptor(places[1]", "reinterpret_tensor_descriptor(places[0]"
    ).shows("error", "take"),
    "bulk load: no wait": BULK_LOAD.without("wait").shows("data_race", "read", "load"),
    "bulk load: alignment": BULK_LOAD.but("x + 1024", "x + 1022").shows("error", "load", saying="16 bytes"),
    "shared memory never written": UNWRITTEN.shows("unwritten_shared", "read", role="kernel"),
    "half of a tile never written": VIEWS.without("right").shows("unwritten_shared", "read"),
    "views overlap in a column": VIEWS.but("[0, 32], [16, 32]", "[0, 31], [16, 32]")
        .shows("data_race", "left", "right"),
    "view outside of the tile": VIEWS.but("[0, 32], [16, 32])", "[0, 48], [16, 32])  # slice")
        .shows("out_of_bounds", "slice"),
    "transposed view overlaps": VIEWS.but(
        "right = tlx.local_slice(tile[0], [0, 32], [16, 32])",
        "right = tlx.local_trans(tlx.local_slice(tile[0], [0, 0], [16, 32]))",
    )
    .but("tl.full((16, 32), 2", "tl.full((32, 16), 2")
    .shows("data_race", "left", "right"),
    "view of more bytes than the tile": VIEWS.but(
        "left = tlx.local_slice(tile[0], [0, 0], [16, 32])",
        "left = tlx.local_reinterpret(tile[0], tl.float16)  # view",
    ).shows("error", "view"),
    **{
        f"{name}: no wait": case.without("wait").shows("data_race", "write narrow")
        for name, case in (("storage alias", ALIAS), ("reused buffer", REUSED_BUFFER))
    },
    "storage alias too small": ALIAS.but("tl.float16, 1, reuse=spec)", "tl.float16, 4, reuse=spec)  # grow")
        .shows("out_of_budget", "grow"),
    "too much shared memory": BUDGET.also(N=15).shows("out_of_budget", "allocate", saying="232448"),
    "load from outside": MASKED.but("mask=i < N, other=7)", "mask=i < 4096, other=7)")
        .shows("out_of_bounds", "load", saying="load"),
    "store to outside": MASKED.but("values + 1, mask=i < N", "values + 1")
        .shows("out_of_bounds", "store", saying="store"),
    "store below the tensor": MASKED.but("tl.store(out + i,", "tl.store(out - 4096 + i,")
        .shows("out_of_bounds", "store"),
    "two programs write one element": MASKED.but("tl.program_id(0) * B", "tl.program_id(0) * (B - 1)")
        .shows("data_race", "store"),
    "cp.async: wait leaves one group too many": CP_ASYNC.but(
        "tlx.async_load_wait_group(STAGES - 2)", "tlx.async_load_wait_group(STAGES - 1)"
    ).shows("data_race", "read"),
    "cp.async: no wait at the end": CP_ASYNC.without("drain").shows("unfinished_at_exit", "commit", saying="cp.async"),
    "cp.async: no group": CP_ASYNC.without("commit").shows("unfinished_at_exit", saying="cp.async"),
    "cp.async: into the buffer that is read": CP_ASYNC.but("ring[ahead % STAGES], mask", "ring[k % STAGES], mask")
    .but(f"{READ}\n", "\n")
    .but("        tl.store(out", f"        {READ}\n        tl.store(out")
    .shows("data_race", "read", "load"),
    "cp.async: published without a wait": CP_ASYNC_PUBLISHED.without("wait").shows("data_race", "read", "load"),
    "atomic before the data": SPLIT.but(
        f"{PART}\n        {BARRIER}\n        {READY}", f"{BARRIER}\n        {READY}\n        {PART}"
    ).shows("data_race", "gather", "part"),
    "atomic of one thread without a barrier": SPLIT.without("of all threads").shows("data_race", "gather", "part"),
    "atomic of one thread is no barrier": SPLIT.but(BARRIER, "tl.atomic_add(out + me, 0.0)")
        .shows("data_race", "gather", "part"),
    "atomic after the reads of other threads": COUNTED_READ.but("tl.debug_barrier()")
        .shows("data_race", "overwritten", "read"),
    "no atomic": SPLIT.but(SPIN).without("ready").shows("data_race", "gather", "part"),
    "stores in place of atomics": ATOMIC_ADD.but("tl.atomic_add(", "tl.store(").shows("data_race", "add", saying="out"),
    "atomic after a TMA store": TMA_STORE_AND_ATOMIC.shows("data_race", "read", "store"),
    "write after the reads of two programs": TWO_READERS.shows("data_race", "write", "read"),
}  # fmt: skip


@each(CORRECT)
def test_correct_kernel_is_exact_and_clean_in_every_schedule(case: Case) -> None:
    case.check()


@each(DEFECTS)
def test_defect_is_found_in_every_schedule(case: Defect) -> None:
    case.check()


def test_atomic_without_a_loop_orders_nothing() -> None:
    case = SPLIT.but(SPIN, "tl.atomic_add(count, 0)")
    assert any(f.kind == "data_race" for schedule in SCHEDULES for f in case.run(schedule)[0].findings)
