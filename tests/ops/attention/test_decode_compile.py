"""`attention_decode` compiles to sm_90a within its predicted resources: shared memory, registers, instructions."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool

ATTENTION = ops.get("attention")
H200 = devices.target("h200")
TEMPLATE = "attention_decode"

PROBLEMS: list[AttentionProblem] = [
    ATTENTION.problem((64, 32, 1, 64), kv_heads=8, kv_len=8192),
    ATTENTION.problem((64, 32, 1, 128), kv_heads=8, kv_len=8192),
    ATTENTION.problem((8, 32, 4, 128), kv_heads=8, kv_len=8192, causal="bottom-right", lse=True, dtype="fp16"),
    ATTENTION.problem((8, 32, 4, 96), kv_heads=8, kv_len=8192, causal="bottom-right", window=1000, softcap=30.0),
    ATTENTION.problem((8, 16, 50, 64), kv_len=100, causal="top-left", lse=True),
    ATTENTION.problem((4, 16, 2, 256), kv_heads=8, kv_len=8192, causal="bottom-right", lse=True),
]


def sample(problem: AttentionProblem) -> list[Config]:
    """The model's favourite, and others; among them one that shares keys, and one that does not."""
    legal = candidates(problem, H200, (TEMPLATE,))
    chosen = [legal[0], *random.Random(problem.label).sample(legal[1:], min(3, len(legal) - 1))]
    for shared in (True, False):
        chosen += [config for config in legal if (int(config.params["splits"]) > 1) == shared][:1]
    return list(dict.fromkeys(chosen))


CASES = [(problem, config) for problem in PROBLEMS for config in sample(problem)]


@pytest.fixture(scope="module")
def binaries(compile_pool: CompilePool) -> dict[Any, Future[Binary]]:
    return {case: compile_pool.submit(emit(ATTENTION, *case)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[1].short}")
def test_every_legal_config_compiles_without_large_spills(
    case: tuple[AttentionProblem, Config], binaries: dict[Any, Future[Binary]]
) -> None:
    facts, formula = binaries[case].result(300).facts, ATTENTION.resources(*case)
    assert facts.shared_bytes <= formula.shared_bytes <= facts.shared_bytes + 2048
    assert facts.spill_bytes <= (16 if case[0].D <= 128 else 64)  # outside of the loop
    assert facts.setmaxnreg > 0
    assert facts.hgmma > 0
    assert facts.loop_conversions == 0
    assert not facts.warnings


def test_two_ctas_share_a_multiprocessor_by_registers(binaries: dict[Any, Future[Binary]]) -> None:
    for (problem, _), future in binaries.items():
        assert future.result(300).facts.registers == (128 if problem.D <= 128 else 160)
