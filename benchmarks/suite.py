"""Times the tuned and the default kernel of every shape of a suite against the libraries, interleaved in one run.

python -m benchmarks.suite benchmarks/suites/gemm.yaml -o benchmarks/results/

Libraries are the operator's peer in torch and others that are installed; `ratio` is to the peer, `others` to those, and
a shape's least ratio is to whichever is fastest.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import row, write
from tlxgen import ops, runtime
from tlxgen.candidates import default_config
from tlxgen.config import Config
from tlxgen.emit import emit
from tlxgen.measure import DeviceReport
from tlxgen.trials import Card, timings

ROUNDS = 41


def main() -> None:
    """Runs the suite, writes the results and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    suite = yaml.safe_load(arguments.suite.read_text())
    rows: list[dict[str, Any]] = []
    path = arguments.output
    for shape in suite["shapes"]:
        problem = ops.get(suite["operator"]).problem(shape["sizes"], **suite["options"], **shape.get("options", {}))
        report, found = measure(problem)
        rows += [{**entry, "at_least": shape["at_least"]} if entry["kind"] == "tuned" else entry for entry in found]
        for entry in found:
            times = f"{entry['time_us']:9.2f} us  {entry['ratio']:.3f}"
            others = "".join(f"  {name} {ratio:.3f}" for name, ratio in entry.get("others", {}).items())
            print(f"{problem.label:40} {entry['kind']:8} {times}{others}  {entry['config_short']}", flush=True)
        path = write(arguments.output, arguments.suite.stem, report, rows)  # each time: what is measured stays measured
    for kind in ("tuned", "default"):
        ratios = [to_fastest(entry) for entry in rows if entry["kind"] == kind]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{kind}: geometric mean {mean:.3f}, least {min(ratios):.3f} over {len(ratios)} shapes")
    slow = [entry for entry in rows if to_fastest(entry) < entry.get("at_least", 0.0)]
    print(path)
    if slow:
        raise SystemExit(f"{len(slow)} shape(s) below their least ratio")


def to_fastest(entry: dict[str, Any]) -> float:
    """The ratio to the fastest library."""
    return float(min([entry["ratio"], *entry.get("others", {}).values()]))


def measure(problem: Any) -> tuple[DeviceReport, list[dict[str, Any]]]:
    """The tuned config (if there is one), the default, and the libraries, in one measurement."""
    card = Card(problem.operator, problem, seed=1)
    try:
        report = card.setup()
        guests = card.invite()
        choice = runtime.select(problem, report.gpu)
        default = default_config(problem, report.gpu)
        configs: dict[str, Config | None] = {
            "tuned": choice.config if choice.origin == "tuned" else None,
            "default": default,
        }
        errors: dict[str, float | None] = {}
        for kind, config in list(configs.items()):
            if config is None:
                continue
            verdict = card.gate(kind, emit(ops.get(problem.operator), problem, config))
            assert verdict.status == "ok", f"{problem.label} {config.short}: {verdict}"
            errors[kind] = verdict.error
        found = timings(card.measure(list(errors), ROUNDS))
    finally:
        card.close()
    rows = []
    for kind, error in errors.items():
        config, timing = configs[kind], found[kind]
        assert config is not None
        others = {name: round(found[name].relative / timing.relative, 4) for name in guests}
        entry = {"kind": kind, **row(problem, config, timing, error, report)}
        rows.append({**entry, "others": others} if others else entry)
    return report, rows


if __name__ == "__main__":
    main()
