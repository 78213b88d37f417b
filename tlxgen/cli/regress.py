"""`tlxgen regress`: the regression gate on tuned configs; uses a GPU if there is one."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tlxgen import devices, paths
from tlxgen.cli import tables
from tlxgen.cli.cache import CacheInputError
from tlxgen.devices import Gpu
from tlxgen.errors import CacheError, OutputError, UnsupportedDeviceError
from tlxgen.regress import ratchet, report, retime, rows
from tlxgen.regress.findings import Outcome
from tlxgen.regress.report import Report
from tlxgen.toolchain import require_tlx
from tlxgen.tuner import gpu_lock
from tlxgen.tuner.runner import LIMIT_S

if TYPE_CHECKING:
    from rich.console import Console

#: Consecutive rows without an answer of the GPU after which the others are skipped: each may take minutes.
_GIVEN_UP = 3


@dataclass(frozen=True)
class Outputs:
    """Reports beside the printed one."""

    junit: Path | None = None
    markdown: Path | None = None
    as_json: bool = False


def run(
    files: Sequence[Path],
    outputs: Outputs,
    *,
    update: bool,
    suites: Path | None,
    gpu: bool | None,
    workers: int | None,
    log: Console,
    limit: float = LIMIT_S,
) -> None:
    """Checks all rows of the files, by default of the shipped ones, and reports.

    Args:
        files: JSON lines, as `tlxgen cache export` writes them.
        outputs: further reports.
        update: whether to update the ratchets.
        suites: folder of suites whose shapes must keep their rows; by default the shipped ones.
        gpu: True to fail without a GPU of the rows' model, False to use none.
        workers: parallel compilers; one per core by default.
        log: for progress and remarks.
        limit: seconds on the GPU after which a kernel counts as hung.

    Raises:
        CacheInputError: a file cannot be read.
        OutputError: a file cannot be written.
        UnsupportedDeviceError: `gpu` is True, and there is no GPU of the rows' model.
        typer.Exit: with status 1, a row fails the gate.
    """
    require_tlx()
    with _bad_input():
        read = {file: rows.read(file) for file in files or shipped_files()}
        before = {file: ratchet.load(ratchet.path_of(file)) for file in read}
        labels = ratchet.suite_labels(suites or paths.SUITES) if update else set()
    present = None if gpu is False else devices.detect()
    every = [row for found in read.values() for row in found]
    if gpu and not any(retime.is_of(present, row) for row in every):
        here = f"no row is of {present.slug}, which is here" if present else "torch sees no CUDA GPU here"
        raise UnsupportedDeviceError(f"--gpu: {here}; leave --gpu out to go on without")
    with log.status(f"{len(every)} rows: compiling and simulating their kernels"):
        outcomes = rows.examine(every, functools.partial(rows.compile_all, workers=workers))
    by_file = {file: [o for o in outcomes if o.row.file == file] for file in read}
    changes: list[str] = []
    if update:
        for file, found in by_file.items():
            after, made = ratchet.updated(before[file], found, labels)
            if after != before[file]:
                ratchet.dump(after, ratchet.path_of(file))
            before[file] = after
            changes += made
    compared = [
        o for file, found in by_file.items() for o in ratchet.compare(before[file], file, found, required=not files)
    ]
    final = tuple(_retimed(compared, present, limit, log))
    _report(report.Report(final, tuple(changes), present.slug if present else ""), outputs)


def shipped_files() -> list[Path]:
    """The shipped files; a deleted one is included if its ratchet remains.

    Raises:
        CacheInputError: there is none.
    """
    folder = paths.SHIPPED_CACHE
    of_ratchets = (path.name.replace(".ratchet.json", ".jsonl") for path in folder.glob("*.ratchet.json"))
    found = sorted({*folder.glob("*.jsonl"), *(folder / name for name in of_ratchets)})
    if not found:
        raise CacheInputError(f"{folder} has no file of tuned configs; name one with --cache")
    return found


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turns errors of reading into bad input, which has exit status 2."""
    try:
        yield
    except CacheInputError:
        raise
    except CacheError as error:
        raise CacheInputError(str(error)) from error


def _retimed(outcomes: Sequence[Outcome], present: Gpu | None, limit: float, log: Console) -> Iterator[Outcome]:
    """The outcomes; sound rows of this GPU's model are checked and timed on it."""
    count = sum(_can_be_timed(outcome, present) for outcome in outcomes)
    if not count:
        yield from outcomes
        return
    with gpu_lock.exclusive(devices.uuid(), log.print):
        busy = gpu_lock.other_processes(devices.uuid())
        if busy:
            what = f"{busy} other process(es) compute on this GPU; times will be unreliable"
            log.print(f"warning: {what}", soft_wrap=True)
        failures = 0  # consecutive
        for outcome in outcomes:
            if not _can_be_timed(outcome, present):
                yield outcome
            elif failures == _GIVEN_UP:
                yield retime.not_tried(outcome)
            else:
                with log.status(f"on the GPU, one of {count}: {outcome.row.name}"):
                    found = retime.retime(outcome, lambda problem: retime.make_runner(problem, limit))
                failures = failures + 1 if retime.gpu_failed(found) else 0
                yield found


def _can_be_timed(outcome: Outcome, present: Gpu | None) -> bool:
    return not outcome.red and retime.is_of(present, outcome.row)


def _report(found: report.Report, outputs: Outputs) -> None:
    for option, path, text in (
        ("--junit", outputs.junit, report.to_junit),
        ("--markdown", outputs.markdown, report.to_markdown),
    ):
        if path is not None:
            try:
                path.write_text(text(found), encoding="utf-8")
            except OSError as error:
                raise OutputError(f"{option} {path}: {error.strerror}") from None
    if outputs.as_json:
        typer.echo(json.dumps(report.to_json(found)))
    else:
        _show(found)
    if not found.green:
        raise typer.Exit(1)


def _show(found: Report) -> None:
    """Prints tables of times and findings, the remedies, and the verdict."""
    findings = list(found.findings())
    if any(outcome.retimed for outcome in found.outcomes):
        table = tables.empty("timed", "µs", "ratio", "stored", "margin")
        for row in report.times(found.outcomes):
            table.add_row(*row)
        tables.show(table)
    if findings:
        table = tables.empty("where", "row", "check", "found")
        for outcome, finding in findings:
            check = finding.check if finding.red else f"({finding.check})"
            table.add_row(outcome.row.place, outcome.row.name, check, finding.what)
        tables.show(table)
        typer.echo("\nWhat to do")
    for outcome, finding in findings:  # not in the table, so that a command can be copied
        typer.echo(f"  {outcome.row.place} {finding.check}: {finding.remedy}")
    for change in found.changes:
        typer.echo(f"updated: {change}")
    typer.echo(found.verdict)
