"""Scaled dot-product attention, forward.

out (B, H, S, D) = softmax(scale · q kᵀ + mask) v, with k and v (B, KV heads, KV length, D); each KV head serves
H / KV heads heads of q. A row that sees no key gives 0, and minus infinity as its log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tlxgen.config import Config, Value
from tlxgen.devices import Gpu
from tlxgen.ops.attention import decode, kernels, peers, time_model
from tlxgen.ops.attention.problem import AttentionProblem, padded_head
from tlxgen.ops.base import Case, Operator, Resources, Tensors, normal_tensors, why_other_tensors
from tlxgen.problem import ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    import torch


_GROWTH = 9.0  # factor of the first keys, in one head of random inputs
_ROW_CHUNK = 1024  # rows of the reference at a time

#: Tensors that each template reads or writes through TMA.
_TMA_TENSORS = {"attention_tma": ("q", "k", "v", "out"), "attention_decode": ("k", "v"), "attention_vanilla": ()}


class Attention(Operator[AttentionProblem]):
    """The attention operator."""

    name = "attention"
    templates = ("attention_tma", "attention_decode", "attention_vanilla")
    peer = "sdpa"
    inputs_in_order = ("q", "k", "v")
    output_name = "out"
    also_written = ("lse",)
    problem_type = AttentionProblem
    examples = (
        {"B": 4, "H": 32, "S": 4096, "D": 64},
        {"B": 1, "H": 8, "S": 1000, "D": 128, "kv_heads": 2, "causal": "bottom-right", "lse": True},
        {"B": 2, "H": 16, "S": 1, "D": 128, "kv_heads": 4, "kv_len": 3000, "dtype": "fp16"},
    )
    by_size = ("tail", "schedule")
    allowed_spill_bytes = 128  # mostly in the producer, which has 24 registers

    def variables(self, problem: AttentionProblem) -> dict[str, Value]:
        """See `Operator.variables`."""
        names = ("B", "H", "S", "D", "kv_len", "causal", "window", "exact")
        values = {name: getattr(problem, name) for name in names}
        return {
            **values,
            "head": padded_head(problem.D),
            "rows": decode.rows(problem),
            "keys": decode.seen_keys(problem),
        }

    def resources(self, problem: AttentionProblem, config: Config) -> Resources:
        """See `Operator.resources`: tiles of Q, the rings of K and V, the staging of the output, barriers."""
        head, item = padded_head(problem.D), ITEM_BYTES[problem.dtype]
        if config.template == "attention_decode":
            return decode.resources(problem, config, head)
        if config.template == "attention_vanilla":
            return kernels.vanilla_resources(config, head, item)
        return kernels.tma_resources(config, head, item)

    def template_context(self, problem: AttentionProblem, config: Config) -> dict[str, Any]:
        """See `Operator.template_context`."""
        head = padded_head(problem.D)
        context = {**kernels.context(problem, head), "hopper": config.template != "attention_vanilla"}
        if config.template == "attention_decode":
            context |= decode.context(problem, config, head)
        if config.template == "attention_tma":
            context |= kernels.tma_context(config, problem.dtype)
        return context

    def small_cases(self, problem: AttentionProblem, config: Config) -> Sequence[Case[AttentionProblem]]:
        """One tile; one, two and many blocks of keys; tails; more rows than keys; heads that share; several CTAs."""
        if config.template == "attention_decode":
            return decode.small_cases(problem, config)
        p = config.params
        m, n, kv = kernels.tile_rows(config), int(p["block_n"]), int(p.get("kv_stages", 2))
        group = problem.H // problem.kv_heads
        shapes = [
            (1, 1, m, n, 1),
            (1, 1, 1, 1, 1),
            (1, 1, m + 8, (kv + 1) * n + 5, 1),
            (1, 2, 2 * m + 3, 2 * n - 7, 1),
            (2, 1, m - 5, n + 1, 2),
            (1, 1, 2 * m, max(1, n // 2), 1),
        ]
        if p.get("tail") == "split":  # on three multiprocessors: one tile, two, and two after a whole round
            shapes += [(1, 1, m, 3 * n + 5, 3), (1, 2, m - 3, 4 * n, 3), (1, 1, 4 * m + 8, 2 * n + 3, 3)]
        cases = []
        for batch, kv_heads, rows, keys, num_sms in shapes:
            sizes = {"B": batch, "H": kv_heads * min(group, 2), "kv_heads": kv_heads, "S": rows, "kv_len": keys}
            cases.append(Case(problem.model_copy(update=sizes), num_sms))
        return cases

    def flops(self, problem: AttentionProblem) -> float:
        """Two products, over the pairs of row and key that see each other."""
        return 4.0 * problem.B * problem.H * problem.D * _pairs(problem)

    def bytes_moved(self, problem: AttentionProblem) -> float:
        """q, out, k and v, once each."""
        rows, keys = problem.B * problem.H * problem.S, problem.B * problem.kv_heads * problem.kv_len
        return float(2 * (rows + keys) * problem.D * ITEM_BYTES[problem.dtype])

    def predict_us(self, problem: AttentionProblem, config: Config, gpu: Gpu) -> float:
        """See `tlxgen.ops.attention.time_model.attention_us`."""
        if config.template == "attention_decode":
            return decode.predict_us(problem, config, gpu, padded_head(problem.D))
        return time_model.attention_us(problem, config, gpu, self.flops(problem), self.bytes_moved(problem))

    def inputs(self, problem: AttentionProblem, device: torch.device | str, seed: int) -> Tensors:
        """Random q, k and v, and an empty `lse` if the problem has one.

        In the last of several heads keys grow towards the first one, so that a row's largest score rises from block to
        block in kernels that walk from the last block to the first, as ours do.
        """
        import torch

        dtype, normal = torch_dtype(problem.dtype), normal_tensors(device, seed)
        keys = (problem.B, problem.kv_heads, problem.kv_len, problem.D)
        tensors = {"q": normal((problem.B, problem.H, problem.S, problem.D), dtype)}
        tensors |= {name: normal(keys, dtype) for name in ("k", "v")}
        if problem.B * problem.kv_heads > 1:
            growth = torch.linspace(_GROWTH, 1.0, problem.kv_len, device=device, dtype=dtype)
            tensors["k"][-1, -1] *= growth[:, None]
        if problem.lse:
            tensors["lse"] = torch.empty(problem.B, problem.H, problem.S, dtype=torch.float32, device=device)
        return tensors

    def output_like(self, problem: AttentionProblem) -> tuple[tuple[int, ...], torch.dtype]:
        """See `Operator.output_like`."""
        return (problem.B, problem.H, problem.S, problem.D), torch_dtype(problem.dtype)

    def reference(self, problem: AttentionProblem, inputs: Tensors) -> torch.Tensor:
        """The result in float64."""
        import torch

        q, k, v = (inputs[name].double() for name in self.inputs_in_order)
        out = torch.empty_like(q)
        group = problem.H // problem.kv_heads
        for batch in range(problem.B):
            for head in range(problem.H):
                keys, values = k[batch, head // group], v[batch, head // group]
                for first in range(0, problem.S, _ROW_CHUNK):
                    rows = slice(first, min(problem.S, first + _ROW_CHUNK))
                    scores = q[batch, head, rows] @ keys.T * _scale(problem, inputs)
                    out[batch, head, rows] = _softmax(_scores(problem, scores, first)) @ values
        return out

    def side_outputs(self, problem: AttentionProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The log-sum-exp in float64, if the problem has one."""
        return {"lse": _log_sum_exp(problem, inputs, "float64")} if problem.lse else {}

    def eager(self, problem: AttentionProblem, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """`scaled_dot_product_attention`; torch's flash kernel or single steps if it cannot express the problem."""
        from tlxgen.ops.attention import flash
        from tlxgen.ops.torch_functions import scaled_dot_product_attention

        q, k, v = (inputs[name] for name in self.inputs_in_order)
        scale, group = _scale(problem, inputs), problem.H // problem.kv_heads
        if problem.lse:
            inputs["lse"].copy_(_log_sum_exp(problem, inputs, "float32"))
        square = problem.causal == "none" or (not problem.window and problem.diagonal == 0 and scale > 0)
        if square and not problem.softcap:
            result = scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal != "none", scale=scale, enable_gqa=group > 1
            )
        elif (attended := flash.attention(problem, q, k, v, scale)) is not None:
            result = attended
        else:
            keys = k.repeat_interleave(group, 1).transpose(2, 3)
            # In float32: rounded scores would give four times the error.
            scores = _scores(problem, q.float() @ keys.float() * scale, 0)
            result = _softmax(scores).to(q.dtype) @ v.repeat_interleave(group, 1)
        return result if out is None else out.copy_(result)

    def other_libraries(
        self, problem: AttentionProblem
    ) -> Mapping[str, Callable[[Tensors, torch.Tensor], torch.Tensor]]:
        """CuDNN through torch, and FlashAttention-3."""
        return peers.installed(problem)

    def check_call(self, problem: AttentionProblem, tensors: Tensors) -> str | None:
        """See `Operator.check_call`."""
        import torch

        keys = (problem.B, problem.kv_heads, problem.kv_len, problem.D)
        shapes: dict[str, tuple[int, ...]] = {"q": (problem.B, problem.H, problem.S, problem.D), "k": keys, "v": keys}
        dtypes = dict.fromkeys(shapes, torch_dtype(problem.dtype))
        if problem.lse:
            shapes["lse"], dtypes["lse"] = shapes["q"][:3], torch.float32
        reason = why_other_tensors(tensors, shapes, dtypes)
        if reason:
            return reason
        scale: Any = tensors.get("scale")
        if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
            return f"scale is {scale!r}; it must be a finite number"
        surplus = sorted(set(tensors) - {*shapes, "scale"})
        return f"{surplus[0]} is not a parameter" if surplus else None

    def launchable(self, problem: AttentionProblem, config: Config, tensors: Tensors, out: torch.Tensor) -> str | None:
        """See `Operator.launchable`; `kernels.why_unreadable` says what strides must be."""
        lse = tensors.get("lse")
        if lse is not None and not lse.is_contiguous():
            return "lse is not contiguous"
        taken = (*((name, tensors[name]) for name in self.inputs_in_order), ("out", out))
        return kernels.why_unreadable(taken, _TMA_TENSORS[config.template])


