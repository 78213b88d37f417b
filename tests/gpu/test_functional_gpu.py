"""`tlxgen.functional` on the card: results and gradients are as near to float64 as torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from tlxgen import devices, functional
from tlxgen.functional import attention_backward, attention_call
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.runtime import kernel
from tlxgen.space.candidates import favourite

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["attention_tma", "attention_vanilla"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AttentionProblem]]:
    """Every kernel is of one template, whatever is tuned or known to run; the problems that one was asked for."""
    gpu = devices.detect()
    assert gpu is not None
    asked: list[AttentionProblem] = []

    def kernel_for(problem: AttentionProblem) -> kernel.Kernel:
        asked.append(problem)
        (config,) = favourite(problem, gpu, request.param)
        return kernel.Kernel(problem, kernel.Choice("default", config), gpu)

    kernel.forget()
    monkeypatch.setattr(attention_call, "kernel_for", kernel_for)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kernel.FallbackWarning)  # the template takes these tensors, or the test is void
        yield asked
    kernel.forget()


@pytest.fixture(autouse=True)
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways in which gradients were computed."""
    taken: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            taken.append(name)
            return function(*args)

        return call

    for name in ("by_flash", "by_recomputing", "by_formula"):
        monkeypatch.setattr(attention_backward, name, noted(name, getattr(attention_backward, name)))
    return taken


def inputs(q: Sequence[int], k: Sequence[int]) -> list[Tensor]:
    return [torch.randn(*shape, device="cuda").bfloat16() for shape in (q, k, k)]


def by_steps(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention in the tensors' dtype, the softmax in float32 at least."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    scores = q @ k.mT * options.get("scale", q.shape[3] ** -0.5)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=q.device)
    if "causal" in options:
        ahead = torch.arange(keys, device=q.device)[None, :] - torch.arange(rows, device=q.device)[:, None]
        ahead = ahead - (keys - rows if options["causal"] == "bottom-right" else 0)
        hidden = (ahead > 0) | (ahead <= -options.get("window", keys + rows))
    blind = hidden.all(-1, keepdim=True)
    seen = scores.masked_fill(hidden & ~blind, float("-inf"))
    return torch.softmax(seen, -1).masked_fill(blind, 0.0).to(q.dtype) @ v


def result_and_gradients(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    factors = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * factors).sum(), leaves)]


def check(
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    exactly: Callable[..., Tensor],
    tensors: Sequence[Tensor],
) -> None:
    """No further from float64's than twice torch's own in bf16, and what rounding may cost."""
    exact = result_and_gradients(exactly, [x.double() for x in tensors])
    mine, its = (result_and_gradients(call, tensors) for call in (ours, torchs))
    for name, one, other, true in zip(("out", "q", "k", "v"), mine, its, exact, strict=True):
        assert torch.isfinite(one).all(), name
        length = true.norm() or 1.0
        far, allowed = ((x.double() - true).norm() / length for x in (one, other))
        assert far <= 2 * allowed + 1e-3, name


IN_PLACE_OF_TORCH: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], str]] = {
    "plain": ((2, 4, 1000, 64), (2, 4, 1000, 64), {}, "by_flash"),
    "causal": ((2, 4, 1000, 128), (2, 4, 1000, 128), {"is_causal": True}, "by_flash"),
    "grouped heads": ((2, 8, 500, 128), (2, 2, 500, 128), {"is_causal": True, "enable_gqa": True}, "by_flash"),
    "more keys": ((2, 4, 300, 96), (2, 4, 777, 96), {}, "by_flash"),
    "a large head": ((1, 2, 400, 256), (1, 2, 400, 256), {"is_causal": True}, "by_flash"),
    "causal, more keys": ((2, 4, 300, 64), (2, 4, 777, 64), {"is_causal": True}, "torch"),
    "a negative scale": ((1, 2, 300, 64), (1, 2, 300, 64), {"is_causal": True, "scale": -0.2}, "by_formula"),
}


