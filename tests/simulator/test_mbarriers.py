"""Kernels that synchronise by mbarriers: rings, products, unusual but correct protocols, and defects of each."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.simulator.cases import COLUMNS, PUT, ROWS, Case, Defect, boxes, each, numbers, protocol

RING = Case(
    PUT
    + """
@triton.jit
def kernel(x, out, TILES, STAGES: tl.constexpr):
    ring = tlx.local_alloc((16, 64), tl.float32, STAGES)
    full = tlx.alloc_barriers(STAGES)
    empty = tlx.alloc_barriers(STAGES)  # empty
    with tlx.async_tasks():
        with tlx.async_task("default"):
            stage = 0
            phase = 1
            for tile in range(TILES):
                tlx.barrier_wait(empty[stage], phase)  # wait empty
                tlx.barrier_expect_bytes(full[stage], 16 * 64 * 4)  # expect
                tlx.async_descriptor_load(x, ring[stage], [tile * 16, 0], full[stage])  # load
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        with tlx.async_task(num_warps=4):  # consumer
            stage = 0
            phase = 0
            for tile in range(TILES):
                tlx.barrier_wait(full[stage], phase)  # wait full
                values = tlx.local_load(ring[stage])  # read
                tlx.barrier_arrive(empty[stage])  # release
                put(out, tile * 16, values * 2, 64)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
""",
    inputs=lambda: [boxes(numbers(5 * ROWS, COLUMNS), ROWS, COLUMNS)],
    output=(5 * ROWS, COLUMNS),
    expected=lambda x: 2 * x,
    constants={"TILES": 5, "STAGES": 2},
)


CONSUMER = f"task@{RING.line('consumer')}"

#: Loops that are longer than the data; predicates skip the rest.
PREDICATED = replace(
    RING,
    text=RING.text.replace("range(TILES)", "range(TILES + 3)")
    .replace("empty[stage], phase)", "empty[stage], phase, pred=tile < TILES)")
    .replace("16 * 64 * 4)", "16 * 64 * 4, pred=tile < TILES)")
    .replace("full[stage])  # load", "full[stage], pred=tile < TILES)  # load")
    .replace("full[stage], phase)", "full[stage], phase, pred=tile < TILES)")
    .replace("tlx.barrier_arrive(empty[stage])", "tlx.barrier_arrive(empty[stage], pred=tile < TILES)")
    .replace("put(out, tile", "if tile < TILES:\n                    put(out, tile")
    .replace(
        "values = tlx.local_load(ring[stage])  # read",
        "if tile < TILES:\n                    values = tlx.local_load(ring[stage])",
    ),
)

PRODUCT = Case(
    PUT
    + """
