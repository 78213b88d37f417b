"""Host time of one call, beside torch's.

    python -m benchmarks.overhead

Three problems whose kernels are so short that the host limits them: a small GEMM, decoding, and short causal attention.
Some hundred calls are queued on the GPU and waited for outside of the timed span; each has other tensors than the one
before, and what is compared takes turns. `call` is a kernel's call, `call_out` one with an output given, `call_named`
one with tensors by name, `functional` the function in place of torch's, `torch` the library's call, `get_kernel` a
look-up. `new_length` is the first call of an unseen length whose kernel is loaded already. Takes about a minute on one
GPU and writes `<date>-overhead-<gpu>.json`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.harness import Results, Row, device_report, options, spaced
from tlxgen import api, functional, ops
from tlxgen.problem import Problem
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime import plans

CALLS = 300
ROUNDS = 7
INPUT_SETS = 16
NEW_LENGTHS = 64


@dataclass(frozen=True)
class Case:
    """Problems by length, the length that is measured, and torch's function."""

    problem: Callable[[int], Problem]
    length: int
    library: Callable[..., torch.Tensor]


def main() -> None:
    """Measures case by case."""
    arguments = options(__doc__).parse_args()
    warnings.simplefilter("ignore", runtime.FallbackWarning)
    results = Results(arguments.output, "overhead", device_report(), {"calls": CALLS, "rounds": ROUNDS})
    for case in cases():
        row = measure(case)
        results.add(row, f"{row['label']:48} {row['origin']:8} {spaced(row['host_us'], '.2f')}")
    print(results.path)


def cases() -> list[Case]:
    """The problems."""
    gemm, attention = ops.get("gemm").problem, ops.get("attention").problem
    decoding: dict[str, Any] = {"kv_heads": 2, "causal": "bottom-right"}
    attend = torch.nn.functional.scaled_dot_product_attention
    return [
        Case(lambda m: gemm((m, 128, 128)), 128, torch.mm),
        Case(lambda n: attention((1, 8, 1, 128), kv_len=n, **decoding), 256, partial(attend, enable_gqa=True)),
        Case(lambda n: attention((1, 2, n, 128), causal="bottom-right"), 128, partial(attend, is_causal=True)),
    ]


def measure(case: Case) -> Row:
    """Microseconds of each kind of call."""
    problem = case.problem(case.length)
    operator = ops.get(problem.operator)
    kernel = api.get_kernel(problem.operator, problem, on_miss="ignore")
    sets = [operator.inputs(problem, "cuda", seed) for seed in range(INPUT_SETS)]
    calls = cycle([tuple(inputs[name] for name in operator.inputs_in_order) for inputs in sets])
    out = kernel(*next(calls))
    causal = partial(functional.attention, causal="bottom-right")
    drop_in: Callable[..., Any] = causal if problem.operator == "attention" else functional.matmul
    found = host_us(
        call=lambda: kernel(*next(calls)),
        torch=lambda: case.library(*next(calls)),
        functional=lambda: drop_in(*next(calls)),
        call_out=lambda: kernel(*next(calls), out=out),
        call_named=lambda: kernel(**sets[0]),
        get_kernel=lambda: api.get_kernel(problem.operator, problem, on_miss="ignore"),
    )
    return {
        "op": problem.operator,
        "problem": problem.model_dump(),
        "label": problem.label,
        "origin": kernel.origin,
        "config_short": kernel.config.short if kernel.config else "torch",
        "host_us": {name: round(us, 2) for name, us in found.items()},
        "new_length_us": round(new_length_us(case), 1),
        "binaries": len(plans.LOADED),
    }


def host_us(**calls: Callable[[], Any]) -> dict[str, float]:
    """Host microseconds of a call by name: the minimum over rounds, in each of which every call takes its turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: min(found) for name, found in times.items()}


def new_length_us(case: Case) -> float:
    """Median host microseconds of the first call of a length, `get_kernel` included."""
    times = []
    first = 1040
    for length in range(first, first + 16 * NEW_LENGTHS, 16):
        problem = case.problem(length)
        inputs = ops.get(problem.operator).inputs(problem, "cuda", 0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        api.get_kernel(problem.operator, problem, on_miss="ignore")(**inputs)
        times.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    main()
