"""Kernel of `moe_combine` in plain Triton: weighted sum of a token's rows, in the order of its choices.

It is bound by memory: k rows are read for each that is written. What decides is how many bytes are under way: to read
4 TB/s at a microsecond a load, an H200 wants 32 KB a multiprocessor. A thread has a 16-byte load of each of its token's
rows under way, all at once, since none hangs on another: with k = 8 that is 16 KB a program of 128 threads, of which
eight fit a multiprocessor (64 registers a thread). With one or two choices a thread takes two loads of each row. The
programs of a token are neighbours, so that where its rows are comes from L2 for all but the first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, N803 - written as kernels are: Triton reads annotations, and knows one

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes of the widest load.
_WIDEST = 16
#: Threads of a program, if K has that many loads.
_THREADS = 128
#: Rows that are under way at once, at most: four registers each. A token with more takes steps of half as many.
_MOST_AT_ONCE = 16


# Weights and ids are the caller's and may begin anywhere, and are read one at a time anyhow.
@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["weights", "ids"])
def kernel(
    result,
    place,
    weights,
    ids,
    out,
    row,
    columns,
    choices,
    experts,
    weight_row,
    weight_choice,
    id_row,
    id_choice,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """BLOCK columns of one token; `row` and `columns` count vectors, so that the compiler knows what divides them."""
    blocks = (columns * VECTOR + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns * VECTOR
    places = place + token * choices
    shares = weights + token * weight_row
    chosen = ids + token * id_row
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, choices, AT_ONCE):
        known, parts = (), ()
        for nth in tl.static_range(AT_ONCE):
            there = first + nth < choices
            expert = tl.load(chosen + (first + nth) * tl.cast(id_choice, tl.int64), mask=there, other=-1)
            source = tl.load(places + (first + nth), mask=there, other=0).to(tl.int64)
            known += ((expert >= 0) & (expert < experts),)  # type: ignore[assignment]
            part = tl.load(result + source * row * VECTOR + column, mask=inside & known[nth], other=0.0)
            parts += (part,)  # type: ignore[assignment]
        # ptxas would add a row up before it asks for the next but one, to save registers. It cannot add without
        # weights, and their loads cannot pass the barrier.
        tl.debug_barrier()
        for nth in tl.static_range(AT_ONCE):
            share = tl.load(shares + (first + nth) * tl.cast(weight_choice, tl.int64), mask=known[nth], other=0.0)
            total += share.to(tl.float32) * parts[nth].to(tl.float32)
    tl.store(out + token * columns * VECTOR + column, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Launch:
    """What the kernel is launched with."""

    programs: int
    args: tuple[Any, ...]
    constants: dict[str, int]
    warps: int

    @property
    def options(self) -> dict[str, int]:
        """Constants and options, as Triton takes them."""
        return {**self.constants, "num_warps": self.warps, "num_stages": 1}

    def __call__(self) -> None:
        """On the current stream of the current device."""
        kernel[(self.programs,)](*self.args, **self.options)


def launch(result: Tensor, place: Tensor, weights: Tensor, ids: Tensor, out: Tensor, experts: int) -> Launch:
    """Of a result with contiguous rows, places and an output that are contiguous, and an output that is not empty."""
    tokens, columns = out.shape
    choices, row = ids.shape[1], result.stride(0)
    widest = _WIDEST // result.element_size()
    vector = math.gcd(widest, columns, row)
    a_thread = widest if choices > 2 else 2 * widest
    block = min(_THREADS * a_thread, triton.next_power_of_2(columns))
    at_once = choices if 0 < choices <= _MOST_AT_ONCE else _MOST_AT_ONCE // 2
    return Launch(
        programs=tokens * -(-columns // block),
        args=(
            *(result, place, weights, ids, out),
            *(row // vector, columns // vector, choices, experts),
            *(*weights.stride(), *ids.stride()),
        ),
        constants={"VECTOR": vector, "BLOCK": block, "AT_ONCE": at_once},
        warps=max(1, block // (32 * a_thread)),
    )
