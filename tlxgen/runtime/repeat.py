"""`Repeat`: serves calls of the form and tensor layout of an earlier one, without checks and planning.

It launches by a `Replay` (`tlxgen.runtime.replay`), which reuses all arguments but addresses, or else by the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlxgen.runtime import plans
from tlxgen.runtime.checks import plain, unseen
from tlxgen.runtime.layout import TensorLayout
from tlxgen.runtime.plans import Plan
from tlxgen.runtime.replay import allocator

if TYPE_CHECKING:
    from tlxgen.runtime.replay import Replay

_NUMBERS = frozenset({int, float, bool, type(None)})
#: The repeat that is traced for a Replay. Tracing takes the time that seven calls save, and in decoding a length occurs
#: once per layer.
TRACED_AT = 4


class Repeat:
    """The layout and numbers of an earlier call, and its plan."""

    __slots__ = (
        "_alike",
        "_apart",
        "_device",
        "_empty",
        "_index",
        "_like",
        "_named",
        "_numbers",
        "_order",
        "_others",
        "_plan",
        "_replay",
        "_untraced",
        "_written",
    )

    def __init__(
        self,
        plan: Plan,
        inputs: Mapping[str, Any],
        order: Sequence[str],
        named: Mapping[str, Any],
        output: Tensor,
        *,
        written: bool,
        in_place: str,
        also_written: Sequence[str] = (),
    ) -> None:
        """Takes a call that was checked and computed; see `repeatable`.

        Args:
            plan: of tensors of this layout.
            inputs: all inputs of the call, by name.
            order: names of the positional tensors.
            named: keyword arguments.
            output: the result.
            written: whether the caller passed the output.
            in_place: name of the input that may be the output; it must not overlap others.
            also_written: names of inputs that the kernel writes; they must not overlap others.
        """
        self._named = tuple(name for name, value in named.items() if isinstance(value, Tensor))
        self._numbers = tuple((name, type(value), value) for name, value in named.items() if name not in self._named)
        self._order = (*order, *self._named)
        self._others = {name: value for name, value in inputs.items() if name not in self._order}
        tensors = tuple(inputs[name] for name in self._order)
        self._alike = TensorLayout((*tensors, output) if written else tensors)
        self._apart = [
            (-1, _reach(output), index, _reach(tensor), self._order[index] == in_place and _lies_as(tensor, output))
            for index, tensor in enumerate(tensors if written else ())
        ]
        for side in (index for index, name in enumerate(self._order) if name in also_written):
            self._apart += [
                (side, _reach(tensors[side]), index, _reach(tensor), False)
                for index, tensor in enumerate(tensors)
                if index != side
            ]
        self._written = written
        self._plan = plan
        self._device = output.device
        self._index = output.device.index or 0
        self._like = (tuple(output.shape), output.stride(), output.dtype)
        self._empty = allocator(*self._like, output.device)
        self._untraced = TRACED_AT
        self._replay: Replay | None = None

    def like(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors, output last if given, have the layout of the earlier call."""
        return self._alike.addresses(tensors) is not None

    def chosen(self, tensors: tuple[Any, ...], out: Tensor | None, named: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The call's tensors in order; None if its numbers differ."""
        for name, kind, value in self._numbers:
            given = named[name]
            if type(given) is not kind or given != value:
                return None
        if self._named:
            tensors = (*tensors, *[named[name] for name in self._named])
        return (*tensors, out) if self._written else tensors

    def __call__(self, tensors: tuple[Any, ...]) -> Tensor | None:
        """The result for these tensors, output last if given; None if the call must be checked."""
        addresses = self._alike.addresses(tensors)
        if addresses is None or unseen(tensors):
            return None
        for written, reach, operand, length, may_be in self._apart:
            start, first = addresses[written], addresses[operand]
            if start < first + length and first < start + reach and not (may_be and first == start):
                return None  # interleaved or overlapping
        replay = self._replay
        if replay is None:
            return self._slowly(tensors)
        if plans.current_device() == self._index:
            return self._again(replay, tensors, addresses)
        with plans.on_device(self._index):
            return self._again(replay, tensors, addresses)

    def _again(self, replay: Replay, tensors: tuple[Any, ...], addresses: list[int]) -> Tensor:
        if self._written:
            output: Tensor = tensors[-1]
        else:
            output = self._empty()
            tensors = (*tensors, output)
            addresses.append(output.data_ptr())
        replay(tensors, addresses, plans.raw_stream(self._index))
        return output

    def _slowly(self, tensors: tuple[Any, ...]) -> Tensor:
        """Launches by the plan; a later call may use a Replay."""
        inputs = {**self._others, **dict(zip(self._order, tensors, strict=False))}
        shape, strides, dtype = self._like
        output: Tensor = (
            tensors[-1] if self._written else torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        )
        self._plan.launch(inputs, output)
        left = self._untraced = self._untraced - 1
        if left == 0:
            if plans.is_capturing():  # a graph would capture unused scratch
                self._untraced = 1
            else:
                self._replay = self._plan.replay(inputs, self._order, output)
        return output


def repeatable(tensors: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether layouts and numbers identify a call: no zero, which equals -0.0, and no NaN, which equals nothing."""
    numbers = [value for value in named.values() if not isinstance(value, Tensor)]
    if any(type(value) not in _NUMBERS or _ambiguous(value) for value in numbers):
        return False
    return plain([*tensors, *(value for value in named.values() if isinstance(value, Tensor))])


def _ambiguous(value: float | None) -> bool:
    return isinstance(value, float) and (value == 0 or math.isnan(value))


def _lies_as(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _reach(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
