"""Every structure of an operator's kernels in the simulator: of configs that synchronise alike, the model's favourite.

python -m benchmarks.structures attention attention_varlen

Takes no GPU: 2116 kernels took six minutes on two cores. What is found is printed as it is found, and ends in status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tlxgen import devices, ops
from tlxgen._version import __version__
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.problem import Problem
from tlxgen.simulator.check import check
from tlxgen.space.candidates import candidates
from tlxgen.toolchain import toolchain

#: Parameters that change numbers, registers or addresses, and neither barriers, copies nor who waits for whom.
PLAIN = frozenset({"sums", "carry", "rescale", "unroll", "head_group", "block_k", "group_m", "pdl", "group"})
SCHEDULES = 3

#: What the kernels of an operator differ by beside their configs.
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
    """One to be checked."""

    operator: str
    problem: Problem
    config: Config

    def found(self) -> str | None:
        """What the simulator finds, in one line."""
        report = check(emit(ops.get(self.operator), self.problem, self.config), SCHEDULES)
        return None if report.clean else f"{self.problem.label} {self.config.short}: {report.findings[0]}"


def main() -> None:
    """Checks them all, and writes how many there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="+", choices=sorted(PROBLEMS))
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    made = [one for operator in arguments.operators for one in kernels(operator)]
    started = time.monotonic()
    findings = []
    with ProcessPoolExecutor() as pool:
        for finding in pool.map(Kernel.found, made, chunksize=4):
            if finding is not None:
                findings.append(finding)
                print(finding, flush=True)
    counts = Counter(f"{one.problem.label}: {one.config.template}" for one in made)
    date = datetime.now(timezone.utc).date().isoformat()
    path = arguments.output / f"{date}-structures.json"
    content = {
        "date": date,
        "what": __doc__.split("\n", 1)[0],
        "versions": {"tlxgen": __version__, "toolchain": toolchain()},
        "schedules": SCHEDULES,
        "seconds": round(time.monotonic() - started),
        "checked": dict(counts),
        "findings": findings,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(made)} kernels, {len(findings)} with findings: {path}")
    sys.exit(bool(findings))


def kernels(operator: str) -> Iterator[Kernel]:
    """One of each structure, for each problem and template of an operator."""
    h200 = devices.target("h200")
    for sizes, options in PROBLEMS[operator]:
        problem = ops.get(operator).problem(sizes, **options)
        structures: dict[tuple[Any, ...], Config] = {}
        for config in candidates(problem, h200):  # best first
            structure = tuple(sorted((name, value) for name, value in config.params.items() if name not in PLAIN))
            structures.setdefault((config.template, structure), config)
        for config in structures.values():
            yield Kernel(operator, problem, config)


if __name__ == "__main__":
    main()