@pytest.mark.parametrize("form", IN_PLACE_OF_TORCH)
def test_results_and_gradients_are_as_good_as_torchs(
    form: str, launched: list[AttentionProblem], ways: list[str]
) -> None:
    shape_q, shape_k, options, way = IN_PLACE_OF_TORCH[form]
    said = {"causal": "top-left"} if options.get("is_causal") else {}
    said |= {"scale": options["scale"]} if "scale" in options else {}
    # Torch's fused kernels hide scores before they scale them: with a negative scale its steps are the peer.
    negative = options.get("scale", 1.0) < 0
    check(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options),
        lambda q, k, v: by_steps(q, k, v, **said) if negative else F.scaled_dot_product_attention(q, k, v, **options),
        lambda q, k, v: by_steps(q, k, v, **said),
        inputs(shape_q, shape_k),
    )
    assert ways == ([] if way == "torch" else [way])
    assert [problem.lse for problem in launched] == [way == "by_flash"]


BEYOND_TORCH: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], str]] = {
    "bottom-right": ((2, 4, 300, 64), (2, 2, 777, 64), {"causal": "bottom-right"}, "by_flash"),
    "blind rows": ((2, 4, 777, 128), (2, 4, 300, 128), {"causal": "bottom-right"}, "by_flash"),
    "a window": ((1, 4, 1000, 128), (1, 2, 1000, 128), {"causal": "bottom-right", "window": 100}, "by_flash"),
    "a window, blind rows": ((1, 4, 700, 64), (1, 2, 300, 64), {"causal": "bottom-right", "window": 50}, "by_flash"),
    "a window of one key": ((1, 2, 300, 64), (1, 2, 300, 64), {"causal": "bottom-right", "window": 1}, "by_flash"),
    "a window larger than all": (
        (1, 2, 300, 64),
        (1, 2, 200, 64),
        {"causal": "bottom-right", "window": 5000},
        "by_flash",
    ),
    "a softcap": ((1, 4, 500, 64), (1, 2, 500, 64), {"causal": "bottom-right", "softcap": 3.0}, "by_formula"),
    "top-left, a window": ((1, 2, 500, 64), (1, 2, 300, 64), {"causal": "top-left", "window": 70}, "by_formula"),
}


@pytest.mark.parametrize("form", BEYOND_TORCH)
def test_what_torch_has_no_name_for_has_gradients_too(form: str, ways: list[str]) -> None:
    shape_q, shape_k, options, way = BEYOND_TORCH[form]
    check(
        lambda q, k, v: functional.attention(q, k, v, **options),
        lambda q, k, v: by_steps(q, k, v, **options),
        lambda q, k, v: by_steps(q, k, v, **options),
        inputs(shape_q, shape_k),
    )
    assert ways == [way]


def test_torch_differentiates_beside_the_log_sum_exp(ways: list[str]) -> None:
    check(
        lambda q, k, v: functional.attention(q, k, v, causal="top-left", return_lse=True)[0],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: by_steps(q, k, v, causal="top-left"),
        inputs((1, 2, 300, 64), (1, 2, 500, 64)),
    )
    assert ways == ["by_recomputing"]


def test_heads_may_lie_between_rows_and_rows_off_16_bytes(
    request: pytest.FixtureRequest, launched: list[AttentionProblem]
) -> None:
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs((2, 4, 300, 64), (2, 4, 300, 64))]
    out = functional.scaled_dot_product_attention(*tensors)  # type: ignore[arg-type]
    assert out.transpose(1, 2).is_contiguous()
    calls = (functional.scaled_dot_product_attention, F.scaled_dot_product_attention, by_steps)
    check(*calls, tensors)
    if "attention_vanilla" in request.node.name:  # TMA does not take rows of 65
        check(*calls, [torch.randn(2, 4, 300, 65, device="cuda").bfloat16()[..., :64] for _ in range(3)])
