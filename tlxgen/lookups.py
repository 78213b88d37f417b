"""What functions in place of torch's have found for a call, looked up the first time only."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from tlxgen import runtime

T = TypeVar("T")

#: Calls that are remembered; where lengths differ with every call they begin anew, and kernels stay with `get_kernel`.
_MOST = 4096
_UNKNOWN: Any = object()


class Lookups(Generic[T]):
    """By all that decides; None may be what was found."""

    def __init__(self) -> None:
        self._found: dict[Hashable, T] = {}
        runtime.CACHES.append(self._found)

    def get(self, key: Hashable, look_up: Callable[[], T]) -> T:
        """What was found for the key, or is now."""
        found: T = self._found.get(key, _UNKNOWN)  # once: another thread may clear it meanwhile
        if found is _UNKNOWN:
            if len(self._found) >= _MOST:
                self._found.clear()
            found = self._found[key] = look_up()
        return found


def better_than_torch(kernel: runtime.Kernel) -> runtime.Kernel | None:
    """The kernel, or None where torch is to compute: there is no other, or torch was measured to be faster."""
    return None if kernel.origin == "torch" or kernel.slower else kernel
