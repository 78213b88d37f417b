"""Kernels written by hand, correct and broken: the simulator computes the correct ones, and names what ails the others.

A case is a kernel, its inputs and the result. `Case.check` demands the exact result and no finding in every schedule;
`Case.but` breaks the kernel in one place, and `Case.finds` demands that every schedule shows the defect. Lines that
findings must point at carry a comment, by which the tests name them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tlxgen.simulator.findings import Finding
from tlxgen.simulator.language import assembly
from tlxgen.simulator.machine.machine import POLICIES, Limits, Machine, Policy
from tlxgen.simulator.program import Program, load

SEEDS = range(3)
SCHEDULES: list[tuple[Policy, int]] = [(policy, seed) for policy in POLICIES for seed in SEEDS]

HEAD = "import triton\nimport triton.language as tl\nimport triton.language.extra.tlx as tlx\n"
CLUSTER = {"ctas_per_cga": (2, 1, 1)}
ROWS, COLUMNS = 16, 64  # of most tiles here


@functools.cache
def program(text: str) -> Program:
    return load("kernel.py", HEAD + text)


def simulate(
    text: str,
    args: Sequence[Any],
    grid: Sequence[int] = (1,),
    *,
    schedule: tuple[Policy, int] = ("random", 0),
    limits: Limits | None = None,
    **options: Any,
) -> Machine:
    policy, seed = schedule
    machine = Machine(frozenset(), seed=seed, policy=policy, limits=limits or Limits())
    program(text)["kernel"].launch(machine, grid, args, options)
    return machine


@dataclass(frozen=True)
class Case:
    """A kernel with its inputs; the output is the last argument, as a pointer or as `into` makes it."""

    text: str
    inputs: Callable[[], Sequence[Any]] = tuple
    output: tuple[int, ...] = (ROWS, COLUMNS)
    expected: Callable[..., torch.Tensor] | None = None  #: of the inputs
    grid: tuple[int, ...] = (1,)
    into: Callable[[torch.Tensor], Any] = lambda out: out
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, schedule: tuple[Policy, int] = ("random", 0)) -> tuple[Machine, torch.Tensor, Sequence[Any]]:
        inputs, out = self.inputs(), torch.zeros(self.output)
        args = [*inputs, self.into(out)]
        machine = simulate(self.text, args, self.grid, schedule=schedule, **self.constants, **self.options)
        return machine, out, inputs

    def check(self) -> None:
        """Right in every schedule."""
        for schedule in SCHEDULES:
            machine, out, inputs = self.run(schedule)
            assert not machine.findings, (schedule, [str(finding) for finding in machine.findings])
            assert self.expected is not None
            torch.testing.assert_close(out, self.expected(*map(tensor_of, inputs)), rtol=0, atol=0, equal_nan=True)

    def but(self, old: str, new: str = "pass") -> Case:
        """The same with one place changed, which must be there."""
        assert self.text.count(old) == 1, f"{old!r} is there {self.text.count(old)} times"
        return replace(self, text=self.text.replace(old, new))

    def also(self, **changes: Any) -> Case:
        """The same with other constants."""
        return replace(self, constants=self.constants | changes)

    def line(self, marker: str) -> int:
        """The line that a comment marks."""
        lines = [i for i, line in enumerate((HEAD + self.text).splitlines(), 1) if line.endswith(f"# {marker}")]
        assert len(lines) == 1, f"{len(lines)} lines are marked {marker!r}"
        return lines[0]

    def finds(self, kind: str, *at: str, role: str = "", saying: str = "") -> list[Finding]:
        """Every schedule finds it, at a marked line (either place of a race counts), in a role that ends so."""
        chosen = []
        for schedule in SCHEDULES:
            machine, _, _ = self.run(schedule)
            lines = {self.line(marker) for marker in at}
            for finding in machine.findings:
                here = {finding.place.line} | ({finding.other.line} if finding.other else set())
                right = finding.kind == kind and finding.place.role.endswith(role) and saying in finding.message
                if right and lines <= here:
                    chosen.append(finding)
                    break
            else:
                raise AssertionError(f"{schedule}: no {kind} at {at} among {[str(f) for f in machine.findings]}")
        return chosen

    def finds_one_of(self, *kinds: str) -> None:
        """Every schedule finds a defect of one of these kinds."""
        for schedule in SCHEDULES:
            found = {finding.kind for finding in self.run(schedule)[0].findings}
            assert found & set(kinds), (schedule, found)


def tensor_of(value: Any) -> Any:
    return value.base if isinstance(value, TensorDescriptor) else value


def boxes(tensor: torch.Tensor, *sides: int, padding: str = "zero") -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(sides), padding)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


PUT = """
@triton.jit
def put(out, row, values, N: tl.constexpr):
    places = (row + tl.arange(0, values.shape[0]))[:, None] * N + tl.arange(0, values.shape[1])[None, :]
    tl.store(out + places, values)  # put
