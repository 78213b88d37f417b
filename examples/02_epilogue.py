"""gelu(x @ weight.T + bias) in one kernel instead of `nn.Linear` followed by `nn.GELU`.

`nn.Linear` stores its weight as (out_features, in_features). The transpose is B (K, N) with contiguous columns: layout
`nt`.
"""

from __future__ import annotations

import torch
from torch import nn

import tlxgen


def main() -> None:
    gpu = torch.cuda.is_available()
    tokens, features_in, features_out = (4096, 4096, 4096) if gpu else (256, 512, 384)
    device = "cuda" if gpu else "cpu"
    linear = nn.Linear(features_in, features_out, dtype=torch.bfloat16, device=device)
    x = torch.randn(tokens, features_in, dtype=torch.bfloat16, device=device)

    shape = {"M": tokens, "N": features_out, "K": features_in}
    fused = tlxgen.get_kernel("gemm", shape, dtype=torch.bfloat16, layout="nt", epilogue="bias+gelu")
    print(f"{fused.problem.label}: origin {fused.origin}")
    print(f"  {fused.explain()}")

    with torch.no_grad():  # kernels record no gradients
        y = fused(x, linear.weight.T, bias=linear.bias)
        unfused = nn.functional.gelu(linear(x))
        exact = nn.functional.gelu(x.double() @ linear.weight.double().T + linear.bias.double())
    error, error_torch = ((z.double() - exact).norm().item() / exact.norm().item() for z in (y, unfused))
    print(f"  relative error against float64 {error:.2e}; nn.Linear and gelu {error_torch:.2e}")
    assert error <= 2 * error_torch


if __name__ == "__main__":
    main()
