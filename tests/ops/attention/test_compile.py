"""Attention kernels compile to sm_90a within their predicted resources: shared memory, registers, instructions."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.errors import CompileError
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool

ATTENTION = ops.get("attention")
H200 = devices.target("h200")

PROBLEMS: list[AttentionProblem] = [
    ATTENTION.problem((4, 32, 4096, 64)),
    ATTENTION.problem((4, 32, 4096, 128)),
    ATTENTION.problem((4, 32, 4096, 128), kv_heads=8, causal="bottom-right", lse=True),
    ATTENTION.problem((4, 16, 4096, 256), causal="bottom-right"),
]


def sample(problem: AttentionProblem, template: str, count: int) -> list[Config]:
    """The model's favourite, and others."""
    legal = candidates(problem, H200, (template,))
    return [legal[0], *random.Random(problem.label).sample(legal[1:], min(count - 1, len(legal) - 1))]


CASES = [
    (problem, config)
    for problem in PROBLEMS
    for template, count in (("attention_tma", 3), ("attention_vanilla", 1))
    for config in sample(problem, template, count)
]


@pytest.fixture(scope="module")
def binaries(compile_pool: CompilePool) -> dict[Any, Future[Binary]]:
    return {case: compile_pool.submit(emit(ATTENTION, *case)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[1].short}")
def test_legal_config_compiles_or_is_rejected_for_spills(
    case: tuple[AttentionProblem, Config], binaries: dict[Any, Future[Binary]]
) -> None:
    problem, config = case
    error = binaries[case].exception(300)
    if error is not None:
        assert isinstance(error, CompileError)
        assert error.kind == "rejected"
        assert "spills" in str(error) or "ptxas warns" in str(error)
        assert config.params["carry"] == "wide"
        return
    facts, formula = binaries[case].result().facts, ATTENTION.resources(problem, config)
    assert facts.shared_bytes <= formula.shared_bytes
    if config.template == "attention_tma":
        assert formula.shared_bytes - facts.shared_bytes <= 2048
        assert facts.setmaxnreg > 0
        assert facts.hgmma > 0
        assert facts.loop_conversions == 0
        assert not facts.warnings


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_every_problem_has_a_tma_config_without_large_spills(
    problem: AttentionProblem, binaries: dict[Any, Future[Binary]]
) -> None:
    own = [future for case, future in binaries.items() if case[0] == problem and case[1].template == "attention_tma"]
    assert any(future.exception(300) is None for future in own)
