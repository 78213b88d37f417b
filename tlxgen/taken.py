"""Who took a call: what was found for tensors that lie alike and the same options is not looked for again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tlxgen import runtime
from tlxgen.alike import Alike
from tlxgen.calls import autocast_anywhere, transformed
from tlxgen.eligible import PLAIN, plain
from tlxgen.pinning import Pin, pinned

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: Options and shapes that are remembered, and ways to lie of each.
_MOST, _MOST_ALIKE = 4096, 8


class Taken(Generic[T]):
    """Of calls in place of torch's that kernels of one operator took: by options and shapes, then by the rest."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._found: dict[Hashable, tuple[tuple[Alike, Pin | None, T], ...]] = {}
        runtime.CACHES.append(self._found)

    def get(self, options: Hashable, tensors: Sequence[Any]) -> T | None:
        """Who took the calls like this one: with these options, on tensors that lie alike; not in graphs."""
        key = _key(options, tensors)
        for alike, pin, who in self._found.get(key, ()):
            if alike.same(tensors):
                same_modes = not (transformed() or autocast_anywhere()) and pinned(self._operator) == pin
                return who if same_modes else None
        return None

    def keep(self, options: Hashable, tensors: Sequence[Tensor], who: T) -> None:
        """Who takes calls like this one, unless it is under way in a mode that may be another the next time."""
        key = _key(options, tensors)
        if key is None or not plain(tensors) or transformed() or autocast_anywhere():
            return
        pin = pinned(self._operator)
        others = tuple(one for one in self._found.get(key, ()) if not one[0].same(tensors))
        if len(self._found) >= _MOST:  # lengths that grow with every call
            self._found.clear()
        self._found[key] = ((Alike(tensors), pin, who), *others)[:_MOST_ALIKE]


def _key(options: Hashable, tensors: Sequence[Any]) -> Hashable:
    """With the shapes of the first two tensors; None where they may have none."""
    first, second = tensors[0], tensors[1]
    if type(first) not in PLAIN or type(second) not in PLAIN or first.is_nested or second.is_nested:
        return None
    return options, first.shape, second.shape
