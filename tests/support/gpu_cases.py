"""What tests on a card share: a sample of configs, and which of them the compiler leaves."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import TypeVar

from tlxgen import devices
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.errors import CompileError, TuningError
from tlxgen.ops.base import Operator
from tlxgen.problem import Problem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool

P = TypeVar("P", bound=Problem)

H200 = devices.target("h200")


def sample(operator: Operator[P], problem: P) -> list[Config]:
    """Two configs of each template that serves the problem."""
    rng = random.Random(problem.label)
    chosen = []
    for template in operator.templates:
        try:
            legal = candidates(problem, H200, (template,))
        except TuningError:
            continue
        chosen += rng.sample(legal, min(2, len(legal)))
    return chosen


def rejected(operator: Operator[P], cases: Collection[tuple[P, Config]]) -> set[tuple[P, Config]]:
    """What the compiler makes no good binary of; those are never launched."""
    with CompilePool((9, 0)) as pool:
        futures = {case: pool.submit(emit(operator, *case)) for case in cases}
        return {case for case, future in futures.items() if isinstance(future.exception(), CompileError)}
