"""`tlxgen.functional.fused_moe`: the layer, expert by expert, and what it makes of experts that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tlxgen import functional
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import grouped, moe, moe_combine, moe_combine_kernel
from tlxgen.functional.moe_combine_kernel import Launch
from tlxgen.runtime import checks

fused_moe: Callable[..., Tensor] = functional.fused_moe

E, T, K, I, TOP = 5, 37, 32, 24, 3  # noqa: E741 - the field's own letter


def operands(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=generator).to(dtype)
    w1 = (torch.randn(E, 2 * I, K, generator=generator) / K**0.5).to(dtype)
    w2 = (torch.randn(E, K, I, generator=generator) / I**0.5).to(dtype)
    weights, ids = torch.randn(T, E, generator=generator).softmax(1).topk(TOP, 1)
    return {"x": x, "w1": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids}


def token_by_token(
    x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu"
) -> Tensor:
    """The layer in float64."""
    rows = []
    for token, weights, ids in zip(x.double(), topk_weights.double(), topk_ids.tolist(), strict=True):
        row = torch.zeros(K, dtype=torch.float64)
        for weight, expert in zip(weights, ids, strict=True):
            if 0 <= expert < len(w1):
                gate, up = (w1[expert].double() @ token).chunk(2)
                row = row + weight * (w2[expert].double() @ (getattr(F, activation)(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_is_the_sum_over_each_tokens_experts(activation: str, dtype: torch.dtype, integer: torch.dtype) -> None:
    given = operands(dtype)
    given["topk_ids"] = given["topk_ids"].to(integer)
    out = fused_moe(**given, activation=activation)
    assert (out.shape, out.dtype) == ((T, K), dtype)
    assert far(out, token_by_token(**given, activation=activation)) < 1e-2


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_first_product_has_the_activation_in_it(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens in the order of experts; where their gradient is wanted, zeros past the last expert."""
    asked, past = [], []

    def noted(a: Tensor, b: Tensor, **named: Any) -> Tensor:
        asked.append((a.shape, b.stride(), named["activation"]))
        past.append(bool(a[int(named["offs"][-1]) :].any()))
        return gated_mm(a, b, **named)

    gated_mm = grouped.gated_mm
    monkeypatch.setattr(moe, "gated_mm", noted)
    given = operands()
    given["topk_ids"][0] = E  # somebody else's
    fused_moe(**given, activation=activation)
    given["x"].requires_grad_()
    fused_moe(**given, activation=activation)
    assert asked == [((T * TOP, K), (2 * I * K, 1, K), activation)] * 2
    assert past == [True, False]


def test_experts_without_tokens_and_tokens_without_experts() -> None:
    given = operands()
    given["topk_ids"] = torch.where(given["topk_ids"] == 2, -1, given["topk_ids"])  # somebody else has it
    given["topk_ids"][4] = torch.tensor([E, -1, 99])
    given["w1"][2] = float("nan")  # must not be read
    out = fused_moe(**given)
    assert torch.equal(out[4], torch.zeros(K, dtype=torch.bfloat16))
    assert far(out, token_by_token(**given)) < 1e-2


@pytest.mark.parametrize("integer", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_ids_may_be_of_any_integer_dtype_though_it_cannot_count_the_experts(integer: torch.dtype) -> None:
    given = operands()
    many = {name: given[name].repeat(60, 1, 1) for name in ("w1", "w2")}  # 300 experts, of which some are chosen
    expected = fused_moe(**{**given, **many})
    assert torch.equal(fused_moe(**{**given, **many, "topk_ids": given["topk_ids"].to(integer)}), expected)


def test_an_expert_elsewhere_counts_nothing_whatever_its_weight() -> None:
    given = operands()
    given["topk_ids"][:, 1] = E
    expected = fused_moe(**given)
    given["topk_weights"][:, 1] = float("nan")
    assert torch.equal(fused_moe(**given), expected)


def test_tokens_are_brought_back_by_one_kernel_unless_gradients_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []

    def interpreted(launch: Launch) -> None:
        InterpretedFunction(moe_combine_kernel.kernel.fn)[(launch.programs,)](*launch.args, **launch.constants)
        launches.append(launch)

    given = operands()
    given["topk_ids"][::3, 0] = -1
    expected = fused_moe(**given)
    monkeypatch.setattr(Launch, "__call__", interpreted)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    monkeypatch.setattr(moe_combine, "_compiles_for", lambda _: True)
    monkeypatch.setattr(moe_combine, "_is_capturing", lambda: False)
    out = fused_moe(**given)
    assert [launch.args[4].data_ptr() for launch in launches] == [out.data_ptr()]
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)  # the interpreter cuts off where a GPU rounds
    for name in ("x", "w1", "w2", "topk_weights"):
        fused_moe(**{**given, name: given[name].clone().requires_grad_()})
    assert len(launches) == 1


def test_a_graph_of_the_compiler_has_the_same_tangents() -> None:
    given = operands()
    shares = given.pop("topk_weights")

    def tangent(shares: Tensor) -> Tensor:
        found: Tensor = torch.func.jvp(lambda shares: fused_moe(topk_weights=shares, **given), (shares,), (shares,))[1]
        return found

    expected = tangent(shares)
    assert expected.any()
    torch.testing.assert_close(torch.compile(tangent, backend="eager")(shares), expected)


def test_a_graph_of_the_compiler_has_the_same_result() -> None:
    given = operands()
    assert torch.equal(torch.compile(fused_moe, backend="eager")(**given), fused_moe(**given))


def test_no_tokens_at_all() -> None:
    given = operands()
    for name in ("x", "topk_weights", "topk_ids"):
        given[name] = given[name][:0]
    assert fused_moe(**given).shape == (0, K)


def test_gradients_are_those_of_the_layer() -> None:
    given = operands()
    given["topk_ids"][:, 0] = torch.where(torch.arange(T) % 2 == 0, -1, given["topk_ids"][:, 0])
    names = ("x", "w1", "w2", "topk_weights")
    own: dict[str, Any] = {**given, **{name: given[name].clone().requires_grad_() for name in names}}
    exact: dict[str, Any] = {**given, **{name: given[name].double().requires_grad_() for name in names}}
    weights = torch.randn(T, K, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((fused_moe(**own).float() * weights).sum(), [own[name] for name in names])
    expected = torch.autograd.grad((token_by_token(**exact) * weights).sum(), [exact[name] for name in names])
    for name, one, other in zip(names, found, expected, strict=True):
        assert far(one, other) < 2e-2, name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w1": torch.zeros(E, 2 * I + 1, K)}, "w1"),
        ({"w1": torch.zeros(E, 2 * I, K + 1)}, "w1"),
        ({"w2": torch.zeros(E, I, K)}, "w2"),
        ({"x": torch.zeros(T, K)}, "one dtype"),
        ({"topk_ids": torch.zeros(T, TOP)}, "must hold integers"),
        ({"topk_ids": torch.zeros(T, TOP + 1, dtype=torch.int32)}, "T = 37"),
        ({"topk_weights": torch.zeros(T + 1, TOP)}, "T = 37"),
        ({"activation": "relu"}, "use silu or gelu"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidProblemError, match=said):
        fused_moe(**{**operands(), **change})
