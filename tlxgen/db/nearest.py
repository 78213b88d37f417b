"""A measured row of a similar problem, for one that was never tuned.

Similar is what differs in lengths alone; every other field (dtype, layout, epilogue, mask, head dimension) changes the
kernel. The distance of two problems is the sum of the octaves between their lengths, weighted by what each length means
to a config (`Problem.lengths`).

A neighbour serves only if it is no worse than the default: on its own problem it was measured to be the fastest, so the
two start level there, and from there to the problem at hand the time model says which of them grows more.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tlxgen import ops
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord
from tlxgen.devices import Gpu
from tlxgen.errors import TlxgenError
from tlxgen.problem import Problem
from tlxgen.space import search_space

#: Octaves, weighted. Beyond, a config was tuned for another regime.
FARTHEST = 2.0
#: How much slower than the default a neighbour may grow by the time model: less than the model can tell.
SLACK = 1.01
#: Of the nearest rows, so many are looked at.
_TRIED = 4


@dataclass(frozen=True)
class Neighbour:
    """A row, its problem, and how far that is from the one asked for."""

    record: TunedRecord
    problem: Problem
    distance: float


def apart(one: Problem, other: Problem) -> dict[str, tuple[Any, Any]]:
    """The fields that change the code and differ, each with both values."""
    a, b = one.model_dump(), other.model_dump()
    return {name: (a[name], b[name]) for name in a if name not in one.lengths and a[name] != b[name]}


def distance(one: Problem, other: Problem) -> float:
    """Weighted octaves between the lengths of two problems without a zero; infinite if anything else differs.

    A metric: symmetric, 0 for equal problems alone, and no detour is shorter.
    """
    if type(one) is not type(other) or apart(one, other):
        return math.inf
    sizes = ((weight, getattr(one, name), getattr(other, name)) for name, weight in one.lengths.items())
    return sum(weight * abs(math.log2(a / b)) for weight, a, b in sizes)


class Neighbourhood:
    """The measured rows of one operator, read once; what is filed later is not seen."""

    def __init__(self, operator: str, records: Iterable[TunedRecord]) -> None:
        self._rows: list[tuple[TunedRecord, Problem]] = []
        self._elsewhere: dict[Problem, list[TunedRecord]] = defaultdict(list)
        for record in records:
            try:
                problem = ops.get(operator).problem(record.key.problem)
            except TlxgenError:
                continue  # of another version
            self._elsewhere[problem].append(record)
            if record.origin == "measured" and not problem.empty:
                self._rows.append((record, problem))
        self._why_other_code = lru_cache(maxsize=1024)(self._other_code)

    def _other_code(self, index: int) -> str | None:
        from tlxgen.db.validity import why_other_code  # brings jinja2, which most problems without a row do without

        return why_other_code(self._rows[index][0])

    def nearest(
        self, problem: Problem, gpu: Gpu, toolchain: str, default: Config | None
    ) -> tuple[Neighbour | None, str]:
        """The nearest row whose config may serve the problem on this GPU, or why there is none."""
        device = gpu.key
        here = [
            (distance(problem, other), record.key.id, index)
            for index, (record, other) in enumerate(self._rows)
            if record.key.device == device and record.key.toolchain == toolchain
        ]
        close = sorted(found for found in here if found[0] <= FARTHEST)
        reasons = []
        for octaves, _, index in close[:_TRIED]:
            record, other = self._rows[index]
            reason = (
                search_space.why_illegal(ops.get(problem.operator), problem, record.config, gpu)
                or self._why_other_code(index)
                or why_worse(problem, record.config, other, default, gpu)
            )
            if reason is None:
                return Neighbour(record, other, octaves), ""
            reasons.append(f"the row of {other.label} cannot serve: {reason}")
        return None, "; ".join(reasons) or self._account(problem, [index for _, _, index in here])

    def elsewhere(self, problem: Problem, gpu: Gpu, toolchain: str) -> str:
        """Where this very problem was tuned instead, on other GPUs or toolchains, and why that is not served here."""
        found = set()
        for record in self._elsewhere.get(problem, ()):
            device = record.key.device
            if device != gpu.key:
                found.add(f"gpu {device.gpu} ({device.sm_count} SMs)")
            elif record.key.toolchain != toolchain:
                found.add(record.key.toolchain)
        if not found:
            return ""
        return f"it was tuned for {', '.join(sorted(found))}, and a row serves its own GPU model and toolchain alone"

    def _account(self, problem: Problem, here: list[int]) -> str:
        """Field by field, what keeps the rows of this GPU from being neighbours."""
        if not here:
            return f"no measured row of {problem.operator} for this GPU and toolchain"
        differing: dict[str, Counter[str]] = defaultdict(Counter)
        same = 0
        for index in here:
            fields = apart(problem, self._rows[index][1])
            same += not fields
            for name, (_, theirs) in fields.items():
                differing[name][str(theirs)] += 1
        parts = [f"{same} further than {FARTHEST:g} octaves"] if same else []
        for name, values in differing.items():
            rows = ", ".join(f"{value} ({count})" for value, count in values.most_common(4))
            parts.append(f"{name} is {getattr(problem, name)}, theirs {rows}")
        return f"none of {len(here)} measured rows is near: {'; '.join(parts)}"


def why_worse(problem: Problem, config: Config, tuned: Problem, default: Config | None, gpu: Gpu) -> str | None:
    """Why a neighbour's config would be slower than the default, or None.

    Args:
        problem: what is to be computed.
        config: the neighbour's.
        tuned: the neighbour's own problem, for which `config` was measured to be best.
        default: the model's favourite for `problem`.
        gpu: what on.
    """
    if default is None or default == config:
        return None
    operator = ops.get(problem.operator)
    ours, theirs = (operator.predict_us(problem, one, gpu) for one in (config, default))
    if ours <= theirs * SLACK:
        return None
    if search_space.why_illegal(operator, tuned, default, gpu) is None:  # then it was a candidate there, and no faster
        ours /= operator.predict_us(tuned, config, gpu)
        theirs /= operator.predict_us(tuned, default, gpu)
    return f"by the time model the default is {ours / theirs - 1:.0%} faster" if ours > theirs * SLACK else None
