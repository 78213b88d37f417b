"""Speed of packed sequences (`attention_varlen`) against the same work in a batch of equal sequences.

    python -m benchmarks.varlen
    python -m benchmarks.varlen --only drawn

Rates are compared: of sequences of lengths l packed, and of as many sequences of their root mean square in `attention`,
which is the same work but for rounding. Both run the config that `get_kernel` serves (`origins` in the rows) and are
timed in turn, `LOOKS` times; libraries are timed beside the packed ones. Twelve cases take a few minutes on one GPU.
Writes `<date>-varlen-<gpu>.json`. Exits with an error if a ratio to the batch is below `AT_LEAST`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from benchmarks.harness import Results, Row, mean_and_least, options, pass_gate, require_gpu, spaced
from tlxgen import ops
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem, drawn_lengths
from tlxgen.runtime import selection
from tlxgen.tuner.measure import DeviceReport
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import Timing, timings

VARLEN, BATCH = "varlen", "batch"
LOOKS, ROUNDS = 5, 9
AT_LEAST = 0.9

#: Number of sequences, rows of all, and rows of the longest, by spread; each takes one or two milliseconds.
SPREADS = {"equal": (4, 16384, 4096), "drawn": (8, 16384, 8192), "one long": (8, 11776, 8192)}

_HEADS = 32
_STEP = 64  # lengths of the batch are multiples of this


@dataclass(frozen=True)
class Work:
    """A spread of lengths, a head dimension, and whether attention is causal."""

    spread: str
    head: int
    causal: bool

    @cached_property
    def packed(self) -> AttentionVarlenProblem:
        """The problem of the packed sequences."""
        count, total, longest = SPREADS[self.spread]
        causal = "bottom-right" if self.causal else "none"
        made: AttentionVarlenProblem = ops.get("attention_varlen").problem(
            (count, _HEADS, total, self.head), max_q=longest, causal=causal
        )
        return made

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each sequence."""
        return [rows for rows, _ in drawn_lengths(self.packed)]

    @cached_property
    def batch(self) -> AttentionProblem:
        """The problem of as many sequences of one length, which is the same work."""
        length = math.sqrt(sum(n * n for n in self.lengths) / len(self.lengths))
        length = max(1, round(length / _STEP)) * _STEP
        return self.packed.alone((length, length), len(self.lengths))

    @cached_property
    def flops(self) -> dict[str, float]:
        """FLOPs of both."""
        attention = ops.get("attention")
        packed = sum(attention.flops(self.packed.alone((n, n))) for n in self.lengths)
        return {VARLEN: packed, BATCH: attention.flops(self.batch)}


def main() -> None:
    """Measures case by case."""
    parser = options(__doc__)
    parser.add_argument("--only", choices=SPREADS, help="only this spread of lengths")
    arguments = parser.parse_args()
    require_gpu()
    results = Results(arguments.output, "varlen", more={"looks": LOOKS, "rounds": ROUNDS})
    children = {VARLEN: Child(), BATCH: Child()}
    try:
        for head, causal, spread in product((64, 128), (False, True), SPREADS):
            if arguments.only in (None, spread):
                results.report, row = measure(Work(spread, head, causal), children)
                results.add(row, line(row))
    finally:
        for child in children.values():
            child.kill()
    found = [row["ratio"] for row in results.rows]
    print(mean_and_least(found), results.path, sep="\n")
    if min(found) < AT_LEAST:
        raise SystemExit(f"{sum(ratio < AT_LEAST for ratio in found)} below {AT_LEAST} of the batch's speed")


def measure(work: Work, children: dict[str, Child]) -> tuple[DeviceReport, Row]:
    """Checks and times both kernels in turn."""
    origins: dict[str, str] = {}
    errors: dict[str, float | None] = {}
    runners: dict[str, Runner] = {}
    for name, problem in ((VARLEN, work.packed), (BATCH, work.batch)):
        runner = runners[name] = Runner(problem.operator, problem, seed=1, child=children[name])
        report = runner.setup()
        choice = selection.select(problem, report.gpu, note_miss=False)
        assert choice.config is not None, f"{problem.label} has no kernel for this GPU"
        origins[name] = choice.origin
        errors |= pass_gate(runner, {name: choice.config})
    if len(errors) < 2:
        raise SystemExit(f"{work.packed.label}: a kernel failed the gate")
    runners[VARLEN].invite()
    looks: list[dict[str, Timing]] = [{} for _ in range(LOOKS)]
    for look in looks:
        for name, runner in runners.items():
            look.update(timings(runner.measure([name], ROUNDS)))
    return report, {**rates(work, looks), "origins": origins, "errors": errors}


def rates(work: Work, looks: list[dict[str, Timing]]) -> Row:
    """Medians over looks; `ratio` is the packed sequences' rate over the batch's, `others` over libraries' rates."""
    us = {name: [look[name].time_us for look in looks] for name in (VARLEN, BATCH)}
    speeds = {name: [work.flops[name] / one * 1e-6 for one in us[name]] for name in us}
    libraries = {"varlen_attn": [1 / look[VARLEN].relative for look in looks]}
    for name in looks[0].keys() - us.keys():
        libraries[name] = [look[name].relative / look[VARLEN].relative for look in looks]
    return {
        "op": "attention_varlen",
        "spread": work.spread,
        "lengths": work.lengths,
        "problem": work.packed.model_dump(),
        "batch": work.batch.model_dump(),
        "time_us": {name: round(statistics.median(values), 2) for name, values in us.items()},
        "tflops": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "ratio": round(statistics.median(a / b for a, b in zip(speeds[VARLEN], speeds[BATCH], strict=True)), 4),
        "others": {name: round(statistics.median(values), 4) for name, values in sorted(libraries.items())},
    }


def line(row: Row) -> str:
    """A line of the printed table."""
    problem = row["problem"]
    head = f"{row['spread']:8} D {problem['D']:3} {'causal' if problem['causal'] != 'none' else 'full':6}"
    speeds = f"{spaced(row['tflops'], '.0f')} TFLOP/s  {row['ratio']:.3f}  {spaced(row['others'], '.3f')}"
    return f"{head}  {speeds}  {'/'.join(row['origins'].values())}"


if __name__ == "__main__":
    main()