@triton.jit
def kernel(a_desc, b_desc, out, STEPS, STAGES: tl.constexpr):
    a = tlx.local_alloc((64, 32), tlx.dtype_of(a_desc), STAGES)
    b = tlx.local_alloc((32, 64), tlx.dtype_of(b_desc), STAGES)
    full = tlx.alloc_barriers(STAGES)
    empty = tlx.alloc_barriers(STAGES)
    BYTES: tl.constexpr = (64 * 32 + 32 * 64) * tlx.size_of(tlx.dtype_of(a_desc))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            acc = tl.zeros((64, 64), tl.float32)
            for k in range(STEPS):
                stage = k % STAGES
                tlx.barrier_wait(full[stage], (k // STAGES) & 1)
                acc = tlx.async_dot(a[stage], b[stage], acc)  # dot
                acc = tlx.async_dot_wait(0, acc)  # retire
                tlx.barrier_arrive(empty[stage])  # release
            put(out, 0, acc, 64)  # result
        with tlx.async_task(num_warps=1, registers=24):
            for k in range(STEPS):
                stage = k % STAGES
                tlx.barrier_wait(empty[stage], ((k // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(full[stage], BYTES)
                tlx.async_descriptor_load(a_desc, a[stage], [0, k * 32], full[stage])  # load a
                tlx.async_descriptor_load(b_desc, b[stage], [k * 32, 0], full[stage])  # load b
""",
    inputs=lambda: [
        boxes(numbers(64, 160, dtype=torch.float16), 64, 32),
        boxes(numbers(160, 64, dtype=torch.float16), 32, 64),
    ],
    output=(64, 64),
    expected=lambda a, b: a.float() @ b.float(),
    constants={"STEPS": 5, "STAGES": 2},
)

DEEP = PRODUCT.but(  # a product under way while the next one starts
    """acc = tlx.async_dot_wait(0, acc)  # retire
                tlx.barrier_arrive(empty[stage])  # release
            put(out, 0, acc, 64)  # result""",
    """acc = tlx.async_dot_wait(1, acc)  # retire
                if k > 0:
                    tlx.barrier_arrive(empty[(k - 1) % STAGES])  # release
            acc = tlx.async_dot_wait(0, acc)  # drain
            put(out, 0, acc, 64)  # result""",
)

ONE_ROLE = Case(
    """
@triton.jit
def kernel(out):
    done = tlx.alloc_barriers(1)
    tlx.barrier_wait(done[0], 0)  # wait
"""
)

WARP_BARRIER = RING.instead("empty", "empty = tlx.alloc_warp_barrier(STAGES, num_warps=4)")

#: One thread of each warp may arrive for all: fewer arrivals, and no barrier among the warps.
SOME_THREADS = Case(
    """
@triton.jit
def kernel(out_ptr, FIRST: tl.constexpr):
    tile = tlx.local_alloc((128,), tl.float32, 1)
    ready = tlx.alloc_warp_barrier(1, num_warps=4)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tile[0], tl.full((128,), 3.0, tl.float32))
            tlx.barrier_arrive(ready[0], 32, pred=tlx.thread_id(0) % 32 == FIRST)
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(ready[0], 0)
            tl.store(out_ptr + tl.arange(0, 128), tlx.local_load(tile[0]))
""",
    output=(128,),
    expected=lambda: torch.full((128,), 3.0),
    constants={"FIRST": 0},
)

BROADCAST = Case(
    """
@triton.jit
def kernel(out):
    go = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1, arrive_count=2)
    tile = tlx.local_alloc((64,), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(4):
                tlx.local_store(tile[0], tl.full((64,), 1, tl.float32) * i)  # write
                tlx.barrier_arrive(go[0])  # go
                tlx.barrier_wait(done[0], i & 1)  # done
        with tlx.async_task(num_warps=4, replicate=2):
            for i in range(4):
                tlx.barrier_wait(go[0], i & 1)
                values = tlx.local_load(tile[0])  # read
                tlx.barrier_arrive(done[0])
            tl.store(out + tlx.async_task_replica_id() * 64 + tl.arange(0, 64), values)
""",
    output=(128,),
    expected=lambda: torch.full((128,), 3.0),
)

RELAY = Case(
    """
@triton.jit
def kernel(out):
    bars = tlx.alloc_barriers(2)
    tile = tlx.local_alloc((64,), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tile[0], tl.full((64,), 5, tl.float32))  # write
            tlx.barrier_arrive(bars[0])
        with tlx.async_task(num_warps=1):
            tlx.barrier_wait(bars[0], 0)  # pass on
            tlx.barrier_arrive(bars[1])
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(bars[1], 0)
            tl.store(out + tl.arange(0, 64), tlx.local_load(tile[0]))  # read
""",
    output=(64,),
    expected=lambda: torch.full((64,), 5.0),
)


def product(a: torch.Tensor, b: torch.Tensor) -> Case:
    """The product of two matrices, loaded in boxes of 32 along K."""
    return replace(PRODUCT, inputs=lambda: [boxes(a, 64, 32), boxes(b, 32, 64)])


TRANSPOSED = replace(
    PRODUCT.but("((64, 32), tlx.dtype_of(a_desc), STAGES)", "((32, 64), tlx.dtype_of(a_desc), STAGES)")
    .but("async_dot(a[stage],", "async_dot(tlx.local_trans(a[stage]),")
    .but("[0, k * 32]", "[k * 32, 0]"),
    inputs=lambda: [boxes(numbers(160, 64, dtype=torch.float16), 32, 64) for _ in range(2)],
    expected=lambda a, b: a.float().T @ b.float(),
)
FROM_REGISTERS = replace(
    PRODUCT.instead("dot", "acc = tlx.async_dot(tlx.local_load(a[stage]) * 2, b[stage], acc)"),
    expected=lambda a, b: 2 * a.float() @ b.float(),
)

TWO_ARRIVALS = "a = tlx.alloc_barriers(1, arrive_count=2)\n    b = tlx.alloc_barriers(1)"
ANSWER = "for i in range(4):\n    tlx.barrier_wait(a[0], i & 1)\n    tlx.barrier_arrive(b[0])"

CORRECT = {
    **{f"ring of {stages} stages": RING.also(STAGES=stages) for stages in (1, 2, 3, 8)},
    "ring without a tile": replace(RING.also(TILES=0), expected=torch.zeros_like),
    "ring with predicates": PREDICATED,
    "warp barrier": WARP_BARRIER,
    "arrival of one thread a warp": SOME_THREADS,
    "product": PRODUCT,
    "product, one in flight": DEEP,
    "product of bf16": product(*(numbers(*shape, dtype=torch.bfloat16) for shape in ((64, 160), (160, 64)))),
    "product of fp32": product(numbers(64, 160), numbers(160, 64)),
    "product of fp32 drops bits beyond TF32": replace(
        product(torch.full((64, 160), 1 + 2.0**-12), numbers(160, 64)), expected=lambda a, b: torch.ones_like(a) @ b
    ),
    "product without a step": replace(PRODUCT.also(STEPS=0), expected=lambda a, b: torch.zeros(64, 64)),
    "product has a shape before its values": PRODUCT.but("  # dot", "; tl.zeros(acc.shape, tl.float32)"),
    "product, left operand in registers": FROM_REGISTERS,
    "product, transposed operand": TRANSPOSED,
    "one phase waited for several times": protocol(
        "for i in range(3):\n    tlx.barrier_wait(a[0], 0)", "tlx.barrier_arrive(a[0])\ntlx.barrier_wait(a[0], 0)"
    ),
    "phase before the first waited for several times": protocol(
        "for i in range(3):\n    tlx.barrier_wait(a[0], 1)\ntlx.barrier_arrive(b[0])",
        "tlx.barrier_wait(b[0], 0)\ntlx.barrier_arrive(a[0])",
    ),
    "two arrivals of one role in a row": protocol(
        ANSWER,
        "for i in range(4):\n    tlx.barrier_arrive(a[0]); tlx.barrier_arrive(a[0])\n    tlx.barrier_wait(b[0], i & 1)",
        TWO_ARRIVALS,
    ),
    "one arrival that counts twice": protocol(
        ANSWER, "for i in range(4):\n    tlx.barrier_arrive(a[0], 2)\n    tlx.barrier_wait(b[0], i & 1)", TWO_ARRIVALS
    ),
    "role waits for its own arrival": protocol(
        "for i in range(3):\n    tlx.barrier_arrive(a[0])\n    tlx.barrier_wait(a[0], i & 1)", "pass"
    ),
    "phases skipped, ordered by another barrier": protocol(
        "tlx.barrier_wait(b[0], 0)\ntlx.barrier_wait(a[0], 0)",
        "for i in range(3):\n    tlx.barrier_arrive(a[0])\ntlx.barrier_arrive(b[0])",
    ),
    "barrier without a waiter": protocol("tlx.barrier_arrive(a[0])", "pass"),
    "barrier with two waiters": BROADCAST,
    "order through a third role": RELAY,
}  # fmt: skip

HALF_RELEASED = RING.instead("release", "tlx.barrier_arrive(empty[stage], pred=tile < 1)")
EMPTY_LOOP, FULL_LOOP = (
    f"for tile in range(TILES):\n                tlx.barrier_wait({name}" for name in ("empty", "full")
)
SHORT_PRODUCER = RING.but(EMPTY_LOOP, EMPTY_LOOP.replace("TILES", "TILES - 1"))
NOT_RETIRED = PRODUCT.instead("retire", "acc = tlx.async_dot_wait(1, acc)").but(
    "put(out, 0, acc", "acc = tlx.async_dot_wait(0, acc)\n            put(out, 0, acc"
)

DEFECTS = {
    "ring: no wait for empty": RING.without("wait empty").shows("barrier_reuse", "expect", role="default"),
    "ring: no wait for full": RING.without("wait full").shows("data_race", "load", "read"),
    "ring: wrong first phase": RING.but("            phase = 0\n", "            phase = 1\n")
        .shows("data_race deadlock"),
    "ring: released before the read": RING.instead("release", "pass")
    .but("values = tlx", "tlx.barrier_arrive(empty[stage]); values = tlx")
    .shows("data_race", "load", "read"),
    "ring: released twice": RING.instead(
        "release", "tlx.barrier_arrive(empty[stage]); tlx.barrier_arrive(empty[stage])"
    ).shows("barrier_reuse deadlock"),
    **{
        f"ring: {size} bytes expected, {kind}": RING.but("16 * 64 * 4", str(size)).shows(kind, saying=saying)
        for size in (16 * 64 * 2, 16 * 64 * 8)
        for kind, saying in (("wrong_byte_count", "bytes"), ("deadlock", "waits for parity 0 of full[0]"))
    },
    "ring: producer ends early, deadlock": SHORT_PRODUCER.shows("deadlock", "wait full"),
    "ring: producer ends early, roles_out_of_step": SHORT_PRODUCER
        .shows("roles_out_of_step", "wait full", saying="default has ended"),
    "ring: consumer ends early": RING.but(FULL_LOOP, FULL_LOOP.replace("TILES", "TILES - 1"))
        .shows("unfinished_at_exit roles_out_of_step"),
    "ring: load without its predicate": PREDICATED.but(
        "full[stage], pred=tile < TILES)  # load", "full[stage])  # load"
    ).shows("wrong_byte_count"),
    "deadlock of one role": ONE_ROLE.shows("deadlock", "wait", role="kernel", saying="no arrivals so far"),
    "deadlock by too large an arrive count": RING.instead("empty", "empty = tlx.alloc_barriers(STAGES, arrive_count=2)")
        .shows("deadlock", "wait empty", saying="1 of 2 arrivals"),
    "warp barrier: too few warps": WARP_BARRIER.but("num_warps=4)  # empty", "num_warps=8)  # empty")
        .shows("deadlock", "wait empty", saying="128 of 256"),
    "warp barrier: too many threads": WARP_BARRIER.but("num_warps=4)  # empty", "num_warps=1)  # empty")
        .shows("barrier_reuse", "release"),
    "arrival of no thread": SOME_THREADS.also(FIRST=32).shows("deadlock"),
    "product: operand a released while it is read": NOT_RETIRED.shows("early_release", "load a", "dot"),
    "product: operand b released while it is read": NOT_RETIRED.shows("early_release", "load b", "dot"),
    "product: result read before the wait": DEEP.without("drain").shows("early_accumulator", "put"),
    "product: result scaled before the wait": DEEP.instead("retire", "acc = tlx.async_dot_wait(1, acc) * 1.0")
        .shows("early_accumulator", "retire"),
    "product: no wait at all": PRODUCT.without("retire").without("result")
        .shows("unfinished_at_exit", "dot", role="default", saying="wgmma"),
    "two waiters, one arrival counted": BROADCAST.but("arrive_count=2", "arrive_count=1").shows("barrier_reuse"),
    "two waiters, no wait for them": BROADCAST.without("done").shows("data_race", "write", "read"),
    "third role does not wait": RELAY.without("pass on").shows("data_race", "write", "read"),
    "arrivals overtake the waiter": protocol(
        "for i in range(2):\n    tlx.barrier_wait(a[0], i & 1)", "for i in range(2):\n    tlx.barrier_arrive(a[0])"
    ).shows("barrier_reuse deadlock"),
    "two roles arrive for two phases": protocol("tlx.barrier_arrive(a[0])", "tlx.barrier_arrive(a[0])")
        .shows("barrier_reuse"),
    "more arrivals than the phase takes": protocol("tlx.barrier_arrive(a[0], 2)", "pass")
        .shows("barrier_reuse", saying="2 arrivals where 1 of 1"),
    "arrive count at run time": protocol("n = 1\ntlx.barrier_arrive(a[0], n)", "pass")
        .shows("error", saying="arrive_count must be a constant"),
    "invalid parity": protocol("tlx.barrier_wait(a[0], 2)", "tlx.barrier_arrive(a[0])")
        .shows("error", saying="a phase is 0 or 1"),
}  # fmt: skip


@each(CORRECT)
def test_correct_kernel_is_exact_and_clean_in_every_schedule(case: Case) -> None:
    case.check()


@each(DEFECTS)
def test_defect_is_found_in_every_schedule(case: Defect) -> None:
    case.check()


def test_deadlock_names_each_role_with_barrier_phase_and_earlier_arrivals() -> None:
    wait_empty, wait_full, empty = (HALF_RELEASED.line(mark) for mark in ("wait empty", "wait full", "empty"))
    for message in HALF_RELEASED.shows("deadlock").check():
        assert (
            f"default line {wait_empty}: waits for parity 0 of empty[1] (allocated in line {empty}; "
            "phase 0 is under way with 0 of 1 arrivals and 0 bytes missing)"
        ) in message
        assert f"{CONSUMER} line {wait_full}: waits for parity 1 of full[1]" in message
        assert "no arrivals so far" in message
        assert "earlier arrivals by default" in message


def test_deadlock_shows_the_cycle() -> None:
    case = RING.instead("release", "tlx.barrier_arrive(empty[stage], pred=tile < 2)")
    case.shows("deadlock", "wait empty", saying=f"cycle: default -> {CONSUMER} -> default").check()
