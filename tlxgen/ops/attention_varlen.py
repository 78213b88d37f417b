"""Attention over packed sequences of different lengths, forward.

Sequence i owns rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q (total_q, H, D) and of the result, and keys
cu_seqlens_kv[i] to cu_seqlens_kv[i + 1] of k and v (total_kv, KV heads, D); within it everything is as in
`tlxgen.ops.attention`. Where sequences end is read on the device alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tlxgen import model
from tlxgen.config import Config, Value
from tlxgen.devices import Gpu
from tlxgen.ops import attention_kernels as kernels
from tlxgen.ops import attention_varlen_torch
from tlxgen.ops.attention import LARGEST_SOFTCAP, AttentionProblem, Causal
from tlxgen.ops.attention import OPERATOR as ATTENTION
from tlxgen.ops.base import Case, Operator, Resources, Tensors, normal_tensors, why_other_tensors
from tlxgen.problem import ITEM_BYTES, Problem, dtype_name, parse_problem, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

#: A sequence: its rows of q, and its keys.
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
    D: int = Field(ge=8, le=256, multiple_of=8)
    kv_heads: int = Field(ge=1)
    total_kv: int = Field(ge=0, le=_LONGEST)
    max_q: int = Field(ge=0, le=_LONGEST)
    max_kv: int = Field(ge=0, le=_LONGEST)
    dtype: Literal["bf16", "fp16"] = "bf16"
    causal: Causal = "none"
    window: int = Field(default=0, ge=0)
    softcap: float = Field(default=0.0, ge=0.0, le=LARGEST_SOFTCAP, allow_inf_nan=False)
    lse: bool = False

    @model_validator(mode="before")
    @classmethod
    def _equal_lengths(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Unless told otherwise: as many keys as rows, and all sequences alike."""
        data = dict(data)
        for name, default in _DEFAULTS.items():
            if data.get(name) is None:
                data.pop(name, None)
                try:
                    data[name] = default(data)
                except (KeyError, TypeError):  # of a field that is missing or no number, which is refused
                    continue
        # No sequence has more rows or keys than there are in all.
        return kernels.without_idle_window(data, "total_q", "total_kv")

    @field_validator("dtype", mode="before")
    @classmethod
    def _short_name(cls, value: Any) -> Any:
        return dtype_name(value)

    @model_validator(mode="after")
    def _consistent(self) -> AttentionVarlenProblem:
        if self.H % self.kv_heads:
            raise ValueError(f"H = {self.H} is no multiple of kv_heads = {self.kv_heads}")
        if self.window and self.causal == "none":
            raise ValueError(f"window = {self.window} needs causal: it counts keys back from the diagonal")
        for total, most in (("total_q", "max_q"), ("total_kv", "max_kv")):
            if getattr(self, total) > self.B * getattr(self, most):
                given = f"{total} = {getattr(self, total)} exceeds B x {most} = {self.B} x {getattr(self, most)}"
                raise ValueError(f"{given}: so much does not fit into the sequences")
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
    def label(self) -> str:
        """As on the command line, with what differs from the defaults: `attention_varlen 4 32 4096 128 bf16 lse=1`."""
        words = ["attention_varlen", self.B, self.H, self.total_q, self.D, self.dtype]
        known: dict[str, Any] = {name: getattr(self, name) for name in self.sizes}
        for name, default in _DEFAULTS.items():
            words += [f"{name}={getattr(self, name)}"] if getattr(self, name) != default(known) else []
            known[name] = getattr(self, name)
        words += [f"causal={self.causal}"] if self.causal != "none" else []
        words += [f"window={self.window}"] if self.window else []
        words += [f"softcap={self.softcap}"] if self.softcap else []
        words += ["lse=1"] if self.lse else []
        return " ".join(map(str, words))

    @classmethod
    def from_label(cls, label: str) -> AttentionVarlenProblem:
        """See `Problem.from_label`."""
        words = label.split()[1:]
        fields: dict[str, Any] = {"dtype": words[4] if len(words) > 4 else "bf16"}
        for word in words[5:]:
            name, _, value = word.partition("=")
            fields[name] = value if name == "causal" else float(value) if name == "softcap" else int(value)
        if "lse" in fields:
            fields["lse"] = bool(fields["lse"])
        return parse_problem(cls, [int(word) if word.isdecimal() else word for word in words[:4]], fields)

    @property
    def head(self) -> int:
        """The head dimension in shared memory."""
        return kernels.padded(self.D)

    def alone(self, lengths: Lengths, batch: int = 1) -> AttentionProblem:
        """So many sequences of the same length, not packed."""
        names = ("H", "D", "kv_heads", "dtype", "causal", "window", "softcap", "lse")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        return AttentionProblem(B=batch, S=lengths[0], kv_len=lengths[1], **fields)

    @property
    def average(self) -> AttentionProblem:
        """All sequences as long as they are on average."""
        lengths = (math.ceil(self.total_q / max(1, self.B)), math.ceil(self.total_kv / max(1, self.B)))
        return self.alone(lengths, self.B)


