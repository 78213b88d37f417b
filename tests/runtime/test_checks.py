"""Which tensors a function in place of torch's hands to a kernel; `tests/test_functional*.py` has whole calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tlxgen import functional
from tlxgen.runtime import checks


class Loud(Tensor):
    """A subclass, which may say something else of itself."""


def matrix() -> Tensor:
    return torch.ones(4, 4, dtype=torch.float16)


REFUSED: dict[str, Any] = {
    "a number": lambda: 3.0,
    "a subclass": lambda: matrix().as_subclass(Loud),
    "nested": lambda: torch.nested.nested_tensor([matrix(), matrix()], layout=torch.jagged),
    "sparse": lambda: matrix().to_sparse(),
    "negated": lambda: torch._neg_view(matrix()),
    "the imaginary part of a conjugate": lambda: torch.ones(4, 4, dtype=torch.complex32).conj().imag,
    "on another device": lambda: matrix().to("meta"),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEVICE", "cpu")


@pytest.mark.parametrize("kind", REFUSED)
def test_kernels_see_plain_memory_alone(kind: str) -> None:
    tensor = REFUSED[kind]()
    assert not checks.seen(tensor)
    assert not checks.seen(matrix(), tensor)
    assert not checks.seen(tensor, matrix())


@pytest.mark.parametrize(
    "tensor",
    [matrix(), torch.nn.Parameter(matrix()), matrix().mT[1:], matrix()[:1].expand(4, 4), matrix()[:0]],
    ids=["as made", "a parameter", "a transposed slice", "expanded", "empty"],
)
def test_strides_are_the_kernels_to_judge(tensor: Tensor) -> None:
    assert checks.seen(matrix(), tensor)


def test_tensors_on_the_cpu_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not checks.seen(matrix())


@pytest.mark.parametrize("kind", ["negated", "the imaginary part of a conjugate"])
def test_torch_computes_what_kernels_do_not_see(kind: str) -> None:
    given = REFUSED[kind]()
    assert torch.equal(functional.matmul(given, matrix()), torch.matmul(given, matrix()))
