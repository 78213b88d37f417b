"""`tlxgen.functional`: what goes to a kernel and what to torch, and gradients as good as torch's own."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

import tlxgen
from tlxgen import functional
from tlxgen.errors import InvalidProblemError, LaunchError
from tlxgen.functional import attention_backward, attention_call
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.runtime import checks
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime.kernel import Choice, Kernel

ROOT = Path(__file__).parents[2]

# Called in many ways, some of them wrong.
attention: Callable[..., Any] = functional.attention
scaled_dot_product_attention: Callable[..., Tensor] = functional.scaled_dot_product_attention


pytestmark = pytest.mark.usefixtures("no_cached_kernels")


@dataclass
class Served:
    """A get_kernel whose kernels are torch in disguise, and what it was asked for."""

    origin: str = "tuned"
    asked: list[AttentionProblem] = field(default_factory=list)
    launched: list[AttentionProblem] = field(default_factory=list)

    def __call__(self, problem: AttentionProblem) -> Any:
        assert problem.operator == "attention"
        self.asked.append(problem)
        return Disguised(self, Kernel(problem, Choice("torch", None), None))


@dataclass
class Disguised:
    served: Served
    kernel: Kernel

    @property
    def origin(self) -> str:
        return "torch" if self.kernel.problem.empty else self.served.origin

    def __call__(self, *tensors: Tensor, **named: Any) -> Tensor:
        self.served.launched.append(self.kernel.problem)  # type: ignore[arg-type]
        return self.kernel(*tensors, **named)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Kernels for the CPU."""
    served = Served()
    monkeypatch.setattr(attention_call, "kernel_for", served)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    return served


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
) -> tuple[Tensor, ...]:
    """What torch's kernel computes on a GPU, from its arguments: (B, S, H, D), aligned bottom-right."""
    starts_q, starts_k, rows, keys, dropout, is_causal, *_ = rest
    assert (starts_q, starts_k, dropout) == (None, None, 0.0)
    assert (rows, keys) == (q.shape[1], k.shape[1])
    assert lse.shape == (q.shape[0], q.shape[2], rows)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    group = q.shape[2] // k.shape[2]
    grad_out, q, k, v, out = (x.double().transpose(1, 2) for x in (grad_out, q, k, v, out))
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ wide_k.mT
    ahead = torch.arange(keys)[None, :] - torch.arange(rows)[:, None] - (keys - rows)
    if is_causal or window_size_right == 0:
        scores = scores.masked_fill(ahead > 0, -math.inf)
    if window_size_left is not None:
        scores = scores.masked_fill(ahead < -window_size_left, -math.inf)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(scores * scale - lse.double()[..., None])
    grad_scores = weights * (grad_out @ wide_v.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
    of_keys = [x.mT @ y for x, y in ((grad_scores, q), (weights, grad_out))]
    of_k, of_v = (x.unflatten(1, (-1, group)).sum(2) for x in of_keys)  # type: ignore[no-untyped-call]
    return tuple(x.transpose(1, 2).to(torch.bfloat16) for x in (grad_scores @ wide_k, of_k, of_v))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch, served: Served) -> list[Sequence[Any]]:
    """Torch's flash-attention backward on the CPU; the calls of it."""
    calls: list[Sequence[Any]] = []

    def backward(*args: Any, **named: Any) -> tuple[Tensor, ...]:
        calls.append(args)
        return flash_backward(*args, **named)

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return calls


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(q: Sequence[int], k: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return normal(*q, dtype=dtype), normal(*k, dtype=dtype, seed=1), normal(*k, dtype=dtype, seed=2)


def between_rows(tensor: Tensor) -> Tensor:
    """The same, with heads between rows in memory."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def by_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in the tensors' own precision, but the softmax in float32 at least."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    rows, keys = q.shape[-2], k.shape[-2]
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if causal != "none":
        ahead = torch.arange(keys)[None, :] - torch.arange(rows)[:, None]
        ahead = ahead - (keys - rows if causal == "bottom-right" else 0)
        hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
    blind = hidden.all(-1, keepdim=True)
    seen = scores.masked_fill(hidden & ~blind, -math.inf)
    weights = torch.softmax(seen, -1).masked_fill(blind, 0.0).to(q.dtype)
    return weights @ v, torch.logsumexp(seen, -1).masked_fill(blind[:, 0], -math.inf)


def gradients(call: Callable[..., Tensor], tensors: Sequence[Tensor], needed: str = "qkv") -> list[Tensor | None]:
    """Of the sum of the result times fixed random numbers, with respect to copies of the tensors as they lie."""
    leaves = [x.detach().requires_grad_(name in needed) for name, x in zip("qkv", tensors, strict=True)]
    out = call(*leaves)
    # Numbers that bf16 and fp16 have, the same for every precision.
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(out.dtype)
    (out * factors).sum().backward()  # type: ignore[no-untyped-call]
    return [leaf.grad for leaf in leaves]


def far(found: Tensor, exact: Tensor) -> float:
    """The relative distance; the distance where the exact one is zero."""
    return float((found.double() - exact).norm() / (exact.norm() or 1.0))


def check_gradients(
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    exactly: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    needed: str = "qkv",
) -> None:
    """No further from float64's than 1.5 times torch's own in the same dtype, and what rounding may cost."""
    exact = gradients(exactly, [x.double() for x in tensors], needed)
    for name, mine, its, true in zip(
        "qkv", gradients(ours, tensors, needed), gradients(torchs, tensors, needed), exact, strict=True
    ):
        if name not in needed:
            assert mine is None
            continue
        assert mine is not None
        assert its is not None
        assert true is not None
        assert mine.dtype == its.dtype
        assert mine.shape == its.shape
        assert torch.isfinite(mine).all()
        allowed = 1.5 * far(its, true) + torch.finfo(mine.dtype).eps / 4
        assert far(mine, true) <= allowed, f"gradient of {name}"


FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 40, 32), (2, 3, 40, 32), {}),
    "causal": ((2, 3, 40, 32), (2, 3, 40, 32), {"is_causal": True}),
    "more keys": ((1, 2, 20, 64), (1, 2, 51, 64), {}),
    "causal, more keys": ((1, 2, 20, 64), (1, 2, 51, 64), {"is_causal": True}),
    "causal, fewer keys": ((1, 2, 51, 64), (1, 2, 20, 64), {"is_causal": True}),
    "grouped heads": ((2, 6, 30, 16), (2, 2, 30, 16), {"enable_gqa": True, "is_causal": True}),
    "one head for all": ((1, 4, 30, 16), (1, 1, 25, 16), {"enable_gqa": True}),
    "scale": ((1, 2, 30, 16), (1, 2, 30, 16), {"scale": 0.7, "is_causal": True}),
    "scale of a whole number": ((1, 2, 30, 16), (1, 2, 30, 16), {"scale": 1}),
    "negative scale": ((1, 2, 30, 16), (1, 2, 30, 16), {"scale": -0.3}),
    "scale of zero": ((1, 2, 30, 16), (1, 2, 30, 16), {"scale": 0.0}),
    "three dimensions": ((5, 30, 16), (5, 30, 16), {"is_causal": True}),
    "three dimensions, grouped": ((6, 30, 16), (3, 30, 16), {"enable_gqa": True}),
    "five dimensions": ((2, 2, 3, 30, 16), (2, 2, 3, 40, 16), {}),
    "six dimensions": ((2, 1, 2, 3, 30, 16), (2, 1, 2, 3, 40, 16), {}),
    "one row": ((2, 2, 1, 64), (2, 2, 33, 64), {}),
}


def explicitly(**options: Any) -> Callable[..., Tensor]:
    """torch's function by its steps, right for scales that its fused kernels may not take."""
    causal = "top-left" if options.get("is_causal") else "none"
    return lambda q, k, v: by_steps(q, k, v, causal=causal, scale=options.get("scale"))[0]


class TestInPlaceOfTorch:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("form", FORMS)
    def test_a_kernel_gives_torchs_result_and_gradients(self, form: str, dtype: torch.dtype, served: Served) -> None:
        shape_q, shape_k, options = FORMS[form]
        tensors = inputs(shape_q, shape_k, dtype)
        out = scaled_dot_product_attention(*tensors, **options)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(*tensors, **options), rtol=2e-2, atol=2e-2)
        check_gradients(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, **options),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
            explicitly(**options),
            tensors,
        )
        # Torch has to run for its gradients anyway where they are not the flash backward's, and where they are right.
        assert len(served.launched) == (1 if options.get("scale", 1) > 0 else 2)

    @pytest.mark.parametrize("form", [form for form, (_, _, options) in FORMS.items() if options.get("scale", 1) > 0])
    def test_the_flash_backward_gives_its_gradients(
        self, form: str, flash: list[Sequence[Any]], served: Served
    ) -> None:
        shape_q, shape_k, options = FORMS[form]
        check_gradients(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, **options),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
            explicitly(**options),
            inputs(shape_q, shape_k),
        )
        top_left = options.get("is_causal", False) and shape_q[-2] != shape_k[-2]
        assert len(flash) == (0 if top_left else 1)
        assert [problem.lse for problem in served.launched] == ([] if top_left else [True])

    @pytest.mark.parametrize("needed", ["q", "k", "v", "qv", "kv"])
    @pytest.mark.parametrize("scale", [None, -0.5])
    def test_gradients_go_where_they_are_asked_for(
        self, needed: str, scale: float | None, flash: list[Sequence[Any]], served: Served
    ) -> None:
        check_gradients(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=scale),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale),
            explicitly(scale=scale),
            inputs((1, 2, 30, 16), (1, 2, 40, 16)),
            needed,
        )
        assert len(served.launched) == 1
        assert len(flash) == (scale is None)

    def test_heads_may_lie_between_rows(self, flash: list[Sequence[Any]]) -> None:
        tensors = [between_rows(x) for x in inputs((2, 3, 40, 32), (2, 3, 40, 32))]
        out = scaled_dot_product_attention(*tensors, is_causal=True)
        assert out.transpose(1, 2).is_contiguous()
        check_gradients(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            explicitly(is_causal=True),
            tensors,
        )
        assert len(flash) == 1

    def test_inputs_may_be_expanded(self, flash: list[Sequence[Any]]) -> None:
        q, k, v = inputs((2, 4, 30, 16), (2, 1, 30, 16))

        def expanded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda q, k, v: function(q, k.expand(2, 4, 30, 16), v.expand(2, 4, 30, 16))

        check_gradients(
            expanded(scaled_dot_product_attention),
            expanded(F.scaled_dot_product_attention),
            expanded(explicitly()),
            (q, k, v),
        )
        assert len(flash) == 1

    def test_one_tensor_may_be_all_three(self, flash: list[Sequence[Any]]) -> None:
        x = normal(1, 2, 30, 16)
        check_gradients(
            lambda q, k, v: scaled_dot_product_attention(q, q, q),
            lambda q, k, v: F.scaled_dot_product_attention(q, q, q),
            lambda q, k, v: explicitly()(q, q, q),
            (x, x, x),
            "q",
        )

    def test_unaligned_tensors_are_copied_for_the_flash_backward(self, flash: list[Sequence[Any]]) -> None:
        padded = [normal(1, 2, 30, 17, seed=seed)[..., :16] for seed in range(3)]
        mine = gradients(scaled_dot_product_attention, padded)
        aligned = gradients(scaled_dot_product_attention, [x.contiguous() for x in padded])
        for call in flash:
            assert all(x.data_ptr() % 16 == 0 and x.stride(1) % 8 == 0 for x in call[1:5])
        for one, other in zip(mine, aligned, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)

    def test_so_is_a_gradient_of_the_output(self, flash: list[Sequence[Any]]) -> None:
        q, k, v = (normal(1, 30, 2, 16, seed=seed).transpose(1, 2).requires_grad_() for seed in range(3))
        out = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten()
        torch.cat([out.new_zeros(1), out]).square().sum().backward()  # type: ignore[no-untyped-call]
        assert flash[0][0].data_ptr() % 16 == 0

    def test_nothing_is_recorded_without_gradients(self, flash: list[Sequence[Any]], served: Served) -> None:
        q, k, v = (x.requires_grad_() for x in inputs((1, 2, 30, 16), (1, 2, 30, 16)))
        with torch.no_grad():
            assert not scaled_dot_product_attention(q, k, v).requires_grad
        with torch.inference_mode():
            assert scaled_dot_product_attention(q, k, v).is_inference()
        assert not scaled_dot_product_attention(q.detach(), k.detach(), v.detach()).requires_grad
        assert [problem.lse for problem in served.launched] == [False] * 3

    def test_second_derivatives_are_right(self, flash: list[Sequence[Any]]) -> None:
        tensors = inputs((1, 4, 20, 16), (1, 2, 20, 16))
        options = {"is_causal": True, "enable_gqa": True}
        mine = second_derivatives(lambda *x: scaled_dot_product_attention(*x, **options), tensors)
        exact = second_derivatives(explicitly(is_causal=True), [x.double() for x in tensors])
        for one, true in zip(mine, exact, strict=True):
            assert far(one, true) < 2e-2
        assert len(flash) <= 1  # the output's part in the gradient's gradient is a first derivative

    def test_its_signature_is_torchs(self) -> None:
        names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
        assert list(inspect.signature(scaled_dot_product_attention).parameters) == names.split()
        q, k, v = inputs((1, 2, 30, 16), (1, 2, 30, 16))
        for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
            with pytest.raises(TypeError):
                function(q, k, v, None, 0.0, False, 0.5)


