"""Does tuning repeat itself? Several seeds, several orders of the candidates, and a neighbour on the card.

    python -m benchmarks.repeatability -o benchmarks/results/
    python -m benchmarks.repeatability --only tunings --problem "gemm 2048 2048 2048 bf16 nn"

- `tunings`: from empty databases, each with a seed of its own; then all winners and the shipped row, measured together.
- `order`: the top three of the same candidates, timed in several orders.
- `contention`: how much the library's own times scatter, on a quiet card and beside a process that loads it; what the
  tuner would say of it, and what choosing by such times costs.

One process owns the card throughout, compilers go on from one tuning to the next, and every step is written when it is
done.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import Load, beside
from benchmarks.results import row, write
from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import tuning_key
from tlxgen.db.shipped import import_shipped
from tlxgen.db.store import Store
from tlxgen.devices import Gpu
from tlxgen.problem import Problem
from tlxgen.space import search_space
from tlxgen.space.candidates import candidates
from tlxgen.tuner import gpu_lock
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.final import lead_is_noise
from tlxgen.tuner.measure import DeviceReport
from tlxgen.tuner.process import Child
from tlxgen.tuner.result import Budget, TuneResult
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import Timing, disturbance, timings
from tlxgen.tuner.tune import tune

LABELS = (
    "gemm 2048 2048 2048 bf16 nn",
    "gemm 512 4096 4096 bf16 nn",
    "attention 2 16 2048 128 bf16 causal=bottom-right",
)
SAMPLER = "tpe"
SEED = 1000  # of inputs that no tuning has seen
ROUNDS = 31  # of a final
COMMON_ROUNDS = 101
ORDERED = 16
FINALISTS = 8
MEASUREMENTS = 20
LOADS: dict[str, Load | None] = {"none": None, "steady": Load(0.0), "bursts": Load(0.05)}

_HOPPER = (9, 0)

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to do, and where its results go."""

    problem: Problem
    child: Child
    pool: CompilePool
    output: Path
    repeats: int
    budget: Budget

    def write(self, part: str, report: DeviceReport, rows: list[Row], **more: Any) -> Path:
        """Writes what is known of one part."""
        name = re.sub(r"[^\w]+", "-", self.problem.label)
        return write(self.output, f"repeatability-{part}-{name}", report, rows, **more)


