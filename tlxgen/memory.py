"""Memory without content, as soon as torch gives it: on the way of every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def allocator(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """What makes tensors like this while their device is the current one of its kind.

    It is the way of torch's compiled graphs if this torch has it, which takes a third of the time of any public one.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001 - see above
    direct = getattr(guards, f"_empty_strided_{device.type}", None)
    if direct is None:
        return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    return partial(direct, shape, strides, dtype)
