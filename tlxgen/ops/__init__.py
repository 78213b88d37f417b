"""Operators: the registry of their names, one package for each, and what they share."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from tlxgen.errors import InvalidProblemError
from tlxgen.ops.base import Operator
from tlxgen.startup import collector, plugins

#: Registered operators; each is a package here, imported on first use.
NAMES: tuple[str, ...] = ("gemm", "grouped_gemm", "attention", "attention_varlen", "vector_add")


@cache
def get(name: str) -> Operator[Any]:
    """The operator called `name`.

    Raises:
        InvalidProblemError: there is none.
    """
    if name not in NAMES:
        raise InvalidProblemError(f"operator {name!r} is not known; use one of {', '.join(NAMES)}")
    with collector.paused(), plugins.spared():  # defining a pydantic model looks for plugins
        operator = import_module(f"tlxgen.ops.{name}.operator").OPERATOR
    assert isinstance(operator, Operator)
    return operator