def main() -> None:
    """Runs the parts that were asked for, writes results and prints a summary of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; several times for several")
    parser.add_argument("--problem", action="append", help="such as `gemm 512 4096 4096 bf16 nn`; by default three")
    parser.add_argument("--repeats", type=int, default=10, help="tunings of a problem")
    parser.add_argument("--trials", type=int, default=64, help="of each tuning")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each tuning's search")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    gpu = devices.detect()
    child, pool = Child(), CompilePool(gpu.capability if gpu else _HOPPER, simulate=True)
    try:
        for label in arguments.problem or LABELS:
            budget = Budget(arguments.trials, arguments.seconds)
            plan = Plan(_problem(label), child, pool, arguments.output, arguments.repeats, budget)
            for part in arguments.only or PARTS:
                print(f"{part}: {plan.problem.label}", flush=True)
                print(PARTS[part](plan), flush=True)
    finally:
        pool.close()
        child.kill()


def _problem(label: str) -> Problem:
    problem: Problem = ops.get(label.split(maxsplit=1)[0]).problem_type.from_label(label)
    return problem


# Tunings.


def tunings(plan: Plan) -> Path:
    """Tunes from scratch, then compares the winners."""
    report = Runner(plan.problem.operator, plan.problem, SEED, child=plan.child).setup()
    asked = {"sampler": SAMPLER, "trials": plan.budget.trials, "seconds": plan.budget.seconds}
    rows: list[Row] = []
    winners: list[Config] = []
    for seed in range(plan.repeats):
        result = _from_scratch(plan, seed)
        winners.append(result.record.config)
        rows.append(_tuning_row(plan.problem, seed, result))
        plan.write("tunings", report, rows, **asked)
        print(f"  seed {seed}: {_in_words(rows[-1])}", flush=True)
    shipped = shipped_config(plan.problem, report.gpu)
    found, report = together(plan, [*winners, *([shipped] if shipped else [])])
    best_us = min(timing.time_us for timing, _ in found.values())
    to_best = {config: round(timing.time_us / best_us, 4) for config, (timing, _) in found.items()}
    for entry, config in zip(rows, winners, strict=True):
        entry["common_us"] = round(found[config][0].time_us, 3) if config in found else None
        entry["to_best"] = to_best.get(config)
    ratios = [to_best[config] for config in winners if config in found]
    of_best: Row = {"worst": max(ratios, default=None), "mean": None, "lost": len(rows) - len(ratios)}
    if ratios:
        of_best["mean"] = round(statistics.geometric_mean(ratios), 4)
        print(f"  of the best found: worst {of_best['worst']:.4f}, geometric mean {of_best['mean']:.4f}")
    if shipped in found and shipped is not None:
        timing, error = found[shipped]
        measured = row(plan.problem, shipped, timing, error, report)
        rows.append({"kind": "shipped", **measured, "to_best": to_best[shipped]})
        print(f"  the shipped row: {to_best[shipped]:.4f}")
    return plan.write("tunings", report, rows, **asked, **of_best)


def _from_scratch(plan: Plan, seed: int) -> TuneResult:
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "tuned.db") as store:
        lent: dict[str, Any] = {"child": plan.child, "pool": plan.pool}
        return tune(plan.problem, store, sampler=SAMPLER, budget=plan.budget, seed=seed, **lent)


def _tuning_row(problem: Problem, seed: int, result: TuneResult) -> Row:
    record = result.record
    return {
        "kind": "tuning",
        "op": problem.operator,
        "problem": problem.model_dump(),
        "seed": seed,
        "tried": result.state.tried,
        "failures": dict(result.state.failures),
        "seconds": round(result.state.elapsed, 1),
        "disturbed": result.disturbed,
        "config": record.config.model_dump(),
        "config_short": record.config.short,
        "time_us": round(record.time_us, 3),
        "ratio": round(record.ratio or math.nan, 4),
    }


def _in_words(entry: Row) -> str:
    words = f"{entry['time_us']:.2f} us, ratio {entry['ratio']:.3f}, {entry['config_short']}"
    return f"{words}; {entry['tried']} tried in {entry['seconds']:.0f} s {entry['disturbed']}"


def shipped_config(problem: Problem, gpu: Gpu) -> Config | None:
    """What comes with tlxgen for this problem, where it still fits."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "tuned.db") as store:
        import_shipped(store)
        record = store.get(tuning_key(problem, gpu.key))
    if record is None or record.origin != "measured":
        return None
    return None if search_space.why_illegal(ops.get(problem.operator), problem, record.config, gpu) else record.config


def together(plan: Plan, configs: Iterable[Config]) -> tuple[dict[Config, tuple[Timing, float | None]], DeviceReport]:
    """All of them in one measurement, each with its error."""
    card = Runner(plan.problem.operator, plan.problem, SEED, child=plan.child)
    report = card.setup()
    passed = pass_gate(card, configs)
    found = timings(card.measure([config.id for config in passed], COMMON_ROUNDS))
    return {config: (found[config.id], error) for config, error in passed.items() if config.id in found}, report


def pass_gate(card: Runner, configs: Iterable[Config]) -> dict[Config, float | None]:
    """Errors of those that are right, ready to be timed."""
    passed = {}
    for config in dict.fromkeys(configs):
        verdict = card.gate(config.id, emit(ops.get(card.operator), card.problem, config))
        if verdict.status == "ok":
            passed[config] = verdict.error
        else:
            print(f"  {config.short}: {verdict.status}, {verdict.message}")
    return passed


# Orders.


def order(plan: Plan) -> Path:
    """Times the model's favourites in several orders, and the first of these twice."""
    card = Runner(plan.problem.operator, plan.problem, SEED, child=plan.child)
    report = card.setup()
    shorts = _favourites(card, report, ORDERED)
    rows: list[Row] = []
    first: dict[str, Timing] = {}
    path = plan.output
    for name, names in orders(list(shorts)):
        found = timings(card.measure(names, ROUNDS))
        first = first or found
        entry: Row = {
            "kind": "order",
            "op": plan.problem.operator,
            "problem": plan.problem.model_dump(),
            "order": name,
            "relative": _relative(found, shorts),
            "top": [shorts[one] for one in top(found)],
            "shared": len({*top(first)} & {*top(found)}),
            "strangers": [shorts[one] for one in strangers(first, found)],
        }
        rows.append(entry)
        path = plan.write("order", report, rows)
        print(f"  {name:10} {entry['shared']} of 3 shared, {len(entry['strangers'])} beyond noise", flush=True)
    return path


