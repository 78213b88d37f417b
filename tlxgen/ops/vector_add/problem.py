"""What vector_add computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from tlxgen.problem import DType, Problem, dtype_name


class VectorAddProblem(Problem):
    """out = x + y over vectors of n elements."""

    operator: ClassVar[str] = "vector_add"
    sizes: ClassVar[tuple[str, ...]] = ("n",)
    lengths: ClassVar[Mapping[str, float]] = {"n": 1.0}
    running: ClassVar[Mapping[str, int]] = {"n": 16}

    n: int = Field(ge=0, le=2**40)
    dtype: DType = Field(default="bf16", description="operands")

    @field_validator("dtype", mode="before")
    @classmethod
    def _short_name(cls, value: Any) -> Any:
        return dtype_name(value)

    @property
    def label(self) -> str:
        """As on the command line: `vector_add 1048576 bf16`."""
        return f"vector_add {self.n} {self.dtype}"
