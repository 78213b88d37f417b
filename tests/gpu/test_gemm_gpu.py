"""Every GEMM template gives the right result on the card: layouts, dtypes, epilogues, and shapes that tiles do not fit.

Each case runs in a child process under a time limit, so that a kernel that hangs fails its own case alone.
"""

from __future__ import annotations

import random

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.ops.gemm.problem import GemmProblem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner

pytestmark = pytest.mark.gpu

GEMM = ops.get("gemm")
H200 = devices.target("h200")

#: Around tiles, stages and multiprocessors: one tile, one step of K, fewer steps than stages, tails everywhere.
AWKWARD = [
    (1, 8, 8),
    (64, 64, 64),
    (8, 16, 8),
    (129, 136, 72),
    (944, 264, 200),
    (1152, 1000, 1000),
    (256, 2112, 64),
    (3008, 1008, 4992),
    (8448, 128, 128),
    (2176, 1032, 456),
]


def cases() -> list[tuple[GemmProblem, Config]]:
    """Problems, each with a sample of its legal configs that holds every template."""
    problems = [GEMM.problem(shape) for shape in AWKWARD]
    problems += [GEMM.problem((520, 776, 328), layout=layout) for layout in ("nt", "tn", "tt")]
    problems += [GEMM.problem((520, 776, 328), layout=layout, dtype="fp16") for layout in ("nn", "tt")]
    problems += [GEMM.problem((520, 776, 328), layout=layout, dtype="fp32") for layout in ("nn", "nt", "tn", "tt")]
    problems += [
        GEMM.problem((520, 776, 328), dtype="fp16", out_dtype="fp32"),
        GEMM.problem((520, 776, 328), out_dtype="fp16"),
    ]
    epilogues = ["bias", "bias+relu", "bias+gelu", "bias+silu", "residual", "scale", "scale+bias+gelu+residual"]
    problems += [GEMM.problem((1032, 776, 456), epilogue=epilogue) for epilogue in epilogues]
    problems += [
        GEMM.problem(shape, layout=layout)
        for shape in ((255, 257, 263), (100, 101, 103))
        for layout in ("nn", "nt", "tn", "tt")
    ]
    problems += [GEMM.problem((1, 1, 1)), GEMM.problem((7, 130, 511), epilogue="bias+gelu")]
    return [(problem, config) for problem in problems for config in sample(problem)]


def sample(problem: GemmProblem) -> list[Config]:
    """Two configs of each template that has legal ones."""
    rng = random.Random(problem.label)
    chosen = []
    for template in GEMM.templates:
        legal = [config for config in candidates(problem, H200) if config.template == template]
        chosen += rng.sample(legal, min(2, len(legal)))
    return chosen


CASES = cases()


@pytest.fixture(scope="session")
def compiled() -> None:
    """All binaries, compiled on all cores before the first launch; failures are the business of the CPU tests."""
    with CompilePool((9, 0)) as pool:
        for future in [pool.submit(emit(GEMM, problem, config)) for problem, config in CASES]:
            future.exception()


@pytest.mark.parametrize(("problem", "config"), CASES, ids=lambda value: getattr(value, "label", None) or value.short)
def test_result_is_as_good_as_the_library(problem: GemmProblem, config: Config, child: Child, compiled: None) -> None:
    card = Runner("gemm", problem, seed=11, child=child)
    card.setup()
    verdict = card.gate("candidate", emit(GEMM, problem, config))
    assert verdict.status == "ok", verdict.message
