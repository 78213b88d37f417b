"""Kernel → is it free of deadlocks and races, and are its numbers right? On the CPU.

A kernel that tlxgen emits is run on small problems that take it through its corners (`Operator.small_cases`), each
under several schedules: asynchronous copies that finish as early as they may, as late as they can, or at random, and
roles that take turns at random. The result is held against the operator's reference by the same rule as on a GPU.
Any other kernel is run as its own host code launches it.
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
from tlxgen.simulator.language import meanings
from tlxgen.simulator.machine.machine import POLICIES, Limits, Machine, Policy
from tlxgen.simulator.machine.timeline import Timeline
from tlxgen.simulator.program import Program, load


@dataclass(frozen=True)
class Schedule:
    """One way in which things may happen."""

    policy: Policy
    seed: int

    def machine(self, limits: Limits | None) -> Machine:
        """A machine on which they happen so."""
        return Machine(seed=self.seed, policy=self.policy, limits=limits or Limits(), assembly=meanings.meaning)


@dataclass(frozen=True)
class Report:
    """What a check came to.

    Attributes:
        findings: in the order in which they were made; what several runs share is there once.
        runs: schedules that were simulated, over all small problems.
        steps: decisions of the scheduler, over all runs.
        seconds: that it took.
        cases: the small problems, and how many programs shared each.
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
    """So many schedules: the policies in turn, each time with another seed."""
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
        source: the kernel; its text is what is run, whoever wrote it.
        count: schedules for each small problem.
        seed: of schedules and inputs.
        limits: of one run.
        path: of the file that findings point into; by default the source's own name.
        timeline: where a Chrome trace of the first run is written.
        stop_early: whether the first run with findings is the last.

    Raises:
        InvalidProblemError: no small problem makes the same kernel.
    """
    tally = _Tally()
    cases = small_cases(source)
    for machine in _runs(source, cases, path, schedules(count, seed), seed, limits, timeline):
        tally.add([machine])
        if stop_early and tally.findings:
            break
    return tally.report(tuple(f"{case.problem.label} on {case.num_sms}" for case in cases))


def _runs(
    source: KernelSource,
    cases: Iterable[Case[Any]],
    path: Path | None,
    chosen: Iterable[Schedule],
    seed: int,
    limits: Limits | None,
    timeline: Path | None,
) -> Iterator[Machine]:
    """Every small problem under every schedule, one after the other: the machines, after their runs."""
    program = load(path or source.file_name, source.text)
    for case in cases:
        trial = _Trial(program, source, case, seed)
        for schedule in chosen:
            machine = schedule.machine(limits)
            if timeline is not None:
                machine.timeline = Timeline()
            trial.run(machine)
            if timeline is not None and machine.timeline is not None:
                machine.timeline.write(timeline)
                timeline = None  # the first run only
            yield machine


def small_cases(source: KernelSource) -> list[Case[Any]]:
    """The operator's small problems for this config, as far as it can serve them with the same code.

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
    """Simulates what a file's own host code launches.

    Args:
        path: of a file with TLX kernels.
        entry: name of a function in it without arguments, which makes CPU tensors and launches `kernel[grid](...)`;
            an AssertionError of it counts as a wrong result.
        count: schedules.
        seed: of the first schedule.
        limits: of one run.

    Raises:
        InvalidProblemError: the file has no such function, or the function launches nothing.
    """
    tally = _Tally()
    for schedule in schedules(count, seed):
        # Loaded anew each time: host code may keep what it has computed.
        program = load(path, make_machine=functools.partial(schedule.machine, limits))
        function = program.namespace.get(entry)
        if not callable(function):
            names = ", ".join(name for name, value in program.namespace.items() if callable(value) and name[0] != "_")
            raise InvalidProblemError(f"{path} has no function {entry!r}; it has {names or 'none'}")
        wrong = []
        try:
            function()
        except AssertionError as error:
            if all(machine.completed for machine in program.machines):  # what was given up has no result
                place = Place(entry, function.__code__.co_firstlineno)
                wrong = [Finding("wrong_result", f"{entry} fails with AssertionError: {error}", place)]
        if not program.machines:
            raise InvalidProblemError(f"{entry} of {path} launches no kernel")
        tally.add(program.machines, wrong)
    return tally.report()


class _Tally:
    """What the runs of a check have found so far."""

    def __init__(self) -> None:
        self.findings: dict[tuple[Any, ...], Finding] = {}
        self._started = time.perf_counter()
        self._runs = self._steps = 0

    def add(self, machines: Iterable[Machine], more: Iterable[Finding] = ()) -> None:
        """Counts a run, of one machine or of several launches; a finding that is known already is left out."""
        self._runs += 1
        found: list[Finding] = []
        for machine in machines:
            self._steps += machine.steps
            found += machine.findings
        for finding in [*found, *more]:
            lines = finding.place.line, finding.other and finding.other.line
            self.findings.setdefault((finding.kind, *lines), finding)

    def report(self, cases: tuple[str, ...] = ()) -> Report:
        """The sum of it."""
        seconds = time.perf_counter() - self._started
        return Report(tuple(self.findings.values()), self._runs, self._steps, seconds, cases)


class _Trial:
    """One small problem, its inputs and what they should give."""

    def __init__(self, program: Program, source: KernelSource, case: Case[Any], seed: int) -> None:
        self.program = program
        self.operator = ops.get(source.operator)
        self.case = case
        self.inputs = self.operator.inputs(case.problem, "cpu", seed)
        self.reference = self.operator.reference(case.problem, self.inputs)
        self.library = self.operator.peer_result(case.problem, self.inputs)
        self.beside = self.operator.side_outputs(case.problem, self.inputs)

    def run(self, machine: Machine) -> None:
        """Runs the kernel on a machine, and says so if the result is wrong."""
        from tlxgen.runtime.plans import with_names
        from tlxgen.runtime.replay import Allocations

        output = self.operator.output(self.case.problem, self.inputs)
        output.fill_(float("nan"))
        for name in self.beside:
            self.inputs[name].fill_(float("nan"))
        allocations = Allocations()
        module: Any = SimpleNamespace(arguments=with_names(self.program["arguments"], torch=allocations))
        grid, args = self.operator.arguments(module, self.inputs, output, num_sms=self.case.num_sms)
        kernel = self.program["kernel"]
        kernel.launch(machine, grid, args, self.program["OPTIONS"])
        if not machine.completed:
            return
        reason = accuracy.why_wrong(output, self.reference, self.library)
        reason = reason or self.operator.why_side_output_wrong(self.case.problem, self.inputs, self.beside)
        made = zip(allocations.tensors, allocations.scratch, strict=True)
        if not reason and any(scratch.zeros and bool(tensor.any()) for tensor, scratch in made):
            reason = "zeros are not left as zeros: the next launch, which may be given them again, would go wrong"
        if reason:
            place = Place(kernel.name, kernel.function.__code__.co_firstlineno)
            machine.findings.append(Finding("wrong_result", f"{self.case.problem.label}: {reason}", place))


def describe(report: Report) -> Iterator[str]:
    """The report in lines for people."""
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
