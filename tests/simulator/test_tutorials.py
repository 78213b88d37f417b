"""fbtriton's Hopper tutorials, simulated from their installed source, host code included.

A tutorial with a defect has a test for the finding, with the rule that makes it a defect. Tiles are smaller than those
that the tutorials tune.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.language.extra import tlx

from tlxgen.simulator.findings import Finding
from tlxgen.simulator.machine.machine import POLICIES, Machine, Policy
from tlxgen.simulator.program import Kernel, Program, load
from tlxgen.simulator.tlx.namespace import Tlx

SEEDS = (0, 1)
GEMM_ERROR, ATTENTION_ERROR = 5e-4, 1e-3  #: of fp16 results, as norms
WRONG = 1e-2  #: no rounding is that far off


@functools.cache
def tutorial(name: str) -> Program:
    """The loaded file; statements at its top that need a GPU are skipped."""
    with resources.as_file(resources.files(tlx) / "tutorials" / name) as path:
        program = load(path)
    program.namespace["DEVICE"] = torch.device("cpu")
    return program


def line_of(program: Program, text: str, nth: int = 0) -> int:
    """The line of a piece of a tutorial."""
    lines = Path(program.path).read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line][nth]


@dataclass(frozen=True)
class Schedule:
    policy: Policy
    seed: int


@pytest.fixture(params=[Schedule(p, s) for p in POLICIES for s in SEEDS], ids=lambda s: f"{s.policy}-{s.seed}")
def schedule(request: pytest.FixtureRequest) -> Schedule:
    assert isinstance(request.param, Schedule)
    return request.param


@pytest.fixture(autouse=True)
def _empty_tensors_are_nan() -> Iterator[None]:
    """Elements that a kernel does not write must not keep an earlier run's values."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@dataclass(frozen=True)
class Tuned:
    """A kernel under `triton.autotune`, with one config."""

    kernel: Kernel
    config: dict[str, Any]
    pre_hook: Callable[[dict[str, Any]], None] | None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = inspect.signature(self.kernel.function).bind_partial(*args, **kwargs).arguments
            if self.pre_hook is not None:
                self.pre_hook({**given, **self.config})
            self.kernel[grid](*args, **kwargs, **self.config)

        return launch


@dataclass(frozen=True)
class Run:
    """The outcome of one call of a tutorial's host code."""

    result: Any
    findings: list[Finding]
    ctas: int

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}

    @property
    def places(self) -> set[tuple[str, int]]:
        return {(finding.kind, finding.place.line) for finding in self.findings}

    def error(self, expected: torch.Tensor) -> float:
        return float((self.result.float() - expected).norm() / expected.norm())

    def check(self, expected: torch.Tensor, error: float = GEMM_ERROR) -> None:
        """No findings, and the expected result."""
        assert self.findings == []
        assert self.error(expected) < error


@dataclass(frozen=True)
class Device:
    """A GPU for host code: its number of multiprocessors and its schedule."""

    schedule: Schedule
    multiprocessors: int = 2

    def run(
        self,
        program: Program,
        host: str,
        *args: Any,
        tuned: tuple[str, dict[str, Any]] | None = None,
        pre_hook: str | None = None,
    ) -> Run:
        """Calls host code.

        Args:
            program: a tutorial.
            host: name of the function.
            args: its arguments.
            tuned: an autotuned kernel's name, and the config to launch it with.
            pre_hook: name of the configs' hook.
        """
        program.machines.clear()
        program.make_machine = lambda: Machine(frozenset(), self.schedule.seed, self.schedule.policy)
        properties = SimpleNamespace(multi_processor_count=self.multiprocessors)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
            if tuned is not None:
                name, config = tuned
                hook = program[pre_hook] if pre_hook else None
                patch.setitem(program.namespace, name, Tuned(program[name], config, hook))
            result = program[host](*args)
        [machine] = program.machines
        return Run(result, machine.findings, math.prod(machine.grid))