def second_derivatives(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the squared length of the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    first = torch.autograd.grad(call(*leaves).double().square().sum(), leaves, create_graph=True)
    return list(torch.autograd.grad(sum(x.double().square().sum() for x in first), leaves))  # type: ignore[arg-type]


def small(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return dict(zip(("query", "key", "value"), inputs((1, 2, 8, 16), (1, 2, 8, 16), dtype), strict=True))


class Named(Tensor):
    """A subclass that does what its parent does."""


TO_TORCH: dict[str, Callable[[], dict[str, Any]]] = {
    "a mask of booleans": lambda: {**small(), "attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()},
    "a mask of numbers": lambda: {**small(), "attn_mask": normal(8, 8)},
    "causal with a mask": lambda: {**small(), "is_causal": True, "attn_mask": torch.ones(8, 8, dtype=torch.bool)},
    "dropout": lambda: {**small(), "dropout_p": 0.5},
    "float32": lambda: small(torch.float32),
    "float64": lambda: small(torch.float64),
    "a head dimension of 12": lambda: {name: x[..., :12].contiguous() for name, x in small().items()},
    "a head dimension of 264": lambda: {name: normal(1, 1, 4, 264) for name in small()},
    "another dimension of values": lambda: {**small(), "value": normal(1, 2, 8, 24)},
    "no batch": lambda: {name: x[:0] for name, x in small().items()},
    "no queries": lambda: {**small(), "query": normal(1, 2, 0, 16)},
    "no keys": lambda: {**small(), "key": normal(1, 2, 0, 16), "value": normal(1, 2, 0, 16)},
    "a broadcast batch": lambda: {**small(), "query": normal(3, 2, 8, 16)},
    "broadcast heads": lambda: {**small(), "key": normal(1, 1, 8, 16), "value": normal(1, 1, 8, 16)},
    "two dimensions": lambda: {name: x[0, 0] for name, x in small().items()},
    "unlike dimensions": lambda: {**small(), "query": normal(1, 1, 2, 8, 16)},
    "columns contiguous": lambda: {**small(), "key": normal(1, 2, 16, 8).mT},
    "a subclass": lambda: {**small(), "query": small()["query"].as_subclass(Named)},
    "an infinite scale": lambda: {**small(), "scale": math.inf},
    "a scale that is no number": lambda: {**small(), "scale": math.nan},
}


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "dtypes that differ": lambda: {**small(), "key": small()["key"].half()},
    "devices that differ": lambda: {**small(), "key": small()["key"].to("meta")},
    "heads that do not divide": lambda: {
        **small(),
        "query": normal(1, 3, 8, 16),
        "enable_gqa": True,
    },
    "heads that differ": lambda: {**small(), "query": normal(1, 4, 8, 16)},
    "head dimensions that differ": lambda: {**small(), "query": normal(1, 2, 8, 24)},
    "one dimension": lambda: {name: x[0, 0, 0] for name, x in small().items()},
    "causal neither true nor false": lambda: {**small(), "is_causal": "yes"},
    "dropout of more than one": lambda: {**small(), "dropout_p": 2.0},
    "a scale in words": lambda: {**small(), "scale": "1"},
    "no tensor": lambda: {**small(), "query": [1.0]},
}


def unplaced(error: Exception) -> str:
    """Its message, whether arguments were given by name or by position."""
    return re.sub(r" \(position \d\)", "", str(error))


class TestWhatGoesToTorch:
    @pytest.mark.parametrize("what", TO_TORCH)
    def test_gives_torchs_bits(self, what: str, served: Served) -> None:
        arguments = TO_TORCH[what]()
        results = []
        for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
            torch.manual_seed(3)
            results.append(function(**arguments))
        assert type(results[0]) is type(results[1])
        assert torch.equal(*(torch.nan_to_num(x) for x in results))
        assert not served.launched

    @pytest.mark.parametrize("what", REFUSED)
    def test_fails_as_in_torch(self, what: str, served: Served) -> None:
        with pytest.raises(Exception) as torchs:  # noqa: PT011 - whatever it is
            F.scaled_dot_product_attention(**REFUSED[what]())
        with pytest.raises(torchs.type) as ours:
            scaled_dot_product_attention(**REFUSED[what]())
        assert unplaced(ours.value) == unplaced(torchs.value)
        assert not served.launched

    @pytest.mark.parametrize("form", FORMS)
    def test_is_all_on_a_cpu(self, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        served = Served()
        monkeypatch.setattr(attention_call, "kernel_for", served)
        shape_q, shape_k, options = FORMS[form]
        tensors = inputs(shape_q, shape_k)
        self.same(tensors, options)
        assert not served.asked

    @pytest.mark.parametrize("form", FORMS)
    def test_is_what_has_no_better_kernel(self, form: str, served: Served) -> None:
        served.origin = "torch"
        shape_q, shape_k, options = FORMS[form]
        self.same(inputs(shape_q, shape_k), options)
        assert served.asked
        assert not served.launched

    def same(self, tensors: Sequence[Tensor], options: dict[str, Any]) -> None:
        calls = [partial(x, **options) for x in (scaled_dot_product_attention, F.scaled_dot_product_attention)]
        ours, torchs = ([call(*tensors), *gradients(call, tensors)] for call in calls)
        for one, other in zip(ours, torchs, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)

    def test_is_a_nested_tensor(self, served: Served) -> None:
        nested = [
            torch.nested.nested_tensor([normal(2, 5, 16), normal(2, 7, 16)], dtype=torch.bfloat16) for _ in range(3)
        ]
        assert scaled_dot_product_attention(*nested).is_nested
        assert not served.launched

    def test_is_what_autocast_converts(self, served: Served) -> None:
        tensors = inputs((1, 2, 8, 16), (1, 2, 8, 16), torch.float16)
        with torch.autocast("cpu", torch.bfloat16):
            assert scaled_dot_product_attention(*tensors).dtype == torch.bfloat16
            assert not served.launched
            scaled_dot_product_attention(*(x.bfloat16() for x in tensors))
        assert len(served.launched) == 1

    def test_is_what_functorch_transforms(self, served: Served) -> None:
        q, k, v = inputs((3, 1, 2, 8, 16), (3, 1, 2, 8, 16))
        expected = F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(torch.vmap(scaled_dot_product_attention)(q, k, v), expected, rtol=2e-2, atol=2e-2)
        slope = torch.func.grad(lambda q: scaled_dot_product_attention(q, k, v).float().sum())(q)
        assert slope.shape == q.shape
        with pytest.raises(LaunchError, match="functorch"):
            torch.vmap(attention)(q, k, v)
        assert not served.launched

    def test_is_what_has_a_tangent(self, served: Served) -> None:
        tensors = inputs((1, 2, 8, 16), (1, 2, 8, 16), torch.float16)
        with torch.autograd.forward_ad.dual_level():
            q = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))  # type: ignore[no-untyped-call]
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out = scaled_dot_product_attention(q, *tensors[1:])
            assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None  # type: ignore[no-untyped-call]
            with pytest.raises(LaunchError, match="forward-mode"):
                attention(q, *tensors[1:])
        assert not served.launched


class TestKernels:
    def test_are_asked_for_once(self, served: Served) -> None:
        q, k, v = inputs((1, 2, 8, 16), (1, 2, 8, 16))
        for _ in range(3):
            scaled_dot_product_attention(q, k, v)
        assert len(served.asked) == 1
        scaled_dot_product_attention(q.half(), k.half(), v.half())
        scaled_dot_product_attention(q[:, :, :7], k, v)
        scaled_dot_product_attention(q, k, v, is_causal=True)
        scaled_dot_product_attention(q, k, v, scale=2.0)
        assert len(served.asked) == 4
        runtime.forget()
        scaled_dot_product_attention(q, k, v)
        assert len(served.asked) == 5

    def test_with_a_square_mask_are_those_of_the_database(self, served: Served) -> None:
        q, k, v = inputs((1, 2, 8, 16), (1, 2, 9, 16))
        scaled_dot_product_attention(q, k[:, :, :8], v[:, :, :8], is_causal=True)
        scaled_dot_product_attention(q, k, v, is_causal=True)
        assert [problem.causal for problem in served.asked] == ["bottom-right", "top-left"]

    def test_need_no_gpu(self) -> None:
        """Without any stand-in: what a machine without a GPU gives."""
        q, k, v = inputs((1, 2, 30, 16), (1, 2, 30, 16))
        expected = F.scaled_dot_product_attention(q, k, v)
        assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
        assert torch.equal(attention(q, k, v), expected)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
    def test_of_such_a_machine_are_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "DEVICE", "cpu")
        tensors = inputs((1, 2, 30, 16), (1, 2, 30, 16))
        with pytest.warns(tlxgen.FallbackWarning):
            out = scaled_dot_product_attention(*tensors)
        assert torch.equal(out, F.scaled_dot_product_attention(*tensors))


