"""Every template compiles for the GPUs it is meant for, to the machine code that its config asks for."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jobs  # type: ignore[import-not-found] # conftest.py makes it importable
import pytest

from tlxgen import ops
from tlxgen.codegen import binaries, loader
from tlxgen.codegen.compile import Binary, compile_kernel
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config
from tlxgen.devices import target
from tlxgen.problem import Problem
from tlxgen.space.candidates import candidates, vanilla_config
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.process import Child

H200 = target("h200")
GEMM = ops.get("gemm")
VECTOR_ADD = ops.get("vector_add")

EVEN, TAILS, ODD = (1024, 1024, 1024), (520, 776, 328), (255, 257, 263)
EVERYTHING = "scale+bias+gelu+residual"

#: Template, shape, options and, where a corner of the space matters, some parameters: together every layout, dtype
#: and kind of epilogue that the template may meet.
PROBLEMS: list[tuple[Any, ...]] = [
    ("gemm_tma_pingpong", EVEN, {}),
    ("gemm_tma_pingpong", TAILS, {"layout": "nt", "dtype": "fp16", "epilogue": "bias+gelu"}),
    ("gemm_tma_pingpong", TAILS, {"layout": "tn", "out_dtype": "fp32"}),
    ("gemm_tma_pingpong", TAILS, {"layout": "tt", "epilogue": "residual"}),
    ("gemm_tma_pingpong", TAILS, {"layout": "nt", "dtype": "fp32"}),
    ("gemm_tma_cooperative", EVEN, {"layout": "tt"}),
    ("gemm_tma_cooperative", TAILS, {"layout": "nt", "epilogue": "bias+gelu"}),
    ("gemm_tma_cooperative", TAILS, {"layout": "nn", "dtype": "fp16", "epilogue": EVERYTHING}),
    ("gemm_tma_cooperative", TAILS, {"layout": "tn", "out_dtype": "fp32", "epilogue": "bias"}),
    ("gemm_tma_cooperative", TAILS, {"layout": "nt", "dtype": "fp32", "epilogue": "residual"}),
    ("gemm_tma_cooperative", (16, 4096, 4096), {"layout": "nt", "epilogue": "bias+silu"}),
    ("gemm_tma_pingpong", TAILS, {"epilogue": "residual"}, {"block_m": 64, "block_n": 128}),
    ("gemm_tma_pingpong", TAILS, {"epilogue": "residual"}, {"block_m": 128, "block_n": 64}),
    (
        "gemm_tma_pingpong",
        TAILS,
        {"layout": "tt", "epilogue": "residual", "out_dtype": "fp32"},
        {"block_m": 64, "block_n": 128},
    ),
    ("gemm_tma_cooperative", TAILS, {"epilogue": "residual"}, {"block_m": 64}),
    ("gemm_tma_cooperative", EVEN, {}, {"block_m": 192}),
    ("gemm_cp_async", EVEN, {"layout": "nt"}),
    ("gemm_cp_async", ODD, {"layout": "nn", "epilogue": "bias+gelu"}),
    ("gemm_cp_async", ODD, {"layout": "tn", "dtype": "fp16"}),
    ("gemm_cp_async", TAILS, {"layout": "tt", "out_dtype": "fp32", "epilogue": "residual"}),
    ("gemm_cp_async", EVEN, {"layout": "nt", "dtype": "fp32", "epilogue": "scale"}),  # where that is legal at all
    ("gemm_vanilla", EVEN, {"layout": "tn"}),
    ("gemm_vanilla", TAILS, {"layout": "nt", "epilogue": EVERYTHING}),
    ("gemm_vanilla", TAILS, {"layout": "nt", "dtype": "fp32"}),
    ("gemm_vanilla", ODD, {"layout": "tt", "dtype": "fp32", "out_dtype": "bf16"}),
    ("gemm_vanilla", ODD, {"layout": "nn", "dtype": "fp16", "epilogue": "bias+gelu"}),
    ("vector_add_tma", (1 << 20,), {}),
    ("vector_add_tma", (12345,), {"dtype": "fp32"}),
    ("vector_add_vanilla", (1 << 20,), {"dtype": "fp16"}),
]


@dataclass(frozen=True)
class Case:
    problem: Problem
    config: Config

    @property
    def source(self) -> KernelSource:
        return emit(ops.get(self.problem.operator), self.problem, self.config)

    @property
    def id(self) -> str:
        return f"{self.problem.label}-{self.config.short}".replace(" ", "_")


def legal(problem: Problem, template: str) -> list[Config]:
    return [config for config in candidates(problem, H200) if config.template == template]


def cases() -> list[Case]:
    """One legal config for each problem, drawn with a fixed seed."""
    chosen = []
    for template, shape, options, *fixed in PROBLEMS:
        problem = ops.get("gemm" if template.startswith("gemm") else "vector_add").problem(shape, **options)
        params = (fixed or [{}])[0].items()
        fitting = [config for config in legal(problem, template) if params <= config.params.items()]
        if fitting:  # that none is missing which matters is a test of its own
            chosen.append(Case(problem, random.Random(f"{template} {problem.label}").choice(fitting)))
    return chosen


CASES = cases()


class Compiled:
    """Binaries by case. A process that runs all tests compiles ahead; one of several only what it asks for."""

    def __init__(self, pool: CompilePool) -> None:
        self._pool = pool
        self._futures: dict[Case, Future[Binary]] = {}
        if "PYTEST_XDIST_WORKER" not in os.environ:
            for case in CASES:
                self._future(case)

    def _future(self, case: Case) -> Future[Binary]:
        if case not in self._futures:
            self._futures[case] = self._pool.submit(case.source)
        return self._futures[case]

    def __getitem__(self, case: Case) -> Binary:
        return self._future(case).result()


@pytest.fixture(scope="session")
def compiled(compile_pool: CompilePool) -> Compiled:
    return Compiled(compile_pool)


def expected_tma(case: Case) -> tuple[int, int]:
    """TMA loads and stores in the code: each role's, written out once for each consumer that the config asks for."""
    p = case.config.params
    if case.config.template == "vector_add_tma":
        return 2, 0
    if not case.config.template.startswith("gemm_tma"):
        return 0, 0
    pingpong = case.config.template == "gemm_tma_pingpong"
    consumers = 2 if pingpong else int(p["consumers"])
    parts_of_a = 1 if pingpong else consumers
    ways = 2 if p.get("tail") == "split" else 1  # that a tile is stored: as one, and put together from pieces
    stores = ways * consumers * int(p["epilogue_subtiles"])
    residual = "residual" in getattr(case.problem, "epilogue_parts", ())
    return parts_of_a + 1 + (stores if residual else 0), stores


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_compiles_to_what_the_config_asks_for(case: Case, compiled: Compiled) -> None:
    source = case.source
    facts = compiled[case].facts
    tlx = not case.config.template.endswith("_vanilla")
    assert (facts.spill_bytes, facts.local_loads, facts.local_stores) == (0, 0, 0)
    assert facts.warnings == ()
    assert bool(facts.setmaxnreg) == ("registers=" in source.text)
    assert (facts.tma_loads, facts.tma_stores) == expected_tma(case)
    if tlx:
        assert facts.loop_conversions == 0
        assert bool(facts.hgmma) == case.config.template.startswith("gemm")


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_takes_the_shared_memory_that_the_resource_model_says(case: Case, compiled: Compiled) -> None:
    predicted = ops.get(case.problem.operator).resources(case.problem, case.config).shared_bytes
    actual = compiled[case].facts.shared_bytes
    assert actual <= predicted, "a config may be called legal that cannot be launched"
    if "tma" in case.config.template and "residual" not in case.problem.label:
        # Elsewhere the compiler decides: plain Triton pipelines as it likes, a residual may take the long way to its
        # place in the accumulator or not, and the tile of a pointer kernel goes out through the ring's memory.
        assert predicted - actual <= 2048