@dataclass(frozen=True)
class Product:
    """C = A·B, with the expected result."""

    m: int
    n: int
    k: int
    transposed: tuple[bool, bool] = (False, False)  #: whether A and B are column-major
    a: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, shape, transposed in (("a", (self.m, self.k), 0), ("b", (self.k, self.n), 1)):
            rows, columns = shape[::-1] if self.transposed[transposed] else shape
            values = torch.randn(rows, columns, generator=generator).half()
            object.__setattr__(self, name, values.T if self.transposed[transposed] else values)

    def __str__(self) -> str:
        majors = "".join("ct"[transposed] for transposed in self.transposed) if any(self.transposed) else ""
        return f"{self.m}x{self.n}x{self.k}{majors}"

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        return self.a.float() @ self.b.float()


#: For three stages and tiles of 128, 64 and 32: fewer steps than stages, as many, more and no multiple; ragged sizes.
FEWER, EQUAL, MORE = Product(128, 64, 32), Product(128, 64, 96), Product(128, 64, 224)
RAGGED = Product(200, 136, 168)
ONE_TILE = [FEWER, EQUAL, MORE, Product(72, 40, 72)]

#: Sizes with CTAs: one with odd and with even counts of tiles, two with equal and unequal ones, three.
TILES = [
    (Product(384, 64, 96), 1),
    (Product(256, 128, 96), 1),
    (Product(256, 128, 160), 2),
    (Product(384, 64, 64), 2),
    (RAGGED, 3),
]
SIZES = [(size, 1) for size in ONE_TILE] + TILES

#: For clusters of two: one tile a CTA in one column and in two, and two tiles a CTA.
EVEN_TILES = [
    (Product(256, 64, 32), 2),
    (Product(256, 64, 224), 2),
    (Product(256, 128, 96), 2),
    (Product(456, 104, 72), 4),
]


def sized(sizes: list[tuple[Product, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("size", "ctas"), sizes, ids=[f"{size}-on-{ctas}" for size, ctas in sizes])


class TestVectorAddition:
    @pytest.mark.parametrize("elements", [1024, 2048, 2500])
    @pytest.mark.parametrize("host", ["add2", "add2_warp_specialized"])
    def test_two_sums_are_right(self, host: str, elements: int, schedule: Schedule) -> None:
        x, y, a, b = (torch.randn(elements) for _ in range(4))
        run = Device(schedule).run(tutorial("vector-add2.py"), host, x, y, a, b)
        assert run.findings == []
        assert torch.equal(run.result[0], x + y)
        assert torch.equal(run.result[1], a + b)


def gemm_config(**changes: Any) -> dict[str, Any]:
    return {
        "BM": 128,
        "BN": 64,
        "BK": 32,
        "GROUP_SIZE_M": 8,
        "NUM_STAGES": 3,
        "NUM_MMA_WARPS": 8,
        "NUM_MMA_GROUPS": 2,
        "EPILOGUE_SUBTILE": False,
        "num_warps": 4,
        **changes,
    }


class TestWarpSpecialisedGemm:
    """hopper_gemm_ws.py: one producer, two consumers."""

    FILE = "hopper_gemm_ws.py"

    def run(self, size: Product, schedule: Schedule, ctas: int, **changes: Any) -> Run:
        config = gemm_config(NUM_CTAS=1, **{"USE_WARP_BARRIER": False, **changes})
        return Device(schedule, ctas).run(tutorial(self.FILE), "matmul", size.a, size.b, config)

    @sized(SIZES)
    def test_is_right(self, size: Product, ctas: int, schedule: Schedule) -> None:
        self.run(size, schedule, ctas).check(size.expected)

    @pytest.mark.parametrize("stages", [2, 4])
    @pytest.mark.parametrize("warp_barrier", [False, True])
    @pytest.mark.parametrize("subtile", [False, True])
    def test_is_right_in_its_variants(self, stages: int, warp_barrier: bool, subtile: bool, schedule: Schedule) -> None:
        variant = {"NUM_STAGES": stages, "USE_WARP_BARRIER": warp_barrier, "EPILOGUE_SUBTILE": subtile}
        self.run(RAGGED, schedule, 2, **variant).check(RAGGED.expected)

    @pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)])
    def test_is_right_for_column_major_operands(self, transposed: tuple[bool, bool], schedule: Schedule) -> None:
        size = Product(200, 136, 168, transposed)
        self.run(size, schedule, 2).check(size.expected)

    def test_ragged_groups_are_right(self, schedule: Schedule) -> None:
        """`pid % group_size_m` lacks the `% num_pid_in_group` of the other tutorials: a permutation all the same."""
        size = Product(640, 128, 32)
        self.run(size, schedule, 3, GROUP_SIZE_M=2).check(size.expected)


