"""Each operator of `torch.library` with arguments, and a function that compilers turn into a graph around it.

Shared by tests on the CPU, where torch computes behind the operators, and those on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlxgen import functional, ops
from tlxgen.functional.attention_call import CALLER, GRADIENTS, NOBODY

#: What stands in graphs for a function of `tlxgen.functional`.
varlen_attn: Any = functional.varlen_attn  # which registers its operators when it is asked for

#: Of 8-bit floats torch asks for no schema: it compares by arithmetic that they do not have.
_WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

E, K, N = 3, 64, 48


class Maker:
    """Tensors on a device: each another, all of them the same each time."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, grad: bool = True) -> Tensor:
        """bf16, from a normal distribution."""
        made = torch.randn(shape, generator=self._generator).bfloat16().to(self.device)
        return made.requires_grad_(grad)

    def ends(self, *lengths: int) -> Tensor:
        """Where sequences of these lengths begin and end."""
        return torch.tensor([0, *lengths], device=self.device).cumsum(0, dtype=torch.int32)


def _attention(make: Maker, lse_for: int) -> tuple[Any, ...]:
    q, k, v = make.normal(2, 4, 24, 64), make.normal(2, 2, 40, 64), make.normal(2, 2, 40, 64)
    return q, k, v, "bottom-right", 8, 0.0, 0.3, lse_for


def _attention_backward(make: Maker) -> tuple[Any, ...]:
    *tensors, causal, window, softcap, scale, _ = _attention(make, CALLER)
    q, k, v = (tensor.detach() for tensor in tensors)
    options = (causal, window, softcap, scale, CALLER)
    out, lse = torch.ops.tlxgen.attention(q, k, v, *options)
    return out, None, q, k, v, out, lse, *options


def _packed(make: Maker, rows: int = 0) -> tuple[Any, ...]:
    q, k, v = make.normal(23 + rows, 4, 64), make.normal(26 + rows, 2, 64), make.normal(26 + rows, 2, 64)
    return q, k, v, make.ends(7, 3, 0, 13 + rows), make.ends(9, 5, 2, 10 + rows), 13 + rows, 10 + rows


def _packed_backward(make: Maker) -> tuple[Any, ...]:
    call = [x.detach() if isinstance(x, Tensor) else x for x in _packed(make)]
    out, lse = torch.ops.tlxgen.attention_varlen(*call, True, 4, None, CALLER)
    return out, None, out, lse, *call, True, 4, None


def _grouped(make: Maker, tokens: int = 40) -> tuple[Any, ...]:
    return make.normal(tokens, K), make.normal(E, K, N), make.ends(13, 0, tokens - 13)[1:]


def _weights_gradient(make: Maker) -> tuple[Any, ...]:
    return make.normal(K, 40), make.normal(40, N), make.ends(13, 0, 27)[1:]


def _scaled(make: Maker) -> tuple[Any, ...]:
    problem = ops.get("grouped_gemm").problem((E, 40, N, K), dtype="e4m3")
    inputs = ops.get("grouped_gemm").inputs(problem, make.device, 0)
    return tuple(inputs[name] for name in ("a", "b", "scale_a", "scale_b", "offs"))


def _combined(make: Maker) -> tuple[Any, ...]:
    place = torch.arange(39, -1, -1, dtype=torch.int32, device=make.device)
    ids = torch.arange(40, device=make.device).view(20, 2) % E
    weights = make.normal(20, 2, grad=False).float()
    return make.normal(40, K, grad=False), place, weights, ids, E, make.normal(1, grad=False)


#: Name of the operator → its arguments, in each form that has a path of its own.
ARGUMENTS: dict[str, tuple[str, Callable[[Maker], tuple[Any, ...]]]] = {
    "gemm": ("gemm", lambda make: (make.normal(24, K), make.normal(N, K).mT, None)),
    "gemm with a bias": ("gemm", lambda make: (make.normal(24, K), make.normal(K, N), make.normal(N))),
    "attention": ("attention", lambda make: _attention(make, NOBODY)),
    "attention for gradients": ("attention", lambda make: _attention(make, GRADIENTS)),
    "attention and lse": ("attention", lambda make: _attention(make, CALLER)),
    "attention_backward": ("attention_backward", _attention_backward),
    "attention_varlen": ("attention_varlen", lambda make: (*_packed(make), True, 0, None, NOBODY)),
    "attention_varlen for gradients": ("attention_varlen", lambda make: (*_packed(make), False, 0, 0.2, GRADIENTS)),
    "attention_varlen and lse": ("attention_varlen", lambda make: (*_packed(make), True, 4, None, CALLER)),
    "attention_varlen_backward": ("attention_varlen_backward", _packed_backward),
    "grouped_mm": ("grouped_mm", lambda make: (*_grouped(make), "")),
    "grouped_mm of weights' gradients": ("grouped_mm", lambda make: (*_weights_gradient(make), "")),
    "grouped_mm, gated": ("grouped_mm", lambda make: (*(x.detach() for x in _grouped(make)), "silu")),
    "scaled_grouped_mm": ("scaled_grouped_mm", _scaled),
    "moe_combine": ("moe_combine", _combined),
    "vector_add": ("vector_add", lambda make: (make.normal(24, K), make.normal(24, K))),
}


