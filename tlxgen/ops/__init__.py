"""The operators, by name. Each lives in a module of its own that is imported on first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from tlxgen.errors import InvalidProblemError
from tlxgen.ops.base import Operator
from tlxgen.startup import collector, plugins

#: Name on the command line and in `get_kernel` → module.
NAMES: tuple[str, ...] = ("gemm", "grouped_gemm", "attention", "attention_varlen", "vector_add")


@cache
def get(name: str) -> Operator[Any]:
    """The operator called `name`.

    Raises:
        InvalidProblemError: there is none.
    """
    if name not in NAMES:
        raise InvalidProblemError(f"operator {name!r} is not known; use one of {', '.join(NAMES)}")
    with collector.paused(), plugins.spared():  # its problem is a model of pydantic's
        operator = import_module(f"tlxgen.ops.{name}.operator").OPERATOR
    assert isinstance(operator, Operator)
    return operator