def _scale(problem: AttentionProblem, inputs: Tensors) -> float:
    given: Any = inputs.get("scale")
    return problem.D**-0.5 if given is None else float(given)


def _scores(problem: AttentionProblem, scores: torch.Tensor, first_row: int) -> torch.Tensor:
    """Scaled scores (..., rows, keys), capped, with minus infinity where a row does not see a key."""
    import torch

    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.causal == "none":
        return scores
    rows = torch.arange(first_row, first_row + scores.shape[-2], device=scores.device)[:, None] + problem.diagonal
    keys = torch.arange(problem.kv_len, device=scores.device)[None, :]
    hidden = keys > rows
    if problem.window:
        hidden = hidden | (keys <= rows - problem.window)
    return scores.masked_fill(hidden, float("-inf"))


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities; zeros for rows that see no key."""
    import torch

    blind = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(blind, 0.0)


def _log_sum_exp(problem: AttentionProblem, inputs: Tensors, dtype: str) -> torch.Tensor:
    """Log-sum-exp of each row's scores, computed in a dtype, a chunk of rows at a time."""
    import torch

    precision = getattr(torch, dtype)
    q, keys = inputs["q"], inputs["k"].repeat_interleave(problem.H // problem.kv_heads, 1).to(precision)
    lse = torch.empty(q.shape[:3], dtype=precision, device=q.device)
    for first in range(0, problem.S, _ROW_CHUNK):
        rows = slice(first, min(problem.S, first + _ROW_CHUNK))
        scores = q[:, :, rows].to(precision) @ keys.transpose(2, 3) * _scale(problem, inputs)
        lse[:, :, rows] = torch.logsumexp(_scores(problem, scores, first), -1)
    return lse


def _pairs(problem: AttentionProblem) -> float:
    """Number of pairs of a row and a key that it sees."""
    if problem.causal == "none":
        return float(problem.S) * problem.kv_len
    # Row i sees the keys below i + diagonal + 1, without those before its window.
    low, high = problem.diagonal, problem.diagonal + problem.S
    behind = problem.window or high + problem.kv_len
    seen = _ramp(high, problem.kv_len) - _ramp(low, problem.kv_len)
    return seen - (_ramp(high - behind, problem.kv_len) - _ramp(low - behind, problem.kv_len))


def _ramp(count: int, most: int) -> float:
    """Sum of min(i, most) over i from 1 to count."""
    if count <= 0:
        return 0.0
    rising = min(count, most)
    return rising * (rising + 1) / 2 + float(count - rising) * most


OPERATOR = Attention()
