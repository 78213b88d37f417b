"""`Launcher`: launches a compiled kernel with little host time.

fbtriton's C dispatcher takes grid, stream and arguments and calls `cuLaunchKernelEx`; it reads four attributes of a
tensor descriptor, so descriptors here have no more than those. Where there is no dispatcher (too many arguments, TF32
rounding in the descriptor, upstream's triton, an AMD GPU), Triton's ordinary launcher is used.

Triton builds the dispatcher itself if `TRITON_USE_C_DISPATCHER` is set. That setting belongs to the user and to the
whole process, so it is neither read nor changed here.
"""

from __future__ import annotations

import atexit
import json
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakSet

from tlxgen.codegen.compile import Architecture, compile_kernel

#: Loaded binaries; the lock guards iteration against additions.
_LAUNCHERS: WeakSet[Launcher] = WeakSet()
_LOCK = threading.Lock()


class SlimDescriptor:
    """The attributes of Triton's `TensorDescriptor` that the dispatcher reads, without its checks.

    `Operator.launchable` has checked: base 16-byte aligned, last stride 1, the others multiples
    of 16 bytes.
    """

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(
        self,
        base: Any,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        *,
        round_f32_to_tf32: bool = False,
    ) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.padding = "zero"
        self.round_f32_to_tf32 = round_f32_to_tf32


class Launcher:
    """One binary on the current device, called as `launcher(grid, stream, args)`."""

    def __init__(self, module: ModuleType, args: Sequence[Any], architecture: Architecture) -> None:
        """Compiles (or finds in Triton's cache) and loads the kernel for arguments like `args`.

        Args:
            module: an emitted module.
            args: kernel arguments with full `TensorDescriptor`s.
            architecture: that of the current device.
        """
        self.compiled = compile_kernel(module, args, architecture)
        self.compiled._init_handles()  # noqa: SLF001 - loads the binary, without a launch
        self.dispatcher: Callable[..., None] | None = None
        self.indices: tuple[int, ...] | None = None
        if not any(getattr(arg, "round_f32_to_tf32", False) for arg in args):
            self.dispatcher, self.indices = _dispatcher(self.compiled)
        if self.indices == tuple(range(len(args))):
            self.indices = None  # every argument is passed: no need to pick
        self._constants = len(self.compiled.src.fn.arg_names) - len(args)
        self.lock = threading.Lock()  # the dispatcher keeps its arguments inside
        with _LOCK:
            _LAUNCHERS.add(self)

    @property
    def slim(self) -> bool:
        """Whether arguments may hold `SlimDescriptor`s."""
        return self.dispatcher is not None

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[Any]) -> None:
        """Launches on a raw CUDA stream of the device that the binary was loaded on."""
        if self.dispatcher is None:
            run, compiled = self.compiled.run, self.compiled
            padding = (None,) * self._constants  # the launcher counts constants among the arguments, and skips them
            run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *padding)
            return
        picked = args if self.indices is None else [args[i] for i in self.indices]
        with self.lock:
            self.dispatcher(*grid, stream, *picked)


def _dispatcher(compiled: Any) -> tuple[Callable[..., None] | None, tuple[int, ...] | None]:
    """The dispatcher of a binary loaded by fbtriton, and the arguments that it takes; None if there is none.

    Built as in `CompiledKernel._build_dispatcher`, which would read the user's setting.
    """
    described = compiled.asm.get("launch_metadata")  # upstream's compiler writes none, and fbtriton's none for AMD
    if described is None:
        return None, None
    try:
        from triton.backends.nvidia.triton_dispatcher_factory import make_triton_dispatcher

        schema = json.loads(described)
        made = make_triton_dispatcher(schema, compiled.function)
        return (None, None) if made is None else (made, tuple(arg["index"] for arg in schema["args"]))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        warnings.warn(f"{compiled.name}: launches take longer, since Triton makes no dispatcher: {error}", stacklevel=3)
        return None, None


@atexit.register
def _leave_loaded() -> None:
    """Keeps binaries loaded at interpreter exit, where Triton's unloading would fail and print errors."""
    with _LOCK:
        loaded = list(_LAUNCHERS)
    for launcher in loaded:
        launcher.compiled.module = None
