"""Problems of any operator, for tests that hold for all of them."""

from __future__ import annotations

from typing import Any

from tlxgen.devices import target
from tlxgen.ops.base import Operator
from tlxgen.space.candidates import favourite


def small_problem(operator: Operator[Any]) -> Any:
    """A problem of a few tiles: one that the operator's plain Triton kernel is simulated on."""
    problem = operator.problem(operator.examples[0])
    (config,) = favourite(problem, target("h200"), operator.templates[-1])
    return operator.small_cases(problem, config)[1].problem
