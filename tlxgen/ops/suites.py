"""Suites: YAML files that list an operator and shapes to tune and benchmark (`benchmarks/suites`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
        InvalidProblemError: the file is missing or malformed, or a shape is invalid.
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


def part(listed: Iterable[Problem], words: Sequence[str]) -> list[Problem]:
    """The problems whose labels contain each of these phrases, such as `8 8192` or `zipf`.

    Whole words are compared, and `=` and `+` separate words: `gather` matches `form=gather`, `8192` not `81920`.
    """
    return [one for one in listed if all(_spaced(some) in _spaced(one.label) for some in words)]


def _spaced(text: str) -> str:
    """The words of a text, each with a space on either side."""
    return " ".join(["", *re.findall(r"[^\s=+]+", text), ""])


def _problem(operator: Any, shape: Any, options: dict[str, Any]) -> Problem:
    made: Problem = operator.problem(shape, **options)
    return made
