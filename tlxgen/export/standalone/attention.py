"""`attention`: softmax(scale · q kᵀ + mask) v."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import dtype_name, is_aligned, run


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention.

    Args:
        q: (B, H, S, D).
        k: (B, KV heads, KV length, D); KV heads divides H.
        v: as k.
        causal: where the diagonal ends: `none`, `bottom-right` (as FlashAttention has it) or `top-left` (as torch).
        window: keys that a row of causal attention sees, itself included; 0 for all.
        softcap: scores become softcap · tanh(score / softcap); 0 for none.
        scale: of the scores; 1 / sqrt(D) by default.
        return_lse: also return each row's log-sum-exp (B, H, S), natural, in float32.

    Returns:
        out as q, and with `return_lse` the log-sum-exp. A row that sees no key has 0 and minus infinity.
    """
    if causal not in ("none", "bottom-right", "top-left"):
        raise ValueError(f"causal is {causal!r}; use none, bottom-right or top-left")
    if window and causal == "none":
        raise ValueError(f"window is {window}: it counts keys back from the diagonal, which causal must place")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: see `attention.__doc__`")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads of q are no multiple of {k.shape[1]} heads of k")
    batch, heads, rows, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    if causal == "top-left" and rows == keys:
        causal = "bottom-right"  # equal, and the name used in the table
    if window >= (keys if causal == "bottom-right" else rows):
        window = 0  # no row has more keys than this
    problem: dict[str, Any] = {
        "B": batch,
        "H": heads,
        "S": rows,
        "D": head_dim,
        "kv_heads": kv_heads,
        "kv_len": keys,
        "dtype": dtype_name(q.dtype),
        "causal": causal,
        "window": window,
        "softcap": float(softcap),
        "lse": return_lse,
        "exact": False,
    }

    def fits() -> bool:
        return q.dtype == k.dtype == v.dtype and all(map(is_aligned, (q, k, v)))

    def otherwise() -> Any:
        out, lse = _by_torch(q, k, v, causal, window, softcap, scale, return_lse=return_lse)
        return (out, lse) if return_lse else out

    tensors = {"q": q, "k": k, "v": v, "scale": scale}
    result: Tensor | tuple[Tensor, Tensor] = run("attention", problem, tensors, fits=fits, otherwise=otherwise)
    return result


def _by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    window: int,
    softcap: float,
    scale: float | None,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    square = causal == "none" or (q.shape[2] == k.shape[2] and (scale is None or scale > 0))
    # With a batch of 0, torch on Hopper calls cuDNN, which returns None.
    if square and not (window or softcap or return_lse) and q.shape[0] and k.shape[2]:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal != "none", scale=scale, enable_gqa=group > 1
        )
        return out, q.new_empty(0)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT).float() * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal != "none":
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        columns = torch.arange(k.shape[2], device=q.device)[None, :]
        last = rows + (k.shape[2] - q.shape[2] if causal == "bottom-right" else 0)
        hidden = (columns > last) | ((columns <= last - window) if window else torch.zeros_like(columns > last))
        scores = scores.masked_fill(hidden, float("-inf"))
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
    return weights.to(q.dtype) @ v, torch.logsumexp(scores, -1)
