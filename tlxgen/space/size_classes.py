"""Size classes: problems whose running lengths round to the same values share a ranking and an entry to tune.

Lengths of sequences and batches change from call to call, and ranking all legal configs takes up to 0.1 s. So it is
done for one problem of each class, its representative; the result is then checked against the actual problem.
"""

from __future__ import annotations

import math
from typing import TypeVar

from tlxgen.errors import InvalidProblemError
from tlxgen.problem import Problem, parse_problem

P = TypeVar("P", bound=Problem)

#: Smaller sizes are not rounded: in decoding each row counts.
_FIRST = 16
_STEPS_AN_OCTAVE = 4


def representative(problem: P) -> P:
    """The representative of a problem's class: running lengths rounded down, everything else the same.

    Idempotent. Lengths are kept consistent with each other (`Problem.settled`). A problem whose rounded lengths make
    another kind of problem (a window as long as the keys) is its own representative.
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
    """The largest grid size that is not above `size` and has the same common divisor with `divisor`.

    The grid has four steps per octave, each at least 16.

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