def test_the_sample_covers_templates_layouts_dtypes_and_epilogues() -> None:
    gemms = [case for case in CASES if case.problem.operator == "gemm"]
    assert {case.config.template for case in CASES} == {*GEMM.templates, *VECTOR_ADD.templates}
    for template in GEMM.templates:
        problems: list[Any] = [case.problem for case in gemms if case.config.template == template]
        assert {problem.layout for problem in problems} == {"nn", "nt", "tn", "tt"}
        dtypes = {
            dtype for dtype in ("bf16", "fp16", "fp32") if legal(GEMM.problem(EVEN, dtype=dtype, layout="nt"), template)
        }
        assert {problem.dtype for problem in problems} == dtypes
        assert any(problem.dtype != problem.out_dtype for problem in problems)
        assert any("residual" in problem.epilogue_parts for problem in problems)
        assert any("gelu" in problem.epilogue_parts for problem in problems)


def compiled_hash(compiler: Child, problem: Problem, config: Config) -> str:
    """What Triton files the binary of a contiguous problem under."""
    name, _ = compiler.call(jobs.Compile(problem, config, (9, 0)), 120)
    assert isinstance(name, str)
    return name


class TestSizesOfOne:
    """A stride of 1 is a constant to Triton, not an argument: kernels must take either."""

    @pytest.mark.parametrize("template", ["gemm_cp_async", "gemm_vanilla"])
    @pytest.mark.parametrize(
        ("shape", "layout"),
        [((1, 8, 8), "tn"), ((8, 1, 8), "nn"), ((8, 8, 1), "nn"), ((8, 8, 1), "tt"), ((1, 1, 1), "nt")],
    )
    def test_compile(self, compiler: Child, template: str, shape: tuple[int, ...], layout: str) -> None:
        problem = GEMM.problem(shape, layout=layout)
        compiled_hash(compiler, problem, legal(problem, template)[0])