class TestWarpSpecialisedGemmOfClusters:
    """hopper_gemm_ws.py with NUM_CTAS=2: each CTA loads half of B for both."""

    FILE = "hopper_gemm_ws.py"

    def run(self, size: Product, schedule: Schedule, ctas: int, **changes: Any) -> Run:
        cluster = {"NUM_CTAS": 2, "ctas_per_cga": (2, 1, 1), "USE_WARP_BARRIER": False}
        config = gemm_config(**{**cluster, **changes})
        return Device(schedule, ctas).run(tutorial(self.FILE), "matmul", size.a, size.b, config)

    @sized(EVEN_TILES)
    @pytest.mark.parametrize("warp_barrier", [False, True])
    def test_is_right_for_equal_tile_counts(
        self, size: Product, ctas: int, warp_barrier: bool, schedule: Schedule
    ) -> None:
        """Nor may a CTA exit too early, though nothing but the last K step's handshake keeps it.

        A CTA ends after its consumers have waited for the bytes of the last multicast, and its producer for the peer's
        last arrival. So no `cluster_barrier` is missing at the end: that suspicion is refuted.
        """
        self.run(size, schedule, ctas, USE_WARP_BARRIER=warp_barrier).check(size.expected)

    @pytest.mark.parametrize("transposed", [(True, False), (False, True)])
    def test_is_right_for_column_major_operands(self, transposed: tuple[bool, bool], schedule: Schedule) -> None:
        size = Product(256, 128, 96, transposed)
        self.run(size, schedule, 2).check(size.expected)

    def test_is_wrong_with_groups_of_one(self, schedule: Schedule) -> None:
        """A multicast box lands at the same offset in every target CTA (PTX, `cp.async.bulk.tensor` with
        `.multicast::cluster`), so both must want the same columns of B. With GROUP_SIZE_M=1 the tiles of two CTAs
        are neighbours along N: each gets half of its columns from the other's tile. All barriers are served, so only
        the numbers tell. The tutorial's own search space has this config (and keeps it if M > 10 N).
        """
        size = Product(256, 128, 96)
        run = self.run(size, schedule, 2, GROUP_SIZE_M=1)
        assert run.findings == []
        assert run.error(size.expected) > WRONG

    def test_is_wrong_with_an_odd_number_of_tiles_along_m(self, schedule: Schedule) -> None:
        """Also with the GROUP_SIZE_M=8 that the tutorial keeps for balanced sizes: a group is cut to the 3 tiles that
        there are, and the CTAs of every other cluster lie on both sides of a change of columns.
        """
        size = Product(384, 128, 96)
        run = self.run(size, schedule, 2)
        assert run.findings == []
        assert run.error(size.expected) > WRONG

    def test_hangs_with_an_odd_number_of_tiles(self, schedule: Schedule) -> None:
        """CTA 0 has a tile more: it waits for the arrival of a peer that has ended, and arrives on a barrier in shared
        memory that is no more (PTX: a CTA may access another's shared memory only while that one exists).
        """
        size = Product(384, 64, 96)
        run = self.run(size, schedule, 2)
        program = tutorial(self.FILE)
        handshake = line_of(program, "tlx.barrier_wait(cta_bar, p)")
        assert {("deadlock", handshake), ("roles_out_of_step", handshake)} <= run.places
        assert ("unfinished_at_exit", handshake - 1) in run.places
        assert "waits for more rounds than there are: cta 1 default has ended" in {f.message for f in run.findings}

    @sized([(Product(128, 64, 96), 2), (Product(384, 64, 96), 3)])
    def test_odd_grid_is_refused(self, size: Product, ctas: int, schedule: Schedule) -> None:
        """The host code launches min(multiprocessors, tiles) CTAs, even or not; a grid has whole clusters only
        (`cudaLaunchKernelEx`: the grid must be a multiple of the cluster).
        """
        run = self.run(size, schedule, ctas)
        assert run.kinds == {"launch"}
        assert "no multiple of the cluster's 2 CTAs" in run.findings[0].message