def check(name: str, device: str, tolerance: float | None = None) -> None:
    """`torch.library.opcheck`: schema, fake tensors with the right strides, gradients registered, traced as run."""
    operator, arguments = ARGUMENTS[name]
    options: dict[str, Any] = {"test_utils": _WITHOUT_SCHEMA} if operator == "scaled_grouped_mm" else {}
    options |= {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
    torch.library.opcheck(getattr(torch.ops.tlxgen, operator), arguments(Maker(device)), **options)


#: That a function is called for, in this order.
LENGTHS = (40, 56, 72)


@dataclass(frozen=True)
class Output:
    """A result, and the tensors that it has gradients for."""

    result: Tensor
    leaves: list[Tensor]

    def gradients(self) -> tuple[Tensor, ...]:
        """Of the sum of the result, each element weighted by another number."""
        weights = torch.linspace(-1, 1, self.result.numel(), device=self.result.device).view(self.result.shape)
        return torch.autograd.grad((self.result.float() * weights).sum(), self.leaves)


@dataclass(frozen=True)
class Graph:
    """A function to be compiled, with what is fused around a call, and its tensors for a length.

    Attributes:
        template: how the names of its operator's templates begin.
        function: the function.
        tensors: its arguments.
    """

    template: str
    function: Callable[..., Tensor]
    tensors: Callable[[Maker, int], tuple[Any, ...]]

    def compiled(self, **options: Any) -> Callable[..., Tensor]:
        """The function as one graph."""
        made: Callable[..., Tensor] = torch.compile(self.function, fullgraph=True, **options)
        return made

    def outputs(self, function: Callable[..., Tensor], device: str) -> list[Output]:
        """What this one, or the same compiled, gives for some lengths."""
        return [self._output(function, self.tensors(Maker(device), length)) for length in LENGTHS]

    def _output(self, function: Callable[..., Tensor], tensors: tuple[Any, ...]) -> Output:
        leaves = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
        return Output(function(*tensors), leaves)

    def check(self, outputs: Sequence[Output], device: str) -> None:
        """Whether these are the results of the function itself, and have its gradients."""
        for one, other in zip(outputs, self.outputs(self.function, device), strict=True):
            assert far(one.result, other.result) < 2e-2
            gradients = zip(one.gradients(), other.gradients(), strict=True)
            assert [far(*both) < 3e-2 for both in gradients] == [True] * len(one.leaves)


def far(result: Tensor, exact: Tensor) -> float:
    """Relative distance."""
    return float((result.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


GRAPHS: dict[str, Graph] = {
    "gemm": Graph(
        "gemm",
        lambda x, weight, bias: functional.linear(x * 2, weight, bias).relu(),
        lambda make, rows: (make.normal(rows, K), make.normal(N, K), make.normal(N)),
    ),
    "attention": Graph(
        "attention",
        lambda q, k, v: functional.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1,
        lambda make, rows: tuple(make.normal(2, 4, rows, 64) for _ in range(3)),
    ),
    "grouped_mm": Graph(
        "grouped_gemm",
        lambda a, b, offs: functional.grouped_mm(a * 2, b, offs=offs).relu(),
        _grouped,
    ),
    "attention_varlen": Graph(
        "attention_varlen",
        lambda q, *rest: varlen_attn(q * 2, *rest, window_size=(-1, 0), enable_gqa=True) + 1,
        _packed,
    ),
    "vector_add": Graph(
        "vector_add",
        lambda x, y: functional.add(x * 2, y).relu(),
        lambda make, rows: (make.normal(rows, K), make.normal(rows, K)),
    ),
}
