"""Checks on a call: which tensors a kernel takes, and the modes of torch that the call is made in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: The kind of device that kernels are for.
DEVICE = "cuda"
#: Whose parts kernels see: a subclass may have others, or say something else of itself.
PLAIN = frozenset({Tensor, torch.nn.Parameter})


def plain(tensors: Sequence[Any]) -> bool:
    """Whether these are tensors without more to them than torch knows."""
    return all(type(tensor) in PLAIN for tensor in tensors)


def seen(*tensors: Tensor) -> bool:
    """Whether kernels see all that there is to these tensors: plain ones with strides, none negated, on one GPU."""
    if not plain(tensors):  # no tensors, for one, which torch refuses in its own words
        return False
    device = tensors[0].device
    if device.type != DEVICE or any(
        tensor.device != device or tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors
    ):
        return False
    # What memory holds is not what a negated view says. A compiler cannot trace the question; the call itself refuses.
    return torch.compiler.is_compiling() or not any(tensor.is_neg() for tensor in tensors)


def converted(tensor: Tensor) -> bool:
    """Whether torch would convert a tensor on a GPU before it computes: autocast to another dtype."""
    return torch.is_autocast_enabled(DEVICE) and torch.get_autocast_dtype(DEVICE) != tensor.dtype


def transformed() -> bool:
    """Whether operations are vectorised or differentiated by what a kernel launch escapes: functorch, dual numbers."""
    if _functorch_active() or _dispatch_modes() > 0 or _tracing_state() is not None:
        return True
    return forward_ad._current_level >= 0  # noqa: SLF001 - no public way


def transformed_in_graph() -> bool:
    """As `transformed`, of what a compiler traces: operators of `torch.library` would drop tangents there."""
    return _functorch_active() or forward_ad._current_level >= 0  # noqa: SLF001 - no public way


transformed_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - see `tlxgen.functional.library.kernels_here`


# On the way of every call; none of them has a public name.
_functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_tracing_state: Callable[[], Any] = torch._C._get_tracing_state  # noqa: SLF001
#: Whether autocast is on for any kind of device.
autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled  # noqa: SLF001


def unseen(tensors: Sequence[Any]) -> str | None:
    """What of torch's would not learn of a kernel's launch, and go on with wrong values; None as a rule."""
    if _tracing_state() is not None or (_dispatch_modes() > 0 and any(map(_mode, _INFRASTRUCTURE))):
        return "operations are traced, or have no values, and a kernel's launch would not be seen"
    if forward_ad._current_level >= 0 and any(  # noqa: SLF001 - no public way
        isinstance(x, Tensor) and _unpacked(x).tangent is not None for x in tensors
    ):
        return "a tensor has a tangent, which a kernel would drop"
    return None


_unpacked: Callable[[Tensor], Any] = forward_ad.unpack_dual

#: Modes in which tensors stand for others.
_INFRASTRUCTURE = tuple(
    getattr(torch._C._TorchDispatchModeKey, name)  # noqa: SLF001 - no public way
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
)
_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode  # noqa: SLF001 - likewise


#: Kinds of devices that have autocast, of those that tensors come here on.
_AUTOCAST = frozenset({"cpu", "cuda"})


def autocast(tensor: Tensor) -> bool:
    """Whether autocast may convert tensors on the device of this one."""
    kind = tensor.device.type
    return kind in _AUTOCAST and torch.is_autocast_enabled(kind)


def as_given(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where autocast converts nothing; entered only where it would, since that takes its time."""
    return torch.autocast(tensor.device.type, enabled=False) if autocast(tensor) else nullcontext()