class TestSkinnyGemm:
    """hopper_gemm_ws.py's kernels for few rows or columns, which split K: by cp.async, and by TMA."""

    FILE = "hopper_gemm_ws.py"
    CP_ASYNC, TMA = "_skinny_matmul", "_skinny_matmul_tma"

    def run(self, host: str, size: Product, schedule: Schedule, multiprocessors: int = 1, **changes: Any) -> Run:
        config = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_SIZE_M": 4, "NUM_STAGES": 2, "num_warps": 4}
        kernel = "_skinny_matmul_kernel" if host == self.CP_ASYNC else "_skinny_tma_kernel"
        hook = "_skinny_zero_c_hook" if host == self.CP_ASYNC else "_skinny_tma_set_block_hook"
        return Device(schedule, multiprocessors).run(
            tutorial(self.FILE),
            host,
            size.a,
            size.b,
            size.m,
            size.n,
            size.k,
            tuned=(kernel, {**config, **changes}),
            pre_hook=hook,
        )

    @pytest.mark.parametrize("size", [Product(64, 64, 128), Product(64, 64, 192), Product(100, 72, 200)], ids=str)
    @pytest.mark.parametrize("stages", [2, 3])
    def test_tma_without_a_split_is_right(self, size: Product, stages: int, schedule: Schedule) -> None:
        self.run(self.TMA, size, schedule, NUM_STAGES=stages).check(size.expected)

    def test_tma_split_into_whole_blocks_is_right(self, schedule: Schedule) -> None:
        size = Product(64, 256, 2048)
        run = self.run(self.TMA, size, schedule, multiprocessors=4, BLOCK_K=128)
        assert run.ctas == 2 * 4
        run.check(size.expected, 2 * GEMM_ERROR)  # the parts are rounded too

    def test_tma_split_into_partial_blocks_counts_products_twice(self, schedule: Schedule) -> None:
        """A box is cut off by the tensor's size only, not by the part that a CTA is to sum up: K = 2080 in two parts
        of 1040 is 16 blocks of 64 and a quarter, and the first part reads 48 columns of the second.
        """
        size = Product(64, 256, 2080)
        run = self.run(self.TMA, size, schedule, multiprocessors=4)
        assert run.ctas == 2 * 4
        assert run.findings == []
        twice = size.expected + size.a[:, 1040:1088].float() @ size.b[1040:1088].float()
        assert run.error(size.expected) > WRONG
        assert run.error(twice) < 2 * GEMM_ERROR

    @pytest.mark.parametrize("stages", [3, 4])
    def test_tma_of_a_short_k_ends_with_loads_in_flight(self, stages: int, schedule: Schedule) -> None:
        """The prologue loads NUM_STAGES - 1 blocks of K whether there are as many or not. What is not used is not
        waited for: TMA may still write when the CTA's shared memory is another's, or the epilogue's scratch. (PTX: only
        the mbarrier makes the completion of `cp.async.bulk.tensor` known.) Loads that are too slow are found under way
        at the end, others as bytes without a waiter.
        """
        size = Product(64, 64, 64)
        run = self.run(self.TMA, size, schedule, NUM_STAGES=stages)
        assert run.kinds <= {"unfinished_at_exit", "roles_out_of_step"}
        assert run.kinds
        assert run.error(size.expected) < GEMM_ERROR

    @pytest.mark.parametrize("size", [Product(64, 64, 64), Product(64, 64, 192), Product(100, 72, 200)], ids=str)
    @pytest.mark.parametrize("stages", [2, 3])
    def test_cp_async_ends_with_copies_in_flight(self, size: Product, stages: int, schedule: Schedule) -> None:
        """As in hopper_gemm_pipelined.py, whose loop it shares."""
        run = self.run(self.CP_ASYNC, size, schedule, NUM_STAGES=stages)
        last_commit = line_of(tutorial(self.FILE), "tlx.async_load_commit_group", 1)
        assert run.places == {("unfinished_at_exit", last_commit)}
        assert run.error(size.expected) < GEMM_ERROR

    def test_cp_async_drops_the_remainder_of_k(self, schedule: Schedule) -> None:
        """Parts are K // split_k long, and nobody sums up the K % split_k columns behind the last: here 4 of 8196."""
        size = Product(64, 64, 8196)
        run = self.run(self.CP_ASYNC, size, schedule, multiprocessors=4, BLOCK_K=128)
        assert run.ctas == 8
        assert run.error(size.expected) > WRONG
        assert run.error(size.a[:, :8192].float() @ size.b[:8192].float()) < 2 * GEMM_ERROR


