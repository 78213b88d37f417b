"""Gradients of attention over packed sequences, from what its forward kernel has left behind.

`by_flash` hands the kernel's output and log-sum-exp to torch's flash-attention backward, which is what
`torch.nn.attention.varlen.varlen_attn` does with its own. What that does not take is computed once more, sequence by
sequence, by the formulas of `tlxgen.functional.attention_backward`, which autograd can differentiate again.

Shapes are those of `tlxgen.ops.attention_varlen.operator`: q (total_q, H, D), k and v (total_kv, KV heads, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tlxgen.functional import attention_backward as dense
from tlxgen.ops.attention import flash
from tlxgen.ops.attention.flash import readable, window
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem, sequences


def flash_takes(problem: AttentionVarlenProblem, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether `by_flash` has the problem: what it has of one long sequence."""
    alone = problem.alone((problem.total_q, problem.total_kv))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return flash.takes(alone, q, k, v, scale)


def by_flash(
    problem: AttentionVarlenProblem,
    tensors: Sequence[Tensor],
    lse: Tensor,
    ends: Sequence[Tensor],
    grad_out: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; those of rows and keys past the last end are not written, as torch's own are not.

    Args:
        problem: what was computed; no softcap, not aligned top-left.
        tensors: q, k, v and out.
        lse: (H, total_q) natural logarithms in float32, plus infinity where a row sees no key.
        ends: (B + 1,) each, int32: where sequences begin and end, in q and in k.
        grad_out: as out, lying in any way.
        scale: of the scores, positive; 1 / sqrt(D) by default.
    """
    q, k, v, out, grad_out = map(readable, (*tensors, grad_out))
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(  # noqa: SLF001 - there is no other way to it
        *(grad_out, q, k, v, out, lse),
        *(each.contiguous() for each in ends),
        *(problem.max_q, problem.max_kv),
        *(0.0, problem.causal != "none"),
        *(unused, unused),
        scale=scale,
        **window(problem),
    )
    return of_q, of_k, of_v


def by_formula(
    problem: AttentionVarlenProblem,
    tensors: Sequence[Tensor],
    ends: Sequence[Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (`tensors`) in float32, from those of out and of the log-sum-exp (H, total_q).

    Zeros past the last end. Waits for the device, to learn where sequences end.
    """
    inputs: dict[str, Any] = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"), (*tensors, *ends), strict=True))
    gradients = [torch.zeros_like(x) for x in tensors]
    for rows, keys, alone, own in sequences(problem, inputs):
        of_out = None if grad_out is None else grad_out[rows].transpose(0, 1)[None]
        of_lse = None if grad_lse is None else grad_lse[:, rows][None]
        found = dense.by_formula(alone, (own["q"], own["k"], own["v"]), of_out, of_lse, scale)
        for whole, part, gradient in zip(gradients, (rows, keys, keys), found, strict=True):
            assert gradient is not None
            whole[part] = gradient[0].transpose(0, 1)
    of_q, of_k, of_v = gradients
    return of_q, of_k, of_v
