"""Speed of the config that `get_kernel` serves to problems without a tuned row, against default and fresh tuning.

    python -m benchmarks.nearest
    python -m benchmarks.nearest --operator gemm --count 10 --within 120

50 problems are drawn around the shipped rows, near and far (`benchmarks.untuned`); no other rows are known. Each is
tuned from nothing within a small budget; then the served config, the default and the winner are timed in the same
rounds, on inputs that the tuning did not use. Ratios are of speeds. Takes some 10 minutes on one GPU and writes
`<date>-nearest-<gpu>.json` after every problem. Exits with an error if a neighbour's config (origin `nearest`) is below
`AT_LEAST` in geometric mean; other origins are summarised apart.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from benchmarks.harness import Results, Row, options, pass_gate, require_gpu, spaced
from benchmarks.untuned import OPERATORS, Drawn, drawn
from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.store import Store
from tlxgen.devices import Gpu
from tlxgen.errors import GpuLostError, TuningError
from tlxgen.problem import Problem
from tlxgen.runtime import kernel, selection
from tlxgen.space.candidates import default_config
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.process import Child
from tlxgen.tuner.result import Budget
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import Timing, timings
from tlxgen.tuner.tune import tune

INPUTS = 1000  # seed of inputs that no tuning uses
ROUNDS = 41

#: Operators in turn; half of the problems are GEMMs in any beginning of the list.
TURNS = (
    *("gemm", "attention", "gemm", "grouped_gemm", "gemm"),
    *("attention", "gemm", "attention", "gemm", "grouped_gemm"),
)
_CYCLES = 5  # of TURNS, by default

#: Minimum geometric means of a neighbour's config: of the default's speed, and of a fresh tuning's.
AT_LEAST: Mapping[str, float] = {"to_default": 1.0, "to_tuned": 0.9}

RATIOS = ("to_default", "to_tuned", "default_to_tuned")


@dataclass(frozen=True)
class Bench:
    """Process on the GPU, compilers, and the budget of a tuning."""

    child: Child
    pool: CompilePool
    gpu: Gpu
    budget: Budget


def main() -> None:
    """Measures problem by problem."""
    parser = options(__doc__)
    parser.add_argument("--operator", choices=OPERATORS, help="only this one")
    parser.add_argument("--count", type=int, help="problems; by default 50, or the operator's share of them")
    parser.add_argument("--within", type=float, default=math.inf, help="start no problem after so many seconds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the problems")
    parser.add_argument("--trials", type=int, default=24, help="trials of each tuning")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each tuning's search")
    arguments = parser.parse_args()
    require_gpu()
    started = time.monotonic()
    turns = [name for name in TURNS if arguments.operator in (None, name)]
    count = len(turns) * _CYCLES if arguments.count is None else arguments.count
    name = "-".join(filter(None, ["nearest", arguments.operator]))
    results = Results(
        arguments.output, name, more={one: getattr(arguments, one) for one in ("seed", "trials", "seconds")}
    )
    child = Child()
    try:
        with shipped_rows_only():
            results.report = Runner("gemm", ops.get("gemm").problem((128, 128, 128)), INPUTS, child=child).setup()
            gpu = results.report.gpu
            with CompilePool(gpu.capability, simulate=True) as pool:
                bench = Bench(child, pool, gpu, Budget(arguments.trials, arguments.seconds))
                for one in islice(problems(turns, gpu, arguments.seed), count):
                    if time.monotonic() - started > arguments.within:
                        print(f"stopped after {arguments.within:g} s: {len(results.rows)} of {count} problems measured")
                        break
                    row = measure(one, bench)
                    results.more["summary"] = summary([*results.rows, row])
                    results.add(row, line(row))
    finally:
        child.kill()
    found = summary(results.rows)
    print(*map(summary_line, found), results.path, sep="\n")
    if missed := shortfalls(found):
        raise SystemExit("; ".join(missed))


@contextmanager
def shipped_rows_only() -> Iterator[None]:
    """Uses a database of the shipped rows alone."""
    before = os.environ.get("TLXGEN_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TLXGEN_CACHE"] = str(Path(folder) / "tuned.db")
        kernel.forget()
        try:
            yield
        finally:
            del os.environ["TLXGEN_CACHE"]
            os.environ.update({"TLXGEN_CACHE": before} if before is not None else {})
            kernel.forget()


def problems(turns: Sequence[str], gpu: Gpu, seed: int) -> Iterator[Drawn]:
    """Problems of the operators in turn; an operator's do not depend on which others take part."""
    sources = {name: drawn(name, measured(name, gpu), gpu, seed) for name in dict.fromkeys(turns)}
    return (next(sources[name]) for name in cycle(turns))


