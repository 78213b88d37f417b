"""Speed of the tuned and the default kernel against the libraries, for every shape of a suite.

    python -m benchmarks.suite benchmarks/suites/gemm.yaml
    python -m benchmarks.suite benchmarks/suites/gemm.yaml --tuned --rounds 15     # a third of the time

All kernels of a shape and the libraries are timed in the same rounds. `ratio` is to the operator's peer in torch,
`others` to further installed libraries. Takes about 10 s a shape on one GPU and writes `<date>-<suite>-<gpu>.json`.
Exits with an error if a tuned kernel is below its shape's `at_least`, the minimum ratio to the fastest library.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from benchmarks.harness import Results, Row, kernel_row, mean_and_least, options, pass_gate, require_gpu, spaced
from tlxgen.config import Config
from tlxgen.ops import suites
from tlxgen.problem import Problem
from tlxgen.runtime import selection
from tlxgen.space.candidates import default_config
from tlxgen.tuner.measure import DeviceReport
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings

ROUNDS = 41


def main() -> None:
    """Measures a suite."""
    parser = options(__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--only", default="", help="only shapes whose label contains this")
    parser.add_argument("--tuned", action="store_true", help="no default kernel for shapes that are tuned")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each measurement")
    arguments = parser.parse_args()
    require_gpu()
    shapes = yaml.safe_load(arguments.suite.read_text(encoding="utf-8"))["shapes"]
    results = Results(arguments.output, arguments.suite.stem)
    child = Child()  # one for all shapes: starting torch takes seconds
    try:
        for shape, problem in zip(shapes, suites.problems(arguments.suite), strict=True):
            if arguments.only not in problem.label:
                continue
            results.report, found = measure(problem, child, arguments.rounds, tuned_only=arguments.tuned)
            for row in found:
                at_least = {"at_least": shape["at_least"]} if row["kind"] == "tuned" else {}
                results.add({**row, **at_least}, line(problem.label, row))
    finally:
        child.kill()
    for kind in ("tuned", "default"):
        print(f"{kind}: {mean_and_least(to_fastest(row) for row in results.rows if row['kind'] == kind)}")
    print(results.path)
    if slow := sum(to_fastest(row) < row.get("at_least", 0.0) for row in results.rows):
        raise SystemExit(f"{slow} shape(s) below their least ratio")


def measure(problem: Problem, child: Child, rounds: int, *, tuned_only: bool) -> tuple[DeviceReport, list[Row]]:
    """Rows of the tuned kernel, if there is one, and of the default."""
    runner = Runner(problem.operator, problem, seed=1, child=child)
    report = runner.setup()
    libraries = runner.invite()
    choice = selection.select(problem, report.gpu)
    configs: dict[str, Config] = {}
    if choice.origin == "tuned" and choice.config is not None:
        configs["tuned"] = choice.config
    if not (tuned_only and configs):
        default = default_config(problem, report.gpu)
        assert default is not None, f"{problem.label} has no kernel for this GPU"
        configs["default"] = default
    errors = pass_gate(runner, configs)
    if len(errors) < len(configs):
        raise SystemExit(f"{problem.label}: a kernel failed the gate")
    found = timings(runner.measure(list(errors), rounds))
    rows = []
    for kind, error in errors.items():
        row = {"kind": kind, **kernel_row(problem, configs[kind], found[kind], error, report)}
        others = {name: round(found[name].relative / found[kind].relative, 4) for name in libraries}
        rows.append({**row, "others": others} if others else row)
    return report, rows


def line(label: str, row: Row) -> str:
    """A row of the printed table."""
    others = spaced(row.get("others", {}), ".3f")
    return f"{label:40} {row['kind']:8} {row['time_us']:9.2f} us  {row['ratio']:.3f}  {others}  {row['config_short']}"


def to_fastest(row: Row) -> float:
    """The ratio to the fastest library."""
    return float(min([row["ratio"], *row.get("others", {}).values()]))


if __name__ == "__main__":
    main()
