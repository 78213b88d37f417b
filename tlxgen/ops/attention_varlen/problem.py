"""The problem of attention over packed sequences, and the lengths that its tuning inputs have."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tlxgen.ops.attention.problem import (
    LARGEST_HEAD,
    LARGEST_SOFTCAP,
    AttentionProblem,
    Causal,
    padded_head,
    without_idle_window,
)
from tlxgen.ops.base import Tensors
from tlxgen.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Numbers of rows and keys of a sequence.
Lengths = tuple[int, int]

_LONGEST = 2**24


class AttentionVarlenProblem(Problem):
    """Attention of q (total_q, H, D) to k and v (total_kv, kv_heads, D), B sequences one after the other.

    No sequence has more rows than `max_q`, nor more keys than `max_kv`. The other fields are those of
    `AttentionProblem`, and hold within each sequence.
    """

    operator: ClassVar[str] = "attention_varlen"
    sizes: ClassVar[tuple[str, ...]] = ("B", "H", "total_q", "D")
    extents: ClassVar[tuple[str, ...]] = ("kv_heads", "total_kv", "max_q", "max_kv")
    lengths: ClassVar[Mapping[str, float]] = dict.fromkeys(("total_q", "total_kv"), 1.0) | dict.fromkeys(
        ("B", "H", "kv_heads", "max_q", "max_kv"), 0.5
    )
    running: ClassVar[Mapping[str, int]] = dict.fromkeys(("B", "total_q", "total_kv", "max_q", "max_kv"), 1)

    B: int = Field(ge=0, le=2**20)
    H: int = Field(ge=1, le=2**12)
    total_q: int = Field(ge=0, le=_LONGEST)
    D: int = Field(ge=8, le=LARGEST_HEAD, multiple_of=8)
    kv_heads: int = Field(ge=1, description="heads of k and v, H by default")
    total_kv: int = Field(ge=0, le=_LONGEST, description="keys of all sequences, total_q by default")
    max_q: int = Field(ge=0, le=_LONGEST, description="rows of the longest sequence, by default the average")
    max_kv: int = Field(ge=0, le=_LONGEST, description="keys of the longest sequence, by default max_q or the average")
    dtype: Literal["bf16", "fp16"] = Field(default="bf16", description="operands")
    causal: Causal = Field(default="none", description="where the diagonal ends")
    window: int = Field(default=0, ge=0, description="keys that a row of a causal problem sees, itself included")
    softcap: float = Field(
        default=0.0,
        ge=0.0,
        le=LARGEST_SOFTCAP,
        allow_inf_nan=False,
        description="scores become softcap * tanh(score / softcap)",
    )
    lse: bool = Field(default=False, description="also write each row's log-sum-exp")

    @model_validator(mode="before")
    @classmethod
    def _equal_lengths(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Fills defaults: as many keys as rows, and sequences of equal lengths."""
        data = dict(data)
        for name, default in _DEFAULTS.items():
            if data.get(name) is None:
                data.pop(name, None)
                try:
                    data[name] = default(data)
                except (KeyError, TypeError):  # it needs a field that is missing or no number; validation says so
                    continue
        # No sequence has more rows or keys than there are in all.
        return without_idle_window(data, "total_q", "total_kv")

    @model_validator(mode="after")
    def _consistent(self) -> AttentionVarlenProblem:
        if self.H % self.kv_heads:
            raise ValueError(f"H = {self.H} is no multiple of kv_heads = {self.kv_heads}")
        if self.window and self.causal == "none":
            raise ValueError(f"window = {self.window} needs causal: it counts keys back from the diagonal")
        for total, most in (("total_q", "max_q"), ("total_kv", "max_kv")):
            if getattr(self, total) > self.B * getattr(self, most):
                given = f"{total} = {getattr(self, total)} exceeds B x {most} = {self.B} x {getattr(self, most)}"
                raise ValueError(f"{given}; raise {most}")
        return self

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute, or nothing to attend to."""
        return not (self.B and self.total_q and self.total_kv)

    def settled(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """See `Problem.settled`: the longest sequence is no shorter than all are on average."""
        made = dict(lengths)
        for total, most in (("total_q", "max_q"), ("total_kv", "max_kv")):
            made[most] = max(made[most], -(-made[total] // max(1, made["B"])))
        return made

    @property
    def head(self) -> int:
        """The head dimension in shared memory."""
        return padded_head(self.D)

    def alone(self, lengths: Lengths, batch: int = 1) -> AttentionProblem:
        """The problem of `batch` sequences of these lengths, not packed."""
        names = ("H", "D", "kv_heads", "dtype", "causal", "window", "softcap", "lse")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        return AttentionProblem(B=batch, S=lengths[0], kv_len=lengths[1], **fields)

    @property
    def average(self) -> AttentionProblem:
        """The problem of as many sequences of the average length, not packed."""
        lengths = (math.ceil(self.total_q / max(1, self.B)), math.ceil(self.total_kv / max(1, self.B)))
        return self.alone(lengths, self.B)


#: Defaults of fields, as functions of the fields before them.
_DEFAULTS: dict[str, Any] = {
    "kv_heads": lambda known: known["H"],
    "total_kv": lambda known: known["total_q"],
    "max_q": lambda known: -(-known["total_q"] // max(1, known["B"])),
    "max_kv": lambda known: max(known["max_q"], -(-known["total_kv"] // max(1, known["B"]))),
}


def drawn_lengths(problem: AttentionVarlenProblem) -> tuple[Lengths, ...]:
    """Lengths of a problem's sequences, for tuning and tests: uneven, and the same each time.

    One sequence has the maximum. The others are uniform from 0, scaled to the total and cut at the maximum. A sequence
    with more rows has more keys; with equal totals and maxima, rows and keys are equal. The order is random.
    """
    return _drawn(problem.B, (problem.total_q, problem.max_q), (problem.total_kv, problem.max_kv))


@lru_cache(maxsize=64)
def _drawn(count: int, rows: tuple[int, int], keys: tuple[int, int]) -> tuple[Lengths, ...]:
    rng = random.Random(f"{count} {rows} {keys}")  # noqa: S311 - no secret
    shares = sorted((rng.randrange(1, 2**30) for _ in range(count)), reverse=True)
    drawn = list(zip(_stretched(shares, *rows), _stretched(shares, *keys), strict=True))
    rng.shuffle(drawn)
    return tuple(drawn)


def _stretched(shares: Sequence[int], total: int, most: int) -> list[int]:
    """Lengths in proportion to descending shares that sum to the total; the first is the maximum.

    >>> _stretched([9, 8, 4, 2, 1], 100, 40)
    [40, 32, 16, 8, 4]
    """
    if not shares:
        return []
    most = min(most, total)
    lengths, left, weight = [most], total - most, sum(shares[1:])
    while len(lengths) < len(shares) and shares[len(lengths)] * left > most * weight:
        weight -= shares[len(lengths)]
        lengths.append(most)
        left -= most
    cut = len(lengths)
    lengths += [share * left // weight for share in shares[cut:]]
    missing = total - sum(lengths)  # less than one for each length that was rounded down
    return [n + 1 if cut <= i < cut + missing else n for i, n in enumerate(lengths)]


def _measures(lengths: Sequence[Lengths]) -> dict[str, int]:
    """Totals and maxima of rows and keys."""
    rows, keys = zip(*lengths, strict=True)
    return {"total_q": sum(rows), "max_q": max(rows), "total_kv": sum(keys), "max_kv": max(keys)}


def sequences(
    problem: AttentionVarlenProblem, inputs: Tensors
) -> Iterator[tuple[slice, slice, AttentionProblem, Tensors]]:
    """For each sequence with rows and keys: its rows, its keys, and its problem and inputs as plain attention.

    Reads `cu_seqlens`, and so waits for the device.
    """
    ends = (inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_kv"].tolist())
    for rows, keys in zip(*(map(slice, *zip(*pairwise(one), strict=True)) for one in ends), strict=True):
        lengths = (rows.stop - rows.start, keys.stop - keys.start)
        if all(lengths):
            parts = {"q": rows, "k": keys, "v": keys}
            own = {name: inputs[name][part].transpose(0, 1)[None] for name, part in parts.items()}
            own |= {"scale": inputs["scale"]} if "scale" in inputs else {}
            yield rows, keys, problem.alone(lengths), own
