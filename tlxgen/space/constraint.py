"""Constraints of search spaces: expressions that must hold, each with its reason.

The language is a subset of Python's expressions: arithmetic, comparisons, `and`/`or`/`not`, `a if b else c`,
`x in (1, 2)` and a few functions. Anything else is refused when the expression is parsed; `simpleeval` evaluates it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import simpleeval
from pydantic import BaseModel, ConfigDict, Field, StrictStr, model_validator

from tlxgen.errors import InvalidConfigError


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


#: Functions that expressions may call; `ceil_div(a, b)` is a / b rounded up.
FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil_div": _ceil_div}
_OPERATORS = {
    kind: simpleeval.DEFAULT_OPERATORS[kind]
    for kind in (
        *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.Not),
        *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    )
}
_SYNTAX = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.IfExp, ast.Call),
    *(ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
)


class Constraint(BaseModel):
    """An expression that must hold, and the reason why."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    require: StrictStr = Field(min_length=1)
    why: StrictStr = Field(min_length=1)

    @cached_property
    def expression(self) -> ast.expr:
        """The parsed expression, cached."""
        return _parse(self.require)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that the expression reads."""
        nodes = [node for node in ast.walk(self.expression) if isinstance(node, ast.Name)]
        return frozenset(node.id for node in nodes) - FUNCTIONS.keys()

    def shown(self, values: Mapping[str, Any]) -> str:
        """The values that the expression reads, as `name=value` pairs."""
        return ", ".join(f"{name}={values[name]}" for name in sorted(self.names)) or "no variables"

    @model_validator(mode="after")
    def _parses(self) -> Constraint:
        _ = self.expression  # malformed expressions are refused when the file is read
        return self


def _parse(text: str) -> ast.expr:
    """The syntax tree of an expression.

    Raises:
        ValueError: it is not an expression of this language.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression: {error.msg}") from None
    for node in ast.walk(tree):
        known = not isinstance(node, ast.Call) or (
            isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        )
        if not known or not (isinstance(node, _SYNTAX) or type(node) in _OPERATORS):
            allowed = f"arithmetic, comparisons, and/or/not, if-else, `in` and {', '.join(sorted(FUNCTIONS))}"
            raise ValueError(f"{text!r} uses {type(node).__name__}; constraints are made of {allowed}")
    return tree


class Evaluator:
    """Evaluates the constraints of one template and caches results by the values they read. Not thread-safe.

    Args:
        template: its name, for error messages.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        # Compound types are needed for `x in (64, 128)`.
        self._eval: Any = simpleeval.EvalWithCompoundTypes(operators=_OPERATORS, functions=FUNCTIONS.copy())
        self._known: dict[tuple[Any, ...], bool] = {}  # thousands of configs agree in what a constraint reads

    def first_violated(self, constraints: Sequence[Constraint], values: dict[str, Any]) -> Constraint | None:
        """The first constraint that does not hold, or None.

        Raises:
            InvalidConfigError: an expression has no value, such as a division by zero.
        """
        for constraint in constraints:
            read = (constraint.require, *(values.get(name) for name in constraint.names))
            holds = self._known.get(read)
            if holds is None:
                holds = self._known[read] = self._holds(constraint, values)
            if not holds:
                return constraint
        return None

    def _holds(self, constraint: Constraint, values: dict[str, Any]) -> bool:
        self._eval.names = values
        try:
            return bool(self._eval.eval(constraint.require, previously_parsed=constraint.expression))
        except (ArithmeticError, TypeError, ValueError, simpleeval.InvalidExpression) as error:
            raise InvalidConfigError(
                f"search space {self._template}: {constraint.require!r} has no value at "
                f"{constraint.shown(values)}: {error}; guard it with `... if ... else ...`"
            ) from error
