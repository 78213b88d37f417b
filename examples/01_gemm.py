"""A tuned GEMM: loaded, checked against float64 and timed beside torch.

    tlxgen tune gemm 4096 4096 4096
    python examples/01_gemm.py

Without a CUDA GPU, torch computes a small product and the kernel stored for an H200 is shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

import tlxgen
from tlxgen import devices, ops
from tlxgen.runtime import kernel as runtime

SHAPE = (4096, 4096, 4096)
SMALL = (256, 256, 256)  # without a GPU


def main() -> None:
    gpu = torch.cuda.is_available()
    if not gpu:
        show_stored()
    M, N, K = SHAPE if gpu else SMALL  # noqa: N806 - the field's names
    mm = tlxgen.get_kernel("gemm", (M, N, K), dtype=torch.bfloat16)
    print(f"{mm.problem.label}: origin {mm.origin}")
    print(f"  {mm.explain()}")

    device = "cuda" if gpu else "cpu"
    a = torch.randn(M, K, dtype=torch.bfloat16, device=device)
    b = torch.randn(K, N, dtype=torch.bfloat16, device=device)
    c = mm(a, b)
    exact = a.double() @ b.double()
    error, error_torch = relative_error(c, exact), relative_error(a @ b, exact)
    print(f"  relative error against float64 {error:.2e}; torch's own {error_torch:.2e}")
    assert error <= 2 * error_torch

    if gpu:
        times = times_us({"tlxgen": lambda: mm(a, b, out=c), "torch": lambda: torch.mm(a, b, out=c)})
        for name, time_us in times.items():
            print(f"  {name:6} {time_us:8.1f} us, {2 * M * N * K / time_us * 1e-6:.0f} TFLOP/s")
        print("  a rough timing; docs/measuring.md describes the exact one")
    else:
        print("  no CUDA GPU: computed by torch, not timed")


def show_stored() -> None:
    """Prints the kernel that `get_kernel` would return on an H200, as `tlxgen show --target h200` does."""
    problem = ops.get("gemm").problem(SHAPE)
    h200 = devices.target("h200")
    kernel = runtime.Kernel(problem, runtime.select(problem, h200, note_miss=False), h200)
    meanings = {
        "tuned": "measured on an H200",
        "predicted": "compiled and ranked by the time model, not measured",
        "default": "nothing stored: the time model's first choice",
    }
    print(f"{problem.label} on an H200: origin {kernel.origin} ({meanings.get(kernel.origin, 'no TLX kernel')})")
    print(f"  {kernel.explain()}")


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def times_us(calls: dict[str, Callable[[], object]], rounds: int = 50) -> dict[str, float]:
    """Median microseconds of each call, by CUDA events; the calls alternate."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 5):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if turn >= 5:  # the first five are warm-up
                samples[name].append(start.elapsed_time(stop) * 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


if __name__ == "__main__":
    main()
