"""wgmma: products that run on while the task goes on, and read shared memory until they are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from tlxgen.simulator.blocks import Block, Shape, numpy_dtype
from tlxgen.simulator.shared_memory import Tile

if TYPE_CHECKING:
    from tlxgen.simulator.machine import Machine


class Product(Block):
    """A result of `async_dot`: an accumulator in registers that only other products may use before its wait."""

    __slots__ = ("_value", "group", "machine", "result_shape")

    def __init__(self, machine: Machine, dtype: Any, shape: tuple[int, int], group: int) -> None:
        self.machine = machine
        self.dtype = dtype
        self.result_shape = shape
        self.group = group
        self._value: np.ndarray | None = None

    @property
    def data(self) -> Any:
        """The values; reading them before the wait is what hardware answers with garbage."""
        if self._value is None or not self.waited:
            self.machine.fail("early_accumulator", "the result of async_dot is read before the wait that retires it")
            return np.full(self.result_shape, np.nan if self.dtype.is_floating() else 0, numpy_dtype(self.dtype))
        return self._value

    @data.setter
    def data(self, value: Any) -> None:
        self._value = value

    @property
    def shape(self) -> Shape:
        """Known before the values are."""
        return Shape(self.result_shape)

    @property
    def waited(self) -> bool:
        """Whether the task that issued it has waited for it."""
        return self.machine.task.dots.waited >= self.group

    def finish(self, a: Tile | Block, b: Tile, acc: Block | None) -> None:
        """The hardware's last moment to read the operands."""
        product = multiply(a, b) if self.dtype.is_floating() else _integers(a, b)
        if acc is not None:
            product = product + (acc.in_registers if isinstance(acc, Product) else acc.data)
        self._value = product

    @property
    def in_registers(self) -> Any:
        """The values as the next product finds them, which needs no wait: products of one task finish in order."""
        return self._value


def multiply(a: Tile | Block, b: Tile | Block) -> Any:
    """A·B in float32, of operands as tensor cores take them."""
    return _operand(a) @ _operand(b)


def _operand(value: Tile | Block) -> Any:
    array = value.array if isinstance(value, Tile) else value.data
    if array.dtype == np.float32:
        return (np.ascontiguousarray(array).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # TF32 truncates
    return array.astype(np.float32)


def _integers(a: Tile | Block, b: Tile | Block) -> Any:
    left, right = (x.array if isinstance(x, Tile) else x.data for x in (a, b))
    return left.astype(np.int32) @ right.astype(np.int32)


def accumulator_dtype(a: Tile | Block) -> Any:
    """int32 for integers, float32 otherwise."""
    return tl.int32 if a.dtype.is_int() else tl.float32
