"""Whether tensors lie in memory as others did: all that checks and plans ask of tensors, but for their addresses.

Torch's compiler guards its graphs by such a question, asked in C++ for a tenth of what Python takes. Its class has no
public name, so it is believed once it has told apart what must be, and Python asks where it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tlxgen.runtime.checks import autocast, plain

#: Bytes that addresses are told apart by: what Triton, TMA and cp.async know of alignment.
_ALIGNMENT = 16
_LOW = _ALIGNMENT - 1
_data_ptr = Tensor.data_ptr


class Alike:
    """The tensors of one call, in order, without their memory; asked of those of another."""

    __slots__ = ("_count", "_low", "_no_grad", "_placed", "_same")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Of plain tensors; see `plain`."""
        self._count = len(tensors)
        addresses = list(map(_data_ptr, tensors))
        self._low = [address & _LOW for address in addresses]
        self._placed = 0 not in addresses
        self._no_grad = any(tensor.requires_grad for tensor in tensors)
        self._same = _guarded(tensors) or _compared(tensors)

    def same(self, tensors: Sequence[Any]) -> bool:
        """Whether these lie alike, at any address, and autograd need not know of the call."""
        return (
            len(tensors) == self._count
            and not any(map(_nested, tensors))
            and self._same(*tensors)
            and not (self._no_grad and torch.is_grad_enabled())
        )

    def addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Where tensors are that lie alike, aligned alike too; None for others."""
        if (
            len(tensors) != self._count
            or any(map(_nested, tensors))
            or not self._same(*tensors)
            or (self._no_grad and torch.is_grad_enabled())  # as `same`, at less
        ):
            return None
        found = list(map(_data_ptr, tensors))
        if self._placed and 0 in found:  # memory that was given back
            return None
        return found if [address & _LOW for address in found] == self._low else None


def _nested(tensor: Any) -> bool:
    """Of which the guards in C++ cannot be asked: they would end the process."""
    return getattr(tensor, "is_nested", False) is True


def _compared(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """The question in Python."""
    expected = [_told(tensor) for tensor in tensors]

    def same(*others: Any) -> bool:
        return plain(others) and [_told(tensor) for tensor in others] == expected

    return same


def _told(x: Tensor) -> tuple[Any, ...]:
    strides = x.stride() if x.layout is torch.strided else None
    flags = (x.requires_grad, x.is_neg(), x.is_conj(), x.is_inference())
    return type(x), x.shape, x.dtype, strides, x.layout, x.device, *flags, autocast(x), *_modes()


def _modes() -> tuple[bool, int]:
    """What torch's dispatcher would do beside the operation itself."""
    transforms: bool = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public way
    modes: int = torch._C._len_torch_dispatch_stack()  # noqa: SLF001 - the same
    return transforms, modes


def _guarded(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """The question in C++, which tells dispatch keys apart too: modes, autocast, transforms, negated views.

    None where it would not take the tensors themselves, such as one that is given twice.
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
    """Whether this torch has the guards, and they see each difference that there may be."""
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
        except Exception:  # noqa: BLE001 - whatever another torch makes of it
            return False
    return all(right) and not any(told)
