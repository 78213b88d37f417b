"""Tensor layouts, problems of every operator, and the check of a call's result.

A table: each problem is called with its operands, or its output, in each layout. `tests/runtime/test_operands.py` runs
it on the CPU, where torch computes, `tests/gpu/test_operands_gpu.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tlxgen import api, ops
from tlxgen.ops import accuracy
from tlxgen.problem import Problem
from tlxgen.runtime import kernel as runtime

#: Sizes, outermost in memory first → strides of these dimensions, and where the first element is; in elements.
Layout: TypeAlias = Callable[[Sequence[int]], tuple[list[int], int]]

#: Elements before and behind a tensor that nobody may touch; of any dtype, they are whole 16 bytes.
GUARD = 64
_GUARDED = 7.0


def dense(sizes: Sequence[int], *, pitch: int = 0, apart: int = 0, inner: int = 1) -> list[int]:
    """Strides of dimensions one inside the other: elements `inner` apart, rows longer by `pitch`, all by `apart`."""
    strides: list[int] = []
    stride = inner
    for index, size in enumerate(reversed(sizes)):
        strides.insert(0, stride)
        stride = stride * max(1, size) + (pitch if index == 0 else 0)
    if apart and len(sizes) > 2:
        strides[0] += apart
    return strides


def _swapped(sizes: Sequence[int], one: int, other: int) -> list[int]:
    """Strides of dimensions that lie as if two of them had changed places."""
    if len(sizes) <= max(one, other, -one - 1, -other - 1):
        return dense(sizes)
    order = list(range(len(sizes)))
    order[one], order[other] = order[other], order[one]
    found = dense([sizes[index] for index in order])
    return [found[order.index(index)] for index in range(len(sizes))]


def _every_other_row(sizes: Sequence[int]) -> list[int]:
    """Dense, with a row between each two."""
    strides = dense(sizes)
    return [2 * stride for stride in strides[:-1]] + strides[-1:]


LONE = "any stride where there is one"
#: Ways for operands and outputs.
LAYOUTS: dict[str, Layout] = {
    "without holes": lambda sizes: (dense(sizes), 0),
    "padded rows": lambda sizes: (dense(sizes, pitch=16), 0),
    "rows of an odd pitch": lambda sizes: (dense(sizes, pitch=1), 0),
    "matrices oddly far apart": lambda sizes: (dense(sizes, apart=3), 0),
    "one element late": lambda sizes: (dense(sizes), 1),
    "every other row": lambda sizes: (_every_other_row(sizes), 0),
    "every other element": lambda sizes: (dense(sizes, inner=2), 0),
    "rows and columns swapped": lambda sizes: (_swapped(sizes, -2, -1), 0),
    "outer dimensions swapped": lambda sizes: (_swapped(sizes, 0, 1) if len(sizes) > 2 else dense(sizes), 0),
    LONE: lambda sizes: (
        [5 if size == 1 else stride for size, stride in zip(sizes, dense(sizes), strict=True)],
        0,
    ),
}
#: For operands alone: the first of the outermost dimension stands for all.
ONE_FOR_ALL = "one for all"
#: Ways in which every template takes tensors.
TAKEN = ("without holes", "padded rows")

#: Operands of any strides. The others, of one number for each row or group, have to lie without holes for a kernel.
_LARGE = frozenset({"a", "b", "residual", "q", "k", "v", "x", "y"})


@dataclass
class Placed:
    """A tensor within memory of its own.

    Attributes:
        tensor: the tensor.
        memory: all of it, with what lies between, before and behind the tensor's elements.
    """

    tensor: Tensor
    memory: Tensor

    def others(self) -> Tensor:
        """What is in the memory beside the tensor, which itself reads as guarded."""
        memory = self.memory.clone()
        memory.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(_GUARDED)
        return memory


def placed(like: Tensor, way: str, beside: float) -> Placed:
    """A tensor of these values, its dimensions in memory in the order of those of `like`.

    Args:
        like: the values.
        way: one of `LAYOUTS`, or `ONE_FOR_ALL`.
        beside: what is in the memory beside it.
    """
    order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
    sizes = [like.shape[dim] for dim in order]
    if way == ONE_FOR_ALL:
        strides, first = dense(sizes), 0
        strides[:1] = [0] * len(strides[:1])
        like = like.select(order[0], 0).unsqueeze(order[0]).expand(like.shape)
    else:
        strides, first = LAYOUTS[way](sizes)
    reach = sum(max(0, size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    memory = torch.full((2 * GUARD + first + reach,), beside, dtype=torch.float32, device=like.device).to(like.dtype)
    back = [order.index(dim) for dim in range(like.dim())]
    there = memory.as_strided(sizes, strides, GUARD + first).permute(back)
    if way == ONE_FOR_ALL:
        there.select(order[0], 0).copy_(like.select(order[0], 0))
    else:
        there.copy_(like)
    return Placed(there, memory)


@dataclass(frozen=True)
class Case:
    """A problem, by operator, sizes and options."""

    operator: str
    sizes: Sequence[int]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem itself."""
        made: Problem = ops.get(self.operator).problem(self.sizes, **self.options)
        return made


