"""Is the row of a similar problem worth serving? Problems without a row: what is served, the default, a fresh tuning.

    python -m benchmarks.nearest -o benchmarks/results/
    python -m benchmarks.nearest --operator gemm --count 10 --within 120

Problems are drawn around the rows that come with tlxgen, near and far, and no other rows are known. Each is tuned from
nothing, with a small budget; then the config that `get_kernel` would serve, the model's favourite and the winner are
timed in one interleaved measurement, on inputs that the tuning has not seen. Ratios are of speeds. Only where `nearest`
is what is served do they say something of it; the others are counted apart.

One process owns the card throughout, and results are written after every problem.
"""

from __future__ import annotations

import argparse
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
from typing import Any

from benchmarks.repeatability import pass_gate
from benchmarks.results import write
from benchmarks.untuned import OPERATORS, Drawn, drawn
from tlxgen import ops, toolchain
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.store import Store
from tlxgen.devices import Gpu
from tlxgen.errors import GpuLostError, TuningError
from tlxgen.problem import Problem
from tlxgen.runtime import kernel, selection
from tlxgen.space.candidates import default_config
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.measure import DeviceReport
from tlxgen.tuner.process import Child
from tlxgen.tuner.result import Budget, TuneResult
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import Timing, timings
from tlxgen.tuner.tune import tune

SEED = 1
INPUTS = 1000  # seed of inputs that no tuning has seen
ROUNDS = 41

#: Whose turn it is, over and over: half of the problems are gemm's, so that any beginning of the list is a fair sample.
TURNS = (
    *("gemm", "attention", "gemm", "grouped_gemm", "gemm"),
    *("attention", "gemm", "attention", "gemm"),
    "grouped_gemm",
)
#: Problems of each turn, unless told otherwise.
_ROUNDS_OF_TURNS = 5

#: What `nearest` must reach in geometric mean: of the default's speed, and of a fresh tuning's.
AT_LEAST: Mapping[str, float] = {"to_default": 1.0, "to_tuned": 0.9}

Row = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """What `get_kernel` would run; of a neighbour, which one and how far it is."""

    origin: str
    config: Config | None
    neighbour: str = ""
    distance: float | None = None


@dataclass(frozen=True)
class Bench:
    """Where problems are measured, and how much a tuning may take."""

    child: Child
    pool: CompilePool
    gpu: Gpu
    budget: Budget


def main() -> None:
    """Measures problem by problem, and says how `nearest` fares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator", choices=OPERATORS, help="this one alone")
    parser.add_argument("--count", type=int, help="problems; by default 50, or the operator's share of them")
    parser.add_argument("--within", type=float, default=math.inf, help="begin no problem after so many seconds")
    parser.add_argument("--seed", type=int, default=SEED, help="of the problems")
    parser.add_argument("--trials", type=int, default=24, help="of each tuning")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each tuning's search")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    started = time.monotonic()
    turns = [name for name in TURNS if arguments.operator in (None, name)]
    count = len(turns) * _ROUNDS_OF_TURNS if arguments.count is None else arguments.count
    name = "-".join(["nearest", *([arguments.operator] if arguments.operator else [])])
    asked = {"seed": arguments.seed, "trials": arguments.trials, "seconds": arguments.seconds}
    path, rows = arguments.output, list[Row]()
    child = Child()
    try:
        with shipped_alone():
            report = Runner("gemm", ops.get("gemm").problem((128, 128, 128)), INPUTS, child=child).setup()
            with CompilePool(report.gpu.capability, simulate=True) as pool:
                bench = Bench(child, pool, report.gpu, Budget(arguments.trials, arguments.seconds))
                for one in islice(problems(turns, report.gpu, arguments.seed), count):
                    if time.monotonic() - started > arguments.within:
                        print(f"{arguments.within:g} s are over: {len(rows)} of {count} problems were measured")
                        break
                    rows.append(measure(one, bench))
                    print(line(rows[-1]), flush=True)
                    path = write(arguments.output, name, report, rows, **asked, summary=summary(rows))
    finally:
        child.kill()
    print(*told(summary(rows)), path, sep="\n")
    if short := shortfalls(summary(rows)):
        raise SystemExit("; ".join(short))


@contextmanager
def shipped_alone() -> Iterator[None]:
    """A database that holds what comes with tlxgen, and nothing that was tuned here."""
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
    """Operator by operator in turn; those of one operator are the same whatever others there are."""
    sources = {name: drawn(name, measured(name, gpu), gpu, seed) for name in dict.fromkeys(turns)}
    return (next(sources[name]) for name in cycle(turns))


def measured(operator: str, gpu: Gpu) -> list[Problem]:
    """Problems that have a measured row for such a GPU, in an order of their own."""
    records = selection.store().records(operator)
    here = [record for record in records if record.origin == "measured" and record.key.device == gpu.key]
    return sorted((ops.get(operator).problem(record.key.problem) for record in here), key=lambda problem: problem.label)


def served(problem: Problem, gpu: Gpu) -> Served:
    """What `select` serves, with the distance that it tells in words."""
    choice = selection.select(problem, gpu, note_miss=False)
    if choice.origin != "nearest":
        return Served(choice.origin, choice.config)
    rows = selection.neighbourhood(problem.operator)
    found, _ = rows.nearest(problem, gpu, toolchain.toolchain(), default_config(problem, gpu))
    assert found is not None
    return Served(choice.origin, choice.config, found.problem.label, found.distance)


def measure(one: Drawn, bench: Bench) -> Row:
    """Tunes a problem, then compares; of one that no candidate works for, what was said."""
    problem = one.problem
    entry: Row = {"op": problem.operator, "problem": problem.model_dump(), "label": problem.label, "reach": one.reach}
    choice, default = served(problem, bench.gpu), default_config(problem, bench.gpu)
    entry |= {"origin": choice.origin, "neighbour": choice.neighbour, "distance": rounded(choice.distance)}
    for config in filter(None, dict.fromkeys((choice.config, default))):  # they are ready when the search is over
        bench.pool.submit(emit(ops.get(problem.operator), problem, config))
    try:
        result = from_scratch(problem, bench)
        configs = {"served": choice.config, "default": default, "tuned": result.record.config}
        found, report = together(problem, configs, bench)
    except GpuLostError:
        raise
    except TuningError as error:
        return {**entry, "failure": str(error)}
    tried = {"tried": result.state.tried, "seconds": round(result.state.elapsed, 1)}
    return {
        **entry,
        **tried,
        "disturbed": result.disturbed,
        "peer_us": rounded(report.peer_us),
        **ratios(configs, found),
    }


def from_scratch(problem: Problem, bench: Bench) -> TuneResult:
    """The winner of a search that knows nothing."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "tuned.db") as store:
        return tune(problem, store, budget=bench.budget, child=bench.child, pool=bench.pool)


