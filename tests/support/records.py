"""Rows for tests of files and databases: of real problems, since others are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from tlxgen import ops
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord, TuningKey
from tlxgen.devices import DeviceKey
from tlxgen.problem import Problem

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)

#: What differs from row to row is the first length.
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "gemm": lambda m: (m, 4096, 4096),
    "attention": lambda m: (1, 8, m, 128),
    "vector_add": lambda m: (m,),
}


def problem_of(m: int, operator: str = "gemm") -> dict[str, Any]:
    """A problem as keys have it."""
    problem: Problem = ops.get(operator).problem(SHAPES[operator](m))
    return problem.model_dump()


def a_record(m: int = 4096, operator: str = "gemm", gpu: str = "h200", **changes: Any) -> TunedRecord:
    """A measured row, with these fields in place of its own."""
    device = DeviceKey(gpu=gpu, sm_count=132, capability="9.0")
    fields: dict[str, Any] = {
        "key": TuningKey(operator=operator, problem=problem_of(m, operator), device=device, toolchain="fbtriton 3.7.4"),
        "config": Config(template=f"{operator}_vanilla", params={"stages": 4, "block_m": 128}),
        "origin": "measured",
        "source_hash": "c0de",
        "time_us": 100.0,
        "protocol": "1",
        "created": NOON,
    }
    return TunedRecord.model_validate({**fields, **changes})