"""

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


class TestRing:
    @pytest.mark.parametrize("stages", [1, 2, 3, 8])
    def test_is_clean_whether_it_is_shorter_or_longer_than_the_loop(self, stages: int) -> None:
        RING.also(STAGES=stages).check()

    def test_of_no_tile_at_all_does_nothing(self) -> None:
        replace(RING.also(TILES=0), expected=torch.zeros_like).check()

    def test_that_is_written_before_it_is_free(self) -> None:
        RING.but("tlx.barrier_wait(empty[stage], phase)  # wait empty").finds("barrier_reuse", "expect", role="default")

    def test_that_is_read_before_it_is_full(self) -> None:
        case = RING.but("tlx.barrier_wait(full[stage], phase)  # wait full")
        case.finds("data_race", "load", "read")

    def test_that_is_read_a_phase_too_early(self) -> None:
        RING.but("            phase = 0\n", "            phase = 1\n").finds_one_of("data_race", "deadlock")

    def test_that_is_released_before_it_is_read(self) -> None:
        old = (
            "values = tlx.local_load(ring[stage])  # read\n                tlx.barrier_arrive(empty[stage])  # release"
        )
        new = "tlx.barrier_arrive(empty[stage])\n                values = tlx.local_load(ring[stage])  # read"
        RING.but(old, new).finds("data_race", "load", "read")

    def test_that_is_released_twice(self) -> None:
        case = RING.but("  # release", "\n                tlx.barrier_arrive(empty[stage])  # again")
        case.finds_one_of("barrier_reuse", "deadlock")

    @pytest.mark.parametrize("size", [16 * 64 * 2, 16 * 64 * 8])
    def test_whose_bytes_are_counted_wrongly(self, size: int) -> None:
        case = RING.but("16 * 64 * 4", str(size))
        case.finds("wrong_byte_count", saying="bytes")
        case.finds("deadlock", saying="waits for parity 0 of full[0]")

    def test_whose_producer_stops_a_tile_short(self) -> None:
        case = RING.but(
            "for tile in range(TILES):\n                tlx.barrier_wait(empty",
            "for tile in range(TILES - 1):\n                tlx.barrier_wait(empty",
        )
        case.finds("deadlock", "wait full")
        case.finds("roles_out_of_step", "wait full", saying="default has ended")

    def test_whose_consumer_stops_a_tile_short(self) -> None:
        case = RING.but(
            "for tile in range(TILES):\n                tlx.barrier_wait(full",
            "for tile in range(TILES - 1):\n                tlx.barrier_wait(full",
        )
        case.finds_one_of("unfinished_at_exit", "roles_out_of_step")

    def test_is_clean_with_predicates_that_leave_out_what_the_loop_leaves_out(self) -> None:
        case = replace(RING, text=PREDICATED)
        case.check()
        case.but("full[stage], pred=tile < TILES)  # load", "full[stage])  # load").finds("wrong_byte_count", saying="")


PREDICATED = (
    RING.text.replace("range(TILES)", "range(TILES + 3)")
    .replace("empty[stage], phase)", "empty[stage], phase, pred=tile < TILES)")
    .replace("16 * 64 * 4)", "16 * 64 * 4, pred=tile < TILES)")
    .replace("full[stage])  # load", "full[stage], pred=tile < TILES)  # load")
    .replace("full[stage], phase)", "full[stage], phase, pred=tile < TILES)")
    .replace("tlx.barrier_arrive(empty[stage])", "tlx.barrier_arrive(empty[stage], pred=tile < TILES)")
    .replace("put(out, tile", "if tile < TILES:\n                    put(out, tile")
    .replace(
        "values = tlx.local_load(ring[stage])  # read",
        "if tile < TILES:\n                    values = tlx.local_load(ring[stage])",
    )
)


class TestDeadlock:
    STUCK = RING.but("tlx.barrier_arrive(empty[stage])  # release", "tlx.barrier_arrive(empty[stage], pred=tile < 1)")

    def test_names_each_role_with_its_barrier_and_phase(self) -> None:
        for finding in self.STUCK.finds("deadlock"):
            wait_empty, wait_full = self.STUCK.line("wait empty"), self.STUCK.line("wait full")
            allocated = self.STUCK.line("empty")
            assert (
                f"default line {wait_empty}: waits for parity 0 of empty[1] (allocated in line {allocated}; "
                "phase 0 is under way with 0 of 1 arrivals and 0 bytes missing)"
            ) in finding.message
            assert f"{CONSUMER} line {wait_full}: waits for parity 1 of full[1]" in finding.message

    def test_says_who_came_to_the_barrier_before(self) -> None:
        for finding in self.STUCK.finds("deadlock"):
            assert "no arrivals so far" in finding.message
            assert "earlier arrivals by default" in finding.message

    def test_shows_the_circle(self) -> None:
        case = RING.but(
            "tlx.barrier_arrive(empty[stage])  # release", "tlx.barrier_arrive(empty[stage], pred=tile < 2)"
        )
        for finding in case.finds("deadlock", "wait empty"):
            assert f"cycle: default -> {CONSUMER} -> default" in finding.message

    def test_of_one_role_alone_is_one_too(self) -> None:
        case = Case(
            """
@triton.jit
def kernel(out):
    done = tlx.alloc_barriers(1)
    tlx.barrier_wait(done[0], 0)  # wait
"""
        )
        case.finds("deadlock", "wait", role="kernel", saying="no arrivals so far")

    def test_with_more_arrivals_asked_for_than_come(self) -> None:
        case = RING.but("empty = tlx.alloc_barriers(STAGES)", "empty = tlx.alloc_barriers(STAGES, arrive_count=2)")
        case.finds("deadlock", "wait empty", saying="1 of 2 arrivals")


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


class TestProduct:
    @pytest.mark.parametrize("case", [PRODUCT, DEEP])
    def test_is_exact(self, case: Case) -> None:
        case.check()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_is_exact_in_other_dtypes(self, dtype: torch.dtype) -> None:
        inputs = [numbers(64, 160, dtype=dtype), numbers(160, 64, dtype=dtype)]
        replace(PRODUCT, inputs=lambda: [boxes(inputs[0], 64, 32), boxes(inputs[1], 32, 64)]).check()

    def test_of_float32_drops_what_tf32_has_no_bits_for(self) -> None:
        a, b = torch.full((64, 160), 1 + 2.0**-12), numbers(160, 64)
        inputs = [boxes(a, 64, 32), boxes(b, 32, 64)]
        replace(PRODUCT, inputs=lambda: inputs, expected=lambda a, b: torch.ones_like(a) @ b).check()

    def test_without_a_step_is_zero(self) -> None:
        replace(PRODUCT.also(STEPS=0), expected=lambda a, b: torch.zeros(64, 64)).check()

    def test_whose_operands_are_released_while_it_reads_them(self) -> None:
        case = PRODUCT.but("async_dot_wait(0, acc)  # retire", "async_dot_wait(1, acc)  # retire")
        case = case.but("put(out, 0, acc", "acc = tlx.async_dot_wait(0, acc)\n            put(out, 0, acc")
        case.finds("early_release", "load a", "dot")
        case.finds("early_release", "load b", "dot")

    def test_whose_result_is_read_before_the_wait(self) -> None:
        DEEP.but("acc = tlx.async_dot_wait(0, acc)  # drain").finds("early_accumulator", "put")

    def test_whose_result_is_scaled_while_the_product_runs(self) -> None:
        DEEP.but("# retire", "# retire\n                acc = acc * 1.0  # scale").finds("early_accumulator", "scale")

    def test_that_is_never_waited_for(self) -> None:
        case = PRODUCT.but("acc = tlx.async_dot_wait(0, acc)  # retire").but("put(out, 0, acc, 64)  # result")
        case.finds("unfinished_at_exit", "dot", role="default", saying="wgmma")

    def test_knows_its_shape_before_its_values(self) -> None:
        PRODUCT.but("  # dot", "\n                zeros = tl.zeros(acc.shape, tl.float32)").check()

    def test_takes_the_left_operand_from_registers(self) -> None:
        old = "acc = tlx.async_dot(a[stage], b[stage], acc)  # dot"
        new = "acc = tlx.async_dot(tlx.local_load(a[stage]) * 2, b[stage], acc)  # dot"
        replace(PRODUCT.but(old, new), expected=lambda a, b: 2 * a.float() @ b.float()).check()

    def test_takes_transposed_operands(self) -> None:
        case = PRODUCT.but("((64, 32), tlx.dtype_of(a_desc), STAGES)", "((32, 64), tlx.dtype_of(a_desc), STAGES)")
        case = case.but("async_dot(a[stage],", "async_dot(tlx.local_trans(a[stage]),").but("[0, k * 32]", "[k * 32, 0]")
        a, b = numbers(160, 64, dtype=torch.float16), numbers(160, 64, dtype=torch.float16)
        inputs = [boxes(a, 32, 64), boxes(b, 32, 64)]
        replace(case, inputs=lambda: inputs, expected=lambda a, b: a.float().T @ b.float()).check()


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


class TestStoreThroughTma:
    def test_is_exact(self) -> None:
        STORE.check()

    def test_needs_a_fence(self) -> None:
        STORE.but('tlx.fence("async_shared")  # fence').finds("missing_fence", "store", "write", role="kernel")

    def test_needs_a_fence_after_each_write_not_only_the_first(self) -> None:
        case = STORE.but('tlx.fence("async_shared")', 'if i == 0:\n            tlx.fence("async_shared")')
        case.finds("missing_fence", "store", "write")

    def test_must_be_waited_for_before_its_tile_is_written_again(self) -> None:
        case = STORE.but("tlx.async_descriptor_store_wait(0)  # wait", "tlx.async_descriptor_store_wait(1)")
        case.finds("early_release", "write", "store")
        case.finds("unfinished_at_exit", "store", saying="TMA store")

    def test_of_one_box_twice_leaves_the_order_open(self) -> None:
        STORE.but("[i * 16, 0]", "[0, 0]").finds("data_race", "store")

    def test_is_not_over_for_a_later_read_of_global_memory(self) -> None:
        case = STORE.but("# wait", "# wait\n    again = out.load([0, 0])  # read")
        case.finds("data_race", "read", "store")

    def test_leaves_alone_what_is_outside_of_the_tensor(self) -> None:
        case = replace(STORE, output=(2 * ROWS + 3, COLUMNS))
        replace(case, expected=lambda: STORE.expected()[: 2 * ROWS + 3]).check()  # type: ignore[misc]

    def test_by_a_descriptor_is_exact_too(self) -> None:
        text = """