class TestPipelinedGemm:
    """hopper_gemm_pipelined.py: one role, which copies by cp.async ahead of itself."""

    FILE = "hopper_gemm_pipelined.py"

    @pytest.mark.parametrize("size", [Product(64, 64, 32), Product(128, 64, 96), Product(100, 72, 168)], ids=str)
    @pytest.mark.parametrize("stages", [2, 3, 4])
    def test_ends_with_copies_in_flight(self, size: Product, stages: int, schedule: Schedule) -> None:
        """The loop commits a group each time and waits for all but NUM_STAGES - 2; after it nothing waits for the rest,
        which are masked off and so write zeros. (PTX: the writes of `cp.async` are known to be complete only after
        `cp.async.wait_group`, `wait_all` or an mbarrier; neither `bar.sync` nor the end of a thread is among these.)

        It is more than untidy. The compiler takes the buffers for dead then: with tiles of 128, 128 and 64, three
        stages and four warps, `cp.async.wait_group` stands in the PTX's loop only, shared memory is the ring's 98,304
        bytes and no more, and the epilogue sends the accumulator through the first 8 KB of it, which belong to a stage.
        """
        config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8, "NUM_STAGES": stages}
        program = tutorial(self.FILE)
        run = Device(schedule).run(program, "matmul", size.a, size.b, config)
        assert run.places == {("unfinished_at_exit", line_of(program, "tlx.async_load_commit_group", 1))}
        assert len(run.findings) == run.ctas
        assert run.error(size.expected) < GEMM_ERROR


class TestPersistentCooperativeGemm:
    """hopper-persistent-gemm-ws-cooperative.py: two consumers share each tile."""

    FILE = "hopper-persistent-gemm-ws-cooperative.py"

    @sized(SIZES)
    @pytest.mark.parametrize("subtile", [False, True])
    def test_is_right(self, size: Product, ctas: int, subtile: bool, schedule: Schedule) -> None:
        run = Device(schedule, ctas).run(
            tutorial(self.FILE),
            "matmul_tlx_ws_persistent",
            size.a,
            size.b,
            tuned=("matmul_kernel_tlx_ws_persistent", gemm_config(EPILOGUE_SUBTILE=subtile)),
            pre_hook="matmul_tma_set_block_size_hook",
        )
        run.check(size.expected)


class TestPersistentPingPongGemm:
    """hopper-persistent-gemm-ws-pingpong.py: two consumers take turns, each with tiles of its own."""

    FILE = "hopper-persistent-gemm-ws-pingpong.py"

    @sized(SIZES)
    @pytest.mark.parametrize("barriers", ["named", "mbarrier"])
    def test_is_right_for_odd_and_even_tile_counts(
        self, size: Product, ctas: int, barriers: str, schedule: Schedule
    ) -> None:
        """Consumer 0 has a tile more if the count is odd, or the only one. It is not stuck then: consumer 1 has armed
        barrier 9 once ahead (an mbarrier's first wait for parity 1 passes by itself), so each turn of consumer 0 needs
        only turns of consumer 1 that there are. Both forms keep their order; the suspicion is refuted.
        """
        run = Device(schedule, ctas).run(
            tutorial(self.FILE),
            "matmul_tlx_ws_persistent",
            size.a,
            size.b,
            tuned=("matmul_kernel_tlx_ws_persistent", gemm_config(USE_NAMED_BARRIER=barriers == "named")),
            pre_hook="matmul_tma_set_block_size_hook",
        )
        run.check(size.expected)


