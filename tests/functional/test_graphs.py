"""Operators that stand in graphs of `torch.compile`, on the CPU, where torch computes behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tlxgen import functional
from tlxgen.errors import InvalidProblemError, LaunchError
from tlxgen.functional import dispatch
from tlxgen.functional.attention_call import CALLER, GRADIENTS, NOBODY
from tlxgen.runtime import kernel

sdpa = torch.nn.functional.scaled_dot_product_attention


pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


def normal(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, requires_grad=grad)


class Graphs:
    """A backend that keeps the graphs it was given and runs their operators as they are."""

    def __init__(self) -> None:
        self.operators: list[str] = []
        self.compiled = 0

    def __call__(self, module: Any, _inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        self.operators += [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        forward: Callable[..., Any] = module.forward
        return forward


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Graphs]:
    graphs = Graphs()
    return torch.compile(function, fullgraph=True, backend=graphs, **options), graphs


class TestOpcheck:
    """Schema, fake tensors with the right strides, gradients registered, traced as run."""

    @pytest.mark.parametrize("lse_for", [NOBODY, GRADIENTS, CALLER])
    def test_attention(self, lse_for: int) -> None:
        q, k, v = normal(2, 4, 8, 16), normal(2, 2, 12, 16), normal(2, 2, 12, 16)
        torch.library.opcheck(torch.ops.tlxgen.attention, (q, k, v, "bottom-right", 8, 5.0, 0.3, lse_for))

    def test_attention_between_rows(self) -> None:
        """Heads that lie between rows do so in the output."""
        q, k, v = (normal(2, 8, 4, 16).transpose(1, 2) for _ in range(3))
        torch.library.opcheck(torch.ops.tlxgen.attention, (q, k, v, "none", 0, 0.0, None, NOBODY))

    def test_attention_backward(self) -> None:
        q, k, v = (normal(1, 2, 8, 16, grad=False) for _ in range(3))
        out, lse = torch.ops.tlxgen.attention(q, k, v, "none", 0, 0.0, None, CALLER)
        options = ("none", 0, 0.0, None, CALLER)
        torch.library.opcheck(torch.ops.tlxgen.attention_backward, (out, lse, q, k, v, out, lse, *options))
        torch.library.opcheck(torch.ops.tlxgen.attention_backward, (out, None, q, k, v, out, lse, *options))

    @pytest.mark.parametrize("bias", [False, True])
    def test_gemm(self, bias: bool) -> None:
        a, b = normal(8, 16), normal(4, 16).mT
        torch.library.opcheck(torch.ops.tlxgen.gemm, (a, b, normal(4) if bias else None))


class TestGraphs:
    def test_attention_of_any_length_is_compiled_once_and_whole(self) -> None:
        model, graphs = compiled(lambda q, k, v: functional.attention(q, k, v, causal="bottom-right"), dynamic=True)
        for keys in (20, 24, 40):
            q, k, v = (
                normal(1, 2, 8, 16, grad=False),
                normal(1, 2, keys, 16, grad=False),
                normal(1, 2, keys, 16, grad=False),
            )
            assert_close(model(q, k, v), functional.attention(q, k, v, causal="bottom-right"))
        assert graphs.compiled == 1
        assert graphs.operators.count("tlxgen.attention") == 1

    def test_torchs_attention_is_replaced(self) -> None:
        model, graphs = compiled(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        q, k, v = (normal(2, 4, 8, 16) for _ in range(3))
        assert_close(model(q, k, v), sdpa(q, k, v, is_causal=True))
        assert "tlxgen.attention" in graphs.operators

    @pytest.mark.parametrize("lse", [False, True], ids=["of the output", "and of the log-sum-exp"])
    def test_gradients_are_those_outside_of_graphs(self, lse: bool) -> None:
        def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not lse:
                return functional.attention(q, k, v, causal="bottom-right", softcap=2.0)
            out, sums = functional.attention(q, k, v, causal="bottom-right", softcap=2.0, return_lse=True)
            return out * 2 + sums[..., None]

        tensors = [normal(1, 4, 8, 16), normal(1, 2, 12, 16), normal(1, 2, 12, 16)]
        in_graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        one, other = (torch.autograd.grad(f(*tensors).float().square().sum(), tensors) for f in (model, in_graph))
        for expected, found in zip(one, other, strict=True):
            assert_close(found, expected, rtol=2e-2, atol=2e-2)

    def test_products_and_their_gradients(self) -> None:
        x, weight, bias = normal(2, 3, 16), normal(8, 16), normal(8)
        for model in (functional.linear, lambda x, w, b: functional.matmul(x, w.mT) + b):
            in_graph = torch.compile(model, fullgraph=True, backend="aot_eager")
            one, other = (
                torch.autograd.grad(f(x, weight, bias).float().square().sum(), (x, weight, bias))
                for f in (torch.nn.functional.linear, in_graph)
            )
            for expected, found in zip(one, other, strict=True):
                assert_close(found, expected, rtol=5e-2, atol=0.1)

    def test_products_of_any_length_are_compiled_once_and_whole(self) -> None:
        model, graphs = compiled(functional.linear, dynamic=True)
        weight = normal(8, 16, grad=False)
        for rows in (5, 9, 33):
            x = normal(rows, 16, grad=False)
            assert_close(model(x, weight), torch.nn.functional.linear(x, weight))
        assert (graphs.compiled, graphs.operators.count("tlxgen.gemm")) == (1, 1)

    @pytest.mark.parametrize(
        "options",
        [{"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, {"scale": -1.0, "gradients": True}],
        ids=["a mask", "gradients that the kernels' side does not have"],
    )
    def test_what_is_torchs_stays_torchs(self, options: dict[str, Any]) -> None:
        gradients = options.pop("gradients", False)
        model, graphs = compiled(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options))
        q, k, v = (normal(1, 2, 8, 16, grad=gradients) for _ in range(3))
        assert_close(model(q, k, v), sdpa(q, k, v, **options))
        assert "tlxgen.attention" not in graphs.operators

    def test_machines_without_kernels_keep_torchs_operators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "kernels_here", lambda: False)
        q, x, weight = normal(1, 2, 8, 16, grad=False), normal(4, 16, grad=False), normal(8, 16, grad=False)
        model, graphs = compiled(
            lambda: (functional.scaled_dot_product_attention(q, q, q), functional.linear(x, weight))
        )
        model()
        assert not any("tlxgen" in operator for operator in graphs.operators)

    def test_the_scale_may_be_an_argument(self) -> None:
        model, graphs = compiled(lambda q, scale: functional.attention(q, q, q, scale=scale), dynamic=True)
        q = normal(1, 2, 8, 16, grad=False)
        for scale in (0.3, 0.4):
            assert_close(model(q, scale), functional.attention(q, q, q, scale=scale))
        assert any("tlxgen.attention" in name for name in graphs.operators)

    def test_transforms_are_refused_as_outside_of_graphs(self) -> None:
        q = normal(1, 2, 8, 16, grad=False)
        model = torch.compile(
            lambda q: torch.func.jvp(lambda q: functional.attention(q, q, q), (q,), (q,)), backend="aot_eager"
        )
        with pytest.raises(LaunchError, match="functorch"):
            model(q)

    def test_a_bad_call_is_refused_as_outside_of_graphs(self) -> None:
        q = normal(1, 2, 8, 12, grad=False)  # 8 does not divide the head dimension
        with pytest.raises(InvalidProblemError):
            torch.ops.tlxgen.attention(q, q, q, "none", 0, 0.0, None, NOBODY)


def test_a_machine_without_a_gpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(kernel, "_current_device", lambda: None)
    assert dispatch.kernels_here() is False
    monkeypatch.setattr(kernel, "_current_device", lambda: 0)
    assert dispatch.kernels_here() is True


def test_a_backward_under_autocast_computes_what_the_graph_was_made_for() -> None:
    a, b = normal(32, 32), normal(32, 32, grad=False)
    function, _ = compiled(lambda a, b: functional.matmul(torch.sin(a) * 2, b))
    out = function(a, b)
    (expected,) = torch.autograd.grad(out, a, torch.ones_like(out), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.float16):
        (found,) = torch.autograd.grad(out, a, torch.ones_like(out))
        assert torch.ops.tlxgen.gemm(a, b, None).dtype == torch.bfloat16
    assert_close(found, expected)
