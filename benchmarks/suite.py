"""Times the tuned and the default kernel of every shape of a suite against the libraries, interleaved in one run.

python -m benchmarks.suite benchmarks/suites/gemm.yaml -o benchmarks/results/
python -m benchmarks.suite benchmarks/suites/gemm.yaml --tuned --rounds 15     # takes a third of the time

Libraries are the operator's peer in torch and others that are installed; `ratio` is to the peer, `others` to those, and
a shape's least ratio is to whichever is fastest.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import beside, row, write
from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.ops import suites
from tlxgen.runtime import kernel
from tlxgen.space.candidates import default_config
from tlxgen.tuner.measure import DeviceReport
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings

ROUNDS = 41


def main() -> None:
    """Runs the suite, writes the results and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--only", default="", help="shapes whose label has this in it")
    parser.add_argument("--tuned", action="store_true", help="leave out default kernels where a tuned one is")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each measurement")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    shapes = yaml.safe_load(arguments.suite.read_text(encoding="utf-8"))["shapes"]
    rows: list[dict[str, Any]] = []
    path = arguments.output
    child = Child()  # one for all: starting torch takes seconds
    try:
        for shape, problem in zip(shapes, suites.problems(arguments.suite), strict=True):
            if arguments.only not in problem.label:
                continue
            report, found = measure(problem, child, arguments.rounds, alone=arguments.tuned)
            rows += [{**e, "at_least": shape["at_least"]} if e["kind"] == "tuned" else e for e in found]
            for entry in found:
                print(line(problem.label, entry), flush=True)
            path = write(arguments.output, arguments.suite.stem, report, rows)  # each time: what is measured stays so
    finally:
        child.kill()
    for kind in ("tuned", "default"):
        ratios = [to_fastest(entry) for entry in rows if entry["kind"] == kind]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{kind}: geometric mean {mean:.3f}, least {min(ratios):.3f} over {len(ratios)} shapes")
    slow = [entry for entry in rows if to_fastest(entry) < entry.get("at_least", 0.0)]
    print(path)
    if slow:
        raise SystemExit(f"{len(slow)} shape(s) below their least ratio")


def line(label: str, entry: dict[str, Any]) -> str:
    """An entry in the table."""
    times = f"{entry['time_us']:9.2f} us  {entry['ratio']:.3f}"
    others = "".join(f"  {name} {ratio:.3f}" for name, ratio in entry.get("others", {}).items())
    return f"{label:40} {entry['kind']:8} {times}{others}  {entry['config_short']}"


def to_fastest(entry: dict[str, Any]) -> float:
    """The ratio to the fastest library."""
    return float(min([entry["ratio"], *entry.get("others", {}).values()]))


def measure(problem: Any, child: Child, rounds: int, *, alone: bool) -> tuple[DeviceReport, list[dict[str, Any]]]:
    """The tuned config (if there is one), the default (unless the tuned one is to be alone), and the libraries."""
    card = Runner(problem.operator, problem, seed=1, child=child)
    report = card.setup()
    guests = card.invite()
    choice = kernel.select(problem, report.gpu)
    configs: dict[str, Config] = {}
    if choice.origin == "tuned" and choice.config is not None:
        configs["tuned"] = choice.config
    if not (alone and configs):
        default = default_config(problem, report.gpu)
        assert default is not None, f"{problem.label} has no kernel here"
        configs["default"] = default
    errors: dict[str, float | None] = {}
    for kind, config in configs.items():
        verdict = card.gate(kind, emit(ops.get(problem.operator), problem, config))
        assert verdict.status == "ok", f"{problem.label} {config.short}: {verdict}"
        errors[kind] = verdict.error
    found = timings(card.measure(list(errors), rounds))
    rows = []
    for kind, error in errors.items():
        others = beside(found, kind, guests)
        entry = {"kind": kind, **row(problem, configs[kind], found[kind], error, report)}
        rows.append({**entry, "others": others} if others else entry)
    return report, rows


if __name__ == "__main__":
    main()
