"""wgmma: asynchronous products, which read shared memory until they are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from tlxgen.simulator.dtypes import numpy_dtype
from tlxgen.simulator.language.blocks import Block, Shape
from tlxgen.simulator.language.tensor_cores import multiply
from tlxgen.simulator.machine.shared_memory import Tile

if TYPE_CHECKING:
    from tlxgen.simulator.machine.machine import Machine


class Product(Block):
    """The result of `async_dot`: an accumulator in registers; before its wait only other products may use it."""

    __slots__ = ("_value", "group", "machine", "result_shape")

    def __init__(self, machine: Machine, dtype: Any, shape: tuple[int, int], group: int) -> None:
        self.machine = machine
        self.dtype = dtype
        self.result_shape = shape
        self.group = group
        self._value: np.ndarray | None = None

    @property
    def data(self) -> Any:
        """The values; before the wait a finding, and NaN, since the registers are undefined then."""
        if self._value is None or not self.waited:
            message = "the result of an async_dot is read, which no async_dot_wait of this role has retired"
            self.machine.fail("early_accumulator", message)
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
        """Computes the product; the operands are read now, as late as hardware may read them."""
        before = acc.in_registers if isinstance(acc, Product) else None if acc is None else acc.data
        self._value = multiply(_operand(a), _operand(b), before, self.dtype)

    @property
    def in_registers(self) -> Any:
        """The values for the next product, which needs no wait: products of one task finish in order."""
        return self._value


def _operand(value: Tile | Block) -> Block:
    return Block(value.array, value.dtype) if isinstance(value, Tile) else value


def accumulator_dtype(a: Tile | Block) -> Any:
    """int32 for integers, float32 otherwise."""
    return tl.int32 if a.dtype.is_int() else tl.float32
