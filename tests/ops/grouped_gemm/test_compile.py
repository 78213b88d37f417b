"""Kernels of grouped GEMM compile to sm_90a as the spaces promise: shared memory, registers, instructions."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.codegen.loader import load
from tlxgen.config import Config
from tlxgen.ops.grouped_gemm.problem import GroupedGemmProblem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool

GROUPED = ops.get("grouped_gemm")
H200 = devices.target("h200")
SHAPE = (64, 16384, 2048, 4096)

#: And of how many random TMA configs beside the favourite; plain Triton once for each number.
PROBLEMS: list[tuple[GroupedGemmProblem, int]] = [
    (GROUPED.problem(SHAPE, layout="nt"), 1),
    (GROUPED.problem(SHAPE, form="3d3d", layout="tn", epilogue="bias+gelu", out_dtype="fp32"), 0),
    (GROUPED.problem((64, 16384, 2044, 4096), layout="nt", epilogue="bias+silu", dtype="fp16"), 1),
    (GROUPED.problem(SHAPE, form="3d2d"), 0),
    (GROUPED.problem(SHAPE, form="2d2d"), 1),
    (GROUPED.problem(SHAPE, form="3d3d", epilogue="relu"), 0),
    (GROUPED.problem(SHAPE, form="masked", max_rows=1024), 0),
    (GROUPED.problem(SHAPE, layout="nt", epilogue="bias+swiglu"), 1),
    (GROUPED.problem(SHAPE, form="gather", layout="nt", epilogue="swiglu"), 1),
    (GROUPED.problem((64, 16384, 2044, 4096), form="masked", max_rows=1024, layout="nt", epilogue="bias+geglu"), 0),
    (GROUPED.problem(SHAPE, dtype="e4m3"), 1),
    (GROUPED.problem((64, 16384, 2044, 4096), dtype="e4m3", epilogue="bias+swiglu"), 0),
]


def sample(problem: GroupedGemmProblem, more: int) -> list[Config]:
    """The model's favourite, and others."""
    legal = candidates(problem, H200, ("grouped_gemm_tma",))
    others = random.Random(problem.label).sample(legal[1:], more)
    return [legal[0], *others, *candidates(problem, H200, ("grouped_gemm_vanilla",))[:more]]


CASES = [(problem, config) for problem, more in PROBLEMS for config in sample(problem, more)]


@pytest.fixture(scope="module")
def binaries(compile_pool: CompilePool) -> dict[Any, Future[Binary]]:
    return {case: compile_pool.submit(emit(GROUPED, *case)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[1].short}")
def test_a_legal_config_compiles_as_promised(
    case: tuple[GroupedGemmProblem, Config], binaries: dict[Any, Future[Binary]]
) -> None:
    problem, config = case
    facts, formula = binaries[case].result(300).facts, GROUPED.resources(problem, config)
    assert facts.shared_bytes <= formula.shared_bytes
    if config.template == "grouped_gemm_tma":
        assert formula.shared_bytes - facts.shared_bytes <= 2048
        assert facts.hgmma > 0
        assert facts.loop_conversions == 0
        assert not facts.warnings
        assert (facts.tma_stores > 0) == (config.params["store"] == "tma")
        assert (facts.setmaxnreg > 0) == (config.params["block_m"] != 64)  # a single consumer has all there are


@pytest.mark.parametrize("problem", [problem for problem, _ in PROBLEMS], ids=lambda problem: problem.label)
def test_arguments_fit_tritons_dispatcher(problem: GroupedGemmProblem) -> None:
    module = load(emit(GROUPED, problem, candidates(problem, H200, ("grouped_gemm_tma",))[0]))
    inputs = GROUPED.inputs(problem, "meta", 0)
    grid, args = GROUPED.arguments(module, inputs, GROUPED.output(problem, inputs), num_sms=132)
    assert grid == (132, 1, 1)
    slots = [1 + 2 * len(arg.shape) if hasattr(arg, "block_shape") else 1 for arg in args]
    assert sum(slots) <= 62
    assert sum(slot > 1 for slot in slots) <= 8