@triton.jit
def kernel(out, TILES):
    for i in range(TILES):
        out.store([i * 16, 0], tl.full((16, 64), 1, tl.float32) * (i + 1))  # store
"""
        replace(STORE, text=text).check()
        replace(STORE, text=text).but("[i * 16, 0]", "[0, 0]").finds("data_race", "store")

    def test_that_adds_may_come_from_many_ctas(self) -> None:
        text = STORE.text.replace("out, tile[0], [i * 16, 0])", 'out, tile[0], [i * 16, 0], store_reduce="add")')
        case = replace(STORE, text=text, grid=(5,), expected=lambda: 5 * STORE.expected())  # type: ignore[misc]
        case.check()
        case.but(', store_reduce="add"', "").finds("data_race", "store")

    def test_of_bytes_is_exact(self) -> None:
        case = STORE.but(
            "tlx.async_descriptor_store(out, tile[0], [i * 16, 0])", "tlx.async_store(out + i * 1024, tile[0], 4096)"
        )
        case = replace(case, into=lambda out: out)
        case.check()
        case.but('tlx.fence("async_shared")  # fence').finds("missing_fence", "store", "write")
        case.but("i * 1024", "0").finds("data_race", "store")


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


class TestLoadThroughTma:
    def test_is_exact(self) -> None:
        ONE_LOAD.check()

    def test_must_be_waited_for(self) -> None:
        ONE_LOAD.but("tlx.barrier_wait(full[0], 0)  # wait").finds("data_race", "read", "load", role="kernel")

    @pytest.mark.parametrize(("padding", "filler"), [("zero", 0.0), ("nan", float("nan"))])
    def test_fills_what_is_outside_and_counts_all_bytes(self, padding: str, filler: float) -> None:
        def expected(x: torch.Tensor) -> torch.Tensor:
            result = torch.full((ROWS, COLUMNS), filler)
            result[:5] = x[ROWS:]
            return result

        inputs = [boxes(numbers(ROWS + 5, COLUMNS), ROWS, COLUMNS, padding=padding)]
        replace(ONE_LOAD, inputs=lambda: inputs, expected=expected).check()

    def test_from_wholly_outside_is_all_filler(self) -> None:
        case = ONE_LOAD.but("[16, 0]", "[-64, 640]")
        replace(case, expected=lambda x: torch.zeros(ROWS, COLUMNS)).check()

    def test_of_a_box_that_is_not_the_tile(self) -> None:
        case = ONE_LOAD.but("local_alloc((16, 64)", "local_alloc((32, 64)")
        case.finds("error", "load")

    @pytest.mark.parametrize("maker", ["tl.make_tensor_descriptor(", "tlx.make_tensor_descriptor(None, "])
    def test_with_a_descriptor_of_the_kernel(self, maker: str) -> None:
        made = f"    desc = {maker}x, [48, 64], [64, 1], [16, 64])  # make\n    full ="
        case = ONE_LOAD.but("    full =", made).but("load(x, tile", "load(desc, tile")
        case = replace(case, inputs=lambda: [numbers(3 * ROWS, COLUMNS)])
        case.check()
        case.but("[64, 1], [16, 64]", "[63, 1], [16, 64]").finds("launch", "make", saying="16 bytes")

    def test_with_a_descriptor_kept_in_global_memory(self) -> None:
        made = """    places = tlx.allocate_tensor_descriptor(2)
    tlx.make_tensor_descriptor(places[1], x, [48, 64], [64, 1], [16, 64])  # make
    desc = tlx.reinterpret_tensor_descriptor(places[1], [16, 64], tl.float32)  # take
    full ="""
        case = ONE_LOAD.but("    full =", made).but("load(x, tile", "load(desc, tile")
        case = replace(case, inputs=lambda: [numbers(3 * ROWS, COLUMNS)])
        case.check()
        case.but("reinterpret_tensor_descriptor(places[1]", "reinterpret_tensor_descriptor(places[0]").finds(
            "error", "take"
        )

    def test_of_bytes(self) -> None:
        case = ONE_LOAD.but(
            "async_descriptor_load(x, tile[0], [16, 0], full[0])",
            "async_load(x + 1024, tile[0], bulk=True, barrier=full[0])",
        )
        case = replace(case, inputs=lambda: [numbers(3 * ROWS, COLUMNS)])
        case.check()
        case.but("tlx.barrier_wait(full[0], 0)  # wait").finds("data_race", "read", "load")
        case.but("x + 1024", "x + 1022").finds("error", "load", saying="16 bytes")

    def test_before_the_barrier_expects_it_is_fine(self) -> None:
        expect = "    tlx.barrier_expect_bytes(full[0], 16 * 64 * 4)\n"
        ONE_LOAD.but(expect, "").but("    tlx.barrier_wait", f"{expect}    tlx.barrier_wait").check()

    def test_with_nobody_to_wait_for_it(self) -> None:
        case = ONE_LOAD.but("tlx.barrier_wait(full[0], 0)  # wait").but(
            "put(out, 0, tlx.local_load(tile[0]), 64)  # read"
        )
        case.finds_one_of("unfinished_at_exit", "roles_out_of_step")


class TestNeverWritten:
    def test_shared_memory_is_no_zero(self) -> None:
        text = (
            PUT
            + """
