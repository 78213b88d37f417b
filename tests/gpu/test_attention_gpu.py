"""Attention's kernels give the right result on the card: masks, lengths, heads, dtypes, and the log-sum-exp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import gpu_cases
from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.codegen.loader import load
from tlxgen.config import Config
from tlxgen.ops import accuracy
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.runtime.launch import Launcher
from tlxgen.space.candidates import candidates
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner

pytestmark = pytest.mark.gpu

ATTENTION = ops.get("attention")
H200 = devices.target("h200")

PROBLEMS: list[AttentionProblem] = [
    *(ATTENTION.problem((2, 4, 1000, head), kv_heads=2) for head in (8, 64, 96, 128, 256)),
    *(ATTENTION.problem((2, 4, 1000, head), causal="bottom-right") for head in (64, 128, 256)),
    ATTENTION.problem((1, 3, 1, 64)),
    ATTENTION.problem((2, 2, 1, 128), kv_len=4096),
    ATTENTION.problem((1, 2, 4095, 128), causal="bottom-right", dtype="fp16"),
    ATTENTION.problem((3, 8, 1000, 64), kv_len=1777, causal="bottom-right"),
    ATTENTION.problem((1, 2, 1777, 64), kv_len=1000, causal="bottom-right"),
    ATTENTION.problem((1, 2, 900, 128), kv_len=700, causal="top-left", window=200),
    ATTENTION.problem((1, 4, 1500, 128), kv_heads=1, causal="bottom-right", window=256, softcap=30.0),
    ATTENTION.problem((64, 32, 1, 128), kv_heads=8, kv_len=4096),
    ATTENTION.problem((3, 32, 4, 64), kv_heads=4, kv_len=7777, causal="bottom-right", dtype="fp16"),
    ATTENTION.problem((1, 16, 2, 256), kv_heads=2, kv_len=20000, causal="bottom-right", window=9000, softcap=30.0),
]


CASES = [(problem, config) for problem in PROBLEMS for config in gpu_cases.sample(ATTENTION, problem)]


@pytest.fixture(scope="session")
def rejected() -> set[tuple[AttentionProblem, Config]]:
    """What the compiler made no good binary of; those are never launched."""
    return gpu_cases.rejected(ATTENTION, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[1].short}")
def test_result_is_as_good_as_the_library(
    case: tuple[AttentionProblem, Config], child: Child, rejected: set[tuple[AttentionProblem, Config]]
) -> None:
    if case in rejected:
        pytest.skip("the compiler spills")
    problem, config = case
    card = Runner("attention", problem, seed=11, child=child)
    card.setup()
    verdict = card.gate("candidate", emit(ATTENTION, problem, config))
    assert verdict.status == "ok", verdict.message


@pytest.mark.parametrize("template", ATTENTION.templates)
def test_the_log_sum_exp_is_that_of_the_scores(template: str) -> None:
    rows = 30 if template == "attention_decode" else 300
    problem = ATTENTION.problem((2, 4, rows, 64), kv_heads=2, kv_len=200, causal="bottom-right", lse=True)
    inputs = ATTENTION.inputs(problem, "cuda", 0)
    out = ATTENTION.output(problem, inputs)
    module = load(emit(ATTENTION, problem, candidates(problem, H200, (template,))[0]))
    grid, args = ATTENTION.arguments(module, inputs, out, num_sms=132)
    Launcher(module, args, torch.cuda.get_device_capability())(grid, torch.cuda.current_stream().cuda_stream, args)
    found = inputs["lse"].clone()
    ATTENTION.eager(problem, inputs)  # writes torch's own
    torch.testing.assert_close(found, inputs["lse"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("splits", [1, 3, 16, 64])
def test_the_same_arguments_may_be_launched_again(splits: int) -> None:
    """Splits count their arrivals, and leave the count as they found it."""
    problem = ATTENTION.problem((4, 32, 1, 128), kv_heads=8, kv_len=8000)
    inputs = ATTENTION.inputs(problem, "cuda", 0)
    out = ATTENTION.output(problem, inputs)
    config = Config(template="attention_decode", params={"block_n": 64, "kv_stages": 3, "splits": splits})
    module = load(emit(ATTENTION, problem, config))
    grid, args = ATTENTION.arguments(module, inputs, out, num_sms=132)
    launcher = Launcher(module, args, torch.cuda.get_device_capability())
    results = []
    for _ in range(50):
        out.fill_(float("nan"))
        launcher(grid, torch.cuda.current_stream().cuda_stream, args)
        results.append(out.clone())
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], ATTENTION.eager(problem, inputs), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 8, 1000, 128), {"kv_len": 5001, "lse": True}),  # fewer tiles than programs
        ((1, 40, 1000, 64), {"kv_len": 3000, "dtype": "fp16", "softcap": 30.0}),
        ((5, 10, 1000, 96), {"kv_heads": 5, "kv_len": 2500}),  # whole tiles, and pieces
        ((3, 10, 1000, 256), {"lse": True}),
    ],
    ids=str,
)
def test_pieces_of_tiles_add_up_launch_for_launch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Whichever piece comes last, bits are the same, and the count is left as it was found."""
    problem = ATTENTION.problem(shape, **options)
    legal = candidates(problem, H200, ("attention_tma",))
    inputs = ATTENTION.inputs(problem, "cuda", 0)
    out = ATTENTION.output(problem, inputs)
    module = load(emit(ATTENTION, problem, next(c for c in legal if c.params["tail"] == "split")))
    grid, args = ATTENTION.arguments(module, inputs, out, num_sms=132)
    (counters,) = (x for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.int32)
    assert counters.numel() > 0
    launcher = Launcher(module, args, torch.cuda.get_device_capability())
    results = []
    for _ in range(200):
        out.fill_(float("nan"))
        launcher(grid, torch.cuda.current_stream().cuda_stream, args)
        results.append(out.clone())
    assert not counters.any()
    assert all(torch.equal(result, results[0]) for result in results)
    assert ATTENTION.why_side_output_wrong(problem, inputs, ATTENTION.side_outputs(problem, inputs)) is None
    library = ATTENTION.eager(problem, inputs)  # writes its own log-sum-exp
    reason = accuracy.why_wrong(results[0], ATTENTION.reference(problem, inputs), library)
    assert reason is None, reason


