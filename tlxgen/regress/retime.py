"""The rows on the card that they were measured on: right results, and the ratio to the library that was stored.

A row is slower if its ratio r to the library's time, the median of the rounds' paired ratios, has

    r < R - max(f R, 3 sqrt(s² + S²))

where R is the stored ratio, f the least fall that counts (2 %), and s and S are the standard errors of r and R. A
median of n values that scatter by d has the standard error sqrt(π/2) d / sqrt(n) (Kendall and Stuart, The Advanced
Theory of Statistics, vol. 1; of a normal distribution), and d is the interquartile range / 1.349: for r that of the
paired ratios, for R the stored spread of the times over the time, which has the card's drift in it and so is rather
too large.

Rounds of one run are not independent, and cards differ. Hence f; and what looks slower is measured once more, over
twice the rounds, and that measurement decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from tlxgen import ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.db.record import TunedRecord
from tlxgen.devices import Gpu
from tlxgen.errors import TuningError
from tlxgen.ops.command_line import command
from tlxgen.problem import Problem
from tlxgen.regress.findings import Finding, Outcome, Retimed, Row
from tlxgen.regress.rows import is_final, tune_again
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings
from tlxgen.tuner.measure import PEER, DeviceReport, Verdict
from tlxgen.tuner.process import ChildDiedError, ChildTimeoutError

_ROUNDS = 31
_STORED_ROUNDS = 31  # of the final that a row comes from
_ERRORS = 3.0

#: A ratio that falls by a smaller part has not fallen: cards of one model differ.
LEAST_FALL = 0.02

#: Median over mean, as standard errors of a normal distribution; and its quartiles apart, in standard deviations.
_OF_A_MEDIAN = math.sqrt(math.pi / 2)
_QUARTILES = 1.349

#: A measurement that would not show a fall by so much says nothing.
_TOO_NOISY = 0.1

_NAME = "row"
FREE = "see to the card (`nvidia-smi`, `tlxgen doctor`) and run again"


class Timer(Protocol):
    """What is asked of a card: `tlxgen.tuner.runner.Runner`, or a table of recorded times."""

    def setup(self) -> DeviceReport:
        """Makes inputs and reference."""

    def gate(self, name: str, source: KernelSource) -> Verdict:
        """Whether a kernel's results are right."""

    def measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Microseconds by name, the peer's among them, a value for each round."""

    def close(self) -> None:
        """Gives the card back."""


MakeTimer: TypeAlias = Callable[[Problem], Timer]


def card(problem: Problem, limit: float) -> Timer:
    """The card of this machine, on which a kernel may take so many seconds."""
    return Runner(problem.operator, problem, seed=2, limit=limit)  # of inputs that tuning has not seen


def is_of(gpu: Gpu | None, row: Row) -> bool:
    """Whether a row was measured on GPUs like this one."""
    return gpu is not None and row.record is not None and row.record.key.device == gpu.key


def retime(outcome: Outcome, make_timer: MakeTimer) -> Outcome:
    """A sound row with what the card finds."""
    record = outcome.row.record
    assert record is not None, "only rows that were read are timed"
    problem = ops.get(record.key.operator).problem(record.key.problem)
    timer = make_timer(problem)
    try:
        return _on(timer, outcome, record, problem)
    except (TuningError, ChildDiedError, ChildTimeoutError) as error:  # not what the kernel did
        return outcome.adding(Finding("card", str(error), FREE))
    finally:
        timer.close()


def card_failed(outcome: Outcome) -> bool:
    """Whether the card did not answer, whatever the kernel."""
    return any(finding.check == "card" and finding.remedy == FREE for finding in outcome.findings)


def not_tried(outcome: Outcome) -> Outcome:
    """Of a row for which the card was not asked any more."""
    return outcome.adding(Finding("card", "not tried: the card did not answer for the rows before", FREE))


def _on(timer: Timer, outcome: Outcome, record: TunedRecord, problem: Problem) -> Outcome:
    report = timer.setup()
    verdict = timer.gate(_NAME, emit(ops.get(record.key.operator), problem, record.config))
    if verdict.status != "ok":
        return outcome.adding(_refused(verdict, problem, record))
    stored = record.ratio
    if stored is None or not is_final(record):
        return outcome
    found = _measured(timer, record, stored, _ROUNDS)
    if found is not None and found.slower:
        found = _measured(timer, record, stored, 2 * _ROUNDS)
    if found is None:
        what = "the kernel passed the gate and did not survive repeated launches"
        return outcome.adding(Finding("card", what, _check_it(problem, record)))
    if found.slower:
        return outcome.adding(_slower(found, record, report), retimed=found)
    if found.margin > _TOO_NOISY * stored:
        what = f"the times scatter too much to see a fall of less than {found.margin / stored:.0%}"
        return outcome.adding(Finding("time", what, FREE, red=False), retimed=found)
    return outcome.adding(retimed=found)


def _measured(timer: Timer, record: TunedRecord, stored: float, rounds: int) -> Retimed | None:
    """One interleaved measurement; None if the kernel did not survive it."""
    samples = timer.measure([_NAME], rounds)
    timing = timings(samples).get(_NAME)
    if timing is None:
        return None
    ratios = [b / a for a, b in zip(samples[_NAME], samples[PEER], strict=True)]
    now = _standard_error(_quartile_range(ratios), rounds)
    then = stored * _standard_error(record.spread_us / record.time_us, _STORED_ROUNDS)
    margin = max(LEAST_FALL * stored, _ERRORS * math.hypot(now, then))
    return Retimed(timing.time_us, timing.peer_us, statistics.median(ratios), stored, margin, rounds)


def _standard_error(quartile_range: float, rounds: int) -> float:
    """Of the median of so many values."""
    return _OF_A_MEDIAN * quartile_range / _QUARTILES / math.sqrt(rounds)


def _quartile_range(values: Sequence[float]) -> float:
    first, _, third = statistics.quantiles(values, n=4)
    return third - first


def _refused(verdict: Verdict, problem: Problem, record: TunedRecord) -> Finding:
    numerics = verdict.status in {"wrong_result", "unstable_result"}
    what = f"{verdict.status}: {' '.join(verdict.message.split())}"
    kernels_doing = numerics or verdict.status in {"hang", "launch_failed"}
    return Finding("numerics" if numerics else "card", what, _check_it(problem, record) if kernels_doing else FREE)


def _check_it(problem: Problem, record: TunedRecord) -> str:
    look = f"{command('check', problem)} --config '{record.config.short}'"
    return f"take the row out until it is mended; `{look}` simulates the kernel"


def _slower(found: Retimed, record: TunedRecord, report: DeviceReport) -> Finding:
    what = (
        f"ratio {found.ratio:.3f} to {record.peer}, stored {found.stored_ratio:.3f}, margin {found.margin:.3f} "
        f"(kernel {record.time_us:.2f} → {found.time_us:.2f} us, {record.peer} {record.peer_us:.2f} → "
        f"{found.peer_us:.2f} us)"
    )
    others = [
        f"{name} {record.versions[name]} → {version}"
        for name, version in report.versions.items()
        if record.versions.get(name, version) != version
    ]
    if others:
        return Finding("time", f"{what}; {', '.join(others)}", f"another library may be faster: {tune_again(record)}")
    return Finding("time", what, f"see that nothing else ran on the card, then {tune_again(record)}")
