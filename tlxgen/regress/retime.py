"""Results and times of rows on the GPU model that they were measured on.

A row is slower if its ratio r to the library's time, the median of the rounds' paired ratios, has

    r < R - max(f R, 3 sqrt(s² + S²))

where R is the stored ratio, f the least fall that counts (2 %), and s and S are the standard errors of r and R. A
median of n values that scatter by d has the standard error sqrt(π/2) d / sqrt(n) (Kendall and Stuart, The Advanced
Theory of Statistics, vol. 1; of a normal distribution), and d is the interquartile range / 1.349: for r that of the
paired ratios, for R the stored spread of the times over the time, which includes the GPU's drift and so is rather too
large.

Rounds of one run are not independent, and GPUs of one model differ; hence f, and what looks slower is measured once
more, over twice the rounds, which decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.db.record import TunedRecord
from tlxgen.devices import Gpu
from tlxgen.errors import TuningError
from tlxgen.ops.command_line import command
from tlxgen.problem import Problem
from tlxgen.regress.findings import Finding, Outcome, Retimed, Row
from tlxgen.regress.rows import is_final, tune_again
from tlxgen.tuner.measure import PEER, DeviceReport, Verdict
from tlxgen.tuner.process import ChildDiedError, ChildTimeoutError
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import iqr, ratios, timings

_ROUNDS = 31
_STORED_ROUNDS = 31  #: of the final that a row comes from
_ERRORS = 3.0

#: The least fall of a ratio that counts, as a fraction: GPUs of one model differ.
LEAST_FALL = 0.02

#: Of a normal distribution: standard error of the median over that of the mean, and quartiles in standard deviations.
_OF_A_MEDIAN = math.sqrt(math.pi / 2)
_QUARTILES = 1.349

#: Margin, relative to the stored ratio, beyond which a measurement cannot show a regression.
_TOO_NOISY = 0.1

_NAME = "row"
_CHECK_GPU = "check the GPU (`nvidia-smi`, `tlxgen doctor`) and run again"


def make_runner(problem: Problem, limit: float) -> Runner:
    """A runner on this machine's GPU, with a limit of seconds per kernel."""
    return Runner(problem.operator, problem, seed=2, limit=limit)  # other inputs than tuning's, whose seed is 0


def is_of(gpu: Gpu | None, row: Row) -> bool:
    """Whether a row was measured on this model of GPU."""
    return gpu is not None and row.record is not None and row.record.key.device == gpu.key


def retime(outcome: Outcome, runner_of: Callable[[Problem], Runner]) -> Outcome:
    """The outcome of a sound row with the findings on results and times."""
    record = outcome.row.record
    assert record is not None, "only rows that were read are timed"
    problem = ops.get(record.key.operator).problem(record.key.problem)
    runner = runner_of(problem)
    try:
        return _on(runner, outcome, record, problem)
    except (TuningError, ChildDiedError, ChildTimeoutError) as error:  # not the kernel's fault
        return outcome.adding(Finding("card", str(error), _CHECK_GPU))
    finally:
        runner.close()


def gpu_failed(outcome: Outcome) -> bool:
    """Whether the GPU did not answer, independently of the kernel."""
    return any(finding.check == "card" and finding.remedy == _CHECK_GPU for finding in outcome.findings)


def not_tried(outcome: Outcome) -> Outcome:
    """The outcome of a row that is skipped because the GPU does not answer."""
    return outcome.adding(Finding("card", "not tried: the GPU did not answer for the rows before", _CHECK_GPU))


def _on(runner: Runner, outcome: Outcome, record: TunedRecord, problem: Problem) -> Outcome:
    report = runner.setup()
    verdict = runner.gate(_NAME, emit(ops.get(record.key.operator), problem, record.config))
    if verdict.status != "ok":
        return outcome.adding(_refused(verdict, problem, record))
    stored = record.ratio
    if stored is None or not is_final(record):
        return outcome
    found = _measured(runner, record, stored, _ROUNDS)
    if found is not None and found.slower:
        found = _measured(runner, record, stored, 2 * _ROUNDS)
    if found is None:
        what = "the kernel passed the gate and did not survive repeated launches"
        return outcome.adding(Finding("card", what, _check_kernel(problem, record)))
    if found.slower:
        return outcome.adding(_slower(found, record, report), retimed=found)
    if found.margin > _TOO_NOISY * stored:
        what = f"the times scatter too much to see a fall of less than {found.margin / stored:.0%}"
        return outcome.adding(Finding("time", what, _CHECK_GPU, red=False), retimed=found)
    return outcome.adding(retimed=found)


def _measured(runner: Runner, record: TunedRecord, stored: float, rounds: int) -> Retimed | None:
    """One interleaved measurement; None if the kernel failed in it."""
    samples = runner.measure([_NAME], rounds)
    timing = timings(samples).get(_NAME)
    if timing is None:
        return None
    paired = ratios(samples[_NAME], samples[PEER])
    now = _standard_error(iqr(paired), rounds)
    then = stored * _standard_error(record.spread_us / record.time_us, _STORED_ROUNDS)
    margin = max(LEAST_FALL * stored, _ERRORS * math.hypot(now, then))
    return Retimed(timing.time_us, timing.peer_us, statistics.median(paired), stored, margin, rounds)


def _standard_error(quartile_range: float, rounds: int) -> float:
    """Of the median of `rounds` values."""
    return _OF_A_MEDIAN * quartile_range / _QUARTILES / math.sqrt(rounds)


def _refused(verdict: Verdict, problem: Problem, record: TunedRecord) -> Finding:
    numerics = verdict.status in {"wrong_result", "unstable_result"}
    what = f"{verdict.status}: {' '.join(verdict.message.split())}"
    by_kernel = numerics or verdict.status in {"hang", "launch_failed"}
    remedy = _check_kernel(problem, record) if by_kernel else _CHECK_GPU
    return Finding("numerics" if numerics else "card", what, remedy)


def _check_kernel(problem: Problem, record: TunedRecord) -> str:
    check = f"{command('check', problem)} --config '{record.config.short}'"
    return f"take the row out until it is mended; `{check}` simulates the kernel"


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
    return Finding("time", what, f"see that nothing else ran on the GPU, then {tune_again(record)}")