class TestOneStructureCompilesOnce:
    """Sizes are arguments: another shape needs no other binary."""

    @pytest.mark.parametrize("template", [*GEMM.templates])
    def test_for_two_shapes(self, compiler: Child, template: str) -> None:
        small, large = GEMM.problem(EVEN, layout="nt"), GEMM.problem((2048, 4096, 512), layout="nt")
        config = next(config for config in legal(small, template) if config in legal(large, template))
        assert compiled_hash(compiler, small, config) == compiled_hash(compiler, large, config)

    @pytest.mark.parametrize("template", ["gemm_tma_pingpong", "gemm_tma_cooperative"])
    def test_for_sizes_that_16_does_not_divide(self, compiler: Child, template: str) -> None:
        even, tails = GEMM.problem(EVEN, layout="nt"), GEMM.problem((1, 8, 136), layout="nt")
        config = legal(even, template)[0]
        assert compiled_hash(compiler, even, config) == compiled_hash(compiler, tails, config)

    def test_for_two_lengths_of_vectors(self, compiler: Child) -> None:
        one, other = VECTOR_ADD.problem((1 << 20,)), VECTOR_ADD.problem((12345,))
        config = legal(one, "vector_add_tma")[0]
        assert compiled_hash(compiler, one, config) == compiled_hash(compiler, other, config)

    def test_but_other_layouts_are_other_kernels(self, compiler: Child) -> None:
        config = legal(GEMM.problem(EVEN), "gemm_tma_cooperative")[0]
        hashes = {compiled_hash(compiler, GEMM.problem(EVEN, layout=layout), config) for layout in ("nn", "nt")}
        assert len(hashes) == 2


def loaded(problem: Problem, config: Config) -> tuple[ModuleType, tuple[Any, ...], dict[str, Any]]:
    """The emitted module, kernel arguments and launch arguments, on the meta device."""
    operator = ops.get(problem.operator)
    module = loader.load(emit(operator, problem, config))
    inputs = operator.inputs(problem, "meta", 0)
    output = operator.output(problem, inputs)
    _, args = operator.arguments(module, inputs, output, num_sms=132)
    return module, args, {**inputs, operator.output_name: output}


