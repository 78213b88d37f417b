"""`Replay`: launches with the grid and arguments of an earlier call of the same layout, but other addresses.

An emitted `arguments` computes grid and arguments from shapes, strides and numbers. `trace` finds out which argument is
the address of which tensor by calling it with stand-ins: `meta` tensors with a storage of their own. What `torch.empty`
or `torch.zeros` return there is scratch, new for each launch. Anything else, or a result that differs from that for
the call's own tensors, is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tlxgen.runtime.launch import Launcher, SlimDescriptor

#: Grid and kernel arguments of a call.
Launch: TypeAlias = tuple[tuple[int, int, int], Sequence[Any]]
#: An emitted `arguments`: of inputs, output, and a replacement of `torch`.
Arguments: TypeAlias = Callable[[dict[str, Any], Tensor, Any], Launch]

_CONSTANTS = frozenset({int, float, bool, type(None)})


@dataclass(frozen=True)
class Scratch:
    """Scratch memory of a launch: uninitialised, or zeros, which every template resets to zeros."""

    zeros: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def maker(self, device: torch.device) -> Callable[[], Tensor]:
        """A function that allocates it, since launches on several streams may overlap."""
        make = allocator(self.shape, self.strides, self.dtype, device)
        return (lambda: make().zero_()) if self.zeros else make


@dataclass(frozen=True)
class Pointer:
    """An argument that is the address of a tensor of the call plus an offset in bytes."""

    argument: int
    tensor: int
    offset: int


@dataclass(frozen=True)
class Described:
    """An argument that is a TMA descriptor of a tensor of the call."""

    argument: int
    tensor: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]

    def descriptor(self) -> SlimDescriptor:
        """The descriptor without its tensor."""
        return SlimDescriptor(None, self.shape, self.strides, self.block_shape)


@dataclass(frozen=True)
class Trace:
    """Grid and arguments of a launch, and the tensor that each comes from: the call's in order, then scratch."""

    grid: tuple[int, int, int]
    constants: tuple[Any, ...]  #: None if another field applies
    pointers: tuple[Pointer, ...]
    described: tuple[Described, ...]
    scratch: tuple[Scratch, ...]


def trace(arguments: Arguments, inputs: dict[str, Any], order: Sequence[str], output: Tensor) -> Trace | None:
    """The trace of a launch; None if the source of an argument is not certain.

    Args:
        arguments: of the emitted module.
        inputs: the call's tensors and numbers by name.
        order: names of the tensors in the order of their addresses; the output comes last.
        output: the output tensor.
    """
    tensors = (*(inputs[name] for name in order), output)
    stand_ins = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    allocations = Allocations()
    try:
        launch = arguments({**inputs, **dict(zip(order, stand_ins, strict=False))}, stand_ins[-1], allocations)
        found = _read(launch, stand_ins, allocations)
        if found is None or not _agrees(found, arguments(inputs, output, torch), tensors):
            return None
    except Exception:  # noqa: BLE001 - it read contents, which stand-ins lack, or ran out of memory
        return None
    return found


class Allocations:
    """Replaces `torch` in an emitted module and records allocations."""

    def __init__(self) -> None:
        self.scratch: list[Scratch] = []
        self.tensors: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **options: Any) -> Tensor:
        """`torch.empty` as called by emitted code."""
        return self._noted(torch.empty(*size, **options), options, zeros=False)

    def zeros(self, *size: Any, **options: Any) -> Tensor:
        """`torch.zeros` as called by emitted code."""
        return self._noted(torch.zeros(*size, **options), options, zeros=True)

    def _noted(self, tensor: Tensor, options: dict[str, Any], *, zeros: bool) -> Tensor:
        if {"dtype", "device"} <= options.keys():  # otherwise torch's defaults apply
            self.scratch.append(Scratch(zeros, tuple(tensor.shape), tensor.stride(), tensor.dtype))
            self.tensors.append(tensor)
        return tensor


def _read(launch: Launch, stand_ins: Sequence[Tensor], allocations: Allocations) -> Trace | None:
    grid, args = launch
    known = [*stand_ins, *allocations.tensors]
    by_storage = {_storage(tensor): index for index, tensor in enumerate(known)}
    constants: list[Any] = []
    pointers, described = [], []
    for argument, value in enumerate(args):
        constants.append(value if type(value) in _CONSTANTS else None)
        if type(value) in _CONSTANTS:
            continue
        tensor = value.base if type(value) is SlimDescriptor else value
        if type(tensor) is not Tensor:
            return None
        index = by_storage.get(_storage(tensor))
        if index is None or tensor.dtype != known[index].dtype or tensor.is_neg() or tensor.is_conj():
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size()
        if tensor is value:
            pointers.append(Pointer(argument, index, offset))
        elif offset or value.round_f32_to_tf32 or value.padding != "zero":
            return None
        else:
            sizes = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
            described.append(Described(argument, index, *sizes))
    return Trace(grid, tuple(constants), tuple(pointers), tuple(described), tuple(allocations.scratch))


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - no public name
    return identity


