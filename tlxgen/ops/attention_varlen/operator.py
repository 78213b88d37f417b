"""Attention over packed sequences of different lengths, forward.

Sequence i owns rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q (total_q, H, D) and of the result, and keys
cu_seqlens_kv[i] to cu_seqlens_kv[i + 1] of k and v (total_kv, KV heads, D); within it everything is as in
`tlxgen.ops.attention.operator`. Only the kernel reads `cu_seqlens`: nothing waits for the GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tlxgen.config import Config, Value
from tlxgen.devices import Gpu
from tlxgen.ops.attention import kernels, time_model
from tlxgen.ops.attention.operator import OPERATOR as ATTENTION
from tlxgen.ops.attention_varlen import torch_reference
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem, _measures, drawn_lengths, sequences
from tlxgen.ops.base import Case, Operator, Resources, Tensors, normal_tensors, why_other_tensors
from tlxgen.problem import ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    import torch


class AttentionVarlen(Operator[AttentionVarlenProblem]):
    """The operator for packed sequences."""

    name = "attention_varlen"
    templates = ("attention_varlen", "attention_varlen_vanilla")
    peer = "varlen_attn"
    inputs_in_order = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")
    output_name = "out"
    also_written = ("lse",)
    problem_type = AttentionVarlenProblem
    examples = (
        {"B": 4, "H": 32, "total_q": 8192, "D": 64},
        {"B": 3, "H": 8, "total_q": 1000, "D": 128, "kv_heads": 2, "causal": "bottom-right", "lse": True},
    )
    allowed_spill_bytes = ATTENTION.allowed_spill_bytes

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
            # Whether no row sees some keys of a sequence: those beyond the diagonal, or before the window.
            "clipped": problem.window > 0 if problem.causal == "bottom-right" else problem.causal == "top-left",
            "hopper": config.template == "attention_varlen",
        }
        if config.template == "attention_varlen":
            context |= kernels.tma_context(config, problem.dtype)
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
        """See `Operator.flops`: for sequences of the lengths that `inputs` draws."""
        return _flops(problem)

    def bytes_moved(self, problem: AttentionVarlenProblem) -> float:
        """q, out, k and v, once each."""
        rows, keys = problem.H * problem.total_q, problem.kv_heads * problem.total_kv
        return float(2 * (rows + keys) * problem.D * ITEM_BYTES[problem.dtype])

    def predict_us(self, problem: AttentionVarlenProblem, config: Config, gpu: Gpu) -> float:
        """See `tlxgen.ops.attention.time_model.attention_us`: for as many sequences of the average length."""
        return time_model.attention_us(problem.average, config, gpu, self.flops(problem), self.bytes_moved(problem))

    def call_defaults(self, problem: AttentionVarlenProblem) -> dict[str, Any]:
        """See `Operator.call_defaults`."""
        return {"max_q": problem.max_q}

    def inputs(self, problem: AttentionVarlenProblem, device: torch.device | str, seed: int) -> Tensors:
        """Random q, k and v, sequences as in `drawn_lengths`, and an empty `lse` if the problem has one."""
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
        """The log-sum-exp in float64, if the problem has one."""
        import torch

        if not problem.lse:
            return {}
        lse = torch.full_like(inputs["lse"], float("-inf"), dtype=torch.float64)
        for rows, _, alone, own in sequences(problem, inputs):
            lse[:, rows] = ATTENTION.side_outputs(alone, own)["lse"][0]
        return {"lse": lse}

    def eager(self, problem: AttentionVarlenProblem, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """`varlen_attn` on a GPU if it has the mask, else attention of padded sequences; neither waits for the GPU.

        On AMD's GPUs, where torch returns the log-sum-exp in another shape, sequences are always padded.
        """
        import torch

        if problem.empty:
            result = torch.zeros_like(inputs["q"])
            if problem.lse:
                inputs["lse"].fill_(float("-inf"))
        elif inputs["q"].is_cuda and not torch.version.hip and problem.causal != "top-left" and not problem.softcap:
            result = torch_reference.flash(problem, inputs)
        else:
            result = torch_reference.padded(problem, inputs)
        return result if out is None else out.copy_(result)

    def check_call(self, problem: AttentionVarlenProblem, tensors: Tensors) -> str | None:
        """See `Operator.check_call`; the contents of `cu_seqlens` are not checked, which would wait for the GPU."""
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
            return f"max_q is {most!r}; {problem.B} sequences of at most that many rows cannot hold {problem.total_q}"
        surplus = sorted(set(tensors) - {*shapes, "scale", "max_q"})
        return f"{surplus[0]} is not a parameter" if surplus else None

    def launchable(
        self, problem: AttentionVarlenProblem, config: Config, tensors: Tensors, out: torch.Tensor
    ) -> str | None:
        """See `Operator.launchable`; `kernels.why_unreadable` says what strides must be."""
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "lse"):
            if name in tensors and not tensors[name].is_contiguous():
                return f"{name} is not contiguous"
        taken = (*((name, tensors[name]) for name in ("q", "k", "v")), ("out", out))
        return kernels.why_unreadable(taken, ("q", "k", "v", "out") if config.template == "attention_varlen" else ())


@lru_cache(maxsize=64)
def _flops(problem: AttentionVarlenProblem) -> float:
    counts = Counter(drawn_lengths(problem))
    return sum(number * ATTENTION.flops(problem.alone(lengths)) for lengths, number in counts.items())


OPERATOR = AttentionVarlen()