def orders(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Named orders of the same names."""
    yield "forth", names
    yield "again", names
    yield "back", names[::-1]
    for seed in range(3):
        yield f"shuffled {seed}", random.Random(seed).sample(names, len(names))  # noqa: S311 - an order, not a secret


def top(found: Mapping[str, Timing], n: int = 3) -> list[str]:
    """The fastest, first of all the very fastest."""
    return sorted(found, key=lambda name: found[name].time_us)[:n]


def strangers(first: Mapping[str, Timing], other: Mapping[str, Timing]) -> list[str]:
    """Those of the other's top three that the first tells from its own: its third leads them by more than noise."""
    *_, third = top(first)
    known = [name for name in top(other) if name in first and name not in top(first)]
    return [name for name in known if not lead_is_noise(first[third].samples, first[name].samples, len(first))]


# Contention.


def contention(plan: Plan) -> Path:
    """Measures as a final does, time and again, alone and in company."""
    card = Runner(plan.problem.operator, plan.problem, SEED, child=plan.child)
    report = card.setup()
    shorts = _favourites(card, report, FINALISTS)
    uuid = devices.uuid()
    before = gpu_lock.other_processes(uuid)
    rows: list[Row] = []
    summaries: dict[str, Row] = {}
    quiet: dict[str, float] = {}
    path = plan.output
    for name, load in LOADS.items():
        with beside(load):
            newcomers = gpu_lock.other_processes(uuid) - before
            measured = [timings(card.measure(list(shorts), ROUNDS)) for _ in range(MEASUREMENTS)]
        quiet = quiet or {one: statistics.median(found[one].relative for found in measured) for one in shorts}
        entries = [_contention_row(found, quiet, newcomers) for found in measured]
        common = {"kind": "contention", "op": plan.problem.operator, "problem": plan.problem.model_dump()}
        rows += [{**common, "load": name, "turn": i, **entry} for i, entry in enumerate(entries)]
        summaries[name] = summary(entries)
        path = plan.write("contention", report, rows, configs=shorts, summary=summaries)
        print(f"  {name:8} {summaries[name]}", flush=True)
    return path


def _contention_row(found: Mapping[str, Timing], quiet: Mapping[str, float], newcomers: int) -> Row:
    """One measurement; `shift` is how far a ratio moved, `cost` how much slower its winner is on the quiet card."""
    fastest = min(found, key=lambda name: found[name].time_us)
    some = found[fastest]
    return {
        "peer_us": round(some.peer_us, 3),
        "peer_spread": round(some.peer_spread, 4),
        "relative": {name: round(timing.relative, 4) for name, timing in found.items()},
        "shift": round(max(abs(timing.relative / quiet[name] - 1) for name, timing in found.items()), 4),
        "cost": round(quiet[fastest] / min(quiet.values()) - 1, 4),
        "newcomers": newcomers,
        "told_by_spread": disturbance(found.values()),
        "told": disturbance(found.values(), newcomers),
    }


def summary(entries: list[Row]) -> Row:
    """Of the measurements under one load: the scatter of the library, how many are told, and what they would cost."""
    spreads = [entry["peer_spread"] for entry in entries]
    return {
        "spread": [min(spreads), round(statistics.median(spreads), 4), max(spreads)],
        "told_by_spread": sum(bool(entry["told_by_spread"]) for entry in entries),
        "told": sum(bool(entry["told"]) for entry in entries),
        "of": len(entries),
        "shift": max(entry["shift"] for entry in entries),
        "cost": max(entry["cost"] for entry in entries),
    }


def _favourites(card: Runner, report: DeviceReport, n: int) -> dict[str, str]:
    """The model's favourites that are right, by name."""
    configs = pass_gate(card, candidates(card.problem, report.gpu)[:n])
    return {config.id: config.short for config in configs}


def _relative(found: Mapping[str, Timing], shorts: Mapping[str, str]) -> dict[str, float]:
    """Times over the library's, by config, in the order in which they were timed."""
    return {shorts[name]: round(timing.relative, 4) for name, timing in found.items()}


PARTS = {"tunings": tunings, "order": order, "contention": contention}


if __name__ == "__main__":
    main()