def _agrees(found: Trace, launch: Launch, tensors: Sequence[Tensor]) -> bool:
    """Whether the trace reproduces `arguments` for the call's own tensors."""
    grid, args = launch
    if grid != found.grid or len(args) != len(found.constants):
        return False
    told = {one.argument for one in found.pointers} | {one.argument for one in found.described}
    return (
        all(
            argument in told or (type(value) is type(constant) and value == constant)
            for argument, (value, constant) in enumerate(zip(args, found.constants, strict=True))
        )
        and all(_points(args[one.argument], one, tensors, found.scratch) for one in found.pointers)
        and all(_describes(args[one.argument], one, tensors) for one in found.described)
    )


def _points(value: Any, told: Pointer, tensors: Sequence[Tensor], scratch: Sequence[Scratch]) -> bool:
    if told.tensor < len(tensors):
        address: int = value.data_ptr()
        return address == tensors[told.tensor].data_ptr() + told.offset
    made = scratch[told.tensor - len(tensors)]
    return (tuple(value.shape), value.dtype, told.offset) == (made.shape, made.dtype, 0)


def _describes(value: Any, told: Described, tensors: Sequence[Tensor]) -> bool:
    if told.tensor >= len(tensors) or value.base.data_ptr() != tensors[told.tensor].data_ptr():
        return False
    sizes = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
    return sizes == (told.shape, told.strides, told.block_shape)


class Replay:
    """A trace and the dispatcher of its binary; launches are serialised, since the argument list is reused."""

    __slots__ = ("_args", "_bases", "_dispatch", "_kept", "_lock", "_pointers", "_scratch", "_zeros")

    def __init__(self, found: Trace, launcher: Launcher, device: torch.device) -> None:
        """Takes a trace, a launcher with a dispatcher, and its device."""
        assert launcher.dispatcher is not None
        args: list[Any] = list(found.constants)
        bases: dict[int, tuple[SlimDescriptor, int]] = {}
        for one in found.described:
            args[one.argument] = one.descriptor()
            bases[one.argument] = (args[one.argument], one.tensor)
        picked = range(len(args)) if launcher.indices is None else launcher.indices
        places = {argument: place for place, argument in enumerate(picked, _FIXED)}
        self._args = [*found.grid, 0, *(args[argument] for argument in picked)]
        self._bases = tuple(base for argument, base in bases.items() if argument in places)
        self._pointers = tuple(
            (places[one.argument], one.tensor, one.offset) for one in found.pointers if one.argument in places
        )
        self._scratch = tuple((scratch.maker(device), scratch.zeros) for scratch in found.scratch)
        self._zeros: dict[int, Tensor] = {}  #: for launches on the default stream
        self._kept: tuple[list[Tensor], list[int]] | None = (
            None  #: kept zeros and their addresses, if all scratch is zeros
        )
        self._dispatch = launcher.dispatcher
        self._lock = launcher.lock  # of descriptors too, which are reused for all launches

    def __call__(self, tensors: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        """Launches on a raw stream of the current device, for the call's tensors in order, output last."""
        if self._scratch:
            scratch = self._kept if stream == _DEFAULT_STREAM else None
            if scratch is None:
                made = self._made(stream)
                scratch = made, [tensor.data_ptr() for tensor in made]
                if stream == _DEFAULT_STREAM and all(zeros for _, zeros in self._scratch):
                    self._kept = scratch
            addresses = [*addresses, *scratch[1]]  # keeps the tensors alive until the launch
        args = self._args
        with self._lock:
            args[_STREAM] = stream
            for place, tensor, offset in self._pointers:
                args[place] = addresses[tensor] + offset
            for descriptor, tensor in self._bases:
                descriptor.base = tensors[tensor]
            try:
                self._dispatch(*args)
            finally:
                for descriptor, _ in self._bases:  # releases the memory
                    descriptor.base = None

    def _made(self, stream: int) -> list[Tensor]:
        """Scratch for a launch. Filling costs as much as a short kernel, so zeros are kept on the default stream.

        On other streams they are not: a stream's handle may be reused while launches of the old stream run, and a
        captured graph may be replayed beside anything.
        """
        if stream != _DEFAULT_STREAM:
            return [make() for make, _ in self._scratch]
        made = []
        for index, (make, zeros) in enumerate(self._scratch):
            scratch = self._zeros.get(index) if zeros else None
            if scratch is None:
                scratch = make()
                if zeros:
                    self._zeros[index] = scratch
            made.append(scratch)
        return made


_DEFAULT_STREAM = 0

#: Positions of stream (after the grid) and first kernel argument in a dispatcher call.
_STREAM, _FIXED = 3, 4


def allocator(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """A fast `torch.empty_strided` for this shape, on the current device of its type.

    Uses the function of torch's compiled graphs if it exists, in a third of the time of the public one.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001 - see above
    direct = getattr(guards, f"_empty_strided_{device.type}", None)
    if direct is None:
        return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    return partial(direct, shape, strides, dtype)
