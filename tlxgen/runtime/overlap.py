"""Whether tensors share memory. A kernel that writes where it reads would give wrong numbers without an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: Work limit of numpy, half a millisecond. Slices, transposes and packed heads need one step.
_WORK = 10_000


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of one tensor shares memory with an element of the other.

    Exact, except that True is returned where deciding would take more than `_WORK` steps.
    """
    first, second = _bytes(one), _bytes(other)
    if first is None or second is None or first[0] >= second[1] or second[0] >= first[1]:
        return False
    return first[0] == second[0] or _shared(_placed(one, first[0]), _placed(other, second[0]))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both tensors have the same elements at the same addresses."""
    lies = (one.data_ptr(), one.shape, one.stride(), one.dtype)
    return lies == (other.data_ptr(), other.shape, other.stride(), other.dtype)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor share memory; as exact as `overlap`.

    Dimensions are added one by one, shortest stride first. If the extent so far does not fit between two steps of the
    next dimension, the block at its first step is compared with all later ones.
    """
    if not tensor.numel():
        return False
    reach = 1
    inner: list[tuple[int, int]] = []
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue
        # Addresses count elements; only differences matter, and numpy would allocate an array at 0.
        if stride < reach and _shared(_Placed(1, inner, 1), _Placed(1 + stride, [*inner, (size - 1, stride)], 1)):
            return True
        inner.append((size, stride))
        reach += (size - 1) * stride
    return False


def _bytes(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Addresses of the first byte and after the last; None for a tensor without memory."""
    start = tensor.data_ptr()
    if not start or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


class _Placed:
    """An array interface for `numpy.shares_memory`, as raw bytes, since numpy has no bfloat16 or 8-bit floats."""

    def __init__(self, start: int, dimensions: Sequence[tuple[int, int]], width: int) -> None:
        """Takes sizes, and strides in elements of `item` bytes."""
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{width}",
            "data": (start, True),
            "shape": tuple(size for size, _ in dimensions),
            "strides": tuple(stride * width for _, stride in dimensions),
        }


def _placed(tensor: torch.Tensor, start: int) -> _Placed:
    return _Placed(start, list(zip(tensor.shape, tensor.stride(), strict=True)), tensor.element_size())


def _shared(one: _Placed, other: _Placed) -> bool:
    """Whether the tensors share a byte, or that is too hard to decide; memory is not read, so it may be a GPU's."""
    import numpy as np

    try:
        # Its annotation allows only two of the accepted numbers.
        return np.shares_memory(np.asarray(one), np.asarray(other), max_work=_WORK)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True