BEYOND: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 30, 16), (2, 2, 30, 16), {}),
    "square": ((2, 4, 30, 16), (2, 2, 30, 16), {"causal": "top-left"}),
    "bottom-right": ((2, 4, 30, 16), (2, 2, 47, 16), {"causal": "bottom-right"}),
    "blind rows": ((2, 4, 47, 16), (2, 2, 30, 16), {"causal": "bottom-right"}),
    "a window": ((1, 4, 47, 16), (1, 2, 47, 16), {"causal": "bottom-right", "window": 9}),
    "a window of one key": ((1, 4, 47, 16), (1, 2, 50, 16), {"causal": "bottom-right", "window": 1}),
    "a window larger than all": ((1, 4, 47, 16), (1, 2, 50, 16), {"causal": "bottom-right", "window": 999}),
    "a window that rows have left": ((1, 2, 47, 16), (1, 2, 20, 16), {"causal": "top-left", "window": 9}),
    "a softcap": ((1, 4, 30, 16), (1, 1, 35, 16), {"softcap": 2.0}),
    "all at once": (
        (1, 4, 47, 16),
        (1, 2, 30, 16),
        {"causal": "bottom-right", "window": 9, "softcap": 2.0, "scale": 0.8},
    ),
    "a negative scale": ((1, 4, 47, 16), (1, 2, 30, 16), {"causal": "bottom-right", "scale": -0.8}),
    "a scale of zero": ((1, 4, 47, 16), (1, 2, 30, 16), {"causal": "bottom-right", "window": 5, "scale": 0.0}),
    "three dimensions": ((4, 30, 16), (2, 35, 16), {"causal": "bottom-right"}),
    "five dimensions": ((2, 1, 4, 30, 16), (2, 1, 2, 35, 16), {"causal": "bottom-right", "softcap": 3.0}),
}


