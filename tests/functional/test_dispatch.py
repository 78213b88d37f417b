"""Who took a call is asked of tensors, options, pins and modes: what may change the answer is part of the question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tlxgen
from tlxgen import ops
from tlxgen.devices import target
from tlxgen.functional.dispatch import CallCache
from tlxgen.runtime import kernel
from tlxgen.runtime.caches import CACHES
from tlxgen.space.candidates import candidates


@pytest.fixture
def taken() -> Iterator[CallCache[str]]:
    """One that `forget` forgets only while the test runs."""
    made: CallCache[str] = CallCache("gemm")
    yield made
    CACHES[:] = [kept for kept in CACHES if kept is not made._found]


def ab() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 32, dtype=torch.bfloat16), torch.zeros(32, 16, dtype=torch.bfloat16)


def test_calls_alike_are_known(taken: CallCache[str]) -> None:
    assert taken.get("matmul", ab()) is None
    taken.keep("matmul", ab(), "kernel")
    assert taken.get("matmul", ab()) == "kernel"
    assert taken.get("linear", ab()) is None


def test_others_are_not(taken: CallCache[str]) -> None:
    a, b = ab()
    taken.keep("matmul", (a, b), "kernel")
    others: list[Any] = [
        (a[:4], b),
        (a, b.half()),
        (a, torch.zeros(16, 32, dtype=torch.bfloat16).T),
        (a, b, b),
        (a.tolist(), b),
        (a.clone().requires_grad_(), b),
        (torch.nested.nested_tensor([a, a]), b),
        (torch.nn.Parameter(a, requires_grad=False), b),
    ]
    assert [taken.get("matmul", other) for other in others] == [None] * len(others)


def test_ways_to_lie_are_told_apart(taken: CallCache[str]) -> None:
    a, b = ab()
    other = torch.zeros(16, 32, dtype=torch.bfloat16).T
    taken.keep("matmul", (a, b), "nn")
    taken.keep("matmul", (a, other), "nt")
    assert [taken.get("matmul", (a, x)) for x in (b, other, b)] == ["nn", "nt", "nn"]


def test_parameters_are_known_without_gradients_alone(taken: CallCache[str]) -> None:
    a, b = ab()
    weight = torch.nn.Parameter(b)
    with torch.no_grad():
        taken.keep("matmul", (a, weight), "kernel")
        assert taken.get("matmul", (a, weight)) == "kernel"
    assert taken.get("matmul", (a, weight)) is None


def test_a_pin_asks_anew(taken: CallCache[str]) -> None:
    problem = ops.get("gemm").problem((8, 16, 32))
    one, other, *_ = candidates(problem, target("h200"))
    taken.keep("matmul", ab(), "default")
    for config in (one, other):
        with tlxgen.pin("gemm", config):
            assert taken.get("matmul", ab()) is None
            taken.keep("matmul", ab(), config.short)
            assert taken.get("matmul", ab()) == config.short
    assert taken.get("matmul", ab()) is None


def test_modes_are_not_taken_for_their_absence(taken: CallCache[str]) -> None:
    a, b = ab()
    taken.keep("matmul", (a, b), "kernel")
    with torch.autocast("cpu", dtype=torch.float16):
        assert taken.get("matmul", (a, b)) is None
    with torch.autograd.forward_ad.dual_level():
        assert taken.get("matmul", (a, b)) is None
    assert not torch.vmap(lambda x: x + (taken.get("matmul", (a, b)) is not None))(a).any()
    assert taken.get("matmul", (a, b)) == "kernel"


def test_nothing_is_kept_in_modes(taken: CallCache[str]) -> None:
    """Autocast to bf16 now may be autocast to fp16 the next time."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        taken.keep("matmul", ab(), "kernel")
        assert taken.get("matmul", ab()) is None
    with torch.autograd.forward_ad.dual_level():
        taken.keep("matmul", ab(), "kernel")
    assert taken._found == {}


def test_all_is_forgotten_with_the_kernels(taken: CallCache[str]) -> None:
    taken.keep("matmul", ab(), "kernel")
    kernel.forget()
    assert taken.get("matmul", ab()) is None


def test_it_does_not_grow_without_end(taken: CallCache[str]) -> None:
    b = ab()[1]
    for rows in range(1, 4200):
        taken.keep("matmul", (torch.empty(rows, 32, dtype=torch.bfloat16, device="meta"), b), "kernel")
    assert len(taken._found) <= 4096
    for pitch in range(32, 64):
        taken.keep("matmul", (torch.empty(8, pitch, device="meta")[:, :32], b), "kernel")
    assert max(map(len, taken._found.values())) <= 8
