"""Torch's own functions where they return less than they say: attention of no batches, by cuDNN."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.operands import LONE, SIZES, Call
from tlxgen import functional, ops
from tlxgen.ops import torch_functions
from tlxgen.ops.attention import flash
from tlxgen.runtime import checks, kernel

_cudnn_enabled: Callable[[], bool] = torch.backends.cuda.cudnn_sdp_enabled
SDPA = torch.nn.functional.scaled_dot_product_attention


class Cudnn:
    """Torch's attention as it is on an H200 with torch 2.11, unless it is told to do without cuDNN."""

    def __init__(self) -> None:
        self.nothing = 0

    def __call__(self, query: Tensor, *others: Any, **options: Any) -> Tensor | None:
        if query.shape[0] or not _cudnn_enabled():
            return SDPA(query, *others, **options)
        self.nothing += 1
        return None


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudnn]:
    made = Cudnn()
    monkeypatch.setattr(torch_functions, "_attention", made)
    kernel.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kernel.FallbackWarning)
        yield made
    kernel.forget()


def of_no_batches(**options: Any) -> list[Tensor]:
    """q, k and v."""
    shapes = ((0, 4, 8, 64), (0, 2, 9, 64), (0, 2, 9, 64))
    return [torch.empty(shape, dtype=torch.bfloat16, **options) for shape in shapes]


@pytest.mark.parametrize("name", SIZES)
def test_every_operator_has_a_result_of_sizes_of_one_and_zero(name: str) -> None:
    call = Call.of(SIZES[name], "cpu", LONE)
    assert call.right().shape == call.expected.shape
    call.right(call.output("padded rows"))


def test_the_table_has_what_cudnn_leaves_undefined(cudnn: Cudnn) -> None:
    Call.of(SIZES["no batch"], "cpu").right()
    assert cudnn.nothing == 2, "once as the peer, once as the kernel"


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_no_batches_are_recorded(causal: bool, cudnn: Cudnn) -> None:
    q, k, v = of_no_batches(requires_grad=True)
    out = torch_functions.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
    assert cudnn.nothing == 1


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("causal", ["none", "bottom-right"])
def test_functions_have_results_and_gradients_of_no_batches(
    causal: Any, return_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's flash-attention backward, which would be asked on a GPU, is not: it may refuse them."""
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
    q, k, v = of_no_batches(requires_grad=True)
    attention: Any = functional.attention
    with torch.no_grad():
        assert attention(q, k, v, causal=causal).shape == q.shape
    result = attention(q, k, v, causal=causal, return_lse=return_lse)
    outputs = result if return_lse else (result,)
    assert [x.shape for x in outputs] == [q.shape, q.shape[:3]][: len(outputs)]
    found = torch.autograd.grad(sum(x.float().sum() for x in outputs), (q, k, v))
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


def test_the_replacement_of_torchs_has_a_result_too(cudnn: Cudnn) -> None:
    q, k, v = of_no_batches()
    assert functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).shape == q.shape
    assert cudnn.nothing == 1


@pytest.mark.parametrize("sizes", [(0, 2, 8, 64), (2, 2, 0, 64)])
def test_torchs_flash_backward_is_for_something(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
    problem: Any = ops.get("attention").problem(sizes)
    q = torch.empty(sizes, dtype=torch.bfloat16)
    assert not flash.takes(problem, q, q, q, None)


def test_what_is_not_empty_is_torchs_unchanged(cudnn: Cudnn) -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    causal = torch_functions.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert torch.equal(causal, SDPA(q, k, v, is_causal=True))
    graph = torch.compile(torch_functions.scaled_dot_product_attention, fullgraph=True, backend="eager")
    assert torch.equal(graph(q, k, v), SDPA(q, k, v))
    assert not cudnn.nothing
