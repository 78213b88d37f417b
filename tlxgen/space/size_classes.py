"""Sizes of one class: close enough to share a search for the best config, and a line in the list of what to tune.

Lengths of sequences and batches differ from call to call. Ranking every legal config takes up to a tenth of a second,
so it is done for one problem of each class, its representative; what is chosen there is then checked against the
problem at hand.
"""

from __future__ import annotations

import math
from typing import TypeVar

from tlxgen.errors import InvalidProblemError
from tlxgen.problem import Problem, parse_problem

P = TypeVar("P", bound=Problem)

#: Below, sizes stand for themselves: decoding, where each row counts.
_FIRST = 16
_STEPS_AN_OCTAVE = 4


def representative(problem: P) -> P:
    """The problem that stands for all of its class: each running length rounded down, everything else the same.

    Idempotent. A length that others do not let be so short is as short as they do (`Problem.settled`). What the
    rounding would make another kind of problem (a window as long as the keys) stands for itself.
    """
    fields = problem.model_dump()
    rounded = problem.settled({name: rounded_down(fields[name], divisor) for name, divisor in problem.running.items()})
    if all(fields[name] == size for name, size in rounded.items()):
        return problem
    try:
        made = parse_problem(type(problem), {**fields, **rounded}, {})
    except InvalidProblemError:
        return problem
    return made if made.model_dump() == {**fields, **rounded} else problem


def rounded_down(size: int, divisor: int = 16) -> int:
    """The representative of a size: of those that share with `divisor` what it shares, the next on the grid or below.

    The grid has four steps an octave, but none shorter than 16.

    >>> [rounded_down(n) for n in (0, 7, 16, 40, 100, 1000, 4095, 4096, 5000, 8191)]
    [0, 7, 16, 40, 100, 904, 3585, 4096, 4104, 7169]
    >>> [rounded_down(n, divisor=1) for n in (0, 7, 100, 1000, 4095, 4096, 8191)]
    [0, 7, 96, 896, 3584, 4096, 7168]

    Args:
        size: at least 0.
        divisor: a power of two up to 16.
    """
    if size < _FIRST:
        return size
    step = max(_FIRST, (1 << (size.bit_length() - 1)) // _STEPS_AN_OCTAVE)
    common = math.gcd(size, divisor)
    return size // step * step + (common if common < divisor else 0)
