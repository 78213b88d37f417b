"""A transformer block written for torch, run with tlxgen's linear layers and attention.

It is a decoder block: RMS norms, grouped-query attention with rotary embeddings, a gated feed-forward network.
`replaced` patches tlxgen's functions into `torch.nn.functional`. Output and gradients are compared with torch's; on a
GPU both are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from tlxgen import functional


class Block(nn.Module):
    """A decoder block: x (batch, rows, width) to the same shape."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward network, each added to its input."""
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(sizes, 1)
        rows = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(rows.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.second_norm(x)).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


def rotated(x: Tensor) -> Tensor:
    """Applies rotary embeddings to x (batch, heads, rows, head dimension)."""
    rows, half = x.shape[2], x.shape[3] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(rows, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


@contextmanager
def replaced() -> Iterator[None]:
    """Patches `F.linear` and `F.scaled_dot_product_attention` with tlxgen's."""
    with (
        patch.object(F, "linear", functional.linear),
        patch.object(F, "scaled_dot_product_attention", functional.scaled_dot_product_attention),
    ):
        yield


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    batch, rows, width, heads, kv_heads, inner = (4, 4096, 4096, 32, 8, 14336) if on_gpu else (1, 64, 128, 4, 2, 256)
    torch.manual_seed(0)
    block = Block(width, heads, kv_heads, inner).to(device, torch.bfloat16)
    x = torch.randn(batch, rows, width, device=device, dtype=torch.bfloat16)

    expected = torch.autograd.grad(block(x).float().square().mean(), list(block.parameters()))
    with replaced():
        found = torch.autograd.grad(block(x).float().square().mean(), list(block.parameters()))
    for (name, _), one, other in zip(block.named_parameters(), found, expected, strict=True):
        difference = relative(one, other)
        print(f"gradient of {name}: differs from torch's by {difference:.1e}")
        assert difference < 3e-2

    with torch.inference_mode():
        plain = block(x)
        with replaced():
            ours = block(x)
        print(f"output: differs from torch's by {relative(ours, plain):.1e}")
        assert relative(ours, plain) < 1e-2
        if on_gpu:
            torchs, tlxgens = interleaved(lambda: block(x))
            print(f"torch {torchs:.2f} ms, tlxgen {tlxgens:.2f} ms: {torchs / tlxgens:.2f} of its speed")


def interleaved(call: Callable[[], Tensor], rounds: int = 15) -> tuple[float, float]:
    """Median milliseconds of a call with torch's functions and with tlxgen's, alternating."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        times[0].append(milliseconds(call))
        with replaced():
            times[1].append(milliseconds(call))
    return statistics.median(times[0]), statistics.median(times[1])


def milliseconds(call: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


if __name__ == "__main__":
    main()
