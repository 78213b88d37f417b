"""Check of every structure of an operator's kernels in the simulator.

    python -m benchmarks.structures attention attention_varlen

Configs have one structure if they differ only in `PLAIN` parameters; of each structure the one that the time model
prefers is checked. Needs no GPU; 2116 kernels took six minutes on two cores. Prints findings at once, writes
`<date>-structures.json` and exits with status 1 if there are any.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from benchmarks.harness import Results, options
from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.problem import Problem
from tlxgen.simulator.check import check
from tlxgen.space.candidates import candidates

#: Parameters that change numbers, registers or addresses, but neither barriers nor copies nor waits.
PLAIN = frozenset({"sums", "carry", "rescale", "head_group", "block_k", "group_m", "pdl", "group"})
SCHEDULES = 3

#: Problems whose kernels differ beyond their configs.
PROBLEMS: dict[str, tuple[tuple[tuple[int, ...], dict[str, Any]], ...]] = {
    "gemm": (
        ((16, 1280, 8192), {"layout": "nt"}),
        ((512, 1280, 8192), {"epilogue": "bias+residual"}),
        ((4096, 4096, 4096), {"out_dtype": "fp32", "layout": "tn"}),
    ),
    "attention": (
        ((2, 4, 1024, 64), {}),
        ((2, 4, 1024, 64), {"causal": "bottom-right"}),
        ((2, 4, 1024, 128), {}),
        ((2, 4, 1024, 128), {"causal": "bottom-right", "lse": True}),
        ((2, 4, 1024, 128), {"causal": "bottom-right", "window": 300}),
        ((2, 4, 1024, 256), {}),
        ((2, 4, 1024, 256), {"causal": "top-left"}),
        ((2, 8, 1, 128), {"kv_heads": 2, "kv_len": 4096, "lse": True}),
    ),
    "attention_varlen": (
        ((4, 4, 4096, 64), {"causal": "bottom-right"}),
        ((4, 4, 4096, 128), {"causal": "bottom-right", "lse": True}),
        ((4, 4, 4096, 256), {}),
    ),
    "grouped_gemm": (
        ((8, 8192, 4096, 4096), {}),
        ((8, 8192, 4096, 4096), {"form": "2d2d", "layout": "tn"}),
    ),
}


class Kernel(NamedTuple):
    """A kernel to check."""

    operator: str
    problem: Problem
    config: Config

    def finding(self) -> str | None:
        """The simulator's first finding, in one line."""
        report = check(emit(ops.get(self.operator), self.problem, self.config), SCHEDULES)
        return None if report.clean else f"{self.problem.label} {self.config.short}: {report.findings[0]}"


def main() -> None:
    """Checks all kernels of the named operators."""
    parser = options(__doc__)
    parser.add_argument("operators", nargs="+", choices=sorted(PROBLEMS))
    arguments = parser.parse_args()
    made = [one for operator in arguments.operators for one in kernels(operator)]
    checked = Counter(f"{one.problem.label}: {one.config.template}" for one in made)
    results = Results(arguments.output, "structures", more={"schedules": SCHEDULES, "checked": dict(checked)})
    started = time.monotonic()
    with ProcessPoolExecutor() as pool:
        for finding in pool.map(Kernel.finding, made, chunksize=4):
            if finding is not None:
                results.add({"finding": finding}, finding)
    results.more["seconds"] = round(time.monotonic() - started)
    results.write()
    print(f"{len(made)} kernels, {len(results.rows)} with findings: {results.path}")
    sys.exit(1 if results.rows else 0)


def kernels(operator: str) -> Iterator[Kernel]:
    """A kernel of each structure, for each problem and template of an operator."""
    h200 = devices.target("h200")
    for sizes, fields in PROBLEMS[operator]:
        problem = ops.get(operator).problem(sizes, **fields)
        structures: dict[tuple[Any, ...], Config] = {}
        for config in candidates(problem, h200):  # best first
            structure = tuple(sorted((name, value) for name, value in config.params.items() if name not in PLAIN))
            structures.setdefault((config.template, structure), config)
        for config in structures.values():
            yield Kernel(operator, problem, config)


if __name__ == "__main__":
    main()