def measured(operator: str, gpu: Gpu) -> list[Problem]:
    """Problems with a measured row for this GPU, sorted by label."""
    records = selection.store().records(operator)
    own = [record for record in records if record.origin == "measured" and record.key.device == gpu.key]
    return sorted((ops.get(operator).problem(record.key.problem) for record in own), key=lambda problem: problem.label)


def measure(one: Drawn, bench: Bench) -> Row:
    """Tunes a problem and compares the configs; `failure` is why no candidate works."""
    problem = one.problem
    choice = selection.select(problem, bench.gpu, note_miss=False)
    configs = {"served": choice.config, "default": default_config(problem, bench.gpu)}
    row: Row = {"op": problem.operator, "problem": problem.model_dump(), "label": problem.label, "reach": one.reach}
    row |= {"origin": choice.origin, "note": choice.note}
    for config in filter(None, dict.fromkeys(configs.values())):  # compiled while the search runs
        bench.pool.submit(emit(ops.get(problem.operator), problem, config))
    try:
        with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "tuned.db") as store:
            result = tune(problem, store, budget=bench.budget, child=bench.child, pool=bench.pool)
        configs["tuned"] = result.record.config
        runner = Runner(problem.operator, problem, INPUTS, child=bench.child)
        row["peer_us"] = round(runner.setup().peer_us, 3)
        names = {config.id: config for config in configs.values() if config is not None}
        found = timings(runner.measure(list(pass_gate(runner, names)), ROUNDS))
    except GpuLostError:
        raise
    except TuningError as error:
        return {**row, "failure": str(error)}
    search = {"tried": result.state.tried, "seconds": round(result.state.elapsed, 1), "disturbed": result.disturbed}
    return {**row, **search, **ratios(configs, found)}


def ratios(configs: Mapping[str, Config | None], found: Mapping[str, Timing]) -> Row:
    """Microseconds, and ratios of speeds; None where one of the two was not timed."""
    us = {name: found[config.id].time_us if config and config.id in found else None for name, config in configs.items()}

    def speed(one: str, other: str) -> float | None:
        ours, theirs = us[one], us[other]
        return None if ours is None or theirs is None else round(theirs / ours, 4)

    return {
        "configs": {name: config.short if config else None for name, config in configs.items()},
        "us": {name: value and round(value, 3) for name, value in us.items()},
        "to_default": speed("served", "default"),
        "to_tuned": speed("served", "tuned"),
        "default_to_tuned": speed("default", "tuned"),
    }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Number of problems, and geometric mean and minimum of each ratio, by origin: of all operators and of each."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for operator in ("all", row["op"]):
            groups.setdefault((row["origin"], operator), []).append(row)
    found = []
    for (origin, operator), group in sorted(groups.items(), key=lambda item: item[0][0] != "nearest"):
        one: Row = {"origin": origin, "op": operator, "problems": len(group)}
        for name in RATIOS:
            values = [row[name] for row in group if row.get(name) is not None]
            one[name] = {"mean": round(statistics.geometric_mean(values), 4), "least": min(values)} if values else None
        found.append(one)
    return found


def shortfalls(summaries: Sequence[Row]) -> list[str]:
    """Means of origin `nearest`, over all operators, that are below `AT_LEAST`."""
    nearest = [one for one in summaries if (one["origin"], one["op"]) == ("nearest", "all")]
    if not nearest:
        return ["nearest was never served"]
    means = {name: nearest[0][name]["mean"] if nearest[0][name] else 0.0 for name in AT_LEAST}
    return [
        f"nearest: {name} {means[name]:.3f} is below {min_}" for name, min_ in AT_LEAST.items() if means[name] < min_
    ]


def summary_line(one: Row) -> str:
    """A line of the printed summary."""
    means = [f"{name} {one[name]['mean']:.3f} (least {one[name]['least']:.3f})" for name in RATIOS if one[name]]
    return "  ".join([f"{one['origin']:8} {one['op']:13} {one['problems']:3}", *means])


def line(row: Row) -> str:
    """A line of the printed table."""
    head = f"{row['label']:56} {row['reach']:4} {row['origin']:8}"
    if "failure" in row:
        return f"{head}  {row['failure']}"
    times = spaced({name: us for name, us in row["us"].items() if us is not None}, ".1f")
    speeds = spaced({name: row[name] for name in RATIOS if row[name] is not None}, ".3f")
    return f"{head}  {times} us  {speeds}  {row['tried']} tried in {row['seconds']:.0f} s {row['disturbed']}".rstrip()


if __name__ == "__main__":
    main()
