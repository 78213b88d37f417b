"""torch's FlashAttention-2, for windows and for causal attention that is not square.

`scaled_dot_product_attention` takes these as a mask only, and with a mask torch stores all scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tlxgen.ops.attention.problem import AttentionProblem
    from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem


_VECTOR = 16  # bytes


def attention(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """Attention of q (B, H, S, D) to k and v (B, KV heads, KV length, D) with any strides; 0 for rows that see no key.

    Returns:
        The result, (B, H, S, D); None if the kernel does not take the GPU or the problem.
    """
    import torch

    if problem.empty or not q.is_cuda:
        return None
    q, k, v = map(readable, (q, k, v))
    if not takes(problem, q, k, v, scale):
        return None
    out, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - there is no public function
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(None, None),  # cu_seqlens, for packed sequences
        *(problem.S, problem.kv_len),
        *(0.0, problem.causal != "none", False),  # dropout, causal, debug mask
        scale=scale,
        **window(problem),
    )
    result: Tensor = out.transpose(1, 2)
    return result


def takes(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether torch's flash kernels, forward and backward, take the problem on the GPU that holds the tensors.

    The flash kernels align the diagonal bottom-right, have no softcap in torch, and mask scores with minus infinity
    before they scale them, which needs a positive scale. AMD's keep other numbers between forward and backward and
    are untested. torch says which GPUs they run on, but does not check for empty batches.
    """
    import torch

    if problem.empty or torch.version.hip:
        return False
    if problem.softcap or problem.causal == "top-left" or not (scale is None or scale > 0):
        return False
    # Asked without the mask: for a causal one that is not square torch says no, though the kernels take it.
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, problem.kv_heads != problem.H)
    return torch.backends.cuda.can_use_flash_attention(asked)


def window(problem: AttentionProblem | AttentionVarlenProblem) -> dict[str, int | None]:
    """Arguments of torch's flash kernels: keys that a row sees on either side of its own."""
    return {
        "window_size_left": problem.window - 1 if problem.window else None,
        "window_size_right": 0 if problem.window else None,
    }


def readable(x: Tensor) -> Tensor:
    """The tensor, or a copy that FlashAttention can read in vectors of 16 bytes, which it does not check itself."""
    import torch

    size = x.element_size()
    if x.stride(-1) == 1 and not (x.data_ptr() % _VECTOR or any(step * size % _VECTOR for step in x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)
