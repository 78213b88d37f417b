"""Host time of one call, in total and by part, against torch's.

    python -m benchmarks.overhead

Three problems whose kernels are so short that the host limits them: a small GEMM, decoding, and short causal attention.
Some hundred calls are queued on the GPU and waited for outside of the timed span. Each call has other tensors than the
one before, What is compared takes turns.

A first call: `check` of the arguments, allocation of the `output`, `plan` look-up, grid and `arguments` (descriptors
included), `dispatch` to the driver. A repeated call: comparison of the tensors' layout (`alike`), `memory` for the
result, `replay` of the launch. `call` is all of that, `call_out` with an output given, `call_named` with tensors by
name, `functional` the function in place of torch's, `torch` the library's call. `new_length` is the first call of an
unseen length whose kernel is loaded already. Takes about a minute on one GPU and writes `<date>-overhead-<gpu>.json`.
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
    """A problem, a function from lengths to problems for `new_length`, and torch's function."""

    problem: Problem
    longer: Callable[[int], Problem]
    library: Callable[..., torch.Tensor]


def main() -> None:
    """Measures case by case."""
    arguments = options(__doc__).parse_args()
    warnings.simplefilter("ignore", runtime.FallbackWarning)
    results = Results(arguments.output, "overhead", device_report(), {"calls": CALLS, "rounds": ROUNDS})
    for case in cases():
        row = measure(case)
        results.add(row, f"{case.problem.label:48} {row['origin']:8} {spaced(row['host_us'], '.2f')}")
    print(results.path)


def cases() -> list[Case]:
    """The problems."""
    gemm, attention = ops.get("gemm"), ops.get("attention")

    def product(m: int) -> Problem:
        problem: Problem = gemm.problem((m, 128, 128))
        return problem

    def decoding(keys: int) -> Problem:
        problem: Problem = attention.problem((1, 8, 1, 128), kv_heads=2, kv_len=keys, causal="bottom-right")
        return problem

    def prefill(length: int) -> Problem:
        problem: Problem = attention.problem((1, 2, length, 128), causal="bottom-right")
        return problem

    attend = torch.nn.functional.scaled_dot_product_attention
    return [
        Case(product(128), product, torch.mm),
        Case(decoding(256), decoding, partial(attend, enable_gqa=True)),
        Case(prefill(128), prefill, partial(attend, is_causal=True)),
    ]


def measure(case: Case) -> Row:
    """Microseconds of each part."""
    problem, operator = case.problem, ops.get(case.problem.operator)
    kernel = api.get_kernel(problem.operator, problem, on_miss="ignore")
    sets = [operator.inputs(problem, "cuda", seed) for seed in range(INPUT_SETS)]
    inputs = sets[0]
    tensors = tuple(inputs[name] for name in operator.inputs_in_order)
    out = kernel(*tensors)
    calls = cycle([tuple(inputs[name] for name in operator.inputs_in_order) for inputs in sets])
    causal = partial(functional.attention, causal="bottom-right")
    drop_in: Callable[..., Any] = causal if problem.operator == "attention" else functional.matmul
    found = {
        **parts(kernel, inputs, out),
        **host_us(
            call=lambda: kernel(*next(calls)),
            torch=lambda: case.library(*next(calls)),
            functional=lambda: drop_in(*next(calls)),
            call_out=lambda: kernel(*next(calls), out=out),
            call_named=lambda: kernel(**inputs),
            get_kernel=lambda: api.get_kernel(problem.operator, problem, on_miss="ignore"),
        ),
        **repeated_parts(kernel, tensors),
    }
    return {
        "op": problem.operator,
        "problem": problem.model_dump(),
        "origin": kernel.origin,
        "config_short": kernel.config.short if kernel.config else "torch",
        "host_us": {name: round(us, 2) for name, us in found.items()},
        "new_length_us": round(new_length_us(case), 1),
        "binaries": len(plans.LOADED),
    }


def parts(kernel: runtime.Kernel, inputs: dict[str, Any], out: torch.Tensor) -> dict[str, float]:
    """Microseconds of the parts of a first call; empty where torch computes."""
    if kernel.config is None:
        return {}
    operator, problem = ops.get(kernel.problem.operator), kernel.problem
    plan = kernel.plan(inputs, out)
    if not isinstance(plan, plans.KernelPlan):
        return {}
    grid, args = plan.arguments(inputs, out)
    return host_us(
        check=lambda: operator.check_call(problem, inputs),
        output=lambda: operator.output(problem, inputs),
        plan=lambda: kernel.plan(inputs, out),
        arguments=lambda: plan.arguments(inputs, out),
        dispatch=lambda: plan.dispatch(grid, args),
    )


def repeated_parts(kernel: runtime.Kernel, tensors: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Microseconds of the parts of a repeated call; empty where nothing is replayed."""
    repeat = next(iter(kernel._plain), None)  # noqa: SLF001 - its parts have no public names
    replay = None if repeat is None else repeat._replay  # noqa: SLF001
    if repeat is None or replay is None:
        return {}
    taken = (*tensors, repeat._empty())  # noqa: SLF001
    addresses = [tensor.data_ptr() for tensor in taken]
    stream = plans.raw_stream(taken[-1].device.index or 0)
    return host_us(
        alike=lambda: repeat.like(tensors),
        memory=repeat._empty,  # noqa: SLF001
        replay=lambda: replay(taken, addresses, stream),
    )


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
        problem = case.longer(length)
        inputs = ops.get(problem.operator).inputs(problem, "cuda", 0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        api.get_kernel(problem.operator, problem, on_miss="ignore")(**inputs)
        times.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    main()
