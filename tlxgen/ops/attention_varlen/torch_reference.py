"""Attention over packed sequences in torch, without waiting for the GPU, so that graphs can capture it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tlxgen.ops.attention.flash import readable, window

if TYPE_CHECKING:
    import torch

    from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem
    from tlxgen.ops.base import Tensors


def flash(problem: AttentionVarlenProblem, inputs: Tensors) -> torch.Tensor:
    """The result of torch's FlashAttention kernel for packed sequences; also writes the log-sum-exp."""
    import torch

    # With max_q = 1 and grouped heads, torch requires one row of every sequence.
    max_q = problem.max_q if problem.total_q == problem.B else max(2, problem.max_q)
    # torch's `varlen_attn` takes grouped heads from 2.12 on; the kernel that it calls always did.
    result: torch.Tensor
    result, lse, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        *(readable(inputs[name]) for name in ("q", "k", "v")),
        *(inputs[name].contiguous() for name in ("cu_seqlens_q", "cu_seqlens_kv")),
        *(max_q, problem.max_kv),
        *(0.0, problem.causal != "none", False),  # dropout, causal, debug mask
        scale=_scale(problem, inputs),
        **window(problem),
    )
    if problem.lse:
        inputs["lse"].copy_(
            lse.masked_fill(lse.isposinf(), float("-inf"))
        )  # torch marks rows that see no key with +inf
    return result


def padded(problem: AttentionVarlenProblem, inputs: Tensors) -> torch.Tensor:
    """The result from sequences padded with zeros to the longest; also writes the log-sum-exp."""
    import torch

    from tlxgen.ops.torch_functions import scaled_dot_product_attention

    ends, total = inputs["cu_seqlens_q"].long(), problem.total_q
    q = _filled(inputs["q"], ends, problem.max_q)
    k, v = (_filled(inputs[name], inputs["cu_seqlens_kv"].long(), problem.max_kv) for name in ("k", "v"))
    scale, group = _scale(problem, inputs), problem.H // problem.kv_heads
    seen = _seen(problem, inputs)
    blind = ~seen.any(-1, keepdim=True)
    if not (problem.softcap or problem.lse):
        result = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=group > 1)
        return _packed(result.masked_fill(blind, 0.0), ends, total)
    scores = q.float() @ k.repeat_interleave(group, 1).transpose(2, 3).float() * scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if problem.lse:
        inputs["lse"].copy_(_packed(torch.logsumexp(scores, 3, keepdim=True), ends, total)[..., 0].T)
    weights = torch.softmax(scores, 3).masked_fill(blind, 0.0).to(q.dtype)
    return _packed(weights @ v.repeat_interleave(group, 1), ends, total)


def _seen(problem: AttentionVarlenProblem, inputs: Tensors) -> torch.Tensor:
    """Which keys each row of each sequence sees, (B, 1, max_q, max_kv)."""
    import torch

    rows_in, keys_in = (inputs[name].diff()[:, None, None] for name in ("cu_seqlens_q", "cu_seqlens_kv"))
    rows = torch.arange(problem.max_q, device=rows_in.device)[:, None]
    keys = torch.arange(problem.max_kv, device=rows_in.device)
    seen = (keys < keys_in).expand(-1, problem.max_q, -1)
    if problem.causal != "none":
        last = rows + (keys_in - rows_in if problem.causal == "bottom-right" else 0)
        seen = seen & (keys <= last)
        if problem.window:
            seen = seen & (keys > last - problem.window)
    return seen[:, None]


def _filled(packed: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
    """(rows, heads, D) as (B, heads, longest, D), padded with zeros."""
    import torch

    places = torch.arange(longest, device=packed.device)
    rows = packed[(ends[:-1, None] + places).clamp(max=len(packed) - 1)]
    inside = places < ends.diff()[:, None]
    return torch.where(inside[..., None, None], rows, 0.0).transpose(1, 2)


def _packed(padded: torch.Tensor, ends: torch.Tensor, total: int) -> torch.Tensor:
    """(B, heads, longest, D) as (rows, heads, D); rows past the last end are copies of others."""
    import torch

    rows = torch.arange(total, device=padded.device).clamp(max=ends[-1] - 1)
    sequence = torch.searchsorted(ends[1:], rows, right=True)
    return padded.transpose(1, 2)[sequence, rows - ends[sequence]]


def _scale(problem: AttentionVarlenProblem, inputs: Tensors) -> float:
    given: Any = inputs.get("scale")
    return problem.D**-0.5 if given is None else float(given)
