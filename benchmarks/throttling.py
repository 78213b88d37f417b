"""Does the way of measuring decide who wins? The same kernels in several orders, on a cool card and on a busy one.

python -m benchmarks.throttling -o benchmarks/results/

A card at rest runs at its highest clock until it meets its power limit; the two states rank kernels differently. A fair
protocol gives the same ratios in every order and at every repetition, and that is what the table shows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write
from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.problem import Problem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.measure import PEER, DeviceReport, Gate, Session, Setup

SHAPES = [(4096, 4096, 4096), (2048, 2048, 2048), (8192, 8192, 8192), (512, 4096, 4096)]
ROUNDS = 41
REPETITIONS = 3
REST_S = 0.4

Order = Callable[[list[str], int], list[str]]


def reversed_each_round(names: list[str], turn: int) -> list[str]:
    """What the tuner does."""
    return names if turn % 2 else names[::-1]


def shuffled(names: list[str], turn: int) -> list[str]:
    """Any order, a new one each round."""
    return random.Random(turn).sample(names, len(names))  # noqa: S311 - an order, not a secret


def rotated(names: list[str], turn: int) -> list[str]:
    """Everybody in every place."""
    place = turn % len(names)
    turned = names[place:] + names[:place]
    return turned if turn // len(names) % 2 else turned[::-1]


#: Name → (order, whether the host waits for the card after each round).
PROTOCOLS: dict[str, tuple[Order, bool]] = {
    "reversed+sync": (reversed_each_round, True),
    "shuffled+sync": (shuffled, True),
    "shuffled": (shuffled, False),
    "rotated": (rotated, False),
}


def main() -> None:
    """Measures, writes the results and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    report: DeviceReport | None = None
    for sizes in SHAPES:
        problem = ops.get("gemm").problem(sizes)
        setup = Setup("gemm", problem, seed=1)
        report = setup()
        for entry in measure(problem, pass_gate(problem, report)):
            rows.append(entry)
            ratios = " ".join(f"{ratio:.3f}" for ratio in entry["paired"])
            print(f"{problem.label:32} {entry['names']} {entry['state']:5} {entry['protocol']:14} {ratios}")
    assert report is not None
    print(write(arguments.output, "throttling", report, rows))


def pass_gate(problem: Problem, report: DeviceReport) -> list[str]:
    """Names of the model's eight favourites, ready to be timed."""
    names = []
    for i, config in enumerate(candidates(problem, report.gpu)[:8]):
        verdict = Gate(f"c{i}", emit(ops.get("gemm"), problem, config))()
        assert verdict.status == "ok", verdict
        names.append(f"c{i}")
    return names


def measure(problem: Problem, names: list[str]) -> Iterator[dict[str, Any]]:
    """Ratios of the first candidate to the library, for each number of candidates, state of the card and protocol."""
    session = Session.current()
    for some in (names[:2], names):
        together = [*some[: len(some) // 2], PEER, *some[len(some) // 2 :]]
        for state in ("cool", "busy"):
            for protocol, (order, wait) in PROTOCOLS.items():
                runs = []
                session.warm_up(together)
                for _ in range(REPETITIONS):
                    if state == "cool":
                        time.sleep(REST_S)
                    else:
                        session.warm_up([PEER])
                    runs.append(samples(session, together, order, wait))
                yield {
                    "op": "gemm",
                    "problem": problem.model_dump(),
                    "names": len(together),
                    "state": state,
                    "protocol": protocol,
                    "peer_us": [round(statistics.median(run[PEER]), 2) for run in runs],
                    "of_medians": [round(of_medians(run), 4) for run in runs],
                    "paired": [round(paired(run), 4) for run in runs],
                }


def of_medians(run: dict[str, list[float]]) -> float:
    """The library's median over the first candidate's."""
    return statistics.median(run[PEER]) / statistics.median(run["c0"])


def paired(run: dict[str, list[float]]) -> float:
    """The median of their ratio, taken round by round."""
    return statistics.median(b / a for a, b in zip(run["c0"], run[PEER], strict=True))


def samples(session: Session, names: list[str], order: Order, wait: bool) -> dict[str, list[float]]:
    """Microseconds of one launch by name, one for each round."""
    rounds = []
    for turn in range(ROUNDS):
        if wait or turn == 0:
            session.candidates[PEER].replay()
        rounds.append({name: session.candidates[name].replay() for name in order(names, turn)})
        if wait:
            session.candidates[PEER].replay()
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return {name: [session.candidates[name].sample_us(one[name]) for one in rounds] for name in names}


if __name__ == "__main__":
    main()
