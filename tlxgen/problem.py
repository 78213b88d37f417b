"""`Problem`: the base class of what operators compute; names and sizes of dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from tlxgen.errors import InvalidProblemError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

DType = Literal["bf16", "fp16", "fp32"]

#: Bytes of one element.
ITEM_BYTES: dict[str, int] = {"e4m3": 1, "bf16": 2, "fp16": 2, "fp32": 4}

_TORCH_NAMES = {"e4m3": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ALIASES = {
    "float8_e4m3fn": "e4m3",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "tf32": "fp32",
}


class Problem(BaseModel):
    """One operator applied to one shape; frozen and hashable.

    Subclasses add the fields; all of them are part of the cache key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    operator: ClassVar[str]
    #: Fields that are sizes, in the order of the command line.
    sizes: ClassVar[tuple[str, ...]]
    #: Further fields that a kernel takes as arguments, so that its code does not depend on them.
    extents: ClassVar[tuple[str, ...]] = ()
    #: Sizes and extents that emitted code depends on only by divisibility by 16, each with its weight per octave in the
    #: distance of problems (`tlxgen.db.nearest`). Without any, a problem has no neighbours.
    lengths: ClassVar[Mapping[str, float]] = {}
    #: Lengths that change from call to call, such as batches and sequences, each with the largest power of two whose
    #: divisibility matters to a kernel (`tlxgen.space.size_classes`).
    running: ClassVar[Mapping[str, int]] = {}
    #: Fields whose values stand in a label without their names, after the sizes.
    label_fields: ClassVar[tuple[str, ...]] = ("dtype",)

    @field_validator("dtype", "out_dtype", mode="before", check_fields=False)
    @classmethod
    def _short_name(cls, value: Any) -> Any:
        return dtype_name(value)

    @property
    def empty(self) -> bool:
        """Whether a size is zero: nothing to tune, and torch computes."""
        return any(getattr(self, size) == 0 for size in self.sizes)

    def settled(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Rounded running lengths, made consistent with each other; unchanged by default."""
        return dict(lengths)

    @property
    def label(self) -> str:
        """The problem in one line of text, such as `vector_add 1048576 bf16`.

        Operator, sizes, the dtype, and `name=value` for every other field that differs from its default.
        """
        sizes = [getattr(self, name) for name in self.sizes]
        given = {name: getattr(self, name) for name in self.label_fields}
        words = [self.operator, *map(str, sizes), *map(str, given.values())]
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in self.sizes or name in given:
                continue
            if value != _default(type(self), name, sizes, given):
                words.append(f"{name}={int(value) if isinstance(value, bool) else value}")
            given[name] = value
        return " ".join(words)

    @classmethod
    def from_label(cls, label: str) -> Self:
        """The problem that has this label.

        Raises:
            InvalidProblemError: there is none.
        """
        words = label.split()[1:]
        count, positional = len(cls.sizes), iter(cls.label_fields)
        fields: dict[str, Any] = {}
        for word in words[count:]:
            name, equals, value = word.partition("=")
            if not equals:
                fields[next(positional, word)] = word
                continue
            name = "out_dtype" if name == "out" else name
            fields[name] = _parsed(cls, name, value)
        return parse_problem(cls, [int(word) if word.isdecimal() else word for word in words[:count]], fields)


def dtype_name(dtype: Any) -> str:
    """The short name of a dtype given as a `torch.dtype` or as a string.

    >>> dtype_name("bfloat16"), dtype_name("fp16")
    ('bf16', 'fp16')

    Unknown names are returned unchanged; the Problem refuses them.
    """
    name = str(dtype).removeprefix("torch.")
    return _ALIASES.get(name, name)


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The `torch.dtype` of a short name."""
    import torch

    dtype = getattr(torch, _TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


P = TypeVar("P", bound=Problem)


def parse_problem(
    problem_type: type[P],
    shape: Any,
    options: Mapping[str, Any],
) -> P:
    """A Problem from what callers pass: the Problem itself, its sizes in order, or its fields by name.

    Raises:
        InvalidProblemError: one line that names the argument, the value and the rule.
    """
    if isinstance(shape, problem_type):
        if not options:
            return shape
        fields = {name: value for name, value in shape.model_dump().items() if name not in options}
    elif isinstance(shape, Mapping):
        fields = dict(shape)
    elif not isinstance(shape, Iterable):
        raise InvalidProblemError(f"{problem_type.operator}: shape {shape!r} is neither sizes, fields nor a Problem")
    else:
        sizes, given = problem_type.sizes, tuple(shape)
        if len(given) != len(sizes):
            raise InvalidProblemError(f"{problem_type.operator} takes sizes {' '.join(sizes)}, got {given}")
        fields = dict(zip(sizes, given, strict=True))
    try:
        return problem_type(**fields, **options)
    except ValidationError as error:
        raise InvalidProblemError(_one_line(problem_type.operator, error)) from None
    except TypeError as error:  # a field given twice
        raise InvalidProblemError(f"{problem_type.operator}: {error}") from None


def _default(problem_type: type[Problem], name: str, sizes: list[int], given: Mapping[str, Any]) -> Any:
    """The default of a field, given sizes and other fields; None if those make no problem."""
    try:
        return getattr(parse_problem(problem_type, sizes, given), name)
    except InvalidProblemError:
        return None


def _parsed(problem_type: type[Problem], name: str, word: str) -> Any:
    """A word of a label converted to the field's type, or the word itself if it cannot be."""
    field = problem_type.model_fields.get(name)
    kind: Any = None if field is None else field.annotation
    try:
        return bool(int(word)) if kind is bool else kind(word) if kind in (int, float) else word
    except ValueError:
        return word


def _one_line(operator: str, error: ValidationError) -> str:
    """The first error, such as `gemm: M = 0: Input should be greater than 0`."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{operator} has no field {name!r}"
    if first["type"] == "missing":
        return f"{operator} needs {name}"
    told = re.search(rf"\b{re.escape(name)}\b", message) is not None
    return f"{operator}: {message}" if told else f"{operator}: {name} = {first['input']!r}: {message}"