@dataclass(frozen=True)
class Heads:
    """Q, K and V of some heads, with the expected result."""

    heads: int
    context: int
    width: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.context}x{self.width}"

    @property
    def scale(self) -> float:
        return 0.5 / math.sqrt(self.width)

    @functools.cached_property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(1, self.heads, self.context, self.width, generator=generator).half() for _ in range(3))

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        q, k, v = (tensor.float() for tensor in self.inputs)
        return torch.softmax(q @ k.transpose(-1, -2) * self.scale, -1) @ v


FLASH, PIPELINED, PINGPONG = "hopper_fa_ws.py", "hopper_fa_ws_pipelined.py", "hopper_fa_ws_pipelined_pingpong.py"
PERSISTENT = "hopper_fa_ws_pipelined_pingpong_persistent.py"
ATTENTION = [FLASH, PIPELINED, PINGPONG, PERSISTENT]

#: One, two (as many as buffers) and three K steps; D of 64 and 128; several heads.
HEADS = [
    (Heads(1, 128, 128), 128),
    (Heads(1, 128, 64), 64),
    (Heads(2, 256, 64), 64),
    (Heads(1, 384, 128), 128),
]


#: No fp8 kernel runs on Hopper: wgmma takes 8-bit operands K-major only (PTX, `wgmma.mma_async`: transposition is
#: for 16-bit types), and the compiler gives up on these tiles of V. The tests show the other defects.
FP8 = torch.float8_e5m2


def attend(
    file: str,
    heads: Heads,
    schedule: Schedule,
    block_n: int = 64,
    consumers: int = 2,
    multiprocessors: int = 1,
    inputs: tuple[torch.Tensor, ...] | None = None,
) -> Run:
    buffers = {"NUM_BUFFERS_Q": 1, "NUM_BUFFERS_KV": 2} if file == PERSISTENT else {"NUM_BUFFERS": 2}
    config = {
        "BLOCK_M": 64 * consumers,
        "BLOCK_N": block_n,
        "NUM_MMA_WARPS": 4 * consumers,
        "NUM_MMA_GROUPS": consumers,
        "num_warps": 4,
        **buffers,
    }
    device = Device(schedule, multiprocessors)
    return device.run(tutorial(file), "attention", *(inputs or heads.inputs), heads.scale, config)


