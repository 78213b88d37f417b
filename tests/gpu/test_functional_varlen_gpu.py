"""`tlxgen.functional.varlen_attn` on the card: results and gradients are as near to float64 as torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

from tlxgen import devices, functional
from tlxgen.functional import varlen, varlen_call
from tlxgen.functional import varlen_backward as backward
from tlxgen.runtime import kernel
from tlxgen.space.candidates import favourite

pytestmark = pytest.mark.gpu

varlen_attn: Any = functional.varlen_attn

#: Rows and keys of each sequence.
LENGTHS = {
    "as many": [(300, 300), (129, 129), (1, 1), (500, 500)],
    "more keys": [(100, 300), (1, 129), (64, 500)],
    "blind rows": [(300, 100), (129, 0), (0, 64), (200, 200)],
}
WINDOWS = {"all keys": (-1, -1), "causal": (-1, 0), "a window": (70, 0)}
H, KV_HEADS = 4, 2


@pytest.fixture(autouse=True, params=["attention_varlen", "attention_varlen_vanilla"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every kernel is of one template, whatever is tuned or known to run; the problems that one was asked for."""
    gpu = devices.detect()
    assert gpu is not None
    asked: list[Any] = []

    def kernel_for(problem: Any) -> kernel.Kernel:
        asked.append(problem)
        (config,) = favourite(problem, gpu, request.param)
        return kernel.Kernel(problem, kernel.Choice("default", config), gpu)

    kernel.forget()
    monkeypatch.setattr(varlen_call, "kernel_for", kernel_for)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kernel.FallbackWarning)
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

    for name in ("by_flash", "by_formula"):
        monkeypatch.setattr(backward, name, noted(name, getattr(backward, name)))
    return taken


def inputs(lengths: Sequence[tuple[int, int]], head: int) -> tuple[Any, ...]:
    rows, keys = zip(*lengths, strict=True)
    shapes = (sum(rows), H, head), (sum(keys), KV_HEADS, head), (sum(keys), KV_HEADS, head)
    ends = [torch.tensor([0, *each], device="cuda").cumsum(0, dtype=torch.int32) for each in (rows, keys)]
    q, k, v = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    return q, k, v, *ends, max(rows), max(keys)


def by_steps(
    tensors: Sequence[Tensor], lengths: Sequence[tuple[int, int]], window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in the tensors' dtype, the softmax in float32 at least, sequence by sequence."""
    q, k, v = tensors
    outs, sums, row, key = [], [], 0, 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for rows, keys in lengths:
        one, other, values = (
            x.transpose(0, 1) for x in (q[row : row + rows], k[key : key + keys], v[key : key + keys])
        )
        scores = one @ other.mT * q.shape[2] ** -0.5
        scores = scores if scores.dtype == torch.float64 else scores.float()
        ahead = torch.arange(keys, device=q.device)[None] - torch.arange(rows, device=q.device)[:, None] - keys + rows
        hidden = (ahead > 0) if window[1] == 0 else torch.zeros_like(ahead, dtype=torch.bool)
        hidden = hidden | (ahead < -window[0]) if window[0] >= 0 else hidden
        blind = hidden.all(1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(hidden & ~blind, float("-inf")), 2).masked_fill(blind, 0.0)
        outs.append((weights.to(q.dtype) @ values).transpose(0, 1))
        sums.append(torch.logsumexp(scores.masked_fill(hidden, float("-inf")), 2))
        row, key = row + rows, key + keys
    return torch.cat(outs), torch.cat(sums, 1)


def result_and_gradients(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    factors = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * factors).sum(), leaves)]


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("form", LENGTHS)
def test_results_and_gradients_are_as_good_as_by_steps(
    form: str, window: str, head: int, launched: list[Any], ways: list[str]
) -> None:
    lengths, size = LENGTHS[form], WINDOWS[window]
    *tensors, ends_q, ends_k, max_q, max_k = inputs(lengths, head)
    rest, options = (ends_q, ends_k, max_q, max_k), {"window_size": size, "enable_gqa": True}
    ours = result_and_gradients(lambda q, k, v: varlen_attn(q, k, v, *rest, **options), tensors)
    exact = result_and_gradients(lambda *x: by_steps(x, lengths, size)[0], [x.double() for x in tensors])
    theirs = result_and_gradients(lambda *x: by_steps(x, lengths, size)[0], tensors)
    for name, one, other, true in zip(("out", "q", "k", "v"), ours, theirs, exact, strict=True):
        assert torch.isfinite(one).all(), name
        far, allowed = ((x.double() - true).norm() / true.norm() for x in (one, other))
        assert far <= 2 * allowed + 1e-3, name
    assert (ways, [problem.lse for problem in launched]) == (["by_flash"], [True])


@pytest.mark.parametrize("form", LENGTHS)
def test_the_log_sum_exp_is_torchs(form: str) -> None:
    """Plus infinity where a row sees no key, as torch's kernel has it."""
    lengths = LENGTHS[form]
    call = inputs(lengths, 64)
    q, k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in call[:3])  # torch 2.11 has no grouped heads
    options: dict[str, Any] = {"window_size": (-1, 0), "return_aux": AuxRequest(lse=True)}
    out, lse = varlen_attn(*call, **options, enable_gqa=True)
    theirs, expected = varlen._torchs(q, k, v, *call[3:], **options)
    torch.testing.assert_close(lse, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-2)


def test_gradients_of_the_log_sum_exp_are_by_formula(ways: list[str]) -> None:
    lengths = LENGTHS["more keys"]
    *tensors, ends_q, ends_k, max_q, max_k = inputs(lengths, 64)
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = varlen_attn(*leaves, ends_q, ends_k, max_q, max_k, **options)
    found = torch.autograd.grad(out.float().sum() + lse.square().sum(), leaves)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    exact, sums = by_steps(doubles, lengths, (-1, 0))
    for one, true in zip(found, torch.autograd.grad(exact.sum() + sums.square().sum(), doubles), strict=True):
        assert (one.double() - true).norm() <= 1e-2 * true.norm()
    assert ways == ["by_formula"]


def test_slices_of_one_projection_are_taken_as_they_lie(launched: list[Any]) -> None:
    """Query, key and value of one product, (T, 3, H, D): the rows of each are three times as far apart."""
    lengths = LENGTHS["as many"]
    *_, ends, _, longest, _ = inputs(lengths, 64)
    packed = torch.randn(sum(rows for rows, _ in lengths), 3, H, 64, device="cuda").bfloat16()
    q, k, v = packed.unbind(1)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    exact, _ = by_steps([q.double(), k.double(), v.double()], lengths, (-1, 0))
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()
    assert out.is_contiguous()
    assert len(launched) == 1


def test_a_call_is_captured_into_a_graph_and_waits_for_nothing() -> None:
    lengths = LENGTHS["as many"]
    call = inputs(lengths, 64)
    first = varlen_attn(*call, window_size=(-1, 0), enable_gqa=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_attn(*call, window_size=(-1, 0), enable_gqa=True)
    graph.replay()
    assert torch.equal(out, first)
