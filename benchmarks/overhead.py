"""Host time of one call, part by part, against torch's own.

python -m benchmarks.overhead -o benchmarks/results/

The host is what is timed: calls are queued on the GPU, a few hundred at a time, and waited for between the times. Each
call is on other tensors than the one before, torch's is called without anything in between, and what is compared takes
turns.

A first call does these in turn: `check` the arguments, allocate the `output`, look the `plan` up, make grid and
`arguments` (descriptors among them), `dispatch` to the driver. One like it does less: see that its tensors are `alike`,
take `memory` for the result, and `replay` the launch; `call` is all of that, `call_out` with an output of the caller's,
`call_named` with tensors by name, `functional` what is in place of torch's, `torch` the library's call of the same.
`new_length` is the first call of a length that was never seen, whose kernel another length has loaded.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write
from tlxgen import api, functional, ops
from tlxgen.problem import Problem
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime import plans
from tlxgen.tuner.measure import Setup

CALLS = 300
ROUNDS = 7
SETS = 16  # of inputs
NEW_LENGTHS = 64


@dataclass(frozen=True)
class Case:
    """A problem, how its length is changed for `new_length`, and torch's own function."""

    problem: Problem
    longer: Callable[[int], Problem]
    library: Callable[..., torch.Tensor]


def main() -> None:
    """Measures, writes the results and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", runtime.FallbackWarning)
    rows = []
    for case in cases():
        entry = measure(case)
        rows.append(entry)
        parts = "  ".join(f"{name} {us:.2f}" for name, us in entry["host_us"].items())
        print(f"{case.problem.label:48} {entry['origin']:8} {parts}", flush=True)
    report = Setup("gemm", cases()[0].problem, seed=1)()
    print(write(arguments.output, "overhead", report, rows, calls=CALLS, rounds=ROUNDS))


def cases() -> list[Case]:
    """Kernels that take so little time on the GPU that the host cannot hide behind them."""
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


def measure(case: Case) -> dict[str, Any]:
    """Microseconds of each part."""
    problem, operator = case.problem, ops.get(case.problem.operator)
    kernel = api.get_kernel(problem.operator, problem, on_miss="ignore")
    sets = [operator.inputs(problem, "cuda", seed) for seed in range(SETS)]
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
        **repeated_parts(kernel, tensors),  # which there are by now
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
    """Of a call that a kernel computes; none where torch does."""
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
    """Of a call like one before; none where nothing is replayed."""
    repeat = next(iter(kernel._plain), None)  # noqa: SLF001 - its parts have no names for others
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
    """Microseconds until the host goes on, by name: the least of some rounds, since whatever else happens only adds.

    All take their turn in each round: hosts change their speed.
    """
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
    """Median microseconds of the first call of a length, host side, `get_kernel` included."""
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
