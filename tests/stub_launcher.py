"""In place of a launcher: notes what a dispatcher would read at the moment that it is called."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from torch import Tensor

from tlxgen.launch import SlimDescriptor

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
