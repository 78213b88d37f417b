"""The smallest operator: out = x + y, with loads and additions in separate warp groups.

docs/adding_an_operator.md shows how to add one like it.
"""

from __future__ import annotations

import torch

import tlxgen


def main() -> None:
    n = 1 << 20
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = tlxgen.get_kernel("vector_add", (n,), dtype=torch.float32)
    print(f"{add.problem.label}: origin {add.origin}")
    print(f"  {add.explain()}")

    x, y = (torch.randn(n, device=device) for _ in range(2))
    assert torch.equal(add(x, y), x + y)
    print("  bitwise equal to torch")


if __name__ == "__main__":
    main()