class TestBeyondTorch:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("form", BEYOND)
    def test_results_and_gradients_are_right(self, form: str, dtype: torch.dtype, served: Served) -> None:
        shape_q, shape_k, options = BEYOND[form]
        tensors = inputs(shape_q, shape_k, dtype)
        out, lse = attention(*tensors, **options, return_lse=True)
        exact, exact_lse = by_steps(*(x.double() for x in tensors), **options)
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
        check_gradients(
            lambda q, k, v: attention(q, k, v, **options),
            lambda q, k, v: by_steps(q, k, v, **options)[0],
            lambda q, k, v: by_steps(q, k, v, **options)[0],
            tensors,
        )
        assert len(served.launched) == (1 if form in {"plain", "square"} else 2)

    @pytest.mark.parametrize("needed", ["qkv", "q", "k", "v", "qv"])
    @pytest.mark.parametrize("form", ["plain", "square", "more keys", "fewer keys"])
    def test_torch_differentiates_beside_the_log_sum_exp(self, form: str, needed: str, served: Served) -> None:
        """The kernel has to run for the log-sum-exp; torch's attention is computed once more for the gradients."""
        rows, keys = {"more keys": (20, 33), "fewer keys": (33, 20)}.get(form, (30, 30))
        options: dict[str, Any] = {"causal": "none" if form == "plain" else "top-left"}
        check_gradients(
            lambda q, k, v: attention(q, k, v, **options, return_lse=True)[0],
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=form != "plain", enable_gqa=True),
            lambda q, k, v: by_steps(q, k, v, **options)[0],
            inputs((1, 4, rows, 16), (1, 2, keys, 16)),
            needed,
        )
        assert [problem.lse for problem in served.launched] == [True]

    @pytest.mark.parametrize("form", BEYOND)
    def test_the_flash_backward_has_its_part(self, form: str, flash: list[Sequence[Any]]) -> None:
        shape_q, shape_k, options = BEYOND[form]
        check_gradients(
            lambda q, k, v: attention(q, k, v, **options),
            lambda q, k, v: by_steps(q, k, v, **options)[0],
            lambda q, k, v: by_steps(q, k, v, **options)[0],
            inputs(shape_q, shape_k),
        )
        top_left = options.get("causal") == "top-left" and shape_q[-2] != shape_k[-2]
        takes = not options.get("softcap") and not top_left and options.get("scale", 1.0) > 0
        assert len(flash) == takes

    @pytest.mark.parametrize("form", BEYOND)
    def test_torch_computes_on_a_cpu(self, form: str) -> None:
        shape_q, shape_k, options = BEYOND[form]
        check_gradients(
            lambda q, k, v: attention(q, k, v, **options),
            lambda q, k, v: by_steps(q, k, v, **options)[0],
            lambda q, k, v: by_steps(q, k, v, **options)[0],
            inputs(shape_q, shape_k),
        )

    @pytest.mark.parametrize("form", BEYOND)
    def test_blocks_of_scores_add_up(self, form: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        shape_q, shape_k, options = BEYOND[form]
        tensors = inputs(shape_q, shape_k, torch.float16)
        whole = gradients(lambda q, k, v: attention(q, k, v, **{"softcap": 50.0, **options}), tensors)
        monkeypatch.setattr(attention_backward, "_SCORES", 300)
        in_blocks = gradients(lambda q, k, v: attention(q, k, v, **{"softcap": 50.0, **options}), tensors)
        for one, other in zip(whole, in_blocks, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("form", BEYOND)
    @pytest.mark.parametrize("both", [False, True])
    def test_the_log_sum_exp_has_gradients(self, form: str, both: bool, flash: list[Sequence[Any]]) -> None:
        shape_q, shape_k, options = BEYOND[form]
        tensors = inputs(shape_q, shape_k, torch.float16)

        def total(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out, lse = function(q, k, v)
                lse = lse.masked_fill(torch.isneginf(lse), 0.0)
                return torch.cat([lse.flatten(), out.flatten().to(lse.dtype)] if both else [lse.flatten()])

            return call

        needed = "qkv" if both else "qk"
        mine = gradients(total(lambda q, k, v: attention(q, k, v, **options, return_lse=True)), tensors, needed)
        exact = gradients(total(lambda q, k, v: by_steps(q, k, v, **options)), [x.double() for x in tensors], needed)
        for one, true in zip(mine, exact, strict=True):
            if true is not None:
                assert one is not None
                assert far(one, true) < 2e-3
        assert not flash

    def test_rows_that_see_nothing_have_no_part(self, flash: list[Sequence[Any]]) -> None:
        tensors = [x.requires_grad_() for x in inputs((1, 2, 30, 16), (1, 2, 20, 16))]
        out, lse = attention(*tensors, causal="bottom-right", return_lse=True)
        assert torch.isneginf(lse[:, :, :10]).all()
        assert not out[:, :, :10].any()
        q, k, v = torch.autograd.grad(out[:, :, :10].sum(), tensors, retain_graph=True)
        assert not any(x.any() for x in (q, k, v))
        q, k, v = torch.autograd.grad(out.sum(), tensors)
        assert not q[:, :, :10].any()
        assert q[:, :, 11:].any()
        assert len(flash) == 2

    @pytest.mark.parametrize("form", ["blind rows", "all at once", "a window"])
    def test_second_derivatives_are_right(self, form: str, flash: list[Sequence[Any]]) -> None:
        shape_q, shape_k, options = BEYOND[form]
        tensors = inputs(shape_q, shape_k, torch.float16)
        mine = second_derivatives(lambda q, k, v: attention(q, k, v, **options), tensors)
        exact = second_derivatives(lambda q, k, v: by_steps(q, k, v, **options)[0], [x.double() for x in tensors])
        for one, true in zip(mine, exact, strict=True):
            assert far(one, true) < 5e-3
        assert len(flash) <= 1

    def test_autocast_changes_nothing(self, served: Served) -> None:
        tensors = inputs((1, 2, 30, 16), (1, 2, 20, 16), torch.float16)
        options: dict[str, Any] = {"causal": "bottom-right", "softcap": 2.0}
        plain = gradients(lambda q, k, v: attention(q, k, v, **options), tensors)
        with torch.autocast("cpu", torch.bfloat16):
            cast = gradients(lambda q, k, v: attention(q, k, v, **options), tensors)
            assert attention(*tensors).dtype == torch.float16
        for one, other in zip(plain, cast, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)

    @pytest.mark.parametrize(("shape_q", "shape_k"), [((0, 2, 8, 16), (0, 2, 8, 16)), ((1, 2, 8, 16), (1, 2, 0, 16))])
    @pytest.mark.parametrize("causal", ["none", "bottom-right"])
    def test_nothing_to_see_is_no_error(self, shape_q: Sequence[int], shape_k: Sequence[int], causal: Any) -> None:
        tensors = [x.requires_grad_() for x in inputs(shape_q, shape_k)]
        out, lse = attention(*tensors, causal=causal, return_lse=True)
        assert not out.any()
        assert torch.isneginf(lse).all()
        out.sum().backward()
        assert all(x.grad is not None and not x.grad.any() for x in tensors)

    @pytest.mark.parametrize(
        ("changes", "options", "said"),
        [
            ({"q": normal(2, 2, 8, 16)}, {}, r"q \(2, 2, 8, 16\)"),
            ({"q": normal(1, 2, 8, 24)}, {}, r"q \(1, 2, 8, 24\)"),
            ({"v": normal(1, 2, 9, 16)}, {}, r"v \(1, 2, 9, 16\)"),
            ({"q": normal(8, 16)}, {}, r"\(\.\.\., H, S, D\)"),
            ({"k": normal(1, 2, 8, 16).half()}, {}, "one dtype"),
            ({"q": normal(1, 3, 8, 16)}, {}, "no multiple of kv_heads = 2"),
            ({name: normal(1, 2, 8, 20) for name in "qkv"}, {}, "D = 20"),
            ({name: normal(1, 2, 8, 16).float() for name in "qkv"}, {}, "dtype"),
            ({}, {"window": 3}, "needs causal"),
            ({}, {"causal": "left"}, "causal"),
            ({}, {"softcap": -1.0}, "softcap"),
        ],
    )
    def test_what_no_kernel_is_for_is_refused_by_name(
        self, changes: dict[str, Tensor], options: dict[str, Any], said: str
    ) -> None:
        tensors = {**dict(zip("qkv", inputs((1, 2, 8, 16), (1, 2, 8, 16)), strict=True)), **changes}
        for _ in range(2):
            with pytest.raises(InvalidProblemError, match=said):
                attention(**tensors, **options)

    def test_the_scale_is_a_finite_number(self) -> None:
        tensors = inputs((1, 2, 8, 16), (1, 2, 8, 16))
        with pytest.raises(LaunchError, match="finite"):
            attention(*tensors, scale=math.inf, return_lse=True)


class TestSecondCalls:
    """Of what a kernel took before: whatever could make a difference is looked at again."""

    @pytest.mark.parametrize("form", FORMS)
    def test_give_the_same(self, form: str, served: Served) -> None:
        shape_q, shape_k, options = FORMS[form]
        for _ in range(3):
            with torch.no_grad():
                tensors = inputs(shape_q, shape_k)
                found = scaled_dot_product_attention(*tensors, **options)
                expected = F.scaled_dot_product_attention(*tensors, **options)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
            assert found.shape == expected.shape
        assert len(served.launched) == 3

    def test_of_either_diagonal_are_told_apart(self, served: Served) -> None:
        q, k = normal(2, 3, 16), normal(2, 5, 16)
        first = [attention(q, k, k, causal=causal) for causal in ("none", "top-left", "bottom-right")]
        for _ in range(2):
            for causal, expected in zip(("none", "top-left", "bottom-right"), first, strict=True):
                assert torch.equal(attention(q, k, k, causal=causal), expected)
        assert not torch.equal(first[1], first[2])

    def test_of_each_scale_window_and_softcap_are_told_apart(self, served: Served) -> None:
        q = normal(2, 6, 16)
        ways: list[dict[str, Any]] = [
            {},
            {"scale": 0.5},
            {"scale": -0.5},
            {"scale": 1},
            {"softcap": 1.0},
            {"causal": "bottom-right"},
            {"causal": "bottom-right", "window": 1},
            {"causal": "bottom-right", "window": 2},
        ]
        first = [attention(q, q, q, **way) for way in ways]
        assert len({tuple(one.float().flatten().tolist()) for one in first}) == len(ways)
        for _ in range(2):
            for way, expected in zip(ways, first, strict=True):
                assert torch.equal(attention(q, q, q, **way), expected)

    def test_with_the_log_sum_exp_have_it(self, served: Served) -> None:
        q = normal(2, 2, 6, 16)
        for _ in range(3):
            out, lse = attention(q, q, q, return_lse=True)
            assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 2, 6), torch.float32)
            assert isinstance(attention(q, q, q), Tensor)
        for _ in range(3):
            assert attention(q[0], q[0], q[0], return_lse=True)[1].shape == (2, 6)

    def test_of_wrong_options_are_refused(self, served: Served) -> None:
        q = normal(2, 6, 16)
        for _ in range(3):
            attention(q, q, q, causal="bottom-right", window=1)
            attention(q, q, q, scale=1.0)
        with pytest.raises(InvalidProblemError):
            attention(q, q, q, causal="bottom-right", window=True)
        with pytest.raises(LaunchError):
            attention(q, q, q, scale=True)

    def test_heads_between_rows_stay_there(self, served: Served) -> None:
        for _ in range(3):
            q = normal(2, 6, 3, 16).transpose(1, 2)
            assert attention(q, q, q).stride() == q.stride()

    def test_have_gradients_once_they_are_recorded(self, served: Served) -> None:
        q = normal(2, 6, 16).requires_grad_()
        with torch.no_grad():
            for _ in range(3):
                assert attention(q, q, q).grad_fn is None
                assert scaled_dot_product_attention(q, q, q).grad_fn is None
        assert attention(q, q, q).grad_fn is not None
        assert scaled_dot_product_attention(q, q, q).grad_fn is not None

    def test_know_transforms_and_tangents(self, served: Served) -> None:
        q = normal(2, 6, 16)
        for _ in range(3):
            attention(q, q, q)
        with pytest.raises(LaunchError), torch.autograd.forward_ad.dual_level():
            attention(q, q, q)
        with pytest.raises(LaunchError):
            torch.vmap(lambda x: attention(x, x, x))(normal(4, 2, 6, 16))


class TestCompiled:
    @pytest.mark.slow
    def test_code_leaves_its_graph_for_the_call(self, served: Served) -> None:
        def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = attention(q + 1, k, v, causal="bottom-right", window=3) * scaled_dot_product_attention(
                q, k, v
            )
            return out

        compiled = torch.compile(model, backend="eager")
        tensors = inputs((1, 2, 8, 16), (1, 2, 8, 16))
        for _ in range(2):
            for one, other in zip(gradients(compiled, tensors), gradients(model, tensors), strict=True):
                torch.testing.assert_close(one, other)
        assert len(served.launched) == 4  # attention's

    def test_the_compiler_is_imported_by_those_who_compile(self) -> None:
        script = "import sys, tlxgen.functional; print('torch._dynamo' in sys.modules, 'triton' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "False"]


def test_the_module_comes_with_the_package() -> None:
    assert tlxgen.functional is functional


class TestInPlaceOfTorchs:
    """Programs put the drop-ins where torch's functions are; what goes on to torch must not come back."""

    def test_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        q = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
        expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        monkeypatch.setattr(F, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert torch.equal(out, expected)
        out.sum().backward()  # type: ignore[no-untyped-call]
        eager = tlxgen.get_kernel("attention", (1, 2, 5, 8))
        with torch.no_grad():
            eager(q, q, q)

    def test_products(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, weight = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(5, 4, dtype=torch.bfloat16)
        expected = F.linear(x, weight)
        monkeypatch.setattr(F, "linear", functional.linear)
        monkeypatch.setattr(torch, "matmul", functional.matmul)
        assert torch.equal(F.linear(x, weight), expected)
        assert torch.equal(torch.matmul(x, weight.mT), expected)

    def test_grouped_products(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tokens, weights = torch.randn(4, 8), torch.randn(2, 8, 8)
        offs = torch.tensor([1, 4], dtype=torch.int32)
        expected = F.grouped_mm(tokens, weights, offs=offs)
        monkeypatch.setattr(F, "grouped_mm", functional.grouped_mm)
        assert torch.equal(F.grouped_mm(tokens, weights, offs=offs), expected)
