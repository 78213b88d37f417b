"""What drop-in functions share: caches from calls to what serves them, and helpers for graphs of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tlxgen.runtime.caches import CACHES
from tlxgen.runtime.checks import PLAIN, autocast_anywhere, plain, transformed, transformed_in_graph
from tlxgen.runtime.kernel import Kernel
from tlxgen.runtime.layout import TensorLayout
from tlxgen.runtime.pinning import Pin, pinned

T = TypeVar("T")

#: Entries after which a cache is cleared, and layouts per entry.
_MOST, _MOST_ALIKE = 4096, 8
_UNKNOWN: Any = object()


class CallCache(Generic[T]):
    """Cache from (options, shapes, tensor layout) to the callable that served such a call; for one operator."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._found: dict[Hashable, tuple[tuple[TensorLayout, Pin | None, T], ...]] = {}
        CACHES.append(self._found)

    def get(self, options: Hashable, tensors: Sequence[Any]) -> T | None:
        """The callable for these options and tensors, or None; not for use in graphs."""
        key = _key(options, tensors)
        for alike, pin, served in self._found.get(key, ()):
            if alike.same(tensors):
                same_modes = not (transformed() or autocast_anywhere()) and pinned(self._operator) == pin
                return served if same_modes else None
        return None

    def keep(self, options: Hashable, tensors: Sequence[Tensor], served: T) -> None:
        """Stores the callable, unless the call is under autocast or a transform, or its tensors are subclasses."""
        key = _key(options, tensors)
        if key is None or not plain(tensors) or transformed() or autocast_anywhere():
            return
        pin = pinned(self._operator)
        others = tuple(one for one in self._found.get(key, ()) if not one[0].same(tensors))
        if len(self._found) >= _MOST:  # lengths may grow with every call
            self._found.clear()
        self._found[key] = ((TensorLayout(tensors), pin, served), *others)[:_MOST_ALIKE]


def _key(options: Hashable, tensors: Sequence[Any]) -> Hashable:
    """Key of a call: options and shapes of the first two tensors; None for tensors that may have no shape."""
    first, second = tensors[0], tensors[1]
    if type(first) not in PLAIN or type(second) not in PLAIN or first.is_nested or second.is_nested:
        return None
    return options, first.shape, second.shape


class LookupCache(Generic[T]):
    """Cache from a key to the result of a look-up, which may be None."""

    def __init__(self) -> None:
        self._found: dict[Hashable, T] = {}
        CACHES.append(self._found)

    def get(self, key: Hashable, look_up: Callable[[], T]) -> T:
        """The cached result for the key, computed by `look_up` on a miss."""
        found: T = self._found.get(key, _UNKNOWN)  # one access: another thread may clear the cache
        if found is _UNKNOWN:
            if len(self._found) >= _MOST:
                self._found.clear()
            found = self._found[key] = look_up()
        return found


def better_than_torch(kernel: Kernel) -> Kernel | None:
    """The kernel; None if torch should compute, because there is no kernel or torch was measured to be faster."""
    return None if kernel.origin == "torch" or kernel.slower else kernel


def kernels_here() -> bool:
    """Whether graphs may use kernels: this machine has a GPU and triton, and no transform is active."""
    from tlxgen.runtime import kernel, selection

    if transformed_in_graph():
        return False
    return kernel._current_device() is not None and selection.has_triton()  # noqa: SLF001 - the same question


kernels_here._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - as `torch.compiler.assume_constant_result` does, which would import the compiler


def in_layout_of(x: Tensor, result: Tensor) -> Tensor:
    """The result in the layout of `torch.empty_like(x)`, which graphs rely on."""
    strides = torch.empty_like(x, device="meta").stride()
    if result.stride() == strides:
        return result
    return torch.empty_like(x).copy_(result)
