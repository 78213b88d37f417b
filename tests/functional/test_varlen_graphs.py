"""The operator that stands in graphs of `torch.compile` for packed sequences, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest
from torch.testing import assert_close

from tests.functional.test_graphs import compiled
from tests.functional.test_varlen import LENGTHS, MASKS, MAX_K, MAX_Q, H, ends, inputs, varlen_attn
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import dispatch, varlen_backward, varlen_call
from tlxgen.functional.attention_call import CALLER, GRADIENTS, NOBODY
from tlxgen.runtime import checks, kernel

OPERATOR = "tlxgen.attention_varlen.default"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    kernel.forget()
    torch._dynamo.reset()
    torch.manual_seed(0)


class TestOpcheck:
    """Schema, fake tensors with the right strides, gradients registered, traced as run."""

    @pytest.mark.parametrize("lse_for", [NOBODY, GRADIENTS, CALLER])
    def test_attention(self, lse_for: int) -> None:
        torch.library.opcheck(torch.ops.tlxgen.attention_varlen, (*inputs(grad=True), True, 4, 0.3, lse_for))

    def test_a_query_that_lies_across(self) -> None:
        q, *rest = inputs()
        across = q.transpose(0, 1).contiguous().transpose(0, 1)
        torch.library.opcheck(torch.ops.tlxgen.attention_varlen, (across, *rest, False, 0, None, CALLER))

    @pytest.mark.parametrize("of_lse", [False, True])
    def test_its_gradients(self, of_lse: bool) -> None:
        call, options = inputs(), (True, 0, None)
        out, lse = torch.ops.tlxgen.attention_varlen(*call, *options, CALLER)
        grads = (None, torch.ones_like(lse)) if of_lse else (out, None)
        torch.library.opcheck(torch.ops.tlxgen.attention_varlen_backward, (*grads, out, lse, *call, *options))

    def test_flash_attention_gets_no_log_sum_exp_that_nobody_wrote(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would read past the end of memory."""
        monkeypatch.setattr(varlen_backward, "flash_takes", lambda *_: True)
        monkeypatch.setattr(varlen_backward, "by_flash", lambda *_: pytest.fail("asked without it"))
        call, options = inputs(), (True, 0, None)
        operators = torch.ops.tlxgen
        out, nothing = operators.attention_varlen(*call, *options, NOBODY)
        found = operators.attention_varlen_backward(out, None, out, nothing, *call, *options)
        monkeypatch.undo()
        _, lse = operators.attention_varlen(*call, *options, GRADIENTS)
        assert_close(found, operators.attention_varlen_backward(out, None, out, lse, *call, *options))


class TestGraphs:
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("lse", [False, True], ids=["the output", "and the log-sum-exp"])
    def test_results_and_gradients_are_those_outside(self, mask: str, lse: bool) -> None:
        def model(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            options: dict[str, Any] = {"window_size": MASKS[mask][0], "enable_gqa": True}
            if not lse:
                return varlen_attn(q * 1, k, v, *rest, **options)
            out, sums = varlen_attn(q * 1, k, v, *rest, **options, return_aux=AuxRequest(lse=True))
            return out + sums.masked_fill(sums.isinf(), 0.0).T[..., None]

        call = inputs(grad=True)
        in_graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        one, other = (torch.autograd.grad(f(*call).float().square().sum(), call[:3]) for f in (model, in_graph))
        for expected, found in zip(one, other, strict=True):
            assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert_close(in_graph(*call), model(*call), rtol=2e-2, atol=2e-2)

    def test_any_lengths_are_one_graph(self) -> None:
        model, graphs = compiled(lambda *call: varlen_attn(*call, window_size=(-1, 0)), dynamic=True)
        for more in (3, 5, 9):
            lengths = [rows + more for rows, _ in LENGTHS]
            q = torch.randn(sum(lengths), H, 16).bfloat16()
            call = (q, q, q, ends(lengths), ends(lengths), MAX_Q + more, MAX_K + more)
            assert_close(model(*call), varlen_attn(*call, window_size=(-1, 0)))
        assert (graphs.compiled, graphs.operators.count(OPERATOR)) == (1, 1)

    def test_the_scale_may_be_an_argument(self) -> None:
        model, graphs = compiled(lambda *call, scale: varlen_attn(*call, scale=scale), dynamic=True)
        call = inputs(kv_heads=H)
        for scale in (0.3, 0.4):
            assert_close(model(*call, scale=scale), varlen_attn(*call, scale=scale))
        assert OPERATOR in graphs.operators

    @pytest.mark.parametrize("mode", ["backward", "forward"])
    def test_functorch_gets_no_wrong_derivatives(self, mode: str) -> None:
        """From operators it would get zeros in forward mode; torch's own function refuses both."""
        q, *rest = inputs(kv_heads=H)

        def derivative(q: Tensor) -> Any:
            if mode == "forward":
                return torch.func.jvp(lambda q: varlen_attn(q, *rest), (q,), (q,))[1]
            return torch.func.grad(lambda q: varlen_attn(q, *rest).float().sum())(q)

        with pytest.raises((RuntimeError, NotImplementedError), match=r"torch_attn|_flash_attention_forward"):
            torch.compile(derivative, backend="aot_eager")(q)

    def test_the_log_sum_exp_of_a_call_without_gradients_is_not_computed(self) -> None:
        model, graphs = compiled(varlen_attn)
        call = inputs(kv_heads=H)
        assert_close(model(*call), varlen_attn(*call))
        found = varlen_call.find(call[:5], call[5:], (False, 0))
        assert found is not None
        assert OPERATOR in graphs.operators
        assert list(found._kernels) == [False]

    @pytest.mark.parametrize("case", ["a window ahead", "no kernels here"])
    def test_what_is_torchs_stays_torchs(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        window = (-1, 3) if case == "a window ahead" else (-1, 0)
        if case == "no kernels here":  # on a GPU, that is
            monkeypatch.setattr(dispatch, "kernels_here", lambda: False)
            monkeypatch.setattr(checks, "DEVICE", "meta")
        q, k, v, *rest, max_q, max_k = inputs(kv_heads=H)
        call = [x.to("meta") for x in (q, k, v, *rest)]
        model, graphs = compiled(lambda *call: varlen_attn(*call, max_q, max_k, window_size=window))
        assert model(*call).shape == q.shape
        assert [name for name in graphs.operators if "varlen" in name] == ["torch_attn._varlen_attn"]

    def test_much_may_lie_past_the_last_end(self) -> None:
        q, k, v, *rest = inputs(kv_heads=H)
        longer = [torch.cat([x, x, x]) for x in (q, k, v)]
        model, _ = compiled(varlen_attn)
        assert_close(model(*longer, *rest)[: len(q)], varlen_attn(q, k, v, *rest))

    def test_what_no_kernel_is_for_is_refused(self) -> None:
        *tensors, _, max_k = inputs()
        with pytest.raises(InvalidProblemError, match="6 sequences of at most 33554432 rows"):
            torch.ops.tlxgen.attention_varlen(*tensors, 2**25, max_k, True, 0, None, NOBODY)