#: One of each operator, and of each form that it has.
CASES: dict[str, Case] = {
    "gemm": Case("gemm", (136, 144, 96)),
    "gemm of a layer": Case("gemm", (136, 144, 96), {"layout": "nt", "epilogue": "scale+bias+gelu+residual"}),
    "grouped_gemm": Case("grouped_gemm", (4, 120, 64, 48)),
    "grouped_gemm 3d2d": Case("grouped_gemm", (4, 120, 64, 48), {"form": "3d2d"}),
    "grouped_gemm 2d2d": Case("grouped_gemm", (4, 120, 64, 48), {"form": "2d2d"}),
    "grouped_gemm 3d3d": Case("grouped_gemm", (4, 120, 64, 48), {"form": "3d3d"}),
    "grouped_gemm masked": Case("grouped_gemm", (4, 120, 64, 48), {"form": "masked", "max_rows": 56}),
    "grouped_gemm gather": Case("grouped_gemm", (4, 120, 64, 48), {"form": "gather", "layout": "nt"}),
    "grouped_gemm e4m3": Case("grouped_gemm", (4, 120, 64, 48), {"dtype": "e4m3"}),
    "attention": Case(
        "attention", (2, 4, 100, 64), {"kv_heads": 2, "kv_len": 130, "causal": "bottom-right", "lse": True}
    ),
    "decoding": Case("attention", (2, 8, 1, 64), {"kv_heads": 2, "kv_len": 300, "causal": "bottom-right"}),
    "attention_varlen": Case("attention_varlen", (3, 4, 150, 64), {"kv_heads": 2, "max_q": 80, "lse": True}),
    "vector_add": Case("vector_add", (1000,)),
}

#: Sizes of one and of zero, by operator.
SIZES: dict[str, Case] = {
    **{f"gemm {m}x{n}x{k}": Case("gemm", (m, n, k)) for m, n, k in ((1, 144, 96), (136, 1, 96), (136, 144, 1))},
    **{f"gemm {m}x{n}x{k}": Case("gemm", (m, n, k)) for m, n, k in ((0, 144, 96), (136, 0, 96), (136, 144, 0))},
    **{
        f"grouped_gemm {'x'.join(map(str, sizes))}": Case("grouped_gemm", sizes)
        for sizes in ((1, 120, 64, 48), (4, 1, 64, 48), (4, 120, 1, 48), (4, 120, 64, 1), (4, 0, 64, 48))
    },
    "one head, row and key": Case("attention", (1, 1, 1, 64), {"kv_len": 1}),
    "no rows": Case("attention", (2, 2, 0, 64), {"kv_len": 16}),
    "no keys": Case("attention", (2, 2, 16, 64), {"kv_len": 0}),
    "no batch": Case("attention", (0, 2, 16, 64)),
    "one packed row": Case("attention_varlen", (1, 1, 1, 64)),
    "no packed rows": Case("attention_varlen", (2, 2, 0, 64), {"max_q": 16}),
    "one number": Case("vector_add", (1,)),
    "no numbers": Case("vector_add", (0,)),
}


@dataclass(frozen=True)
class Call:
    """The tensors of one call of a problem, and what it should give."""

    kernel: runtime.Kernel
    operands: dict[str, Any]
    memory: dict[str, Placed]
    expected: Tensor
    library: Tensor

    @classmethod
    def of(cls, case: Case, device: str, way: str = TAKEN[0], small: str = TAKEN[0]) -> Call:
        """A call with large operands that lie in one way, and small ones (bias, scales, ends, lse) in another.

        Where the first of a dimension stands for all, the others' values are lost, and not expected.
        """
        operator, problem = ops.get(case.operator), case.problem
        inputs: dict[str, Any] = operator.inputs(problem, device, seed=5)
        memory: dict[str, Placed] = {}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                written, whole = name in operator.also_written, value.is_floating_point()
                beside = _GUARDED if written else float("nan") if whole else 0
                memory[name] = placed(value, way if name in _LARGE else small, beside)
        operands = {name: memory[name].tensor if name in memory else value for name, value in inputs.items()}
        values = {
            name: torch.empty_like(x).copy_(operands[name]) if isinstance(x, Tensor) else x
            for name, x in inputs.items()
        }
        expected, library = operator.reference(problem, values), operator.peer_result(problem, values)
        kernel = api.get_kernel(case.operator, problem, on_miss="ignore")
        return cls(kernel, operands, memory, expected, library)

    def right(self, out: Placed | None = None) -> Tensor:
        """The result of the call, which is right, and written nowhere else."""
        operator = ops.get(self.kernel.problem.operator)
        sides = operator.side_outputs(self.kernel.problem, self.operands)
        for name in sides:
            self.operands[name].fill_(float("nan"))
        before = {name: place.memory.clone() for name, place in self.memory.items()}
        result = self.kernel(**self.operands, **({} if out is None else {"out": out.tensor}))
        if result.device.type == "cuda":
            torch.cuda.synchronize()
        for name, place in self.memory.items():
            if name in sides:
                assert bool((place.others() == _GUARDED).all()), f"what lies beside {name} was written"
            else:
                assert torch.equal(_bytes(place.memory), _bytes(before[name])), f"{name} was written"
        if out is not None:
            assert result.data_ptr() == out.tensor.data_ptr()
            assert bool((out.others() == _GUARDED).all()), "what lies beside the output was written"
        written = ~self.expected.isnan()
        expected, found, theirs = (torch.where(written, x, 0.0) for x in (self.expected, result, self.library))
        reason = accuracy.why_wrong(found, expected, theirs)
        assert reason is None, f"{reason}; {self.kernel.explain()}"
        assert operator.why_side_output_wrong(self.kernel.problem, self.operands, sides) is None
        return result

    def output(self, way: str) -> Placed:
        """Room for the result, full of NaN, that lies in this way."""
        shape, dtype = ops.get(self.kernel.problem.operator).output_like(self.kernel.problem)
        return placed(torch.full(shape, float("nan"), dtype=dtype, device=self.expected.device), way, _GUARDED)


def _bytes(memory: Tensor) -> Tensor:
    """To be compared: no NaN equals another."""
    return memory.view(torch.uint8)
