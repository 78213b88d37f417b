"""What is to be computed: the base of every operator's Problem, and the dtypes that problems speak of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

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
    """One operator applied to one shape: frozen, hashable, and the same in every process.

    Subclasses add the fields; all of them are part of the cache key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    operator: ClassVar[str]
    #: The fields that are sizes, in the order of the command line.
    sizes: ClassVar[tuple[str, ...]]
    #: The fields that a kernel takes as arguments, so that its code does not depend on them; `sizes` are such.
    extents: ClassVar[tuple[str, ...]] = ()
    #: The sizes and extents of which emitted code knows no more than whether 16 divides them, each with what an octave
    #: of it counts when problems are compared (`tlxgen.db.nearest`). An operator that names none has no neighbours.
    lengths: ClassVar[Mapping[str, float]] = {}
    #: Those lengths that change from call to call, such as batches and sequences, each with the largest power of two of
    #: which it matters to a kernel whether it divides them (`tlxgen.space.size_classes`).
    running: ClassVar[Mapping[str, int]] = {}
    #: The fields that follow in a label, in order, as far as it has them; `out=` names the output's dtype.
    label_fields: ClassVar[tuple[str, ...]] = ("dtype",)

    @property
    def empty(self) -> bool:
        """Whether a size is zero, so that there is nothing to tune and torch answers."""
        return any(getattr(self, size) == 0 for size in self.sizes)

    def settled(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Running lengths that were rounded down, as they can stand together; as they are, unless they depend."""
        return dict(lengths)

    @property
    def label(self) -> str:
        """The problem in the words of the command line, such as `gemm 4096 4096 4096 bf16 nn`."""
        raise NotImplementedError

    @classmethod
    def from_label(cls, label: str) -> Self:
        """The problem that has this label.

        Raises:
            InvalidProblemError: none has.
        """
        words = label.split()[1:]
        count, names = len(cls.sizes), iter(cls.label_fields)
        fields: dict[str, str] = {}
        for word in words[count:]:
            name, equals, value = word.partition("=")
            fields[f"{name}_dtype" if equals else next(names, word)] = value if equals else word
        return parse_problem(cls, [int(word) if word.isdecimal() else word for word in words[:count]], fields)


def dtype_name(dtype: Any) -> str:
    """The short name of a dtype given as a `torch.dtype` or as a string.

    >>> dtype_name("bfloat16"), dtype_name("fp16")
    ('bf16', 'fp16')

    Unknown names come back unchanged, for the Problem that receives them to refuse.
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


def _one_line(operator: str, error: ValidationError) -> str:
    """The first thing wrong, as `gemm: M = 0: Input should be greater than 0`."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{operator} has no field {name!r}"
    if first["type"] == "missing":
        return f"{operator} needs {name}"
    told = re.search(rf"\b{re.escape(name)}\b", message) is not None
    return f"{operator}: {message}" if told else f"{operator}: {name} = {first['input']!r}: {message}"
