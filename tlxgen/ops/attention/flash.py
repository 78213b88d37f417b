"""FlashAttention-2 as torch has it inside: what `scaled_dot_product_attention` gives no way to ask for without a mask.

That is windows, and diagonals of attention that is not square. With a mask torch would store all scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tlxgen.ops.attention.problem import AttentionProblem
    from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem


_VECTOR = 16  # bytes


def attention(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """Attention of q (B, H, S, D) to k and v (B, KV heads, KV length, D), lying in any way.

    Rows that see no key give 0.

    Returns:
        The result, (B, H, S, D); None where the GPU or the problem is not for it.
    """
    import torch

    if problem.empty or not q.is_cuda:
        return None
    q, k, v = map(readable, (q, k, v))
    if not takes(problem, q, k, v, scale):
        return None
    out, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - there is no other way to it
        *(x.transpose(1, 2) for x in (q, k, v)),
        *(None, None),  # where sequences begin, if they had different lengths
        *(problem.S, problem.kv_len),
        *(0.0, problem.causal != "none", False),  # no dropout, and no mask of it
        scale=scale,
        **window(problem),
    )
    result: Tensor = out.transpose(1, 2)
    return result


def takes(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether torch's flash kernels, forward and backward, take the problem on the GPU that holds the tensors.

    The flash kernels align the diagonal bottom-right, have no softcap as torch calls them, and hide scores by minus
    infinity before they scale them, which takes a positive scale. Torch says which GPUs they run on; of those for
    AMD's, which keep other numbers between forward and backward, nobody has seen the results. Of batches, it does not
    ask whether there are any.
    """
    import torch

    if problem.empty or torch.version.hip:
        return False
    if problem.softcap or problem.causal == "top-left" or not (scale is None or scale > 0):
        return False
    # Without the mask: torch's own forward refuses a causal one that is not square, its backward does not.
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, problem.kv_heads != problem.H)
    return torch.backends.cuda.can_use_flash_attention(asked)


def window(problem: AttentionProblem | AttentionVarlenProblem) -> dict[str, int | None]:
    """What torch's flash kernels, forward and back, call the keys on either side of a row's own that it sees."""
    return {
        "window_size_left": problem.window - 1 if problem.window else None,
        "window_size_right": 0 if problem.window else None,
    }


def readable(x: Tensor) -> Tensor:
    """A tensor as FlashAttention reads it, 16 bytes of the head dimension at a time; it checks less than it asks."""
    import torch

    size = x.element_size()
    if x.stride(-1) == 1 and not (x.data_ptr() % _VECTOR or any(step * size % _VECTOR for step in x.stride()[:-1])):
        return x
    return x.clone(memory_format=torch.contiguous_format)