class AskedForError(Exception):
    """Ends a launch where Triton would compile, with what it was asked to compile."""

    def __init__(self, source: Any, target: Any, options: dict[str, Any]) -> None:
        super().__init__("compile")
        self.source, self.target, self.options = source, target, options


class FakeDriver:
    """As much of Triton's driver as a launch needs before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": 132}


class FakeProperties:
    multi_processor_count = 132


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch
    import triton
    from triton.runtime.driver import driver

    def ask(src: Any, target: Any, options: dict[str, Any]) -> Any:
        raise AskedForError(src, target, options)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: FakeProperties())
    before = driver._active
    driver.set_active(FakeDriver())
    monkeypatch.setattr(triton.compiler, "compile", ask)
    yield
    driver._active = before


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("gemm_tma_pingpong", {"layout": "nt", "epilogue": EVERYTHING}),
        ("gemm_tma_cooperative", {"layout": "nt", "dtype": "fp32"}),
        ("gemm_cp_async", {}),
        ("gemm_vanilla", {"epilogue": "bias+gelu"}),
        ("vector_add_tma", {}),
        ("vector_add_vanilla", {"dtype": "fp32"}),
    ],
)
def test_the_first_launch_asks_for_the_binary_that_was_compiled_ahead(
    template: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Otherwise every first call would compile again what tuning left in Triton's cache."""
    import triton

    operator = GEMM if template.startswith("gemm") else VECTOR_ADD
    problem = operator.problem(EVEN if operator is GEMM else (1 << 20,), **options)
    module, args, tensors = loaded(problem, legal(problem, template)[0])
    ahead: list[AskedForError] = []

    def note(source: Any, target: Any, options: dict[str, Any]) -> None:
        ahead.append(AskedForError(source, target, options))

    with monkeypatch.context() as patch:
        patch.setattr(binaries, "recall", lambda *_: None)
        patch.setattr(binaries, "remember", lambda *_: None)
        patch.setattr(triton, "compile", note)
        compile_kernel(module, args, (9, 0))
    request.getfixturevalue("fake_driver")
    with pytest.raises(AskedForError) as launch:
        module.launch(**tensors)
    asked, (compiled,) = launch.value, ahead
    assert asked.source.hash() == compiled.source.hash()
    assert asked.target == compiled.target
    options_asked = asked.options if isinstance(asked.options, dict) else asked.options.__dict__
    from triton.compiler.compiler import make_backend

    backend = make_backend(asked.target)
    assert backend.parse_options(dict(options_asked)).hash() == backend.parse_options(dict(compiled.options)).hash()


#: Bytes of shared memory that one program can have (CUDA C++ Programming Guide, limits per compute capability).
SHARED_LIMIT = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}


class TestPlainTriton:
    """The fallback serves every GPU that Triton serves."""

    @pytest.mark.parametrize("capability", SHARED_LIMIT, ids=str)
    @pytest.mark.parametrize(
        ("operator", "shape", "options"),
        [
            ("gemm", EVEN, {}),
            ("gemm", ODD, {"layout": "tn", "dtype": "fp32", "epilogue": "bias+gelu"}),
            ("vector_add", (12345,), {}),
        ],
    )
    def test_compiles(
        self,
        operator: str,
        shape: tuple[int, ...],
        options: dict[str, str],
        capability: tuple[int, int],
        compiler: Child,
    ) -> None:
        problem = ops.get(operator).problem(shape, **options)
        gpu = replace(H200, slug="other", capability=capability)
        config = vanilla_config(problem, gpu)
        assert config is not None
        _, shared = compiler.call(jobs.Compile(problem, config, capability), 120)
        assert shared <= SHARED_LIMIT[capability], "compiles, and cannot be launched"
