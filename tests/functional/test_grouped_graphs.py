"""Grouped products and layers of experts in graphs of `torch.compile`, on the CPU, where torch computes behind them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.functional.test_graphs import compiled
from tlxgen import functional
from tlxgen.functional import dispatch, grouped

E, TOKENS, N, K = 3, 40, 24, 16
ENDS = torch.tensor([13, 13, 40], dtype=torch.int32)
FORMS = ("2d3d", "3d2d", "2d2d", "3d3d")


pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


def normal(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_(grad)


def operands(form: str, grad: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    if form == "2d3d":
        return normal(TOKENS, K, grad=grad), normal(E, K, N, grad=grad), ENDS
    if form == "3d2d":
        return normal(E, N, K, grad=grad), normal(K, TOKENS, grad=grad), ENDS
    if form == "2d2d":
        return normal(K, TOKENS, grad=grad), normal(TOKENS, N, grad=grad), ENDS
    return normal(E, 8, K, grad=grad), normal(E, K, N, grad=grad), None


def layer(grad: bool = False) -> dict[str, Any]:
    weights, ids = torch.randn(20, E).softmax(1).topk(2, 1)
    return {
        "x": normal(20, K, grad=grad),
        "w1": normal(E, 2 * N, K, grad=grad),
        "w2": normal(E, K, N, grad=grad),
        "topk_weights": weights.requires_grad_(grad),
        "topk_ids": ids,
    }


class TestOpcheck:
    """Schema, fake tensors with the right strides, gradients registered, traced as run."""

    @pytest.mark.parametrize("form", FORMS)
    def test_products(self, form: str) -> None:
        torch.library.opcheck(torch.ops.tlxgen.grouped_mm, (*operands(form, grad=True), ""))

    @pytest.mark.parametrize("activation", ["silu", "gelu"])
    def test_gated_products(self, activation: str) -> None:
        torch.library.opcheck(torch.ops.tlxgen.grouped_mm, (*operands("2d3d"), activation))

    def test_the_way_back(self) -> None:
        result, place = normal(40, K), torch.randperm(40, dtype=torch.int32)
        weights, ids = torch.randn(20, 2), torch.randint(E, (20, 2))
        torch.library.opcheck(torch.ops.tlxgen.moe_combine, (result, place, weights, ids, E, normal(1)))


class TestGraphs:
    @pytest.mark.parametrize("form", FORMS)
    def test_products_and_their_gradients_are_those_outside(self, form: str) -> None:
        a, b, offs = operands(form, grad=True)
        function, graphs = compiled(lambda a, b: functional.grouped_mm(a, b, offs=offs))
        out, expected = function(a, b), functional.grouped_mm(a, b, offs=offs)
        assert graphs.operators == ["tlxgen.grouped_mm.default"]
        assert_close(out, expected)
        grad = torch.randn(expected.shape).bfloat16()
        for one, other in zip(
            torch.autograd.grad(out, (a, b), grad), torch.autograd.grad(expected, (a, b), grad), strict=True
        ):
            assert_close(one, other)

    def test_gradients_may_be_expanded_and_have_rows_of_any_length(self) -> None:
        """Torch's own grouped product refuses such."""
        a, b, offs = operands("2d3d", grad=True)
        b = b.detach()[..., :20].requires_grad_()
        function, _ = compiled(lambda a, b: functional.grouped_mm(a, b, offs=offs).sum())
        of_a, of_b = torch.autograd.grad(function(a, b), (a, b))
        sizes = ENDS.diff(prepend=ENDS.new_zeros(1)).tolist()
        rows = torch.arange(E).repeat_interleave(torch.tensor(sizes))
        assert_close(of_a.float(), b.float().sum(2)[rows], rtol=2e-2, atol=2e-2)
        sums = torch.stack([a[start:end].float().sum(0) for start, end in pairwise([0, *ENDS.tolist()])])
        assert_close(of_b.float(), sums[..., None].expand(E, K, 20), rtol=2e-2, atol=2e-2)

    def test_any_number_of_tokens_is_one_graph(self) -> None:
        weights = normal(E, K, N)
        function, graphs = compiled(lambda a, offs: functional.grouped_mm(a, weights, offs=offs), dynamic=True)
        for tokens in (40, 56, 72):
            a, offs = normal(tokens, K), torch.tensor([5, 9, tokens], dtype=torch.int32)
            assert_close(function(a, offs), functional.grouped_mm(a, weights, offs=offs))
        assert graphs.compiled == 1

    @pytest.mark.parametrize("grad", [False, True])
    def test_a_layer_is_whole(self, grad: bool) -> None:
        given = layer(grad)
        function, graphs = compiled(functional.fused_moe)
        out, expected = function(**given), functional.fused_moe(**given)
        assert_close(out, expected, rtol=2e-2, atol=2e-2)
        ours = [name for name in graphs.operators if name.startswith("tlxgen")]
        back = [] if grad else ["tlxgen.moe_combine.default"]
        assert ours == ["tlxgen.grouped_mm.default"] * 2 + back
        if grad:
            wanted = [given[name] for name in ("x", "w1", "w2", "topk_weights")]
            cotangent = torch.randn(out.shape).bfloat16()
            for one, other in zip(
                torch.autograd.grad(out, wanted, cotangent),
                torch.autograd.grad(expected, wanted, cotangent),
                strict=True,
            ):
                assert_close(one, other, rtol=5e-2, atol=5e-2)

    def test_machines_without_kernels_keep_torchs_operators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "kernels_here", lambda: False)
        a, b, offs = operands("2d3d")
        function, graphs = compiled(lambda a, b: functional.grouped_mm(a, b, offs=offs))
        assert_close(function(a, b), functional.grouped_mm(a, b, offs=offs))
        assert not any(name.startswith("tlxgen") for name in graphs.operators)

    def test_a_single_row_of_any_pitch_has_gradients(self) -> None:
        grad = normal(1, 27)[:, :24]
        aligned = grouped._with_aligned_rows(grad)
        assert grouped._layout(aligned) == "n"
        assert torch.equal(aligned, grad)
