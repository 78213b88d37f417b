"""Kernels for packed sequences compile to sm_90a within their predicted shared memory, registers and instructions."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.compile import Binary, compile_kernel
from tlxgen.codegen.emit import emit
from tlxgen.codegen.loader import load
from tlxgen.config import Config
from tlxgen.errors import CompileError
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool

VARLEN = ops.get("attention_varlen")
H200 = devices.target("h200")

PROBLEMS: list[AttentionVarlenProblem] = [
    VARLEN.problem((8, 32, 8192, 64), max_q=4096, causal="top-left"),
    VARLEN.problem((8, 32, 8192, 128), max_q=4096),
    VARLEN.problem((8, 32, 8192, 128), max_q=4096, kv_heads=8, causal="bottom-right", lse=True),
    VARLEN.problem((8, 16, 8192, 256), max_q=4096, causal="bottom-right", window=1024),
]


def sample(problem: AttentionVarlenProblem, template: str, count: int) -> list[Config]:
    """The model's favourite, and others."""
    legal = candidates(problem, H200, (template,))
    return [legal[0], *random.Random(problem.label).sample(legal[1:], count - 1)]


CASES = [
    (problem, config)
    for problem in PROBLEMS
    for template, count in (("attention_varlen", 3), ("attention_varlen_vanilla", 1))
    for config in sample(problem, template, count)
]


@pytest.fixture(scope="module")
def binaries(compile_pool: CompilePool) -> dict[Any, Future[Binary]]:
    return {case: compile_pool.submit(emit(VARLEN, *case)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[1].short}")
def test_legal_config_compiles_or_is_rejected_for_spills(
    case: tuple[AttentionVarlenProblem, Config], binaries: dict[Any, Future[Binary]]
) -> None:
    problem, config = case
    error = binaries[case].exception(300)
    if error is not None:
        assert isinstance(error, CompileError)
        assert error.kind == "rejected"
        assert "spills" in str(error)
        assert config.params["carry"] == "wide"
        return
    facts, formula = binaries[case].result().facts, VARLEN.resources(problem, config)
    assert facts.shared_bytes <= formula.shared_bytes
    if config.template == "attention_varlen":
        assert formula.shared_bytes - facts.shared_bytes <= 2048
        assert facts.setmaxnreg > 0
        assert facts.hgmma > 0
        assert facts.loop_conversions == 0
        assert not facts.warnings


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
def test_every_problem_has_a_tma_config_without_large_spills(
    problem: AttentionVarlenProblem, binaries: dict[Any, Future[Binary]]
) -> None:
    own = [future for case, future in binaries.items() if case[0] == problem and case[1].template == "attention_varlen"]
    assert any(future.exception(300) is None for future in own)


class TestDescriptors:
    """What the host hands over for TMA to end sequences: within the limits of CUDA and of Triton's dispatcher."""

    def arguments(self) -> tuple[Any, tuple[Any, ...]]:
        problem = PROBLEMS[2]
        module = load(emit(VARLEN, problem, candidates(problem, H200, ("attention_varlen",))[0]))
        inputs = VARLEN.inputs(problem, "meta", 0)
        _, args = VARLEN.arguments(module, inputs, VARLEN.output(problem, inputs), num_sms=132)
        return module, args

    def test_need_no_memory_beside_the_tensors(self) -> None:
        """Descriptors that a kernel makes itself would: Triton asks its allocator for it at each launch."""
        compiled = compile_kernel(*self.arguments(), (9, 0))
        assert compiled.metadata.global_scratch_size == 0

    def test_leave_room_for_the_other_arguments(self) -> None:
        _, args = self.arguments()
        slots = [1 + 2 * len(arg.shape) if hasattr(arg, "block_shape") else 1 for arg in args]
        assert sum(slots) <= 62
        assert sum(slot > 1 for slot in slots) <= 8

    def test_lead_back_to_the_rows_that_are_meant(self) -> None:
        module, args = self.arguments()
        far = module.FAR.value
        for desc in args[:3]:
            assert all(0 < n <= 2**32 for n in desc.shape)
            assert all(stride * 2 % 16 == 0 and stride * 2 < 2**40 for stride in desc.strides[:-1])
            for start, length, row in ((0, 1, 0), (700, 1300, 0), (700, 1300, 1299), (8191, 1, 0)):
                place = (far, start + length, 3, far - length + row, 5)
                assert all(x < n for x, n in zip(place, desc.shape, strict=True))
                address = sum(2 * x * stride for x, stride in zip(place, desc.strides, strict=True))
                expected = (start + row) * desc.base.stride(0) + 3 * desc.base.stride(1) + 5
                assert address % 2**64 == 2 * expected
