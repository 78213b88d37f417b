"""Plans: how a call is computed once its config is chosen, by a compiled binary and its `arguments`, or by torch.

Plans do not depend on the problem. Calls whose kernels have the same code and whose arguments have the same Triton
specialization share a module, a binary and a plan, whatever their sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tlxgen.codegen import loader
from tlxgen.codegen.emit import KernelSource
from tlxgen.devices import Gpu
from tlxgen.ops.base import Operator
from tlxgen.problem import Problem
from tlxgen.runtime.checks import as_given
from tlxgen.runtime.launch import Launcher, SlimDescriptor

if TYPE_CHECKING:
    from tlxgen.runtime.replay import Replay

_THREAD = threading.local()


class Plan(Protocol):
    """A way to compute a call."""

    def launch(self, inputs: dict[str, Any], output: torch.Tensor) -> None:
        """Writes the result to `output`."""

    def replay(self, inputs: dict[str, Any], order: Sequence[str], output: torch.Tensor) -> Replay | None:
        """A `Replay` for tensors of this layout, in this order with `output` last; None if there is none."""


class TorchPlan:
    """Torch computes."""

    def __init__(self, operator: Operator[Any], problem: Problem) -> None:
        self._operator = operator
        self._problem = problem

    def launch(self, inputs: dict[str, Any], output: torch.Tensor) -> None:
        """See `Plan`."""
        with as_given(output):
            output.copy_(self._operator.eager(self._problem, inputs, None))

    def replay(self, inputs: dict[str, Any], order: Sequence[str], output: torch.Tensor) -> Replay | None:  # noqa: ARG002
        """See `Plan`."""
        return None


class KernelPlan:
    """A compiled kernel on one device."""

    def __init__(self, operator: Operator[Any], module: Any, launcher: Launcher, device: int, num_sms: int) -> None:
        self._arguments = operator.arguments
        self._module = ModuleType(module.__name__)
        vars(self._module).update(arguments=on_host(module.arguments))
        self._launcher = launcher
        self._device = device
        self._options: dict[str, Any] = {"num_sms": num_sms}
        if launcher.slim:
            self._options["descriptor"] = SlimDescriptor

    def launch(self, inputs: dict[str, Any], output: torch.Tensor) -> None:
        """See `Plan`; on the caller's current stream of the plan's device."""
        self.dispatch(*self._arguments(self._module, inputs, output, **self._options))

    def arguments(self, inputs: dict[str, Any], output: torch.Tensor) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        """Grid and kernel arguments of a call."""
        return self._arguments(self._module, inputs, output, **self._options)

    def replay(self, inputs: dict[str, Any], order: Sequence[str], output: torch.Tensor) -> Replay | None:
        """See `Plan`."""
        if not self._launcher.slim:
            return None

        def arguments(inputs: dict[str, Any], output: torch.Tensor, torch_there: Any) -> Any:
            module = ModuleType(self._module.__name__)
            vars(module).update(arguments=with_names(self._module.arguments, torch=torch_there))
            return self._arguments(module, inputs, output, **self._options)

        from tlxgen.runtime.replay import Replay, trace  # not used in a first call

        found = trace(arguments, inputs, order, output)
        return None if found is None else Replay(found, self._launcher, output.device)

    def dispatch(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """Passes a launch to the driver."""
        if current_device() == self._device:
            self._launcher(grid, raw_stream(self._device), args)
            return
        with on_device(self._device):
            self._launcher(grid, raw_stream(self._device), args)


def on_host(arguments: FunctionType) -> FunctionType:
    """An emitted `arguments` with a Python `cdiv`; Triton's, which also works in kernels, takes 2 to 4 us."""
    names = arguments.__globals__
    if "triton" not in names:
        return arguments
    plain = ModuleType("triton")
    vars(plain).update(vars(names["triton"]), cdiv=_cdiv)
    return with_names(arguments, triton=plain)


def with_names(function: FunctionType, **names: Any) -> FunctionType:
    """A copy of the function with some globals replaced."""
    made = FunctionType(function.__code__, {**function.__globals__, **names}, argdefs=function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Once:
    """A thread-safe cache that computes each value once; failures are not cached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Any, Any] = {}
        self._making: dict[Any, threading.Lock] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of a key, computed by `make` on a miss."""
        value = self._values.get(key)
        if value is not None:
            return value
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            value = self._values.get(key)
            if value is None:
                value = self._values[key] = make()
            return value

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def clear(self) -> None:
        """Drops all values."""
        with self._lock:
            self._values.clear()
            self._making.clear()


#: Kernel plans by code, device and specialization.
LOADED = Once()


def kernel_plan(
    operator: Operator[Any], source: KernelSource, gpu: Gpu, inputs: dict[str, Any], output: torch.Tensor
) -> KernelPlan:
    """The plan for tensors of this layout; compiles and loads the binary if needed.

    Raises:
        Exception: any error of the compiler or driver.
    """
    module = loader.load(source)
    device = output.device.index or 0
    with on_device(device):
        key, args = _key(operator, module, gpu, inputs, output)

        def make() -> KernelPlan:
            return KernelPlan(operator, module, Launcher(module, args, gpu.target), device, gpu.sm_count)

        plan: KernelPlan = LOADED.get(key, make)
    return plan


def is_loaded(
    operator: Operator[Any], source: KernelSource, gpu: Gpu, inputs: dict[str, Any], output: torch.Tensor
) -> bool:
    """Whether `kernel_plan` would neither compile nor load, and so may be called during a graph capture."""
    module = loader.loaded(source)
    return module is not None and _key(operator, module, gpu, inputs, output)[0] in LOADED


def _key(
    operator: Operator[Any], module: Any, gpu: Gpu, inputs: dict[str, Any], output: torch.Tensor
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Cache key of a call's binary, and the kernel's arguments."""
    from tlxgen.codegen.compile import specialization

    _, args = operator.arguments(module, inputs, output, num_sms=gpu.sm_count)
    return (module.__name__, output.device.index or 0, specialization(module, args, gpu.target)), args


def on_device(device: int) -> AbstractContextManager[Any]:
    """A context in which this CUDA device is current."""
    return torch.cuda.device(device)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def current_device() -> int:
    """The current device; creates a CUDA context in this thread, which the dispatcher expects."""
    try:
        _THREAD.ready  # noqa: B018 - tests that it exists
    except AttributeError:
        torch.cuda.set_device(torch.cuda.current_device())
        _THREAD.ready = True
    device: int = torch._C._cuda_getDevice()  # noqa: SLF001 - the public function first checks that CUDA is initialised
    return device


def raw_stream(device: int) -> int:
    """The caller's current stream; the public `torch.cuda.current_stream().cuda_stream` is 8 us slower."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
    return stream
