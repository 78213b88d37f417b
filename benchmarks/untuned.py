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
        fields = {**around.model_dump(), **_changed(around, rng, REACHES[reach])}
        try:
            problem: Problem = ops.get(operator).problem(fields)
        except InvalidProblemError:  # for example fewer keys than a mask needs
            continue
        if problem not in known and _IS_SMALL[operator](problem) and default_config(problem, gpu) is not None:
            return Drawn(problem, reach, around)
    raise ValueError(f"{operator}: no problem without a row was found around {len(rows)} rows")


#: Lengths that change, by operator, and what they are multiples of.
_LENGTHS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "gemm": {"M": _STEPS, "N": (64,), "K": (64,)},
    "attention": {"S": _STEPS},
    "grouped_gemm": {"E": (8,), "ROWS": _STEPS, "N": (64,), "K": (64,)},
}


def _changed(around: Any, rng: random.Random, octaves: float) -> dict[str, int]:
    """Changed lengths; in attention rows and keys change by one factor, in decoding only keys; so do both heads."""
    lengths = _LENGTHS[around.operator]
    if around.operator != "attention":
        return {name: _scaled(getattr(around, name), rng, octaves, steps) for name, steps in lengths.items()}
    step = rng.choice(lengths["S"])
    factor = 2.0 ** rng.uniform(-octaves, octaves)
    heads = _scaled(around.kv_heads, rng, octaves, (1,))
    return {
        "B": _scaled(around.B, rng, octaves, (1,)),
        "H": around.H // around.kv_heads * heads,
        "S": around.S if around.S < _DECODING_ROWS else _multiple(around.S * factor, step),
        "kv_heads": heads,
        "kv_len": _multiple(around.kv_len * factor, step),
    }


#: Bounds on sizes, so that inputs and references take little time.
_IS_SMALL: Mapping[str, Callable[[Any], bool]] = {
    "gemm": lambda p: max(p.M, p.N, p.K) <= 8192,
    "attention": lambda p: p.S <= 8192 and p.B * p.S <= 32768 and p.B * p.kv_len <= 2**18,
    "grouped_gemm": lambda p: p.E * p.N * p.K <= 2**30 and p.ROWS <= 32768,
}

OPERATORS = tuple(_LENGTHS)


def _scaled(size: int, rng: random.Random, octaves: float, steps: Sequence[int]) -> int:
    """A size within so many octaves of this one, a multiple of one of `steps` unless the size is below it."""
    step = steps[0] if len(steps) == 1 else rng.choice(steps)
    return _multiple(size * 2.0 ** rng.uniform(-octaves, octaves), step if size >= step else 1)


def _multiple(size: float, step: int) -> int:
    """The nearest multiple of `step`, at least `step`."""
    return max(1, round(size / step)) * step
