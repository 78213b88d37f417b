"""Time of the first call in a new process with warm caches, beside the library's own first call.

    python -m benchmarks.cold_start

GEMM, attention and vector_add. Each process imports torch and makes its inputs on the GPU before the clock starts. One
then imports tlxgen, gets the kernel, calls it and waits; another calls the library and waits. Later processes find on
disk what the first one compiled; the time of that first one is `empty_ms`. Takes about two minutes on one GPU; writes
`<date>-cold-start-<gpu>.json`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.harness import Results, Row, device_report, options, spaced
from tlxgen import ops
from tlxgen.problem import Problem

PROCESSES = 7


@dataclass(frozen=True)
class Case:
    """A problem, a statement that makes the `tensors` of a call, and torch's call of them."""

    problem: Problem
    inputs: str
    library: str


_PRODUCT = "tensors = [torch.randn(4096, 4096).cuda().bfloat16() for _ in 'ab']"
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
    """Measures case by case."""
    parser = options(__doc__)
    parser.add_argument("--processes", type=int, default=PROCESSES, help="processes of each kind, after the first")
    parser.add_argument("--only", default="", help="only problems whose label contains this")
    arguments = parser.parse_args()
    results = Results(arguments.output, "cold-start", device_report(), {"processes": arguments.processes})
    for case in CASES:
        if arguments.only in case.problem.label:
            row = measure(case, arguments.processes)
            results.add(row, line(row))
    print(results.path)


def measure(case: Case, processes: int) -> Row:
    """Milliseconds; parts are medians over processes, which alternate between ours and the library's."""
    empty, origin = first_call(case, _OURS)
    first_call(case, _LIBRARY)
    pairs = [(first_call(case, _OURS)[0], first_call(case, _LIBRARY)[0]) for _ in range(processes)]
    ours, library = zip(*pairs, strict=True)
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
    """Milliseconds of the parts of a new process's first call, and the origin of its kernel."""
    text = _BEFORE.format(inputs=case.inputs) + steps.format(operator=case.problem.operator, library=case.library)
    command = [sys.executable, "-c", text, json.dumps(case.problem.model_dump())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"{case.problem.label}: {done.stderr[-2000:]}")
    times, origin = json.loads(done.stdout)
    return times, origin


def totals(processes: tuple[dict[str, float], ...]) -> list[float]:
    """Minimum, median and maximum of the processes' totals."""
    sums = sorted(sum(times.values()) for times in processes)
    return [round(value, 1) for value in (sums[0], statistics.median(sums), sums[-1])]


def line(row: Row) -> str:
    """A line of the printed table."""
    first, library = row["first_ms"], row["library_ms"]
    return (
        f"{row['label']:48} {row['origin']:8} {first[1]:.0f} ms ({first[0]:.0f} to {first[2]:.0f}; "
        f"{spaced(row['parts_ms'], '.1f')})  library {library[1]:.0f} ({library[0]:.0f} to {library[2]:.0f})  "
        f"empty {row['empty_ms']:.0f}"
    )


if __name__ == "__main__":
    main()
