"""What a GEMM computes: sizes, dtypes, layout, epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tlxgen.problem import DType, Problem

Layout = Literal["nn", "nt", "tn", "tt"]


#: Tile offsets are 32-bit and run up to one tile past the end.
_LARGEST = 2**31 - 1024


#: Parts of an epilogue in the order they are applied; at most one activation.
EPILOGUE_PARTS = ("scale", "bias", "relu", "gelu", "silu", "residual")


ACTIVATIONS = ("relu", "gelu", "silu")


class GemmProblem(Problem):
    """C (M, N) = epilogue(A (M, K) · B (K, N)).

    `layout` has a letter for A and one for B: `n` for contiguous rows, `t` for contiguous columns (stored transposed).
    `nt` is the layout of `nn.Linear`: A (M, K) and a weight stored (N, K). C always has contiguous rows.
    `epilogue` joins parts by `+` in the order scale, bias, relu | gelu | silu, residual; gelu is the exact (erf) form.
    """

    operator: ClassVar[str] = "gemm"
    sizes: ClassVar[tuple[str, ...]] = ("M", "N", "K")
    label_fields: ClassVar[tuple[str, ...]] = ("dtype", "layout", "epilogue")
    lengths: ClassVar[Mapping[str, float]] = {"M": 1.0, "N": 1.0, "K": 0.5}  # K is walked, M and N are tiled
    running: ClassVar[Mapping[str, int]] = {"M": 16}

    M: int = Field(ge=0, le=_LARGEST)
    N: int = Field(ge=0, le=_LARGEST)
    K: int = Field(ge=0, le=_LARGEST)
    dtype: DType = Field(default="bf16", description="operands; fp32 through TF32")
    out_dtype: DType = Field(default="bf16", description="output, the operands' by default")
    layout: Layout = Field(default="nn", description="how A and B are stored, t for transposed")
    epilogue: str = Field(
        default="none", description="none, or parts of scale+bias+relu|gelu|silu+residual in that order"
    )

    @model_validator(mode="before")
    @classmethod
    def _output_like_input(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        if data.get("out_dtype") is None:
            data["out_dtype"] = data.get("dtype", "bf16")
        return data

    @field_validator("epilogue")
    @classmethod
    def _known_parts(cls, value: str) -> str:
        parts = [] if value == "none" else value.split("+")
        ordered = sorted(parts, key=lambda part: EPILOGUE_PARTS.index(part) if part in EPILOGUE_PARTS else 99)
        activations = [part for part in parts if part in ACTIVATIONS]
        if (
            not set(parts) <= set(EPILOGUE_PARTS)
            or parts != ordered
            or len(parts) != len(set(parts))
            or len(activations) > 1
        ):
            rule = "none, or parts joined by + in the order scale, bias, relu|gelu|silu, residual"
            raise ValueError(f"epilogue {value!r} is not known; use {rule}")
        return value

    @property
    def epilogue_parts(self) -> tuple[str, ...]:
        """The epilogue's parts in order; empty for `none`."""
        return () if self.epilogue == "none" else tuple(self.epilogue.split("+"))

    @property
    def a_transposed(self) -> bool:
        """Whether A is stored (K, M)."""
        return self.layout[0] == "t"

    @property
    def b_transposed(self) -> bool:
        """Whether B is stored (N, K)."""
        return self.layout[1] == "t"

    @property
    def label(self) -> str:
        """As on the command line: `gemm 4096 4096 4096 bf16 nn`, with the options that differ from the defaults."""
        words = ["gemm", self.M, self.N, self.K, self.dtype, self.layout]
        words += [f"out={self.out_dtype}"] if self.out_dtype != self.dtype else []
        words += [self.epilogue] if self.epilogue != "none" else []
        return " ".join(map(str, words))