@triton.jit
def kernel(out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    put(out, 0, tlx.local_load(tile[0]), 64)  # read
"""
        )
        Case(text).finds("unwritten_shared", "read", role="kernel")

    def test_half_of_a_tile_counts(self) -> None:
        case = VIEWS.but("tlx.local_store(right, tl.full((16, 32), 2, tl.float32))  # right")
        case.finds("unwritten_shared", "read")


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


class TestViews:
    def test_of_disjoint_columns_do_not_race(self) -> None:
        VIEWS.check()

    def test_that_overlap_in_a_column_race(self) -> None:
        VIEWS.but("[0, 32], [16, 32]", "[0, 31], [16, 32]").finds("data_race", "left", "right")

    def test_outside_of_the_tile_are_refused(self) -> None:
        VIEWS.but("[0, 32], [16, 32])", "[0, 48], [16, 32])  # slice").finds("out_of_bounds", "slice")

    def test_transposed_and_reshaped_are_the_same_bytes(self) -> None:
        text = """
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
"""
        x = numbers(ROWS, COLUMNS)
        expected = torch.cat([x.T.reshape(-1), x.reshape(-1), x.reshape(-1)])
        Case(text, inputs=lambda: [x], output=(3 * 1024,), expected=lambda x: expected).check()

    def test_race_through_their_bytes_whatever_they_are_called(self) -> None:
        case = VIEWS.but(
            "right = tlx.local_slice(tile[0], [0, 32], [16, 32])",
            "right = tlx.local_trans(tlx.local_slice(tile[0], [0, 0], [16, 32]))",
        )
        case.but("tl.full((16, 32), 2", "tl.full((32, 16), 2").finds("data_race", "left", "right")

    def test_of_more_bytes_than_there_are_are_refused(self) -> None:
        VIEWS.but(
            "left = tlx.local_slice(tile[0], [0, 0], [16, 32])",
            "left = tlx.local_reinterpret(tile[0], tl.float16)  # view",
        ).finds("error", "view")


class TestReusedStorage:
    def test_is_clean_one_after_the_other(self) -> None:
        ALIAS.check()

    def test_races_through_the_alias(self) -> None:
        ALIAS.but("tlx.barrier_wait(ready[0], 0)  # wait").finds("data_race", "write narrow")

    def test_of_another_buffer(self) -> None:
        case = ALIAS.but("tl.float32, 1, reuse=spec)", "tl.float32, 1)").but(
            "tl.float16, 1, reuse=spec", "tl.float16, 1, reuse=wide"
        )
        case.check()
        case.but("tlx.barrier_wait(ready[0], 0)  # wait").finds("data_race", "write narrow")

    def test_that_is_too_small(self) -> None:
        case = ALIAS.but("tl.float16, 1, reuse=spec)", "tl.float16, 4, reuse=spec)  # grow")
        case.finds("out_of_budget", "grow")


class TestBudget:
    def test_of_shared_memory_may_be_used_up(self) -> None:
        text = """
@triton.jit
def kernel(out, N: tl.constexpr):
    tile = tlx.local_alloc((64, 64), tl.float32, N)  # allocate
"""
        case = Case(text, expected=lambda: torch.zeros(ROWS, COLUMNS))
        case.also(N=14).check()
        case.also(N=15).finds("out_of_budget", "allocate", saying="232448")

    def test_of_registers_has_steps(self) -> None:
        PRODUCT.but("registers=24", "registers=28").finds("out_of_budget")


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


class TestNamedBarriers:
    def test_take_turns_in_an_odd_number_of_rounds(self) -> None:
        PING_PONG.check()

    def test_take_turns_in_an_even_number_of_rounds(self) -> None:
        case = replace(PING_PONG.also(ROUNDS=4), output=(4 * ROWS, COLUMNS))
        replace(case, expected=lambda: PING_PONG.expected()[: 4 * ROWS]).check()  # type: ignore[misc]

    @pytest.mark.parametrize(("mark", "call"), [("there", "arrive(10"), ("take", "wait(10"), ("back", "arrive(9")])
    def test_with_a_wrong_count_on_one_side(self, mark: str, call: str) -> None:
        case = PING_PONG.but(f"{call}, 256)  # {mark}", f"{call}, 128)  # {mark}")
        case.finds("wrong_thread_count")

    def test_with_a_count_that_is_no_whole_number_of_warps(self) -> None:
        text = PING_PONG.text.replace("256", "250")
        replace(PING_PONG, text=text).finds("wrong_thread_count")

    def test_of_one_role_too_few(self) -> None:
        text = PING_PONG.text.replace("256", "384")
        replace(PING_PONG, text=text).finds("deadlock", saying="named barrier 10 (256 of 384 threads are there)")

    def test_left_out_where_memory_goes_back_race(self) -> None:
        case = PING_PONG.but("if i > 0:\n                    tlx.named_barrier_wait(9, 256)")
        case = case.but("tlx.named_barrier_arrive(9, 256)  # back")
        assert case.finds("data_race", "write", "read")

    @pytest.mark.parametrize("number", [0, 1, 2, 16])
    def test_of_the_compiler_are_taken(self, number: int) -> None:
        text = PING_PONG.text.replace("(10, 256)", f"({number}, 256)")
        replace(PING_PONG, text=text).finds("out_of_budget", "there")

    def test_of_the_compiler_are_as_many_as_its_partitions_with_those_that_fill_a_warp_group(self) -> None:
        """One warp beside the default task: the compiler adds partitions of two warps and one."""
        text = """
@triton.jit
def kernel(out):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(ID, 160)
        with tlx.async_task(num_warps=1):
            tlx.named_barrier_arrive(ID, 160)
"""
        for number in (2, 3, 4):
            Case(text.replace("ID", str(number))).finds("out_of_budget")
        Case(text.replace("ID", "5"), expected=lambda: torch.zeros(ROWS, COLUMNS)).check()

    def test_of_the_compiler_are_those_of_the_largest_group_of_tasks(self) -> None:
        text = """
@triton.jit
def kernel(out):
    for _ in tl.static_range(4):
        with tlx.async_tasks():
            with tlx.async_task("default"):
                tlx.named_barrier_wait(6, 384)
            with tlx.async_task(num_warps=4, replicate=2):
                tlx.named_barrier_arrive(6, 384)
"""
        Case(text, expected=lambda: torch.zeros(ROWS, COLUMNS)).check()


class TestWarpBarriers:
    WARP = RING.but("empty = tlx.alloc_barriers(STAGES)", "empty = tlx.alloc_warp_barrier(STAGES, num_warps=4)")

    def test_count_every_thread(self) -> None:
        self.WARP.check()

    def test_with_warps_that_never_come(self) -> None:
        self.WARP.but("num_warps=4)  # empty", "num_warps=8)  # empty").finds(
            "deadlock", "wait empty", saying="128 of 256"
        )

    def test_with_more_threads_than_they_count(self) -> None:
        self.WARP.but("num_warps=4)  # empty", "num_warps=1)  # empty").finds("barrier_reuse", "release")


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


class TestTasks:
    @pytest.mark.parametrize("programs", [1, 2, 4, 5, 8])
    def test_replicated_persistent_and_with_a_step_of_their_own(self, programs: int) -> None:
        """Tiles are unequally many, none for some programs; `step` is each role's own copy."""
        replace(REPLICAS, grid=(programs,)).check()

    def test_in_a_helper_that_forgets_to_wait(self) -> None:
        case = REPLICAS.but("tlx.barrier_wait(full, phase)  # wait")
        case.finds("data_race", "load", "read")

    def test_that_read_the_tile_of_another_replica(self) -> None:
        case = REPLICAS.but("consume(ring[me]", "consume(ring[0]")
        case.finds("data_race", "load", "read")

    def test_that_all_store_to_one_place(self) -> None:
        REPLICAS.but("tile * 32 + 16 * me", "tile * 32").finds("data_race")

    @pytest.mark.parametrize("flag", [True, False])
    def test_that_a_constant_leaves_out(self, flag: bool) -> None:
        text = """
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
"""
        Case(text, output=(1,), expected=lambda: torch.ones(1)).also(FLAG=flag).check()

    def test_that_take_a_tensor_from_the_kernel(self) -> None:
        text = """
@triton.jit
def kernel(out):
    places = tl.arange(0, 64)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out + tl.arange(0, 64), 1.0)
        with tlx.async_task(num_warps=4):  # task
            tl.store(out + 64 + places, 2.0)
"""
        Case(text).finds("capture", "task", saying="places")

    def test_that_have_a_tensor_of_the_same_name(self) -> None:
        text = """
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
"""
        Case(text, output=(256,), expected=lambda: torch.arange(1.0, 5).repeat_interleave(64)).check()

    def test_that_change_a_tensor_of_the_kernel(self) -> None:
        text = """
@triton.jit
def kernel(out):
    places = tl.arange(0, 64)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out + tl.arange(0, 64), 1.0)
        with tlx.async_task(num_warps=4):  # task
            for _ in range(2):
                places += 64
            tl.store(out + places, 3.0)
"""
        Case(text, output=(256,)).finds("capture", "task", saying="places")

    def test_of_a_second_group_may_rely_on_the_first(self) -> None:
        text = """
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
"""
        Case(text, output=(128,), expected=lambda: torch.full((128,), 2.0)).check()


def protocol(one: str, other: str, barriers: str = "a = tlx.alloc_barriers(1)\n    b = tlx.alloc_barriers(1)") -> Case:
    """Two roles that only signal each other, and mark their ends."""
    indented = ["\n".join(" " * 12 + line for line in body.splitlines()) for body in (one, other)]
    text = f"""
@triton.jit
def kernel(out):
    {barriers}
    tile = tlx.local_alloc((64,), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
{indented[0]}
            tl.store(out, 1.0)
        with tlx.async_task(num_warps=4):
{indented[1]}
            tl.store(out + 1, 1.0)
"""
    return Case(text, output=(2,), expected=lambda: torch.ones(2))


class TestUnusualProtocolsThatAreCorrect:
    def test_a_barrier_of_one_phase_waited_for_several_times(self) -> None:
        protocol(
            "for i in range(3):\n    tlx.barrier_wait(a[0], 0)", "tlx.barrier_arrive(a[0])\ntlx.barrier_wait(a[0], 0)"
        ).check()

    def test_a_wait_for_the_phase_before_the_first_several_times(self) -> None:
        protocol(
            "for i in range(3):\n    tlx.barrier_wait(a[0], 1)\ntlx.barrier_arrive(b[0])",
            "tlx.barrier_wait(b[0], 0)\ntlx.barrier_arrive(a[0])",
        ).check()

    def test_two_arrivals_of_one_role_in_a_row(self) -> None:
        one = "for i in range(4):\n    tlx.barrier_wait(a[0], i & 1)\n    tlx.barrier_arrive(b[0])"
        twice = "    tlx.barrier_arrive(a[0])\n    tlx.barrier_arrive(a[0])"
        other = f"for i in range(4):\n{twice}\n    tlx.barrier_wait(b[0], i & 1)"
        protocol(one, other, "a = tlx.alloc_barriers(1, arrive_count=2)\n    b = tlx.alloc_barriers(1)").check()

    def test_one_arrival_that_counts_twice(self) -> None:
        one = "for i in range(4):\n    tlx.barrier_wait(a[0], i & 1)\n    tlx.barrier_arrive(b[0])"
        other = "for i in range(4):\n    tlx.barrier_arrive(a[0], 2)\n    tlx.barrier_wait(b[0], i & 1)"
        protocol(one, other, "a = tlx.alloc_barriers(1, arrive_count=2)\n    b = tlx.alloc_barriers(1)").check()

    def test_a_role_that_waits_for_its_own_arrival(self) -> None:
        protocol("for i in range(3):\n    tlx.barrier_arrive(a[0])\n    tlx.barrier_wait(a[0], i & 1)", "pass").check()

    def test_phases_that_somebody_skips_since_another_barrier_tells_him(self) -> None:
        one = "tlx.barrier_wait(b[0], 0)\ntlx.barrier_wait(a[0], 0)"
        protocol(one, "for i in range(3):\n    tlx.barrier_arrive(a[0])\ntlx.barrier_arrive(b[0])").check()

    def test_a_barrier_that_nobody_waits_for(self) -> None:
        protocol("tlx.barrier_arrive(a[0])", "pass").check()

    def test_a_barrier_that_two_roles_wait_for(self) -> None:
        text = """
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
"""
        case = Case(text, output=(128,), expected=lambda: torch.full((128,), 3.0))
        case.check()
        case.but("arrive_count=2", "arrive_count=1").finds("barrier_reuse")
        case.but("tlx.barrier_wait(done[0], i & 1)  # done").finds("data_race", "write", "read")

    def test_an_order_that_comes_about_through_a_third_role(self) -> None:
        text = """
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
"""
        case = Case(text, output=(64,), expected=lambda: torch.full((64,), 5.0))
        case.check()
        case.but("tlx.barrier_wait(bars[0], 0)  # pass on").finds("data_race", "write", "read")


class TestArrivals:
    def test_that_lap_whoever_waits(self) -> None:
        one = "for i in range(2):\n    tlx.barrier_wait(a[0], i & 1)"
        case = protocol(one, "for i in range(2):\n    tlx.barrier_arrive(a[0])")
        case.finds_one_of("barrier_reuse", "deadlock")

    def test_of_two_roles_for_two_phases(self) -> None:
        protocol("tlx.barrier_arrive(a[0])", "tlx.barrier_arrive(a[0])").finds("barrier_reuse")

    def test_more_than_the_phase_takes(self) -> None:
        protocol("tlx.barrier_arrive(a[0], 2)", "pass").finds("barrier_reuse", saying="2 arrivals where 1 of 1")

    def test_whose_number_only_the_run_knows(self) -> None:
        protocol("n = 1\ntlx.barrier_arrive(a[0], n)", "pass").finds("error", saying="arrive_count must be a constant")

    def test_for_a_parity_that_is_none(self) -> None:
        protocol("tlx.barrier_wait(a[0], 2)", "tlx.barrier_arrive(a[0])").finds("error", saying="a phase is 0 or 1")


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


class TestClusters:
    def test_share_what_each_of_them_loads(self) -> None:
        MULTICAST.check()

    def test_may_be_several(self) -> None:
        case = MULTICAST.but("rank * TILES + i", "tl.program_id(0) * TILES + i")
        replace(case, grid=(4,), output=(12 * ROWS, COLUMNS), expected=lambda x: torch.cat([x] * 4)).check()

    def test_without_a_handshake_race(self) -> None:
        MULTICAST.but("tlx.barrier_wait(empty[0], (i & 1) ^ 1)  # handshake").finds("data_race", "load", "read")

    def test_with_a_grid_that_they_do_not_fill(self) -> None:
        replace(MULTICAST, grid=(3,)).finds("launch", saying="no multiple of the cluster's 2 CTAs")

    def test_end_together(self) -> None:
        case = MULTICAST.but("tlx.barrier_wait(empty[0], (TILES & 1) ^ 1)  # farewell")
        case.finds("unfinished_at_exit", "release", saying="must wait for the last")

    def test_do_not_meet_at_their_barrier_where_tasks_are(self) -> None:
        tasks = "    with tlx.async_tasks():"
        MULTICAST.but(tasks, f"    tlx.cluster_barrier()\n{tasks}").finds(
            "deadlock", saying="these tasks never arrived"
        )
        text = MULTICAST.text + "    tlx.cluster_barrier()  # meet\n"
        replace(MULTICAST, text=text).finds("deadlock", "meet", saying="never arrive on the barrier of the cluster")

    def test_with_half_the_bytes_expected(self) -> None:
        MULTICAST.but("4096", "2048").finds_one_of("wrong_byte_count", "data_race")

    def test_that_multicast_to_themselves_alone(self) -> None:
        MULTICAST.but("[0, 1])  # load", "[rank])  # load").finds("deadlock")

    def test_meet_though_one_is_done_long_before_the_other(self) -> None:
        text = """
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
"""
        inputs = [boxes(numbers(ROWS, COLUMNS), ROWS, COLUMNS)]
        Case(text, lambda: inputs, (2,), lambda _: torch.ones(2), grid=(2,), options=CLUSTER).check()

    def test_of_which_one_does_not_come(self) -> None:
        text = """
@triton.jit
def kernel(out):
    if tlx.cluster_cta_rank() == 0:
        tlx.cluster_barrier()  # meet
"""
        Case(text, grid=(2,), options=CLUSTER).finds("deadlock", "meet", saying="the barrier of the cluster")


class TestOtherCtas:
    def test_are_copied_to(self) -> None:
        REMOTE.check()

    def test_are_copied_to_through_the_asynchronous_proxy(self) -> None:
        REMOTE.but('tlx.fence("async_shared")  # fence').finds("missing_fence", "send", "write")

    def test_must_wait_for_what_is_copied(self) -> None:
        REMOTE.but("tlx.barrier_wait(full[0], 0)  # wait").finds_one_of("data_race", "unwritten_shared")

    def test_are_sent_registers(self) -> None:
        old = "tlx.async_remote_shmem_copy(inbox[0], mine[0], rank ^ 1, full[0])"
        new = "tlx.async_remote_shmem_store(inbox[0], tl.full((64,), 1, tl.float32) + rank, rank ^ 1, full[0])"
        case = REMOTE.but(old, new).but('tlx.fence("async_shared")  # fence')
        case.check()
        case.but("tlx.barrier_wait(full[0], 0)  # wait").finds_one_of("data_race", "unwritten_shared")

    def test_are_stored_to(self) -> None:
        copy = "tlx.async_remote_shmem_copy(inbox[0], mine[0], rank ^ 1, full[0])"
        store = "tlx.remote_shmem_store(inbox[0], tl.full((64,), 1, tl.float32) + rank, rank ^ 1)"
        case = (
            REMOTE.but(copy, store)
            .but("tlx.barrier_wait(full[0], 0)", "tlx.cluster_barrier()")
            .but("    tlx.barrier_expect_bytes(full[0], 256)\n", "")
        )
        case.check()
        case.but("tlx.cluster_barrier()  # wait").finds("data_race", "send", "read")

    def test_must_be_there(self) -> None:
        REMOTE.but("rank ^ 1", "rank + 1").finds("out_of_bounds", "send", saying="there is no CTA 2")


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


class TestAtomics:
    def test_let_one_cta_wait_for_the_others(self) -> None:
        SPLIT.check()

    def test_compare_and_swap_does_too(self) -> None:
        SPLIT.but(
            "while tl.atomic_add(count, 0) < others", "while tl.atomic_cas(count, others, others) != others"
        ).check()

    def test_that_come_before_the_data_order_nothing(self) -> None:
        part, ready = "tl.store(parts + me * 64 + i, i + me)  # part", "tl.atomic_add(count, 1)  # ready"
        met = "tl.debug_barrier()  # of all threads"
        swapped = f"{met}\n        {ready}\n        {part}"
        SPLIT.but(f"{part}\n        {met}\n        {ready}", swapped).finds("data_race", "gather", "part")

    def test_are_one_thread_s_which_does_not_know_what_others_have_stored(self) -> None:
        SPLIT.but("tl.debug_barrier()  # of all threads").finds("data_race", "gather", "part")
        SPLIT.but("tl.debug_barrier()  # of all threads", "tl.atomic_add(out + me, 0.0)").finds(
            "data_race", "gather", "part"
        )

    def test_nor_what_others_have_read(self) -> None:
        text = """
@triton.jit
def kernel(count, out):
    i = tl.arange(0, 64)
    x = tl.load(out + i)  # read
    tl.debug_barrier()
    if tl.atomic_add(count, 1) == 1:
        tl.store(out + i, x + 1.0)  # overwritten
"""
        case = Case(text, lambda: [torch.zeros(1, dtype=torch.int32)], (64,), lambda *_: torch.ones(64), grid=(2,))
        case.but("tl.debug_barrier()").finds("data_race", "overwritten", "read")

    def test_tell_what_that_thread_has_done(self) -> None:
        """A counter that goes back to zero, and a number beside a flag, whatever all threads store meanwhile."""
        text = """
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
"""

        def inputs() -> list[Any]:
            return [torch.zeros(n, dtype=torch.int32) for n in (1, 1, 2)]

        expected = torch.cat([torch.arange(5.0).repeat_interleave(64), torch.tensor([14.0])])
        Case(text, inputs, (321,), lambda *_: expected, grid=(2,)).check()

    def test_that_nobody_waits_for_order_nothing(self) -> None:
        case = SPLIT.but("while tl.atomic_add(count, 0) < others:  # spin\n            pass", "tl.atomic_add(count, 0)")
        assert any(f.kind == "data_race" for s in SCHEDULES for f in case.run(s)[0].findings)

    def test_left_out_race(self) -> None:
        case = SPLIT.but("while tl.atomic_add(count, 0) < others:  # spin\n            pass")
        case.but("tl.atomic_add(count, 1)  # ready").finds("data_race", "gather", "part")

    def test_may_add_up_what_many_ctas_have(self) -> None:
        text = """
@triton.jit
def kernel(out):
    tl.atomic_add(out + tl.arange(0, 64), 1.0 + tl.program_id(0))  # add
"""
        case = Case(text, output=(64,), expected=lambda: torch.full((64,), 15.0), grid=(5,))
        case.check()
        case.but("tl.atomic_add(", "tl.store(").finds("data_race", "add", role="", saying="out")

    def test_wait_while_copies_are_as_late_as_can_be(self) -> None:
        text = """
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
"""

        def inputs() -> list[Any]:
            return [boxes(torch.ones(ROWS, COLUMNS), ROWS, COLUMNS), torch.zeros(1, dtype=torch.int32)]

        Case(text, inputs, (1,), lambda *_: torch.full((1,), 2.0 * ROWS * COLUMNS), grid=(2,)).check()

    def test_do_not_order_what_tma_has_under_way(self) -> None:
        """The wait is over when the tile has been read; the box may be written later than the atomic."""
        text = """
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
"""
        case = Case(text, lambda: [torch.zeros(1, dtype=torch.int32)], grid=(2,), into=lambda out: boxes(out, 16, 64))
        case.finds("data_race", "read", "store")


class TestLimits:
    ENDLESS = "@triton.jit\ndef kernel(count, out):\n    while tl.atomic_add(count, 0) < 1:  # spin\n        pass\n"
    IDLE = "@triton.jit\ndef kernel(count, out):\n    i = 0\n    while i < 1:  # spin\n        i *= 2\n"

    @pytest.mark.parametrize("text", [ENDLESS, IDLE])
    @pytest.mark.parametrize("schedule", SCHEDULES[::3])
    def test_of_steps_end_a_loop_without_end(self, text: str, schedule: tuple[Policy, int]) -> None:
        args = [torch.zeros(1, dtype=torch.int32), torch.zeros(1)]
        machine = simulate(text, args, (2,), schedule=schedule, limits=Limits(steps=500))
        assert [finding.kind for finding in machine.findings] == ["limit"]
        assert machine.findings[0].place.line in range(5, 9)
        assert "stopped after 501 steps" in machine.findings[0].message

    def test_of_time_end_it_too(self) -> None:
        args = [torch.zeros(1, dtype=torch.int32), torch.zeros(1)]
        machine = simulate(self.ENDLESS, args, limits=Limits(seconds=0.1))
        assert [finding.kind for finding in machine.findings] == ["limit"]
        assert machine.steps < 1_000_000


ASSEMBLY = """
@triton.jit
def kernel(out):
    x = tl.arange(0, 64).to(tl.float32)
    y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)  # asm
    tl.store(out + tl.arange(0, 64), y)
"""


class TestAssembly:
    def test_computes_what_it_is_said_to_mean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(assembly._MEANINGS, "ex2.approx.ftz.f32 $0, $1;", np.exp2)
        out = torch.zeros(64)
        machine = simulate(ASSEMBLY, [out])
        assert not machine.findings
        assert torch.equal(out, torch.exp2(torch.arange(64.0)))

    def test_without_a_meaning_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(assembly._MEANINGS, "ex2.approx.ftz.f32 $0, $1;", raising=False)
        Case(ASSEMBLY, output=(64,)).finds("unknown_instruction", "asm", saying="ex2.approx.ftz.f32")


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


class TestPointers:
    def test_masked_are_within_the_tensors(self) -> None:
        MASKED.check()

    def test_unmasked_load_from_outside(self) -> None:
        MASKED.but("mask=i < N, other=7)", "mask=i < 4096, other=7)").finds("out_of_bounds", "load", saying="load")

    def test_unmasked_store_to_outside(self) -> None:
        MASKED.but("values + 1, mask=i < N", "values + 1").finds("out_of_bounds", "store", saying="store")

    def test_below_the_tensor(self) -> None:
        MASKED.but("tl.store(out + i,", "tl.store(out - 4096 + i,").finds("out_of_bounds", "store")

    def test_of_two_programs_to_one_element(self) -> None:
        case = MASKED.but("tl.program_id(0) * B", "tl.program_id(0) * (B - 1)")
        case.finds("data_race", "store")

    def test_of_two_programs_that_read_one_element_are_fine(self) -> None:
        case = MASKED.but("tl.load(x + i, mask=i < N, other=7)", "tl.load(x + i % 2)")
        replace(case, expected=lambda x: x[:2].repeat(50) + 1).check()


class TestDependentLaunch:
    def test_changes_no_value(self) -> None:
        case = MASKED.but(
            "    values =", "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n    values ="
        )
        replace(case, options={"launch_pdl": True}).check()


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


class TestCpAsync:
    @pytest.mark.parametrize("stages", [2, 3, 4, 8])
    def test_in_a_ring_is_exact(self, stages: int) -> None:
        CP_ASYNC.also(STAGES=stages).check()

    def test_waited_for_too_loosely(self) -> None:
        CP_ASYNC.but("tlx.async_load_wait_group(STAGES - 2)", "tlx.async_load_wait_group(STAGES - 1)").finds(
            "data_race", "read"
        )

    def test_never_waited_for(self) -> None:
        case = CP_ASYNC.but("tlx.async_load_wait_group(0)  # drain")
        case.finds("unfinished_at_exit", "commit", saying="cp.async")

    def test_in_no_group(self) -> None:
        case = CP_ASYNC.but("tlx.async_load_commit_group()  # commit")
        case.finds("unfinished_at_exit", saying="cp.async")

    def test_into_the_buffer_that_is_read(self) -> None:
        read, load = "values = tlx.local_load(ring[k % STAGES])  # read", "ring[ahead % STAGES], mask"
        case = CP_ASYNC.but(load, "ring[k % STAGES], mask").but(f"{read}\n", "\n")
        case.but("        tl.store(out", f"        {read}\n        tl.store(out").finds("data_race", "read", "load")

    def test_is_published_by_an_arrival_after_the_wait(self) -> None:
        one = "tlx.barrier_wait(a[0], 0)\nvalues = tlx.local_load(tile[0])  # read"
        other = """tlx.async_load(out + tl.arange(0, 64) % 2, tile[0])  # load
tlx.async_load_commit_group()
tlx.async_load_wait_group(0)  # wait
tlx.barrier_arrive(a[0])
tlx.barrier_wait(b[0], 0)"""
        case = protocol(f"{one}\ntlx.barrier_arrive(b[0])\ntlx.barrier_wait(b[0], 0)", other)
        case.check()
        case.but("tlx.async_load_wait_group(0)  # wait").finds("data_race", "read", "load")


class TestReadersAndWriters:
    def test_of_global_memory_all_count_not_only_the_latest(self) -> None:
        text = """
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
"""
        case = Case(text, lambda: [torch.zeros(1, dtype=torch.int32)], grid=(3,))
        case.finds("data_race", "write", "read")


class TestSharedNamedBarriers:
    ORDERED = """
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
"""

    def test_may_take_another_count_once_the_round_before_is_known_to_be_complete(self) -> None:
        case = Case(self.ORDERED, output=(1,), expected=lambda: torch.zeros(1))
        case.check()
        case.but("tlx.barrier_wait(a[0], 0)  # order").finds_one_of("wrong_thread_count", "barrier_reuse")


class TestRemoteCopies:
    def test_are_over_before_the_ctas_end(self) -> None:
        case = REMOTE.but("tlx.cluster_barrier()  # farewell")
        case.finds("unfinished_at_exit", "send", saying="must wait for the last")

    def test_of_another_size_are_refused(self) -> None:
        case = REMOTE.but("mine = tlx.local_alloc((64,)", "mine = tlx.local_alloc((32,)")
        case.but("tl.full((64,), 1", "tl.full((32,), 1").finds("error", "send")


class TestRegisters:
    """setmaxnreg is left out without a word where the sum does not fit; the simulator says so."""

    KERNEL = """
@triton.jit
def kernel(out_ptr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out_ptr, 1.0)
        with tlx.async_task(num_warps=4, replicate={replicas}, registers={registers}):
            tl.store(out_ptr + 1 + tlx.async_task_replica_id(), 2.0)
"""

    @pytest.mark.parametrize(
        ("replicas", "registers", "fits"),
        [(2, 240, True), (2, 232, True), (3, 160, True), (3, 168, False), (3, 232, False), (1, 240, True)],
    )
    def test_of_all_tasks_together_fit_or_are_found(self, replicas: int, registers: int, fits: bool) -> None:
        text = self.KERNEL.format(replicas=replicas, registers=registers)
        machine = simulate(text, [torch.zeros(4)])
        assert [finding.kind for finding in machine.findings] == ([] if fits else ["out_of_budget"])


class TestArrivalsOfSomeThreads:
    """One thread of each warp may arrive for all: fewer arrivals on the barrier, and no barrier among the warps."""

    KERNEL = """
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
"""

    def test_count_as_often_as_threads_are_chosen(self) -> None:
        out = torch.zeros(128)
        machine = simulate(self.KERNEL, [out], FIRST=0)
        assert machine.findings == []
        assert torch.equal(out, torch.full((128,), 3.0))

    def test_of_nobody_are_none(self) -> None:
        machine = simulate(self.KERNEL, [torch.zeros(128)], FIRST=32)
        assert "deadlock" in {finding.kind for finding in machine.findings}
