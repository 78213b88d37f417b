"""The table of operators of `torch.library` on the CPU, as if that had kernels; tests/gpu has it for the card."""

from __future__ import annotations

import pytest
import torch

from tests.support.operator_cases import ARGUMENTS, GRAPHS, check

pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "scaled_grouped_mm"])
def test_opcheck(name: str) -> None:
    check(name, "cpu")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_give_what_functions_give(name: str, dynamic: bool) -> None:
    graph = GRAPHS[name]
    graph.check(graph.outputs(graph.compiled(dynamic=dynamic, backend="aot_eager"), "cpu"), "cpu")


def test_every_operator_is_in_the_table() -> None:
    names = (name.split(".")[0].split("::") for name in torch._C._dispatch_get_all_op_names())
    found = {name for space, name in names if space == "tlxgen"}
    assert {operator for operator, _ in ARGUMENTS.values()} == found
