"""Random problems without a tuned row, near to and far from those that have one; a seed determines them."""

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

#: Maximum change of each length, in octaves.
REACHES: Mapping[str, float] = {"near": 0.4, "far": 1.5}

_TRIES = 10_000
_STEPS = (1, 16, 128)  # one of these divides the lengths that change from call to call
_WEIGHT_STEP = 64
_EXPERT_STEP = 8
_DECODING_ROWS = 16  # attention with fewer rows is decoding


@dataclass(frozen=True)
class Drawn:
    """A problem, its key in `REACHES`, and the problem of the row that it was drawn around."""

    problem: Problem
    reach: str
    around: Problem


def drawn(operator: str, rows: Sequence[Problem], gpu: Gpu, seed: int) -> Iterator[Drawn]:
    """Problems without a row, near and far in turn; only lengths differ from those of some row.

    Raises:
        ValueError: no further problem was found.
    """
    rng = random.Random(f"{operator} {seed}")  # noqa: S311 - no secret
    known = set(rows)
    while True:
        for reach in REACHES:
            found = _one(rng, operator, rows, reach, gpu, known)
            known.add(found.problem)
            yield found


def _one(
    rng: random.Random, operator: str, rows: Sequence[Problem], reach: str, gpu: Gpu, known: set[Problem]
) -> Drawn:
    for _ in range(_TRIES if rows else 0):
        around = rng.choice(rows)
        fields = {**around.model_dump(), **_CHANGED[operator](around, rng, REACHES[reach])}
        try:
            problem: Problem = ops.get(operator).problem(fields)
        except InvalidProblemError:  # for example fewer keys than a mask needs
            continue
        if problem not in known and _IS_SMALL[operator](problem) and default_config(problem, gpu) is not None:
            return Drawn(problem, reach, around)
    raise ValueError(f"{operator}: no problem without a row was found around {len(rows)} rows")


# Changed lengths, by operator.


def _gemm(around: Any, rng: random.Random, octaves: float) -> dict[str, int]:
    return {
        "M": _changed(around.M, rng, octaves, rng.choice(_STEPS)),
        "N": _changed(around.N, rng, octaves, _WEIGHT_STEP),
        "K": _changed(around.K, rng, octaves, _WEIGHT_STEP),
    }


def _attention(around: Any, rng: random.Random, octaves: float) -> dict[str, int]:
    """Rows and keys change by one factor, in decoding only keys; heads of q and of k change by one factor."""
    rows, keys, step = around.S, around.kv_len, rng.choice(_STEPS)
    factor = 2.0 ** rng.uniform(-octaves, octaves)
    heads = _changed(around.kv_heads, rng, octaves, 1)
    return {
        "B": _changed(around.B, rng, octaves, 1),
        "H": around.H // around.kv_heads * heads,
        "S": rows if rows < _DECODING_ROWS else _multiple(rows * factor, step),
        "kv_heads": heads,
        "kv_len": _multiple(keys * factor, step),
    }


def _grouped_gemm(around: Any, rng: random.Random, octaves: float) -> dict[str, int]:
    return {
        "E": _changed(around.E, rng, octaves, _EXPERT_STEP),
        "ROWS": _changed(around.ROWS, rng, octaves, rng.choice(_STEPS)),
        "N": _changed(around.N, rng, octaves, _WEIGHT_STEP),
        "K": _changed(around.K, rng, octaves, _WEIGHT_STEP),
    }


_CHANGED: Mapping[str, Callable[[Any, random.Random, float], dict[str, int]]] = {
    "gemm": _gemm,
    "attention": _attention,
    "grouped_gemm": _grouped_gemm,
}

#: Bounds on sizes, so that inputs and references take little time.
_IS_SMALL: Mapping[str, Callable[[Any], bool]] = {
    "gemm": lambda p: max(p.M, p.N, p.K) <= 8192,
    "attention": lambda p: p.S <= 8192 and p.B * p.S <= 32768 and p.B * p.kv_len <= 2**18,
    "grouped_gemm": lambda p: p.E * p.N * p.K <= 2**30 and p.ROWS <= 32768,
}

OPERATORS = tuple(_CHANGED)


def _changed(size: int, rng: random.Random, octaves: float, step: int) -> int:
    """A size within so many octaves of this one, a multiple of `step` unless the size is below it."""
    return _multiple(size * 2.0 ** rng.uniform(-octaves, octaves), step if size >= step else 1)


def _multiple(size: float, step: int) -> int:
    """The nearest multiple of `step`, at least `step`."""
    return max(1, round(size / step)) * step