def test_other_libraries_are_timed_beside_candidates(child: Child) -> None:
    problem = ATTENTION.problem((2, 4, 1000, 64), causal="bottom-right")
    card = Runner("attention", problem, seed=5, child=child)
    card.setup()
    assert "cudnn" in card.invite()
    assert (
        card.gate("candidate", emit(ATTENTION, problem, candidates(problem, H200, ("attention_tma",))[0])).status
        == "ok"
    )
    found = card.measure(["candidate"], 3)
    assert {"candidate", "cudnn"} <= set(found)
    assert all(time_us > 0 for times in found.values() for time_us in times)


@pytest.mark.parametrize("rescale", ["exact", "lazy"])
def test_scores_that_rise_in_every_block_are_as_exact_as_in_the_library(rescale: str) -> None:
    problem = ATTENTION.problem((1, 4, 2000, 128), causal="bottom-right")
    config = candidates(problem, H200, ("attention_tma",))[0]
    inputs = ATTENTION.inputs(problem, "cuda", 0)
    inputs["k"] = inputs["k"] * torch.linspace(12.0, 0.1, 2000, device="cuda")[:, None].to(inputs["k"].dtype)
    out = ATTENTION.output(problem, inputs)
    module = load(
        emit(ATTENTION, problem, Config(template=config.template, params={**config.params, "rescale": rescale}))
    )
    grid, args = ATTENTION.arguments(module, inputs, out, num_sms=132)
    Launcher(module, args, torch.cuda.get_device_capability())(grid, torch.cuda.current_stream().cuda_stream, args)
    reference = ATTENTION.reference(problem, inputs)
    library = accuracy.error(ATTENTION.eager(problem, inputs), reference).norm
    assert accuracy.error(out, reference).norm <= 1.2 * library


@pytest.mark.parametrize(
    "changes", [{"window": 300}, {"kv_len": 1777}, {"kv_len": 700}, {"kv_len": 1777, "window": 64}], ids=str
)
def test_torch_computes_windows_and_rectangles_without_their_scores(changes: dict[str, int]) -> None:
    """The peer of such problems, and what serves them where no kernel does."""
    problem = ATTENTION.problem((2, 4, 1000, 128), kv_heads=2, causal="bottom-right", **changes)
    inputs = ATTENTION.inputs(problem, "cuda", 3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ATTENTION.eager(problem, inputs)
    scores = problem.B * problem.H * problem.S * problem.kv_len * 2
    assert torch.cuda.max_memory_allocated() - before < scores
    exact = ATTENTION.reference(problem, inputs)
    assert ((out.double() - exact).norm() / exact.norm()).item() < 5e-3
