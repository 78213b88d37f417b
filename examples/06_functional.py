"""Attention with gradients: torch's signature, then a window and a softcap, which torch lacks.

Without a CUDA GPU, or where `get_kernel` has nothing faster, torch computes it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from tlxgen import functional


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 2048 if device == "cuda" else 256
    q, k, v = (
        torch.randn(2, heads, rows, 64, dtype=torch.bfloat16, device=device, requires_grad=True) for heads in (8, 2, 2)
    )

    outs = [
        call(q, k, v, is_causal=True, enable_gqa=True)
        for call in (functional.scaled_dot_product_attention, F.scaled_dot_product_attention)
    ]
    ours, torchs = (torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in outs)
    print("scaled_dot_product_attention, causal, grouped heads:")
    for name, one, other in zip(("out", "q", "k", "v"), (outs[0], *ours), (outs[1], *torchs), strict=True):
        difference = relative(one, other)
        print(f"  {name if name == 'out' else 'gradient of ' + name}: differs from torch's by {difference:.1e}")
        assert difference < 2e-2

    out, lse = functional.attention(q, k, v, causal="bottom-right", window=100, softcap=30.0, return_lse=True)
    out.float().square().sum().backward()  # type: ignore[no-untyped-call]
    print("attention with a window of 100 keys and a softcap of 30:")
    print(f"  out {tuple(out.shape)}, log-sum-exp {tuple(lse.shape)}, gradients of q, k and v")
    first = out[0, 0, 0]  # attends to one key, so equals its value
    assert torch.equal(first, v[0, 0, 0])


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


if __name__ == "__main__":
    main()
