"""The first launch of a new process, where an older one has left its caches, beside the library's own first call.

python -m benchmarks.cold_start -o benchmarks/results/

Each process imports torch and makes its inputs on the GPU, which is not counted. Then one imports tlxgen, asks for the
kernel, calls it and waits for the result; another calls the library and waits. What the first process compiles is found
on disk by all others, as in a program's second run; the first itself is `empty`, of caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import write
from tlxgen import ops
from tlxgen.problem import Problem
from tlxgen.tuner.measure import Setup

PROCESSES = 7


@dataclass(frozen=True)
class Case:
    """A problem; torch that makes a call's `tensors`, and torch's own call of them."""

    problem: Problem
    inputs: str
    library: str


_PRODUCT = "tensors = torch.randn(4096, 4096).cuda().bfloat16(), torch.randn(4096, 4096).cuda().bfloat16()"
_VECTORS = "tensors = [torch.randn(1 << 20).cuda()] * 2"
_HEADS = "tensors = [torch.randn(2, 16, 2048, 128).cuda().bfloat16() for _ in 'qkv']"
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)"

CASES = (
    Case(ops.get("gemm").problem((4096, 4096, 4096)), _PRODUCT, "torch.mm(*tensors)"),
    Case(ops.get("attention").problem((2, 16, 2048, 128), causal="bottom-right"), _HEADS, _ATTENTION),
    Case(ops.get("vector_add").problem((1 << 20,), dtype="fp32"), _VECTORS, "torch.add(*tensors)"),
)

_BEFORE = """
import json, sys, time, warnings
import torch
{inputs}
torch.cuda.synchronize()
warnings.simplefilter("ignore")
times, last = {{}}, time.perf_counter()

def over(part):
    global last
    now = time.perf_counter()
    times[part], last = (now - last) * 1e3, now

"""
_OURS = """
import tlxgen
over("import")
kernel = tlxgen.get_kernel({operator!r}, json.loads(sys.argv[1]))
over("get_kernel")
kernel(*tensors)
over("call")
torch.cuda.synchronize()
over("wait")
print(json.dumps([times, kernel.origin]))
"""
_LIBRARY = """
{library}
over("call")
torch.cuda.synchronize()
over("wait")
print(json.dumps([times, "torch"]))
"""


def main() -> None:
    """Measures, writes the results and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=PROCESSES, help="of each kind, beside the first")
    parser.add_argument("--only", default="", help="problems whose label has this in it")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rows = []
    for case in (case for case in CASES if arguments.only in case.problem.label):
        rows.append(measure(case, arguments.processes))
        print(line(rows[-1]), flush=True)
    report = Setup("gemm", CASES[0].problem, seed=1)()
    print(write(arguments.output, "cold-start", report, rows, processes=arguments.processes))


def measure(case: Case, processes: int) -> dict[str, Any]:
    """Milliseconds of the parts, medians over processes; ours and the library's in turn."""
    empty, origin = first_call(case, _OURS)
    first_call(case, _LIBRARY)
    pairs = [(first_call(case, _OURS)[0], first_call(case, _LIBRARY)[0]) for _ in range(processes)]
    ours, library = ([pair[who] for pair in pairs] for who in (0, 1))
    return {
        "op": case.problem.operator,
        "problem": case.problem.model_dump(),
        "label": case.problem.label,
        "origin": origin,
        "empty_ms": round(sum(empty.values()), 1),
        "first_ms": totals(ours),
        "library_ms": totals(library),
        "parts_ms": {part: round(statistics.median(times[part] for times in ours), 1) for part in ours[0]},
    }


def first_call(case: Case, steps: str) -> tuple[dict[str, float], str]:
    """Milliseconds by part of one process's first call, and who served it."""
    text = _BEFORE.format(inputs=case.inputs) + steps.format(operator=case.problem.operator, library=case.library)
    command = [sys.executable, "-c", text, json.dumps(case.problem.model_dump())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"{case.problem.label}: {done.stderr[-2000:]}")
    times, origin = json.loads(done.stdout)
    return times, origin


def totals(found: list[dict[str, float]]) -> list[float]:
    """Least, median and largest sum of a process's parts."""
    sums = sorted(sum(times.values()) for times in found)
    return [round(value, 1) for value in (sums[0], statistics.median(sums), sums[-1])]


def line(row: dict[str, Any]) -> str:
    """A case in the table."""
    parts = "  ".join(f"{part} {ms:.1f}" for part, ms in row["parts_ms"].items())
    first, library = row["first_ms"], row["library_ms"]
    return (
        f"{row['label']:48} {row['origin']:8} {first[1]:.0f} ms ({first[0]:.0f} to {first[2]:.0f}; {parts})  "
        f"library {library[1]:.0f} ({library[0]:.0f} to {library[2]:.0f})  empty {row['empty_ms']:.0f}"
    )


if __name__ == "__main__":
    main()
