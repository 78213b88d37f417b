"""What a grouped GEMM computes, and the distribution of its tokens over experts."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tlxgen.ops.gemm.problem import ACTIVATIONS, Layout
from tlxgen.problem import DType, Problem, dtype_name, parse_problem

Form = Literal["2d3d", "3d2d", "2d2d", "3d3d", "masked", "gather"]

#: Named distributions of tokens over experts.
CLASSES = ("even", "dirichlet", "zipf")

#: The default distribution.
SPREAD = "dirichlet"

#: Gated activations, by the activation of the gate: the left half of the columns is the gate, the right half is
#: multiplied by it (Shazeer, GLU Variants Improve Transformer, 2020).
GATED = {"swiglu": "silu", "geglu": "gelu"}

#: Epilogues add a bias first, then apply one activation, or a gated one.
EPILOGUES = ("none", "bias", *(f"{bias}{name}" for bias in ("", "bias+") for name in (*ACTIVATIONS, *GATED)))

#: Forms whose columns are the weights' and whose rows are tokens, of which a gated activation takes halves.
_GATED_FORMS = ("2d3d", "masked", "gather")

_LAYOUTS = {"3d2d": "nt", "2d2d": "tn"}  # by form, where it is not nn
_EIGHT_BITS = "nt"  # the layout of 8-bit operands: tensor cores take those with K contiguous alone
_EMPTY = 16  # one expert in so many has no tokens, unless they are spread evenly
_LARGEST = 2**31 - 1024  # tile offsets are 32-bit and run up to one tile past the end
_MOST_EXPERTS = 2**16
_MOST_TOKENS = 2**30  # the number that kernels use for the row after an expert's last


class GroupedGemmProblem(Problem):
    """One layer of E experts with weights K x N, and ROWS tokens in all, each of which belongs to one expert.

    `form` says what is multiplied; the names of the first four are the ranks of A and B:

    | form | A | B | C | tokens of expert e |
    |---|---|---|---|---|
    | 2d3d | tokens (ROWS, K) | weights (E, K, N) | (ROWS, N) | rows of A and C from offs[e - 1] to offs[e] |
    | 3d2d | weights (E, N, K) | tokens (K, ROWS) | (N, ROWS) | columns of B and C |
    | 2d2d | tokens (K, ROWS) | gradients (ROWS, N) | (E, K, N) | columns of A, rows of B: what is summed over |
    | 3d3d | tokens (E, ROWS / E, K) | weights (E, K, N) | (E, ROWS / E, N) | all rows of A[e] |
    | masked | tokens (E, max_rows, K) | weights (E, K, N) | (E, max_rows, N) | the first counts[e] rows of A[e] |
    | gather | tokens (T, K) | weights (E, K, N) | (ROWS, N) | as in 2d3d, of C; row i of C is of row rows[i] of A |

    `offs` (E,) are ends, not decreasing, as in torch; `counts` (E,) are at most `max_rows`; `rows` (ROWS,), from 0 to
    T - 1, may repeat, and T is any number. All are int32 and are read by the device only. Rows of C that no expert
    owns (past offs[-1], or past counts[e]) are not written. An expert without tokens gives zeros in form 2d2d, and
    nothing otherwise.

    `layout` has a letter for the matrices of A and one for those of B: `n` for contiguous rows, `t` for contiguous
    columns (stored transposed). C has contiguous rows. `epilogue` is none, or bias, relu | gelu | silu | swiglu |
    geglu, joined by `+`; the bias is (E, N), one for each expert, and form 3d2d takes none.

    swiglu, silu(gate) * up, and geglu, gelu(gate) * up with the gelu of the error function, take the first N / 2
    columns of the product for the gate and the others for up. N stays the columns of weights, product and bias, so that
    it means the same with and without them; C has N / 2 columns. They are for forms 2d3d, masked and gather.

    Of e4m3, 8-bit floats, rows of A and columns of B have a scale each, `scale_a` (ROWS,) and `scale_b` (E, N) in
    float32, by which the product is multiplied before anything is added. Form 2d3d, layout nt, C in bf16: as in torch.

    `group_sizes` is the distribution of tokens for tuning; calls may have any other. It is `even`, `dirichlet` (shares
    from Dirichlet(1)) or `zipf` (shares 1/1, 1/2, 1/3, ... in random order), the latter two with one expert in sixteen
    empty, or the number of each expert's tokens, joined by commas.
    """

    operator: ClassVar[str] = "grouped_gemm"
    sizes: ClassVar[tuple[str, ...]] = ("E", "ROWS", "N", "K")
    extents: ClassVar[tuple[str, ...]] = ("max_rows", "group_sizes")
    lengths: ClassVar[Mapping[str, float]] = {"E": 1.0, "ROWS": 1.0, "N": 1.0, "K": 0.5}  # K is walked
    running: ClassVar[Mapping[str, int]] = {"ROWS": 16}

    E: int = Field(ge=0, le=_MOST_EXPERTS)
    ROWS: int = Field(ge=0, le=_MOST_TOKENS)
    N: int = Field(ge=0, le=_LARGEST)
    K: int = Field(ge=0, le=_LARGEST)
    dtype: Literal["bf16", "fp16", "e4m3"] = Field(default="bf16", description="operands")
    out_dtype: DType = Field(default="bf16", description="output, the operands' by default")
    form: Form = Field(default="2d3d", description="ranks of A and B, or how tokens are addressed")
    layout: Layout = Field(default="nn", description="how A and B are stored, t for transposed")
    epilogue: str = Field(default="none", description="none, or bias+relu|gelu|silu|swiglu|geglu")
    max_rows: int = Field(default=0, ge=0, le=_MOST_TOKENS, description="tokens that an expert of form masked can hold")
    group_sizes: str = Field(
        default=SPREAD, description="tokens of each expert: even, dirichlet, zipf, or numbers joined by commas"
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Defaults of fields that depend on others."""
        data = {name: value for name, value in data.items() if value is not None}
        form = data.get("form", "2d3d")
        dtype = dtype_name(data.get("dtype", "bf16"))
        data.setdefault("out_dtype", _default_out(dtype))
        data.setdefault("layout", _default_layout(form, dtype))
        data.setdefault("group_sizes", _default_spread(form))
        if form == "masked" and "ROWS" in data:
            data.setdefault("max_rows", data["ROWS"])
        return data

    @field_validator("epilogue")
    @classmethod
    def _known_epilogue(cls, value: str) -> str:
        if value not in EPILOGUES:
            raise ValueError(f"epilogue {value!r} is not known; use one of {', '.join(EPILOGUES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> GroupedGemmProblem:
        if self.scaled and (self.form, self.layout, self.out_dtype) != ("2d3d", _EIGHT_BITS, "bf16"):
            told = f"form {self.form}, layout {self.layout}, out_dtype {self.out_dtype}"
            raise ValueError(
                f"dtype {self.dtype} is for form 2d3d, layout {_EIGHT_BITS} and out_dtype bf16, not {told}"
            )
        if self.form == "3d2d" and "bias" in self.epilogue_parts:
            raise ValueError(f"epilogue {self.epilogue!r}: columns are tokens in form 3d2d, which takes no bias")
        if self.gated and self.form not in _GATED_FORMS:
            raise ValueError(f"epilogue {self.epilogue!r} is for forms {', '.join(_GATED_FORMS)}, not {self.form}")
        if self.gated and self.N % 2:
            raise ValueError(f"N = {self.N}: epilogue {self.epilogue} takes half for the gate; N must be even")
        if self.form == "gather" and self.a_transposed:
            raise ValueError(f"layout {self.layout!r}: form gather takes rows of A, which must be contiguous: nn or nt")
        if self.form == "masked" and self.E * self.max_rows < self.ROWS:
            room = f"E x max_rows = {self.E} x {self.max_rows}"
            raise ValueError(f"ROWS = {self.ROWS} exceeds {room}: so many tokens do not fit")
        if self.form != "masked" and self.max_rows:
            raise ValueError(f"max_rows = {self.max_rows} is for form masked; form {self.form} has no such limit")
        if self.form == "3d3d" and self.group_sizes != "even":
            raise ValueError(f"group_sizes = {self.group_sizes!r}: in form 3d3d all experts have equally many tokens")
        if self.form == "3d3d" and self.E and self.ROWS % self.E:
            raise ValueError(f"ROWS = {self.ROWS} is no multiple of E = {self.E}, as form 3d3d wants it")
        reason = self._why_no_spread()
        if reason:
            raise ValueError(f"group_sizes = {self.group_sizes!r}: {reason}")
        return self

    def _why_no_spread(self) -> str | None:
        if self.group_sizes in CLASSES:
            return None
        if not re.fullmatch(r"\d+(,\d+)*", self.group_sizes):
            return f"use {', '.join(CLASSES)}, or the number of each expert's tokens, joined by commas"
        sizes = [int(word) for word in self.group_sizes.split(",")]
        if (len(sizes), sum(sizes)) != (self.E, self.ROWS):
            return f"{sum(sizes)} tokens of {len(sizes)} experts, where ROWS = {self.ROWS} and E = {self.E}"
        if self.form == "masked" and max(sizes) > self.max_rows:
            return f"an expert has {max(sizes)} tokens, and room for max_rows = {self.max_rows}"
        return None

    @property
    def epilogue_parts(self) -> tuple[str, ...]:
        """The epilogue's parts in order; empty for `none`."""
        return () if self.epilogue == "none" else tuple(self.epilogue.split("+"))

    @property
    def gated(self) -> bool:
        """Whether the epilogue multiplies half the product's columns by the activated others."""
        return any(part in GATED for part in self.epilogue_parts)

    @property
    def scaled(self) -> bool:
        """Whether rows of A and columns of B have scales, as 8-bit floats do."""
        return self.dtype == "e4m3"

    @property
    def bias_dtype(self) -> str:
        """The operands' dtype, or the result's if the operands have scales."""
        return self.out_dtype if self.scaled else self.dtype

    @property
    def a_transposed(self) -> bool:
        """Whether columns of A's matrices are contiguous."""
        return self.layout[0] == "t"

    @property
    def b_transposed(self) -> bool:
        """Whether columns of B's matrices are contiguous."""
        return self.layout[1] == "t"

    @property
    def gathered(self) -> Form:
        """The form of the same product once rows of A are gathered."""
        return "2d3d" if self.form == "gather" else self.form

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a, b and c. In form gather `a` may have any number of rows; this is its shape for tuning."""
        e, rows, n, k = self.E, self.ROWS, self.N, self.K
        if self.gathered == "2d3d":
            return {"a": (rows, k), "b": (e, k, n), "c": (rows, self._columns)}
        if self.form == "3d2d":
            return {"a": (e, n, k), "b": (k, rows), "c": (n, rows)}
        if self.form == "2d2d":
            return {"a": (k, rows), "b": (rows, n), "c": (e, k, n)}
        each = self.max_rows if self.form == "masked" else rows // max(1, e)
        return {"a": (e, each, k), "b": (e, k, n), "c": (e, each, self._columns)}

    @property
    def _columns(self) -> int:
        """Columns of C in forms whose columns are the weights'."""
        return self.N // 2 if self.gated else self.N

    def product(self, tokens: int) -> tuple[int, int, int]:
        """M, N and K of the product of an expert with this number of tokens."""
        if self.form == "3d2d":
            return self.N, tokens, self.K
        return (self.K, self.N, tokens) if self.form == "2d2d" else (tokens, self.N, self.K)

    @property
    def label(self) -> str:
        """As on the command line, without defaults: `grouped_gemm 8 8192 14336 4096 bf16 nn`."""
        words = ["grouped_gemm", self.E, self.ROWS, self.N, self.K, self.dtype, self.layout]
        words += [f"out={self.out_dtype}"] if self.out_dtype != _default_out(self.dtype) else []
        words += [f"form={self.form}"] if self.form != "2d3d" else []
        words += [f"epilogue={self.epilogue}"] if self.epilogue != "none" else []
        words += [f"max_rows={self.max_rows}"] if self.form == "masked" else []
        words += [f"group_sizes={self.group_sizes}"] if self.group_sizes != _default_spread(self.form) else []
        return " ".join(map(str, words))

    @classmethod
    def from_label(cls, label: str) -> GroupedGemmProblem:
        """See `Problem.from_label`."""
        words = label.split()[1:]
        fields: dict[str, Any] = dict(zip(("dtype", "layout"), words[4:6], strict=False))
        for word in words[6:]:
            name, _, value = word.partition("=")
            name = "out_dtype" if name == "out" else name
            fields[name] = int(value) if name == "max_rows" and value.isdecimal() else value
        return parse_problem(cls, [int(word) if word.isdecimal() else word for word in words[:4]], fields)


def _default_out(dtype: Any) -> Any:
    return "bf16" if dtype == "e4m3" else dtype


def _default_layout(form: Any, dtype: Any) -> str:
    if dtype == "e4m3":
        return _EIGHT_BITS
    return _LAYOUTS.get(form, "nn") if isinstance(form, str) else "nn"


def _default_spread(form: Any) -> str:
    return "even" if form == "3d3d" else SPREAD


def drawn_sizes(problem: GroupedGemmProblem) -> tuple[int, ...]:
    """Tokens of each expert for tuning and tests, by `group_sizes`; the same in each call."""
    most = problem.max_rows if problem.form == "masked" else problem.ROWS
    return _drawn(problem.E, problem.ROWS, most, problem.group_sizes)


@lru_cache(maxsize=64)
def _drawn(experts: int, rows: int, most: int, spread: str) -> tuple[int, ...]:
    if spread not in CLASSES:
        return tuple(map(int, spread.split(",")))
    rng = random.Random(f"{experts} {rows} {spread}")  # noqa: S311 - no secret
    if spread == "even":
        shares = [1.0] * experts
    else:
        served = experts - experts // _EMPTY
        shares = [rng.expovariate(1.0) if spread == "dirichlet" else 1.0 / (i + 1) for i in range(served)]
        shares += [0.0] * (experts - served)
        rng.shuffle(shares)
    return _shared_out(shares, rows, most)


def _shared_out(shares: Sequence[float], total: int, most: int) -> tuple[int, ...]:
    """Integers in proportion to shares, which sum to the total; none exceeds `most`, the excess goes to the others.

    >>> _shared_out([3.0, 1.0, 0.0], 8, 8), _shared_out([3.0, 1.0, 0.0], 8, 5), _shared_out([3.0, 1.0, 0.0], 8, 3)
    ((6, 2, 0), (5, 3, 0), (3, 3, 2))
    """
    if not shares:
        return ()
    whole = sum(shares)
    # Ends are rounded, not sizes, so that rounding never adds up.
    ends = [round(total * part / whole) for part in accumulate(shares)]
    ends[-1] = total
    sizes = [min(end - start, most) for start, end in zip([0, *ends], ends, strict=False)]
    missing = total - sum(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -shares[i]):
        more = min(missing, most - sizes[i])
        sizes[i] += more
        missing -= more
    return tuple(sizes)