#: Fields that may be left out → what they are then, in an order in which each knows those before.
_DEFAULTS: dict[str, Any] = {
    "kv_heads": lambda known: known["H"],
    "total_kv": lambda known: known["total_q"],
    "max_q": lambda known: -(-known["total_q"] // max(1, known["B"])),
    "max_kv": lambda known: max(known["max_q"], -(-known["total_kv"] // max(1, known["B"]))),
}


class AttentionVarlen(Operator[AttentionVarlenProblem]):
    """The operator for packed sequences."""

    name = "attention_varlen"
    templates = ("attention_varlen", "attention_varlen_vanilla")
    peer = "varlen_attn"
    inputs_in_order = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")
    output_name = "out"
    also_written = ("lse",)
    problem_type = AttentionVarlenProblem
    allowed_spill_bytes = ATTENTION.allowed_spill_bytes

    def problem(
        self, shape: AttentionVarlenProblem | Sequence[int] | Mapping[str, Any], **options: Any
    ) -> AttentionVarlenProblem:
        """See `Operator.problem`."""
        return parse_problem(AttentionVarlenProblem, shape, options)

    def variables(self, problem: AttentionVarlenProblem) -> dict[str, Value]:
        """See `Operator.variables`."""
        names = ("B", "H", "total_q", "D", "total_kv", "max_q", "max_kv", "causal", "window")
        return {**{name: getattr(problem, name) for name in names}, "head": problem.head}

    def resources(self, problem: AttentionVarlenProblem, config: Config) -> Resources:
        """See `Operator.resources`: tiles of Q, the rings of K and V, the staging of the output, barriers."""
        head, item = problem.head, ITEM_BYTES[problem.dtype]
        if config.template == "attention_varlen_vanilla":
            return kernels.vanilla_resources(config, head, item)
        return kernels.tma_resources(config, head, item)

    def template_context(self, problem: AttentionVarlenProblem, config: Config) -> dict[str, Any]:
        """See `Operator.template_context`."""
        head = problem.head
        context = {
            **kernels.context(problem, head),
            # Whether a sequence may have keys that none of its rows sees: beyond the diagonal, or before the window.
            "clipped": problem.window > 0 if problem.causal == "bottom-right" else problem.causal == "top-left",
            "hopper": config.template == "attention_varlen",
        }
        if config.template == "attention_varlen":
            context |= kernels.tma_context(config, head, problem.dtype)
        return context

    def small_cases(self, problem: AttentionVarlenProblem, config: Config) -> Sequence[Case[AttentionVarlenProblem]]:
        """A tile, a row more; no rows; no keys; one, two, many blocks of keys; fewer keys than rows; several CTAs."""
        p = config.params
        m, n, kv = kernels.tile_rows(config), int(p["block_n"]), int(p.get("kv_stages", 2))
        group = min(problem.H // problem.kv_heads, 2)
        cases = []
        for kv_heads, lengths, num_sms in (
            (1, [(m, n)], 1),
            (1, [(1, 1)], 1),
            (1, [(m + 1, (kv + 1) * n + 5), (0, 3)], 1),
            (1, [(2 * m, max(1, n // 2)), (m, 0)], 1),
            (2, [(m + 8, 2 * n - 7), (1, 1), (0, 0)], 1),
            (1, [(m - 5, n + 1)] * 3, 2),
        ):
            sizes = {"B": len(lengths), "H": kv_heads * group, "kv_heads": kv_heads, **_measures(lengths)}
            cases.append(Case(problem.model_copy(update=sizes), num_sms))
        return cases

    def flops(self, problem: AttentionVarlenProblem) -> float:
        """Of sequences of the lengths that `inputs` draws."""
        return _flops(problem)

    def bytes_moved(self, problem: AttentionVarlenProblem) -> float:
        """q, out, k and v, once each."""
        rows, keys = problem.H * problem.total_q, problem.kv_heads * problem.total_kv
        return float(2 * (rows + keys) * problem.D * ITEM_BYTES[problem.dtype])

    def predict_us(self, problem: AttentionVarlenProblem, config: Config, gpu: Gpu) -> float:
        """See `tlxgen.model.attention_us`: as if all sequences had the average length."""
        return model.attention_us(problem.average, config, gpu, self.flops(problem), self.bytes_moved(problem))

    def call_defaults(self, problem: AttentionVarlenProblem) -> dict[str, Any]:
        """See `Operator.call_defaults`."""
        return {"max_q": problem.max_q}

    def inputs(self, problem: AttentionVarlenProblem, device: torch.device | str, seed: int) -> Tensors:
        """Random q, k, v, sequences as in `drawn_lengths`, and room for the log-sum-exp if it is asked for."""
        import torch

        dtype, normal = torch_dtype(problem.dtype), normal_tensors(device, seed)
        keys = (problem.total_kv, problem.kv_heads, problem.D)
        tensors: dict[str, Any] = {"q": normal((problem.total_q, problem.H, problem.D), dtype)}
        tensors |= {name: normal(keys, dtype) for name in ("k", "v")}
        rows, keys_of = zip(*drawn_lengths(problem), strict=True) if problem.B else ((), ())
        for name, lengths in (("cu_seqlens_q", rows), ("cu_seqlens_kv", keys_of)):
            tensors[name] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        if problem.lse:
            tensors["lse"] = torch.empty(problem.H, problem.total_q, dtype=torch.float32, device=device)
        return {**tensors, **self.call_defaults(problem)}

    def output_like(self, problem: AttentionVarlenProblem) -> tuple[tuple[int, ...], torch.dtype]:
        """See `Operator.output_like`."""
        return (problem.total_q, problem.H, problem.D), torch_dtype(problem.dtype)

    def reference(self, problem: AttentionVarlenProblem, inputs: Tensors) -> torch.Tensor:
        """The result in float64, sequence by sequence."""
        import torch

        out = torch.zeros_like(inputs["q"], dtype=torch.float64)
        for rows, _, alone, own in sequences(problem, inputs):
            out[rows] = ATTENTION.reference(alone, own)[0].transpose(0, 1)
        return out

    def side_outputs(self, problem: AttentionVarlenProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The log-sum-exp, if it is asked for."""
        import torch

        if not problem.lse:
            return {}
        lse = torch.full_like(inputs["lse"], float("-inf"), dtype=torch.float64)
        for rows, _, alone, own in sequences(problem, inputs):
            lse[:, rows] = ATTENTION.side_outputs(alone, own)["lse"][0]
        return {"lse": lse}

    def eager(self, problem: AttentionVarlenProblem, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """`varlen_attn` on a GPU where it has the mask, else attention of padded sequences; neither asks the host.

        On AMD's GPUs, where torch returns the log-sum-exp in another shape, sequences are padded.
        """
        import torch

        if problem.empty:
            result = torch.zeros_like(inputs["q"])
            if problem.lse:
                inputs["lse"].fill_(float("-inf"))
        elif inputs["q"].is_cuda and not torch.version.hip and problem.causal != "top-left" and not problem.softcap:
            result = attention_varlen_torch.flash(problem, inputs)
        else:
            result = attention_varlen_torch.padded(problem, inputs)
        return result if out is None else out.copy_(result)

    def check_call(self, problem: AttentionVarlenProblem, tensors: Tensors) -> str | None:
        """See `Operator.check_call`; where sequences end is not looked at, which would wait for the GPU."""
        import torch

        keys = (problem.total_kv, problem.kv_heads, problem.D)
        shapes: dict[str, tuple[int, ...]] = {"q": (problem.total_q, problem.H, problem.D), "k": keys, "v": keys}
        dtypes = dict.fromkeys(shapes, torch_dtype(problem.dtype))
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            shapes[name], dtypes[name] = (problem.B + 1,), torch.int32
        if problem.lse:
            shapes["lse"], dtypes["lse"] = (problem.H, problem.total_q), torch.float32
        reason = why_other_tensors(tensors, shapes, dtypes)
        if reason:
            return reason
        scale: Any = tensors.get("scale")
        if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
            return f"scale is {scale!r}; it must be a finite number"
        most: Any = tensors.get("max_q")
        if not isinstance(most, int) or problem.B * most < problem.total_q:
            return f"max_q is {most!r}; {problem.B} sequences of so many rows do not hold {problem.total_q}"
        surplus = sorted(set(tensors) - {*shapes, "scale", "max_q"})
        return f"{surplus[0]} is not a parameter" if surplus else None

    def launchable(
        self, problem: AttentionVarlenProblem, config: Config, tensors: Tensors, out: torch.Tensor
    ) -> str | None:
        """See `Operator.launchable`: D contiguous, and what TMA asks of base addresses and the other strides."""
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "lse"):
            if name in tensors and not tensors[name].is_contiguous():
                return f"{name} is not contiguous"
        taken = (*((name, tensors[name]) for name in ("q", "k", "v")), ("out", out))
        return kernels.why_unreadable(taken, ("q", "k", "v", "out") if config.template == "attention_varlen" else ())


def drawn_lengths(problem: AttentionVarlenProblem) -> tuple[Lengths, ...]:
    """Lengths of a problem's sequences, for tuning and tests: uneven, and the same each time.

    One sequence is as long as may be. The others have lengths uniform from 0 on, stretched to make up the total, cut
    where the longest ends. The longer a sequence's rows the longer its keys; where totals and maxima of both are alike,
    so are the lengths. The order is random.
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
    """Lengths in proportion to shares, which fall, that sum to the total; the first is the longest that may be.

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
    missing = total - sum(lengths)  # less than one for each that was rounded down
    return [n + 1 if cut <= i < cut + missing else n for i, n in enumerate(lengths)]


def _measures(lengths: Sequence[Lengths]) -> dict[str, int]:
    """Totals and maxima of rows and keys."""
    rows, keys = zip(*lengths, strict=True)
    return {"total_q": sum(rows), "max_q": max(rows), "total_kv": sum(keys), "max_kv": max(keys)}


@lru_cache(maxsize=64)
def _flops(problem: AttentionVarlenProblem) -> float:
    counts = Counter(drawn_lengths(problem))
    return sum(number * ATTENTION.flops(problem.alone(lengths)) for lengths, number in counts.items())


def sequences(
    problem: AttentionVarlenProblem, inputs: Tensors
) -> Iterator[tuple[slice, slice, AttentionProblem, Tensors]]:
    """Sequences with rows and keys: where both are, and each as a problem of its own with its inputs.

    Asks the device where sequences end, and waits for the answer.
    """
    ends = (inputs["cu_seqlens_q"].tolist(), inputs["cu_seqlens_kv"].tolist())
    for rows, keys in zip(*(map(slice, *zip(*pairwise(one), strict=True)) for one in ends), strict=True):
        lengths = (rows.stop - rows.start, keys.stop - keys.start)
        if all(lengths):
            parts = {"q": rows, "k": keys, "v": keys}
            own = {name: inputs[name][part].transpose(0, 1)[None] for name, part in parts.items()}
            own |= {"scale": inputs["scale"]} if "scale" in inputs else {}
            yield rows, keys, problem.alone(lengths), own


OPERATOR = AttentionVarlen()
