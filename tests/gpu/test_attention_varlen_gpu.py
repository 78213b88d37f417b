"""Kernels for packed sequences give the right result on the card: masks, lengths, heads, neighbours full of NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import gpu_cases
from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.codegen.loader import load
from tlxgen.config import Config
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem
from tlxgen.runtime.launch import Launcher, SlimDescriptor
from tlxgen.space.candidates import candidates
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner

pytestmark = pytest.mark.gpu

VARLEN = ops.get("attention_varlen")
H200 = devices.target("h200")

PROBLEMS: list[AttentionVarlenProblem] = [
    *(VARLEN.problem((5, 4, 3000, head), kv_heads=2, max_q=1500) for head in (8, 64, 96, 128, 256)),
    *(VARLEN.problem((5, 4, 3000, head), max_q=1500, causal="bottom-right") for head in (64, 128, 256)),
    VARLEN.problem((1, 3, 1, 64)),
    VARLEN.problem((7, 2, 7, 128), total_kv=7 * 700, max_kv=4096),
    VARLEN.problem((33, 2, 4095, 128), max_q=900, causal="bottom-right", dtype="fp16"),
    VARLEN.problem((4, 8, 1000, 64), total_kv=2777, max_q=600, max_kv=1500, causal="bottom-right"),
    VARLEN.problem((4, 2, 1777, 64), total_kv=1000, max_q=900, max_kv=500, causal="bottom-right"),
    VARLEN.problem((3, 2, 1900, 128), total_kv=1700, max_q=800, max_kv=900, causal="top-left", window=200),
    VARLEN.problem((6, 4, 4500, 128), kv_heads=1, max_q=2000, causal="bottom-right", window=256, softcap=30.0),
]


CASES = [(problem, config) for problem in PROBLEMS for config in gpu_cases.sample(VARLEN, problem)]


@pytest.fixture(scope="session")
def rejected() -> set[tuple[AttentionVarlenProblem, Config]]:
    """What the compiler made no good binary of; those are never launched."""
    return gpu_cases.rejected(VARLEN, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[1].short}")
def test_result_is_as_good_as_the_library(
    case: tuple[AttentionVarlenProblem, Config], child: Child, rejected: set[tuple[AttentionVarlenProblem, Config]]
) -> None:
    if case in rejected:
        pytest.skip("the compiler spills")
    problem, config = case
    card = Runner("attention_varlen", problem, seed=11, child=child)
    card.setup()
    verdict = card.gate("candidate", emit(VARLEN, problem, config))
    assert verdict.status == "ok", verdict.message


def run(problem: AttentionVarlenProblem, template: str, inputs: dict[str, Any]) -> torch.Tensor:
    """One launch as `get_kernel` makes it."""
    out = torch.full_like(inputs["q"], float("nan"))
    module = load(emit(VARLEN, problem, candidates(problem, H200, (template,))[0]))
    _, args = VARLEN.arguments(module, inputs, out, num_sms=132)
    launcher = Launcher(module, args, torch.cuda.get_device_capability())
    slim: dict[str, Any] = {"descriptor": SlimDescriptor} if launcher.slim else {}
    grid, args = VARLEN.arguments(module, inputs, out, num_sms=132, **slim)
    launcher(grid, torch.cuda.current_stream().cuda_stream, args)
    return out


@pytest.mark.parametrize("template", VARLEN.templates)
@pytest.mark.parametrize("options", [{}, {"causal": "bottom-right"}, {"causal": "top-left", "window": 70}])
def test_a_sequence_never_feels_its_neighbours(template: str, options: dict[str, Any]) -> None:
    """TMA ends a sequence where it ends: every other one is NaN, in q, k and v, and so is what lies behind the last."""
    lengths = [300, 129, 0, 1, 64, 500, 130, 77]
    problem = VARLEN.problem((8, 4, sum(lengths), 128), kv_heads=2, max_q=500, **options)
    inputs: dict[str, Any] = dict(VARLEN.inputs(problem, "cuda", 0))
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    inputs["cu_seqlens_q"] = inputs["cu_seqlens_kv"] = ends
    clean = run(problem, template, inputs)
    starts = ends.tolist()
    kept = [slice(starts[i], starts[i + 1]) for i in range(1, 8, 2)]
    for name in ("q", "k", "v"):
        longer = torch.full((starts[-1] + 300, *inputs[name].shape[1:]), float("nan"), dtype=torch.bfloat16).cuda()
        for rows in kept:
            longer[rows] = inputs[name][rows]
        inputs[name] = longer[: starts[-1]]
    out = run(problem, template, inputs)
    for rows in kept:
        assert torch.equal(out[rows], clean[rows])
    assert clean.isfinite().all()


@pytest.mark.parametrize("template", VARLEN.templates)
@pytest.mark.parametrize("options", [{"causal": "bottom-right"}, {"softcap": 20.0}])
def test_the_log_sum_exp_is_that_of_the_scores(template: str, options: dict[str, Any]) -> None:
    problem = VARLEN.problem((5, 4, 900, 64), kv_heads=2, total_kv=700, max_q=400, max_kv=350, lse=True, **options)
    inputs: dict[str, Any] = dict(VARLEN.inputs(problem, "cuda", 0))
    run(problem, template, inputs)
    expected = VARLEN.side_outputs(problem, inputs)
    assert VARLEN.why_side_output_wrong(problem, inputs, expected) is None
    VARLEN.eager(problem, inputs)  # writes torch's own
    assert VARLEN.why_side_output_wrong(problem, inputs, expected) is None
