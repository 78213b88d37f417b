"""Which tensors a drop-in function may pass to a kernel, and the modes of torch that forbid it (autocast, functorch).

The checks of a kernel's own call are in `tlxgen.runtime.call_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: Type of the devices that kernels run on.
DEVICE = "cuda"
#: Types whose memory is their value; a subclass may hold more, or override operations.
PLAIN = frozenset({Tensor, torch.nn.Parameter})


def plain(tensors: Sequence[Any]) -> bool:
    """Whether all are tensors or parameters, not subclasses."""
    return all(type(tensor) in PLAIN for tensor in tensors)


def seen(*tensors: Tensor) -> bool:
    """Whether a kernel can read these tensors: no subclasses, strided, not negated views, on one GPU."""
    if not plain(tensors):  # also refuses what is no tensor; torch raises the error
        return False
    device = tensors[0].device
    if device.type != DEVICE or any(
        tensor.device != device or tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors
    ):
        return False
    # The memory of a negated view is not its value. A compiler cannot trace `is_neg`; the call itself checks again.
    return torch.compiler.is_compiling() or not any(tensor.is_neg() for tensor in tensors)


def converted(tensor: Tensor) -> bool:
    """Whether autocast would convert a tensor on a GPU to another dtype."""
    return torch.is_autocast_enabled(DEVICE) and torch.get_autocast_dtype(DEVICE) != tensor.dtype


def transformed() -> bool:
    """Whether functorch, a dispatch mode, tracing or forward-mode AD is active, which would miss a kernel launch."""
    if _functorch_active() or _dispatch_modes() > 0 or _tracing_state() is not None:
        return True
    return forward_ad._current_level >= 0  # noqa: SLF001 - no public way


def transformed_in_graph() -> bool:
    """As `transformed`, while a compiler traces: operators of `torch.library` would drop tangents."""
    return _functorch_active() or forward_ad._current_level >= 0  # noqa: SLF001 - no public way


transformed_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - see `tlxgen.functional.dispatch.kernels_here`


# Called in every call; none has a public name.
_functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_tracing_state: Callable[[], Any] = torch._C._get_tracing_state  # noqa: SLF001
#: Whether autocast is on for any device type.
autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled  # noqa: SLF001


def unseen(tensors: Sequence[Any]) -> str | None:
    """Why torch would miss a kernel launch and continue with wrong values (tracing, tangents), or None."""
    if _tracing_state() is not None or (_dispatch_modes() > 0 and any(map(_mode, _INFRASTRUCTURE))):
        return "operations are traced, or have no values, and a kernel's launch would not be seen"
    if forward_ad._current_level >= 0 and any(  # noqa: SLF001 - no public way
        isinstance(x, Tensor) and _unpacked(x).tangent is not None for x in tensors
    ):
        return "a tensor has a tangent, which a kernel would drop"
    return None


_unpacked: Callable[[Tensor], Any] = forward_ad.unpack_dual

#: Modes in which tensors are placeholders.
_INFRASTRUCTURE = tuple(
    getattr(torch._C._TorchDispatchModeKey, name)  # noqa: SLF001 - no public way
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
)
_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode  # noqa: SLF001 - likewise


#: Device types with autocast.
_AUTOCAST = frozenset({"cpu", "cuda"})


def autocast(tensor: Tensor) -> bool:
    """Whether autocast is on for the tensor's device type."""
    kind = tensor.device.type
    return kind in _AUTOCAST and torch.is_autocast_enabled(kind)


def as_given(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast; a null context where it is off, which is faster."""
    return torch.autocast(tensor.device.type, enabled=False) if autocast(tensor) else nullcontext()
