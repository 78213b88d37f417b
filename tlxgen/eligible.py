"""Which tensors a function in place of torch's may hand to a kernel, and which it leaves to torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
