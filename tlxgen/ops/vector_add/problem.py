"""What vector_add computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from tlxgen.problem import DType, Problem


class VectorAddProblem(Problem):
    """out = x + y over vectors of n elements."""

    operator: ClassVar[str] = "vector_add"
    sizes: ClassVar[tuple[str, ...]] = ("n",)
    lengths: ClassVar[Mapping[str, float]] = {"n": 1.0}
    running: ClassVar[Mapping[str, int]] = {"n": 16}

    n: int = Field(ge=0, le=2**40)
    dtype: DType = Field(default="bf16", description="operands")