def together(
    problem: Problem, configs: Mapping[str, Config | None], bench: Bench
) -> tuple[dict[Config, Timing], DeviceReport]:
    """All of them in one measurement; who is there twice is measured once."""
    card = Runner(problem.operator, problem, INPUTS, child=bench.child)
    report = card.setup()
    passed = pass_gate(card, [config for config in configs.values() if config is not None])
    found = timings(card.measure([config.id for config in passed], ROUNDS))
    return {config: found[config.id] for config in passed if config.id in found}, report


def ratios(configs: Mapping[str, Config | None], found: Mapping[Config, Timing]) -> Row:
    """Microseconds, and speeds over one another; None where one of the two did not come through."""
    us = {name: found[config].time_us if config and config in found else None for name, config in configs.items()}

    def speed(one: str, other: str) -> float | None:
        ours, theirs = us[one], us[other]
        return None if ours is None or theirs is None else round(theirs / ours, 4)

    return {
        "configs": {name: config.short if config else None for name, config in configs.items()},
        "us": {name: rounded(value) for name, value in us.items()},
        "to_default": speed("served", "default"),
        "to_tuned": speed("served", "tuned"),
        "default_to_tuned": speed("default", "tuned"),
    }


def rounded(value: float | None) -> float | None:
    """For the file."""
    return None if value is None else round(value, 3)


# What it comes to.

_RATIOS = ("to_default", "to_tuned", "default_to_tuned")


def summary(rows: Sequence[Row]) -> list[Row]:
    """Of each origin, over all operators and by operator: how many, and each ratio's geometric mean and least."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for operator in ("all", row["op"]):
            groups.setdefault((row["origin"], operator), []).append(row)
    return [
        {"origin": origin, "op": operator, "problems": len(group), **{name: _of(name, group) for name in _RATIOS}}
        for (origin, operator), group in sorted(groups.items(), key=lambda item: item[0][0] != "nearest")
    ]


def _of(ratio: str, group: Sequence[Row]) -> dict[str, float] | None:
    values = [row[ratio] for row in group if row.get(ratio) is not None]
    return {"mean": round(statistics.geometric_mean(values), 4), "least": min(values)} if values else None


def shortfalls(summaries: Sequence[Row]) -> list[str]:
    """What `nearest` does not reach in geometric mean over all operators."""
    nearest = next((one for one in summaries if (one["origin"], one["op"]) == ("nearest", "all")), None)
    if nearest is None:
        return ["nearest was never served"]
    means = {name: nearest[name]["mean"] if nearest[name] else 0.0 for name in AT_LEAST}
    return [
        f"nearest: {name} {means[name]:.3f} is below {least}" for name, least in AT_LEAST.items() if means[name] < least
    ]


def told(summaries: Sequence[Row]) -> list[str]:
    """A line for each summary."""
    count = sum(one["problems"] for one in summaries if one["op"] == "all")
    return [f"{one['origin']:8} {one['op']:13} {one['problems']:3} of {count}  {_in_words(one)}" for one in summaries]


def _in_words(one: Row) -> str:
    found = ((name, one[name]) for name in _RATIOS)
    return "  ".join(f"{name} {of['mean']:.3f} (least {of['least']:.3f})" for name, of in found if of)


def line(row: Row) -> str:
    """A problem in the table."""
    away = "" if row["distance"] is None else f"{row['distance']:.2f}"
    head = f"{row['label']:56} {row['reach']:4} {row['origin']:8} {away:4}"
    if "failure" in row:
        return f"{head}  {row['failure']}"
    times = "  ".join(f"{name} {'lost' if us is None else format(us, '.1f')}" for name, us in row["us"].items())
    speeds = "  ".join(f"{name} {row[name]:.3f}" for name in _RATIOS if row[name] is not None)
    return f"{head}  {times} us  {speeds}  {row['tried']} tried in {row['seconds']:.0f} s {row['disturbed']}".rstrip()


if __name__ == "__main__":
    main()
