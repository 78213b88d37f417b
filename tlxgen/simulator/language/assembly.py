"""What inline assembly means: a Python function for each text, registered beside the kernel that uses it.

>>> import numpy as np
>>> @register("ex2.approx.ftz.f32 $0, $1;")
... def exp2(x):
...     return np.exp2(x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MEANINGS: dict[str, Callable[..., Any]] = {}


def register(text: str) -> Callable[[F], F]:
    """Decorates the meaning of a piece of assembly: from the operands' arrays to an array, or a tuple of them.

    White space does not count; everything else in the text does.
    """

    def keep(function: F) -> F:
        _MEANINGS[_key(text)] = function
        return function

    return keep


def meaning(text: str) -> Callable[..., Any] | None:
    """What was registered for a text."""
    return _MEANINGS.get(_key(text))


def _key(text: str) -> str:
    return " ".join(text.split())
