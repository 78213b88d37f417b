"""In place of a launcher: notes what a dispatcher would read at the moment that it is called."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from tlxgen import devices
from tlxgen.devices import target
from tlxgen.runtime import call_checks, kernel, plans, repeat
from tlxgen.runtime.launch import SlimDescriptor

if TYPE_CHECKING:
    import pytest

#: Grid, stream and arguments of a launch, with addresses in place of tensors.
Noted = tuple[Any, ...]


class Noting:
    """A launcher whose dispatcher remembers."""

    slim = True
    indices: tuple[int, ...] | None = None
    made: ClassVar[list[Any]] = []
    noted: ClassVar[list[Noted]] = []
    #: The binary of each launch.
    modules: ClassVar[list[str]] = []

    def __init__(self, module: Any = None, args: Any = (), capability: Any = None) -> None:
        self.lock = threading.Lock()
        self.name = getattr(module, "__name__", "")
        self.made.append(self.name)

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Any) -> None:
        picked = args if self.indices is None else [args[i] for i in self.indices]
        with self.lock:
            self.dispatcher(*grid, stream, *picked)

    def dispatcher(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        """See above."""
        self.modules.append(self.name)
        self.noted.append(((x, y, z), stream, *map(read, args)))


def read(value: Any) -> Any:
    """What the dispatcher makes of an argument."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, SlimDescriptor):
        sizes = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
        return (value.base.data_ptr(), *sizes, value.padding, value.round_f32_to_tf32)
    return value


@contextmanager
def no_card(patch: pytest.MonkeyPatch, launcher: type[Any], kind: str) -> Iterator[None]:
    """An H200 that there is not, for tensors on this kind of device, and launchers of this class."""
    patch.setattr(plans, "Launcher", launcher)
    patch.setattr(plans, "on_device", lambda _: nullcontext())
    patch.setattr(plans, "is_capturing", lambda: False)
    patch.setattr(plans, "raw_stream", lambda _: 0)
    patch.setattr(plans, "current_device", lambda: 0)
    patch.setattr(call_checks, "KIND", kind)
    patch.setattr(kernel, "_current_device", lambda: 0)
    patch.setattr(devices, "detect", lambda _=None: target("h200"))
    kernel.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kernel.FallbackWarning)
        yield
    kernel.forget()


@contextmanager
def noting(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Such a card for tensors on the CPU, on which every launch is noted and the first repeat is traced."""
    patch.setattr(repeat, "TRACED_AT", 1)
    for name in ("made", "noted", "modules"):
        patch.setattr(Noting, name, [])
    with no_card(patch, Noting, "cpu"):
        yield
