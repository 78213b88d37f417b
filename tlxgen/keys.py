"""The one place where cache keys are made, for the tuner and for run time alike."""

from __future__ import annotations

from tlxgen.problem import Problem
from tlxgen.record import DeviceKey, TuningKey
from tlxgen.toolchain import toolchain


def tuning_key(problem: Problem, device: DeviceKey) -> TuningKey:
    """The key of a problem on a GPU under the installed toolchain."""
    return TuningKey(operator=problem.operator, problem=problem.model_dump(), device=device, toolchain=toolchain())