class TestAttention:
    """The four attention tutorials: forward, without a mask."""

    @pytest.mark.parametrize(("heads", "block_n"), HEADS, ids=str)
    @pytest.mark.parametrize("file", ATTENTION)
    def test_is_right(self, file: str, heads: Heads, block_n: int, schedule: Schedule) -> None:
        attend(file, heads, schedule, block_n).check(heads.expected, ATTENTION_ERROR)

    @pytest.mark.parametrize("file", [FLASH, PIPELINED])
    def test_is_right_with_one_consumer(self, file: str, schedule: Schedule) -> None:
        """Not in ping-pong, which takes two."""
        heads = Heads(2, 192, 64)
        attend(file, heads, schedule, consumers=1).check(heads.expected, ATTENTION_ERROR)

    @pytest.mark.parametrize(("count", "ctas"), [(2, 1), (3, 1), (3, 2), (5, 3)])
    def test_persistent_kernel_is_right_for_odd_and_even_tiles(self, count: int, ctas: int, schedule: Schedule) -> None:
        """Also the wait before Q is released: it leaves P·V under way, and that reads no Q."""
        heads = Heads(count, 128, 64)
        run = attend(PERSISTENT, heads, schedule, multiprocessors=ctas)
        assert run.ctas == ctas
        run.check(heads.expected, ATTENTION_ERROR)

    @pytest.mark.parametrize("file", ATTENTION)
    def test_ragged_context_writes_beyond_the_log_sums(self, file: str, schedule: Schedule) -> None:
        """`tl.store(m_ptrs, m_i)` has no mask, and the rows of all heads are one axis for TMA: the tail of a head lands
        in the next one's rows, and that of the last behind the tensor. Nothing refuses such a context.
        """
        heads = Heads(2, 192, 64)
        run = attend(file, heads, schedule)
        program = tutorial(file)
        sums, out = line_of(program, "tl.store(m_ptrs, m_i)"), line_of(program, "desc_o.store(")
        assert ("out_of_bounds", sums) in run.places
        assert {line for kind, line in run.places if kind == "data_race"} <= {sums, out}
        assert "data_race" in run.kinds

    @pytest.mark.parametrize("file", [FLASH, PIPELINED, PINGPONG])
    def test_fp8_expects_twice_the_bytes(self, file: str, schedule: Schedule) -> None:
        """`2 * BLOCK_M_SPLIT * HEAD_DIM` is meant for fp16. An mbarrier's phase completes only when its tx-count is
        zero (PTX, "Phase completion of mbarrier"), so consumers wait for Q for ever.
        """
        heads = Heads(1, 128, 64)
        run = attend(file, heads, schedule, inputs=tuple(tensor.to(FP8) for tensor in heads.inputs))
        assert {"deadlock", "wrong_byte_count"} <= run.kinds
        assert any("q_fulls[0]: 4096 more bytes are expected than come" in f.message for f in run.findings)

    def test_fp8_of_the_persistent_kernel_reads_the_wrong_v(self, schedule: Schedule) -> None:
        """V's descriptor is one of [D, N], yet its boxes are loaded at [row of K, 0], into tiles that no `local_trans`
        turns: the first is a piece of V transposed, the second lies behind V's D = 64 rows and is all zeros.
        """
        heads = Heads(1, 128, 64)
        q, k, v = (tensor.to(FP8) for tensor in heads.inputs)
        v_by_columns = v.transpose(-1, -2).contiguous().view(v.shape)
        run = attend(PERSISTENT, heads, schedule, inputs=(q, k, v_by_columns))
        weights = torch.softmax(q.float() @ k.float().transpose(-1, -2) * heads.scale, -1)
        read = torch.cat([v[..., :64, :].float().transpose(-1, -2), torch.zeros(1, 1, 64, 64)], dim=-2)
        assert run.error(weights @ v.float()) > 1
        assert run.error(weights @ read) < 0.1  # e5m2 has two bits of mantissa

    def test_fp8_of_the_persistent_kernel_needs_boxes_like_tiles(self, schedule: Schedule) -> None:
        """A box and the tile that it is loaded to have one shape (the compiler's verifier)."""
        heads = Heads(1, 128, 64)
        inputs = tuple(tensor.to(FP8) for tensor in heads.inputs)
        run = attend(PERSISTENT, heads, schedule, block_n=128, inputs=inputs)
        assert run.kinds == {"error"}
        assert "v_tiles[0] is fp8e5 [128, 64], boxes of desc_v are fp8e5 [64, 128]" in run.findings[0].message


def parameters(operation: Any) -> list[str]:
    """Names of the arguments that can be given by name."""
    every = inspect.signature(operation).parameters.values()
    named = [p.name for p in every if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and p.name[0] != "_"]
    return [name for name in named if name != "self"]


OPERATIONS = [name for name, operation in inspect.getmembers(Tlx, inspect.isfunction) if hasattr(tlx, name)]
UNREAD = {"async_descriptor_prefetch_tensor", "prefetch", "async_tasks", "reuse_group"}  #: their arguments mean nothing


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - UNREAD))
def test_operation_names_its_arguments_as_in_tlx(name: str) -> None:
    expected = parameters(getattr(tlx, name))
    assert parameters(getattr(Tlx, name))[: len(expected)] == expected
