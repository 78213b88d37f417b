"""What attention computes: sizes, heads, mask, softcap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tlxgen.problem import Problem

Causal = Literal["none", "bottom-right", "top-left"]

LARGEST_HEAD = 256
LARGEST_SOFTCAP = 1e4  # beyond, 1 - 2 / (exp(2 x) + 1) has no digits left for the tanh of small scores


class AttentionProblem(Problem):
    """Attention of q (B, H, S, D) to k and v (B, kv_heads, kv_len, D).

    `causal` says where the diagonal ends: with `bottom-right`, as in FlashAttention, the last row sees all keys; with
    `top-left` the first row sees the first key. `window` is the number of keys that a row of a causal problem sees,
    itself included; 0 for all. `softcap` changes scores to softcap · tanh(score / softcap); 0 for none. With `lse` the
    kernel also writes each row's log-sum-exp. With `exact` the output is rescaled at every rise of a row's largest
    score, not only at rises beyond a factor of 2 ** 8. The scale is an argument of the call.
    """

    operator: ClassVar[str] = "attention"
    sizes: ClassVar[tuple[str, ...]] = ("B", "H", "S", "D")
    extents: ClassVar[tuple[str, ...]] = ("kv_heads", "kv_len")
    lengths: ClassVar[Mapping[str, float]] = {"B": 0.5, "H": 0.5, "S": 1.0, "kv_heads": 0.5, "kv_len": 1.0}
    running: ClassVar[Mapping[str, int]] = {"B": 1, "S": 1, "kv_len": 1}

    B: int = Field(ge=0, le=2**20)
    H: int = Field(ge=1, le=2**12)
    S: int = Field(ge=0, le=2**24)
    D: int = Field(ge=8, le=LARGEST_HEAD, multiple_of=8)
    kv_heads: int = Field(ge=1, description="heads of k and v, H by default")
    kv_len: int = Field(ge=0, le=2**24, description="length of k and v, S by default")
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
    exact: bool = Field(default=False, description="rescale the output at every rise of a row's largest score")

    @model_validator(mode="before")
    @classmethod
    def _keys_like_queries(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        for name, default in (("kv_heads", "H"), ("kv_len", "S")):
            if data.get(name) is None and default in data:
                data[name] = data[default]
        return without_idle_window(data, "S", "kv_len")

    @model_validator(mode="after")
    def _consistent(self) -> AttentionProblem:
        if self.H % self.kv_heads:
            raise ValueError(f"H = {self.H} is no multiple of kv_heads = {self.kv_heads}")
        if self.window and self.causal == "none":
            raise ValueError(f"window = {self.window} needs causal: it counts keys back from the diagonal")
        return self

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute, or nothing to attend to."""
        return not (self.B and self.S and self.kv_len)

    @property
    def diagonal(self) -> int:
        """Row i of a causal problem sees keys up to i + this."""
        return self.kv_len - self.S if self.causal == "bottom-right" else 0


def padded_head(head_dim: int) -> int:
    """The head dimension in shared memory: a power of two, at least 64."""
    return max(64, 1 << (head_dim - 1).bit_length())


def without_idle_window(data: Mapping[str, Any], rows: str, keys: str) -> dict[str, Any]:
    """Fields of a problem, with window 0 if the window hides no key.

    Args:
        data: the fields.
        rows: name of the field that bounds the number of rows of a sequence.
        keys: name of the field that bounds the number of its keys.
    """
    causal, window = data.get("causal"), data.get("window")
    longest = data.get(keys if causal == "bottom-right" else rows)
    idle = type(window) is int and type(longest) is int and window >= longest > 0
    return {**data, "window": 0} if idle and causal in ("bottom-right", "top-left") else dict(data)
