"""Operators of `torch.library` on the card: what torch asks of them, and graphs by torch's own compiler around them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.operator_cases import ARGUMENTS, GRAPHS, LENGTHS, check
from tlxgen.runtime import kernel, plans

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels that were launched, which must not have been replayed, by module."""
    names: list[str] = []
    launch = plans.KernelPlan.launch

    def note(plan: plans.KernelPlan, *rest: Any) -> None:
        names.append(plan._module.__name__)
        launch(plan, *rest)

    monkeypatch.setattr(plans.KernelPlan, "launch", note)
    kernel.forget()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kernel.FallbackWarning)
        yield names


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name: str) -> None:
    check(name, "cuda", 2e-2)  # torch's flash-attention backward adds in any order


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_torchs_compiler_run_the_kernels(name: str, dynamic: bool, launched: list[str]) -> None:
    graph = GRAPHS[name]
    outputs = graph.outputs(graph.compiled(dynamic=dynamic), "cuda")
    # Looked at before gradients and the function itself launch theirs.
    assert sum(graph.template in module for module in launched) >= len(LENGTHS), launched
    graph.check(outputs, "cuda")
