"""Caches from a call's options, shapes and tensor layout to what serves it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tlxgen.runtime.caches import CACHES
from tlxgen.runtime.checks import PLAIN, autocast_anywhere, plain, transformed
from tlxgen.runtime.kernel import Kernel
from tlxgen.runtime.layout import Alike
from tlxgen.runtime.pinning import Pin, pinned

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: Entries of a cache, after which it begins anew, and layouts of each entry.
_MOST, _MOST_ALIKE = 4096, 8
_UNKNOWN: Any = object()


class Taken(Generic[T]):
    """Of calls in place of torch's that kernels of one operator took: by options and shapes, then by the rest."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._found: dict[Hashable, tuple[tuple[Alike, Pin | None, T], ...]] = {}
        CACHES.append(self._found)

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


class Lookups(Generic[T]):
    """By all that decides; None may be what was found."""

    def __init__(self) -> None:
        self._found: dict[Hashable, T] = {}
        CACHES.append(self._found)

    def get(self, key: Hashable, look_up: Callable[[], T]) -> T:
        """What was found for the key, or is now."""
        found: T = self._found.get(key, _UNKNOWN)  # once: another thread may clear it meanwhile
        if found is _UNKNOWN:
            if len(self._found) >= _MOST:
                self._found.clear()
            found = self._found[key] = look_up()
        return found


def better_than_torch(kernel: Kernel) -> Kernel | None:
    """The kernel, or None where torch is to compute: there is no other, or torch was measured to be faster."""
    return None if kernel.origin == "torch" or kernel.slower else kernel
