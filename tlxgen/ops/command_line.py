"""The command line that describes a problem: Problem → text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.problem import Problem


def command(verb: str, problem: Problem) -> str:
    """The command line for a problem, with the options that differ from their defaults.

    >>> command("tune", ops.get("gemm").problem((512, 512, 64), dtype="fp16", epilogue="bias"))
    'tlxgen tune gemm 512 512 64 --dtype fp16 --epilogue bias'
    """
    sizes = [getattr(problem, name) for name in problem.sizes]
    words = ["tlxgen", verb, problem.operator, *map(str, sizes)]
    for name, value in _options(problem, sizes).items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    return " ".join(words)


def _options(problem: Problem, sizes: list[int]) -> dict[str, Any]:
    """Options that differ from their defaults; a default may depend on fields before it."""
    fields: Mapping[str, Any] = problem.model_dump(exclude=set(problem.sizes))
    options: dict[str, Any] = {}
    try:
        for name, value in fields.items():
            if getattr(ops.get(problem.operator).problem(sizes, **options), name) != value:
                options[name] = value
    except InvalidProblemError:  # the sizes alone, or some of the options, make no problem
        return {name: value for name, value in fields.items() if value}
    return options
