"""Every legal config of a shape, timed; and whether the tuner's winner comes within 2 % of the best of them.

    python -m benchmarks.exhaustive gemm 4096 4096 4096 -o benchmarks/results/

The table is also what the tests of the search replay.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import row, write
from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.db.store import Store
from tlxgen.problem import Problem
from tlxgen.tuner.result import Budget, TuneResult
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings
from tlxgen.tuner.tune import tune


def main() -> None:
    """Searches in full, then as a user would, and compares the two winners in one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator")
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    problem = ops.get(arguments.operator).problem(arguments.sizes)
    everything, table = search(problem, "exhaustive", Budget(trials=100_000, seconds=500))
    searched, _ = search(problem, "tpe", Budget(trials=100, seconds=120))
    verdict, report, rows = compare(problem, everything, searched)
    name = f"exhaustive-{arguments.operator}-" + "x".join(map(str, arguments.sizes))
    print(write(arguments.output, name, report, rows, table=table, **verdict))
    print(verdict)


def search(problem: Problem, sampler: str, budget: Budget) -> tuple[TuneResult, list[dict[str, Any]]]:
    """One run into an empty database, and all that it tried."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "tuned.db") as store:
        result = tune(problem, store, sampler=sampler, budget=budget)
        trials = store.trials(result.record.key)
    print(f"{sampler}: {len(trials)} tried in {result.state.elapsed:.0f} s, {dict(result.state.failures)}", flush=True)
    table = [
        {
            "config": t.config.model_dump(),
            "status": t.status,
            "time_us": t.time_us and round(t.time_us, 3),
            "message": t.message,
        }
        for t in trials
    ]
    return result, sorted(table, key=lambda entry: entry["time_us"] or float("inf"))


def compare(problem: Problem, full: TuneResult, part: TuneResult) -> tuple[dict[str, Any], Any, list[dict[str, Any]]]:
    """Both winners, paired."""
    configs = {"exhaustive": full.record.config, "searched": part.record.config}
    card = Runner(problem.operator, problem, seed=2)
    try:
        report = card.setup()
        verdicts = {name: card.gate(name, emit(ops.get(problem.operator), problem, c)) for name, c in configs.items()}
        found = timings(card.measure(list(configs), 41))
    finally:
        card.close()
    rows = [{"kind": k, **row(problem, configs[k], t, verdicts[k].error, report)} for k, t in found.items()]
    regret = found["searched"].time_us / found["exhaustive"].time_us - 1
    verdict = {
        "tried_exhaustive": full.state.tried,
        "seconds_exhaustive": round(full.state.elapsed, 1),
        "tried_searched": part.state.tried,
        "seconds_searched": round(part.state.elapsed, 1),
        "regret": round(regret, 4),
    }
    return verdict, report, rows


if __name__ == "__main__":
    main()
