"""`TensorLayout`: compares tensors with those of an earlier call in all that checks and plans depend on but addresses.

Torch's compiler has such guards in C++, ten times as fast as Python. Their class is not public, so it is used only if a
self-test shows that it distinguishes everything that matters; otherwise Python compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tlxgen.runtime.checks import autocast, plain

#: Alignment in bytes that Triton, TMA and cp.async depend on.
_ALIGNMENT = 16
_LOW = _ALIGNMENT - 1
_data_ptr = Tensor.data_ptr


class TensorLayout:
    """Dtypes, shapes, strides, alignment and devices of one call's tensors, in order."""

    __slots__ = ("_count", "_low", "_no_grad", "_placed", "_same")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Takes plain tensors (`checks.plain`)."""
        self._count = len(tensors)
        addresses = list(map(_data_ptr, tensors))
        self._low = [address & _LOW for address in addresses]
        self._placed = 0 not in addresses
        self._no_grad = any(tensor.requires_grad for tensor in tensors)
        self._same = _guarded(tensors) or _compared(tensors)

    def same(self, tensors: Sequence[Any]) -> bool:
        """Whether these tensors have this layout, at any address, and autograd does not record the call."""
        return (
            len(tensors) == self._count
            and not any(map(_nested, tensors))
            and self._same(*tensors)
            and not (self._no_grad and torch.is_grad_enabled())
        )

    def addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Addresses of tensors of the same layout and alignment; None for others."""
        if (
            len(tensors) != self._count
            or any(map(_nested, tensors))
            or not self._same(*tensors)
            or (self._no_grad and torch.is_grad_enabled())  # as `same`, but faster
        ):
            return None
        found = list(map(_data_ptr, tensors))
        if self._placed and 0 in found:  # freed memory
            return None
        return found if [address & _LOW for address in found] == self._low else None


def _nested(tensor: Any) -> bool:
    """Whether a tensor is nested, on which the C++ guards would crash."""
    return getattr(tensor, "is_nested", False) is True


def _compared(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """The comparison in Python."""
    expected = [_told(tensor) for tensor in tensors]

    def same(*others: Any) -> bool:
        return plain(others) and [_told(tensor) for tensor in others] == expected

    return same


def _told(x: Tensor) -> tuple[Any, ...]:
    strides = x.stride() if x.layout is torch.strided else None
    flags = (x.requires_grad, x.is_neg(), x.is_conj(), x.is_inference())
    return type(x), x.shape, x.dtype, strides, x.layout, x.device, *flags, autocast(x), *_modes()


def _modes() -> tuple[bool, int]:
    """Dispatch keys and modes that affect an operation."""
    transforms: bool = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public way
    modes: int = torch._C._len_torch_dispatch_stack()  # noqa: SLF001 - the same
    return transforms, modes


def _guarded(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """The comparison in C++, or None if it refuses the tensors, for example one that is passed twice.

    It also covers dispatch keys: modes, autocast, transforms, negated views.
    """
    if not _believed():
        return None
    same = _guard(tensors)
    return same if same(*tensors) else None


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    guards: Any = torch._C._dynamo.guards  # noqa: SLF001 - see above
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    same: Callable[..., bool] = guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return same


@cache
def _believed() -> bool:
    """Whether this torch has the guards and they pass the self-test."""
    with torch.inference_mode(False), torch.device("cpu"):
        z = torch.zeros(4, 6, dtype=torch.complex64)
        x, leaf = torch.zeros(4, 6), torch.zeros(4, 6, requires_grad=True)
        others = {
            "shape": x[:3],
            "strides": torch.zeros(4, 12)[:, ::2],
            "pitch": torch.zeros(4, 8)[:, :6],
            "expanded": torch.zeros(1, 6).expand(4, 6),
            "dtype": x.int(),
            "device": torch.empty(4, 6, device="meta"),
            "gradients": leaf,
            "type": torch.nn.Parameter(x, requires_grad=False),
            "nothing": None,
        }
        with torch.inference_mode():
            others["inference"] = torch.zeros(4, 6)
        try:
            same, both, views = _guard([x]), _guard([leaf, x]), _guard([z.imag])
            told = [same(other) for other in others.values()] + [both(leaf, other) for other in others.values()]
            told += [views(z.conj().imag), _guard([z])(z.conj())]
            right = [same(x.clone()), views(z.clone().imag), both(leaf.detach().requires_grad_(), x.clone())]
            with torch.autocast("cpu"):
                told.append(same(x))
        except Exception:  # noqa: BLE001 - another torch may raise anything
            return False
    return all(right) and not any(told)
