"""The measured row of a similar problem, for a problem without one.

Similar problems differ in lengths only; every other field (dtype, layout, epilogue, mask, head dimension) changes the
kernel. The distance of two problems is the sum of the octaves between their lengths, weighted by the effect of each
length on the config (`Problem.lengths`).

A neighbour is served only if it is no slower than the default config by this comparison: on its own problem it was
measured to be the fastest, and by the time model its time grows from there to this problem no more than the default's.
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

#: Weighted octaves. Rows that are further away were tuned for another regime.
FARTHEST = 2.0
#: Factor by which a neighbour may be slower than the default by the time model; it is within the model's error.
SLACK = 1.01
#: Number of nearest rows that are tried.
_TRIED = 4


@dataclass(frozen=True)
class Neighbour:
    """A row, its problem, and that problem's distance from the requested one."""

    record: TunedRecord
    problem: Problem
    distance: float


def apart(one: Problem, other: Problem) -> dict[str, tuple[Any, Any]]:
    """Fields that change the code and differ, each with both values."""
    a, b = one.model_dump(), other.model_dump()
    return {name: (a[name], b[name]) for name in a if name not in one.lengths and a[name] != b[name]}


def distance(one: Problem, other: Problem) -> float:
    """Weighted octaves between the lengths of two problems without a zero; infinite if anything else differs.

    It is a metric.
    """
    if type(one) is not type(other) or apart(one, other):
        return math.inf
    sizes = ((weight, getattr(one, name), getattr(other, name)) for name, weight in one.lengths.items())
    return sum(weight * abs(math.log2(a / b)) for weight, a, b in sizes)


class Neighbourhood:
    """The measured rows of one operator, read once; later rows are not seen."""

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
        """Rows of the same problem for other GPUs or toolchains, and why they are not served here."""
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
        """The fields by which the rows of this GPU differ, with counts."""
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
        gpu: the GPU.
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
