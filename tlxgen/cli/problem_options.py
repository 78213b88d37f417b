"""Command-line arguments that describe a problem: sizes, and an option for every field of the operators' Problems."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import typer

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.problem import Problem

#: Fields of a problem given on the command line; a command declares one parameter `options` of this type.
Options: TypeAlias = dict[str, Any]

OPERATORS_HELP = f"One of {', '.join(ops.NAMES)}."


def sizes_help() -> str:
    """Help text: the sizes of every operator, in order."""
    return f"Sizes: {', '.join(' '.join([name, *_problem_type(name).sizes]) for name in ops.NAMES)}."


def takes_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each field of the operators' Problems to a command, which receives them as `options`."""
    hints = get_type_hints(command, include_extras=True)
    made = {option.name: option for option in _options()}
    own = [
        parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "options"
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in made}
        command(**given, options={n: value for n, value in values.items() if value is not None and value is not False})

    parameters = [*own, *made.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parse(operator: str, sizes: Sequence[str], options: Mapping[str, Any]) -> Problem:
    """The Problem that the command line describes.

    Raises:
        InvalidProblemError: a size is not a positive integer, or an option does not fit the operator.
    """
    numbers = [_size(operator, word) for word in sizes]
    problem = ops.get(operator).problem(numbers, **options)
    assert isinstance(problem, Problem)
    return problem


def _size(operator: str, word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        raise InvalidProblemError(f"{operator}: size {word!r} is not a whole number") from None
    if number < 1:
        raise InvalidProblemError(f"{operator}: size {word} must be at least 1")
    return number


def _options() -> Iterator[inspect.Parameter]:
    """A parameter for each field that is not a size."""
    fields: dict[str, dict[str, Any]] = {}  # name → operator → pydantic's description of the field
    for operator in ops.NAMES:
        problem = _problem_type(operator)
        for name, field in problem.model_fields.items():
            if name not in problem.sizes:
                fields.setdefault(name, {})[operator] = field
    for name, by_operator in fields.items():
        kind = _kind(next(iter(by_operator.values())).annotation)
        option = typer.Option(f"--{name.replace('_', '-')}", help=_help(by_operator), rich_help_panel="Problem")
        default, annotation = (False, bool) if kind is bool else (None, kind | None)
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
        )


def _kind(annotation: Any) -> type:
    """Type that the option's argument is converted to."""
    return annotation if annotation in (bool, int, float) else str


def _help(by_operator: Mapping[str, Any]) -> str:
    """Help text of a field; operators with the same description share it."""
    operators: dict[str, list[str]] = {}
    for operator, field in by_operator.items():
        operators.setdefault(_meaning(field), []).append(operator)
    if list(operators.values()) == [list(ops.NAMES)]:
        return next(iter(operators))
    return " ".join(f"{', '.join(names)}: {meaning}" for meaning, names in operators.items())


def _meaning(field: Any) -> str:
    """The field's description and, if it is a Literal, its choices."""
    choices = ", ".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else ""
    description = (field.description or "").removesuffix(".")
    return f"{': '.join(part for part in (description, choices) if part)}."


def _problem_type(operator: str) -> type[Problem]:
    problem_type = ops.get(operator).problem_type
    assert issubclass(problem_type, Problem)
    return problem_type
