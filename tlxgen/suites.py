"""Suites: YAML files of the shapes that an operator's speed is judged by (`benchmarks/suites`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlxgen import ops, paths
from tlxgen.errors import InvalidProblemError, TlxgenError
from tlxgen.problem import Problem


def problems(suite: str | Path) -> list[Problem]:
    """The problems of a suite, in the order of the file.

    Args:
        suite: a YAML file, or the name of one that comes with tlxgen, such as `gemm`.

    Raises:
        InvalidProblemError: there is no such file, it holds no suite, or a shape of it makes no problem.
    """
    path = Path(suite)
    if path.suffix not in (".yaml", ".yml"):
        path = paths.SUITES / f"{suite}.yaml"
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        operator, common, shapes = ops.get(content["operator"]), content.get("options", {}), content["shapes"]
        return [_problem(operator, shape["sizes"], {**common, **shape.get("options", {})}) for shape in shapes]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TlxgenError, KeyError, TypeError, AttributeError) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidProblemError(f"suite {path} cannot be read: {told}") from None


def _problem(operator: Any, shape: Any, options: dict[str, Any]) -> Problem:
    made: Problem = operator.problem(shape, **options)
    return made
