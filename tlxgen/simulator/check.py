"""The check of a kernel: simulated runs under several schedules, and a report of their findings.

An emitted kernel runs on small problems that cover its edge cases (`Operator.small_cases`). Schedules differ in the
order of roles (random) and in the time at which copies finish (early, late or at random). The result is compared with
the operator's reference by the same rule as on a GPU. Any other kernel runs as its own host code launches it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tlxgen import ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.errors import InvalidProblemError
from tlxgen.ops import accuracy
from tlxgen.ops.base import Case
from tlxgen.simulator.findings import Finding, Place
from tlxgen.simulator.machine.machine import POLICIES, Limits, Machine, Policy
from tlxgen.simulator.machine.timeline import Timeline
from tlxgen.simulator.program import Program, load


@dataclass(frozen=True)
class Schedule:
    """One order of events: when copies finish, and the seed of the scheduler."""

    policy: Policy
    seed: int

    def machine(self, limits: Limits | None) -> Machine:
        """A machine with this schedule."""
        return Machine(seed=self.seed, policy=self.policy, limits=limits or Limits())


@dataclass(frozen=True)
class Report:
    """The outcome of a check.

    Attributes:
        findings: in the order in which they were found, without repetitions.
        runs: number of simulated runs, over all small problems.
        steps: decisions of the scheduler, over all runs.
        seconds: duration of the check.
        cases: the small problems, each with its number of multiprocessors.
    """

    findings: tuple[Finding, ...]
    runs: int
    steps: int
    seconds: float
    cases: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def schedules(count: int, seed: int = 0) -> list[Schedule]:
    """A number of schedules: the policies in turn, each time with another seed."""
    return [Schedule(POLICIES[n % len(POLICIES)], n) for n in range(seed, seed + count)]


def check(
    source: KernelSource,
    count: int = 6,
    seed: int = 0,
    *,
    limits: Limits | None = None,
    path: Path | None = None,
    timeline: Path | None = None,
    stop_early: bool = False,
) -> Report:
    """Simulates an emitted kernel.

    Args:
        source: the kernel; its text is run, also if it was edited.
        count: schedules for each small problem.
        seed: of schedules and inputs.
        limits: of one run.
        path: of the file that findings point into; by default the source's own name.
        timeline: where to write a Chrome trace of the first run.
        stop_early: whether to stop at the first run with findings.

    Raises:
        InvalidProblemError: no small problem makes the same kernel.
    """
    totals = _Totals()
    cases = small_cases(source)
    labels = tuple(f"{case.problem.label} on {case.num_sms}" for case in cases)
    program = load(path or source.file_name, source.text)
    for case in cases:
        run = _CaseRun(program, source, case, seed)
        for schedule in schedules(count, seed):
            machine = schedule.machine(limits)
            if timeline is not None and not totals.runs:
                machine.timeline = Timeline()
            run.on(machine)
            if timeline is not None and machine.timeline is not None:
                machine.timeline.write(timeline)
            totals.add([machine])
            if stop_early and totals.findings:
                return totals.report(labels)
    return totals.report(labels)


def small_cases(source: KernelSource) -> list[Case[Any]]:
    """The operator's small problems that this config serves with the same code.

    Raises:
        InvalidProblemError: there are none.
    """
    operator = ops.get(source.operator)
    code = emit(operator, source.problem, source.config).code_hash
    cases = []
    for case in operator.small_cases(source.problem, source.config):
        inputs = operator.inputs(case.problem, "meta", 0)
        refusal = operator.launchable(case.problem, source.config, inputs, operator.output(case.problem, inputs))
        if refusal is None and emit(operator, case.problem, source.config).code_hash == code:
            cases.append(case)
    if not cases:
        raise InvalidProblemError(f"no small problem makes the same kernel as {source.problem.label}")
    return cases


def check_host(path: Path, entry: str, count: int = 6, seed: int = 0, *, limits: Limits | None = None) -> Report:
    """Simulates the launches of a file's own host code.

    Args:
        path: of a file with TLX kernels.
        entry: name of a function in it without arguments, which makes CPU tensors and launches `kernel[grid](...)`;
            an AssertionError of it is a wrong result.
        count: number of schedules.
        seed: of the first schedule.
        limits: of one run.

    Raises:
        InvalidProblemError: the file has no such function, or the function launches nothing.
    """
    totals = _Totals()
    for schedule in schedules(count, seed):
        # Loaded again for each schedule: host code may keep state.
        program = load(path, make_machine=functools.partial(schedule.machine, limits))
        function = program.namespace.get(entry)
        if not callable(function):
            names = ", ".join(name for name, value in program.namespace.items() if callable(value) and name[0] != "_")
            raise InvalidProblemError(f"{path} has no function {entry!r}; it has {names or 'none'}")
        wrong = []
        try:
            function()
        except AssertionError as error:
            if all(machine.completed for machine in program.machines):  # a stopped run has no result
                place = Place(entry, function.__code__.co_firstlineno)
                wrong = [Finding("wrong_result", f"{entry} fails with AssertionError: {error}", place)]
        if not program.machines:
            raise InvalidProblemError(f"{entry} of {path} launches no kernel")
        totals.add(program.machines, wrong)
    return totals.report()


class _Totals:
    """Findings and counts of a check so far."""

    def __init__(self) -> None:
        self.findings: dict[tuple[Any, ...], Finding] = {}
        self._started = time.perf_counter()
        self.runs = self._steps = 0

    def add(self, machines: Iterable[Machine], more: Iterable[Finding] = ()) -> None:
        """Adds a run, of one launch or several; repeated findings are left out."""
        self.runs += 1
        found: list[Finding] = []
        for machine in machines:
            self._steps += machine.steps
            found += machine.findings
        for finding in [*found, *more]:
            lines = finding.place.line, finding.other and finding.other.line
            self.findings.setdefault((finding.kind, *lines), finding)

    def report(self, cases: tuple[str, ...] = ()) -> Report:
        """The totals as a report."""
        seconds = time.perf_counter() - self._started
        return Report(tuple(self.findings.values()), self.runs, self._steps, seconds, cases)


class _CaseRun:
    """One small problem with its inputs and expected results."""

    def __init__(self, program: Program, source: KernelSource, case: Case[Any], seed: int) -> None:
        self.program = program
        self.operator = ops.get(source.operator)
        self.case = case
        self.inputs = self.operator.inputs(case.problem, "cpu", seed)
        self.reference = self.operator.reference(case.problem, self.inputs)
        self.library = self.operator.peer_result(case.problem, self.inputs)
        self.side_outputs = self.operator.side_outputs(case.problem, self.inputs)

    def on(self, machine: Machine) -> None:
        """Runs the kernel on a machine; a wrong result is a finding."""
        from tlxgen.runtime.plans import with_names
        from tlxgen.runtime.replay import Allocations

        output = self.operator.output(self.case.problem, self.inputs)
        output.fill_(float("nan"))
        for name in self.side_outputs:
            self.inputs[name].fill_(float("nan"))
        allocations = Allocations()
        module: Any = SimpleNamespace(arguments=with_names(self.program["arguments"], torch=allocations))
        grid, args = self.operator.arguments(module, self.inputs, output, num_sms=self.case.num_sms)
        kernel = self.program["kernel"]
        kernel.launch(machine, grid, args, self.program["OPTIONS"])
        if not machine.completed:
            return
        reason = accuracy.why_wrong(output, self.reference, self.library)
        reason = reason or self.operator.why_side_output_wrong(self.case.problem, self.inputs, self.side_outputs)
        made = zip(allocations.tensors, allocations.scratch, strict=True)
        if not reason and any(scratch.zeros and bool(tensor.any()) for tensor, scratch in made):
            reason = "zeros are not left as zeros: the next launch, which may reuse them, would go wrong"
        if reason:
            place = Place(kernel.name, kernel.function.__code__.co_firstlineno)
            machine.findings.append(Finding("wrong_result", f"{self.case.problem.label}: {reason}", place))


def describe(report: Report) -> Iterator[str]:
    """The lines that `tlxgen check` prints."""
    for finding in report.findings:
        yield str(finding)
    verdict = "clean" if report.clean else f"{len(report.findings)} finding(s)"
    yield f"{verdict}: {report.runs} runs, {report.steps} steps, {report.seconds:.2f} s"


def to_json(report: Report) -> dict[str, Any]:
    """For `--json`."""
    return {
        "clean": report.clean,
        "findings": [finding.to_json() for finding in report.findings],
        "runs": report.runs,
        "steps": report.steps,
        "seconds": round(report.seconds, 3),
        "cases": list(report.cases),
    }
