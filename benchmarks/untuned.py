"""Problems that have no row, drawn around those that have one: some near, some far, the same for a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlxgen import ops
from tlxgen.devices import Gpu
from tlxgen.errors import InvalidProblemError
from tlxgen.problem import Problem
from tlxgen.space.candidates import default_config

#: How far each length is moved at most, in octaves.
REACHES: Mapping[str, float] = {"near": 0.4, "far": 1.5}

_TRIES = 10_000
#: Lengths that change from call to call are multiples of one of these, weights and heads of others.
_RUNNING = (1, 16, 128)
_WEIGHTS = 64
_EXPERTS = 8
_FEW = 16  # rows, below which attention is decoding


@dataclass(frozen=True)
class Drawn:
    """A problem, how far it was meant to be from a row, and that row's problem."""

    problem: Problem
    reach: str
    around: Problem


def drawn(operator: str, rows: Sequence[Problem], gpu: Gpu, seed: int) -> Iterator[Drawn]:
    """Problems without a row, near and far in turn; all fields but lengths are those of some row.

    Raises:
        ValueError: none can be found (any more).
    """
    rng = random.Random(f"{operator} {seed}")  # noqa: S311 - no secret
    taken = set(rows)
    while True:
        for reach in REACHES:
            found = _one(rng, operator, rows, reach, gpu, taken)
            taken.add(found.problem)
            yield found


def _one(
    rng: random.Random, operator: str, rows: Sequence[Problem], reach: str, gpu: Gpu, taken: set[Problem]
) -> Drawn:
    for _ in range(_TRIES if rows else 0):
        around = rng.choice(rows)
        fields = {**around.model_dump(), **_MOVED[operator](around, rng, REACHES[reach])}
        try:
            problem: Problem = ops.get(operator).problem(fields)
        except InvalidProblemError:  # such as tokens that a mask has no room for
            continue
        if problem not in taken and _SMALL[operator](problem) and default_config(problem, gpu) is not None:
            return Drawn(problem, reach, around)
    raise ValueError(f"{operator}: no problem without a row was found around {len(rows)} rows")


# How lengths move, by operator.


def _gemm(around: Any, rng: random.Random, octaves: float) -> dict[str, int]:
    return {
        "M": _moved(around.M, rng, octaves, rng.choice(_RUNNING)),
        "N": _moved(around.N, rng, octaves, _WEIGHTS),
        "K": _moved(around.K, rng, octaves, _WEIGHTS),
    }


def _attention(around: Any, rng: random.Random, octaves: float) -> dict[str, int]:
    """Rows and keys move together, but for decoding, where only keys do; so do heads of q and of k."""
    rows, keys, step = around.S, around.kv_len, rng.choice(_RUNNING)
    times = 2.0 ** rng.uniform(-octaves, octaves)
    heads = _moved(around.kv_heads, rng, octaves, 1)
    return {
        "B": _moved(around.B, rng, octaves, 1),
        "H": around.H // around.kv_heads * heads,
        "S": rows if rows < _FEW else _multiple(rows * times, step),
        "kv_heads": heads,
        "kv_len": _multiple(keys * times, step),
    }


def _grouped_gemm(around: Any, rng: random.Random, octaves: float) -> dict[str, int]:
    return {
        "E": _moved(around.E, rng, octaves, _EXPERTS),
        "ROWS": _moved(around.ROWS, rng, octaves, rng.choice(_RUNNING)),
        "N": _moved(around.N, rng, octaves, _WEIGHTS),
        "K": _moved(around.K, rng, octaves, _WEIGHTS),
    }


_MOVED: Mapping[str, Callable[[Any, random.Random, float], dict[str, int]]] = {
    "gemm": _gemm,
    "attention": _attention,
    "grouped_gemm": _grouped_gemm,
}

#: What inputs and references of take little time: lengths of GEMM, rows of attention, 2 GB of weights.
_SMALL: Mapping[str, Callable[[Any], bool]] = {
    "gemm": lambda p: max(p.M, p.N, p.K) <= 8192,
    "attention": lambda p: p.S <= 8192 and p.B * p.S <= 32768 and p.B * p.kv_len <= 2**18,
    "grouped_gemm": lambda p: p.E * p.N * p.K <= 2**30 and p.ROWS <= 32768,
}

OPERATORS = tuple(_MOVED)


def _moved(size: int, rng: random.Random, octaves: float, step: int) -> int:
    """A size some way from this one; a few rows are no multiple of many."""
    return _multiple(size * 2.0 ** rng.uniform(-octaves, octaves), step if size >= step else 1)


def _multiple(size: float, step: int) -> int:
    """The nearest multiple, at least one step."""
    return max(1, round(size / step)) * step
