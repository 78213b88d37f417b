"""What knobs bring: the tuned kernel of each shape of a suite beside the same with some of its parameters changed.

python -m benchmarks.knobs benchmarks/suites/attention.yaml --only causal --with schedule=static,head_group=1

All of a shape's kernels are timed in turn in one measurement, with the libraries that are installed. Changes that are
not legal for a shape, or that its row makes already, are left out there; those that do not compile are listed, with the
reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import beside, row, write
from benchmarks.suite import line
from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config, Value
from tlxgen.devices import Gpu
from tlxgen.errors import CompileError
from tlxgen.ops import suites
from tlxgen.problem import Problem
from tlxgen.runtime import kernel
from tlxgen.space import search_space
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.measure import DeviceReport
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings


def main() -> None:
    """Measures each shape, writes what was measured so far, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--only", default="", help="shapes whose label has this in it")
    parser.add_argument("--with", dest="changes", action="append", required=True, metavar="NAME=VALUE,...")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--name", default="knobs", help="of the file of results")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    changes = {text: change(text) for text in arguments.changes}
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    problems = [problem for problem in suites.problems(arguments.suite) if arguments.only in problem.label]
    if not problems:
        raise SystemExit(f"no shape of {arguments.suite} has {arguments.only!r} in its label")
    child = Child()
    try:
        for problem in problems:
            report, found, failed = measure(problem, changes, child, arguments.rounds)
            rows += found
            failures += failed
            for entry in found:
                print(line(f"{problem.label} {entry['change']}", entry), flush=True)
            for entry in failed:
                print(f"{problem.label} {entry['change']}: {entry['reason']}", flush=True)
            path = write(
                arguments.output, arguments.name, report, rows, what=__doc__.split("\n", 1)[0], failures=failures
            )
    finally:
        child.kill()
    print(path)


def change(text: str) -> dict[str, Value]:
    """What `name=value,...` says; values as in YAML.

    Raises:
        SystemExit: it is not of that form.
    """
    pairs = [item.partition("=")[::2] for item in text.split(",")]
    if any(not name.strip() or not value for name, value in pairs):
        raise SystemExit(f"{text!r} is not a list of name=value, with commas in between")
    # YAML 1.1 takes a bare `off` for false.
    return {name.strip(): value if value in ("on", "off") else yaml.safe_load(value) for name, value in pairs}


def variants(
    problem: Problem, tuned: Config, changes: Mapping[str, Mapping[str, Value]], gpu: Gpu
) -> dict[str, Config]:
    """The tuned config, as `tuned`, and by the text of a change each legal config that it makes of it."""
    operator = ops.get(problem.operator)
    found = {"tuned": tuned}
    for text, params in changes.items():
        config = Config(template=tuned.template, params={**tuned.params, **params})
        known = params.keys() <= tuned.params.keys() and config not in found.values()
        if known and search_space.why_illegal(operator, problem, config, gpu) is None:
            found[text] = config
    return found


def measure(
    problem: Problem, changes: Mapping[str, Mapping[str, Value]], child: Child, rounds: int
) -> tuple[DeviceReport, list[dict[str, Any]], list[dict[str, Any]]]:
    """The card's report, a row for each variant that was timed, and what became of the others."""
    operator = ops.get(problem.operator)
    card = Runner(problem.operator, problem, seed=1, child=child)
    report = card.setup()
    choice = kernel.select(problem, report.gpu)
    assert choice.origin == "tuned", f"{problem.label} is not tuned"
    assert choice.config is not None
    guests = card.invite()
    configs = variants(problem, choice.config, changes, report.gpu)
    sources = {name: emit(operator, problem, config) for name, config in configs.items()}
    errors: dict[str, float | None] = {}
    failed: dict[str, str] = {}
    with CompilePool(report.gpu.capability) as pool:
        for name, future in {name: pool.submit(source) for name, source in sources.items()}.items():
            try:
                future.result()
            except CompileError as why:
                failed[name] = str(why).splitlines()[0]
                continue
            verdict = card.gate(name, sources[name])
            if verdict.status == "ok":
                errors[name] = verdict.error
            else:
                failed[name] = f"{verdict.status}: {verdict.message}"
    found = timings(card.measure(list(errors), rounds))
    failed |= {name: f"{fault.status}: {fault.message}" for name, fault in card.faults.items()}
    rows = [
        {
            "kind": "tuned" if name == "tuned" else "changed",
            "change": name,
            **row(problem, configs[name], found[name], error, report),
            "others": beside(found, name, guests),
        }
        for name, error in errors.items()
        if name in found
    ]
    failures = [{"problem": problem.model_dump(), "change": name, "reason": why} for name, why in failed.items()]
    return report, rows, failures


if __name__ == "__main__":
    main()
