"""Whether two tensors share memory: a kernel that writes where it reads gives wrong numbers without an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of one lies in memory that the other has.

    Exact for tensors without holes, and for rows of one pitch, such as column slices of one parent. Of anything else
    whose first and last bytes interleave no answer is cheap, and it counts as apart.
    """
    first, second = _bytes(one), _bytes(other)
    if first is None or second is None or first[0] >= second[1] or second[0] >= first[1]:
        return False
    if _whole(one, first) and _whole(other, second):
        return True
    pitch = _pitch(one)
    if pitch and pitch == _pitch(other):
        start, width = (second[0] - first[0]) % pitch, one.shape[-1] * one.element_size()
        return start < width or start + other.shape[-1] * other.element_size() > pitch
    return False


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether each element of one is that element of the other."""
    lies = (one.data_ptr(), one.shape, one.stride(), one.dtype)
    return lies == (other.data_ptr(), other.shape, other.stride(), other.dtype)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: a stride is shorter than what lies between two of its steps."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def _bytes(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Addresses of the first byte and of the one after the last; None where there is no memory."""
    start = tensor.data_ptr()
    if not start or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _whole(tensor: torch.Tensor, span: tuple[int, int]) -> bool:
    return span[1] - span[0] == tensor.numel() * tensor.element_size()


def _pitch(tensor: torch.Tensor) -> int:
    """Bytes from row to row of a tensor with contiguous rows, all of one pitch; 0 for others."""
    shape, strides = tensor.shape, tensor.stride()
    if tensor.dim() < 2 or strides[-1] != 1:
        return 0
    pitch = strides[-2]
    rows = shape[-2]
    for size, stride in zip(reversed(shape[:-2]), reversed(strides[:-2]), strict=True):
        if stride != pitch * rows:
            return 0
        rows *= size
    return pitch * tensor.element_size()
