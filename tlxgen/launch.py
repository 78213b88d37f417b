"""A compiled kernel, launched with as little in between as possible.

Triton's C dispatcher takes grid, stream and arguments and calls `cuLaunchKernelEx`; it reads four attributes of a
tensor descriptor, so descriptors here have no more than those. Where Triton offers no dispatcher (too many arguments,
TF32 rounding in the descriptor), its ordinary launcher is used.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakSet

from tlxgen.compile import compile_kernel

#: Held while Triton's process-wide setting is other than the user's.
_KNOB = threading.Lock()

#: What is loaded.
_LAUNCHERS: WeakSet[Launcher] = WeakSet()


class SlimDescriptor:
    """What the dispatcher reads of `triton.tools.tensor_descriptor.TensorDescriptor`, without its checks.

    The caller has checked already (`Operator.launchable`): base 16-byte aligned, last stride 1, the others multiples
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

    def __init__(self, module: ModuleType, args: Sequence[Any], capability: tuple[int, int]) -> None:
        """Compiles (or finds in Triton's cache) and loads the kernel for arguments like `args`.

        Args:
            module: an emitted module.
            args: kernel arguments with full `TensorDescriptor`s.
            capability: compute capability of the current device.
        """
        from triton import knobs

        self.compiled = compile_kernel(module, args, capability)
        with _KNOB:
            self._load(knobs, dispatch=not any(getattr(arg, "round_f32_to_tf32", False) for arg in args))
        self.dispatcher: Callable[..., None] | None = self.compiled._dispatcher  # noqa: SLF001 - Triton has no public name for it
        self.indices: tuple[int, ...] | None = self.compiled._dispatch_arg_indices  # noqa: SLF001
        if self.indices == tuple(range(len(args))):
            self.indices = None  # every argument is passed: no need to pick
        self._constants = len(self.compiled.src.fn.arg_names) - len(args)
        self.lock = threading.Lock()  # the dispatcher keeps its arguments inside
        _LAUNCHERS.add(self)

    def _load(self, knobs: Any, *, dispatch: bool) -> None:
        """Loads the binary, with a dispatcher if wanted; the user's own setting of Triton stays as it was."""
        before = knobs.nvidia.use_triton_dispatcher
        knobs.nvidia.use_triton_dispatcher = dispatch
        try:
            self.compiled._init_handles()  # noqa: SLF001 - loads the binary, without a launch
        finally:
            knobs.nvidia.use_triton_dispatcher = before

    @property
    def slim(self) -> bool:
        """Whether arguments may hold `SlimDescriptor`s."""
        return self.dispatcher is not None

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[Any]) -> None:
        """Launches on a raw CUDA stream of the device that the binary was loaded on."""
        if self.dispatcher is None:
            run, compiled = self.compiled.run, self.compiled
            padding = (None,) * self._constants
            run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *padding)
            return
        picked = args if self.indices is None else [args[i] for i in self.indices]
        with self.lock:
            self.dispatcher(*grid, stream, *picked)


@atexit.register
def _leave_loaded() -> None:
    """Triton unloads what Python forgets, at the interpreter's end too, when it is half gone and says so on stderr."""
    for launcher in list(_LAUNCHERS):
        launcher.compiled.module = None
