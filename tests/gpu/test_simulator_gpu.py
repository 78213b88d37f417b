"""The simulator tells the truth: what deadlocks there hangs on a GPU, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.simulator.test_mutations import PLANTED
from tests.support import emitted
from tlxgen import ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.codegen.loader import load as load_on_gpu
from tlxgen.runtime.launch import Launcher
from tlxgen.simulator.check import check, small_cases
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.program import load as load_in_simulator
from tlxgen.tuner.runner import Runner

pytestmark = pytest.mark.gpu

#: Seconds after which a kernel of a millisecond counts as hung; compilation is in it.
LIMIT = 8.0

HANGING = {
    ("gemm_tma_pingpong", "the producer waits for the other phase"),
    ("gemm_tma_pingpong", "all releases are dropped"),
    ("gemm_tma_pingpong", "full takes an arrival more"),
    ("gemm_tma_pingpong", "the turn is never handed over"),
    ("gemm_tma_pingpong", "nobody goes first"),
    ("gemm_tma_cooperative", "too many arrivals are counted"),
    ("gemm_tma_cooperative", "expects too many bytes"),
    ("gemm_tma_cooperative", "the producer stops one step early"),
    ("vector_add_tma", "the release is dropped"),
    ("vector_add_tma", "arrivals of two"),
    ("vector_add_tma", "more bytes than come"),
}
MUTANTS = [(source, bug) for source, bug in PLANTED if (emitted.identify(source), bug.name) in HANGING]


def test_the_list_names_planted_bugs() -> None:
    assert len(MUTANTS) == len(HANGING) >= 10


@pytest.mark.parametrize(("source", "bug"), MUTANTS, ids=lambda x: getattr(x, "name", None) or emitted.identify(x))
def test_what_deadlocks_in_the_simulator_hangs_on_the_card(source: KernelSource, bug: Any) -> None:
    mutant = bug.plant(source)
    assert "deadlock" in {finding.kind for finding in check(mutant, 3, limits=emitted.LIMITS).findings}
    sizes = {"n": 2**24} if source.operator == "vector_add" else {"M": 2048, "N": 2048, "K": 2048}
    problem = source.problem.model_copy(update=sizes)
    card = Runner(source.operator, problem, seed=1, limit=LIMIT)
    try:
        card.setup()
        assert card.gate("as emitted", replace(source, problem=problem)).status == "ok"
        verdict = card.gate("mutant", replace(mutant, problem=problem))
    finally:
        card.close()
    assert verdict.status == "hang", verdict


def numbers() -> Iterator[KernelSource]:
    """Kernels of every template, and the dtypes and epilogues that round in several places."""
    yield from emitted.SOURCES
    gemm = ops.get("gemm")
    for options in ({"dtype": "fp32", "layout": "nt"}, {"dtype": "fp16", "out_dtype": "fp32", "layout": "tn"}):
        problem = gemm.problem((4096, 4096, 4096), **options)
        yield emit(gemm, problem, emitted.config(problem, "gemm_tma_cooperative"))
    problem = gemm.problem((4096, 4096, 4096), epilogue="scale+bias+gelu+residual")
    yield emit(gemm, problem, emitted.config(problem, "gemm_tma_pingpong"))


@pytest.mark.parametrize(
    "source", list(numbers()), ids=lambda source: f"{source.problem.label} {source.config.template}"
)
def test_numbers_agree_with_the_card_within_rounding(source: KernelSource) -> None:
    """The order of summation inside a product is the hardware's own, so single elements may round the other way."""
    operator = ops.get(source.operator)
    for case in small_cases(source):
        inputs = operator.inputs(case.problem, "cpu", 3)
        simulated = operator.output(case.problem, inputs)
        program = load_in_simulator(source.file_name, source.text)
        module: Any = SimpleNamespace(arguments=program["arguments"])
        grid, args = operator.arguments(module, inputs, simulated, num_sms=case.num_sms)
        machine = Machine(frozenset(), seed=1)
        program["kernel"].launch(machine, grid, args, program["OPTIONS"])
        assert not machine.findings
        on_card = {name: value.cuda() if hasattr(value, "cuda") else value for name, value in inputs.items()}
        for name, value in inputs.items():  # `.cuda()` makes transposed operands contiguous in their own order
            if hasattr(value, "stride"):
                assert on_card[name].stride() == value.stride()
        measured = operator.output(case.problem, on_card)
        kernel = load_on_gpu(source)
        grid, args = operator.arguments(kernel, on_card, measured, num_sms=case.num_sms)
        launcher = Launcher(kernel, args, torch.cuda.get_device_capability())
        launcher(grid, torch.cuda.current_stream().cuda_stream, args)
        torch.cuda.synchronize()
        one_step = torch.finfo(simulated.dtype).eps if simulated.dtype != torch.float32 else 1e-5
        difference = (simulated.double() - measured.cpu().double()).abs()
        scale = simulated.double().abs().max()
        assert bool((difference <= one_step * scale.clamp(min=1.0)).all()), float(difference.max() / scale)
