"""`tlxgen check`: simulates a kernel on the CPU and reports deadlocks, races and wrong results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tlxgen import ops
from tlxgen.config import Config
from tlxgen.errors import InvalidProblemError, OutputError, TlxgenError
from tlxgen.space import absent

if TYPE_CHECKING:
    from tlxgen.codegen.emit import KernelSource
    from tlxgen.problem import Problem
    from tlxgen.simulator.check import Report


def run_source(
    source: KernelSource,
    *,
    schedules: int,
    seed: int,
    timeline: Path | None,
    as_json: bool,
    path: Path | None = None,
) -> None:
    """Checks one kernel and prints the report.

    Raises:
        OutputError: the timeline cannot be written.
        typer.Exit: with status 1, there are findings.
    """
    from tlxgen.simulator.check import check

    try:
        report = check(source, schedules, seed, timeline=timeline, path=path)
    except OSError as error:
        raise OutputError(f"--timeline {timeline}: {error.strerror}") from None
    _print(report, as_json)


def run_file(path: Path, entry: str | None, *, schedules: int, seed: int, timeline: Path | None, as_json: bool) -> None:
    """Checks a file that tlxgen emitted (edited or not), or any other through its function `entry`.

    Raises:
        InvalidProblemError: the file cannot be read, or has neither a header of tlxgen nor an `entry`.
        typer.Exit: with status 1, there are findings.
    """
    try:
        text = path.read_text(encoding="utf-8")
        compile(text, str(path), "exec")
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise InvalidProblemError(f"{path}: {error}") from None
    if entry is None:
        source = read_back(path, text)
        run_source(source, schedules=schedules, seed=seed, timeline=timeline, as_json=as_json, path=path)
        return
    if timeline is not None:
        raise InvalidProblemError("--timeline is for emitted kernels: it shows one run of one kernel")
    from tlxgen.simulator.check import check_host

    _print(check_host(path, entry, schedules, seed), as_json)


def read_back(path: Path, text: str) -> KernelSource:
    """The problem and config in the header of an emitted file, with the file's own text.

    Raises:
        InvalidProblemError: there is no such header, or it is invalid.
    """
    from tlxgen.codegen.emit import HEADER_INDENT, KernelSource

    header: dict[str, list[str]] = {}
    last: list[str] = []
    for line in text.splitlines()[:16]:
        word, _, rest = line.strip().partition(" ")
        if word in ("problem", "config", "template") and line.startswith(f"    {word}"):
            last = header[word] = rest.split()
        elif line.startswith(" " * HEADER_INDENT):
            last += line.split()
    if len(header) < 3:
        raise InvalidProblemError(f"{path} has no header of tlxgen: name a function that launches its kernel (--entry)")
    try:
        problem: Problem = ops.get(header["problem"][0]).problem_type.from_label(" ".join(header["problem"]))
        config = absent.completed(Config.from_short(" ".join([header["template"][0], *header["config"]])))
    except (TlxgenError, LookupError) as error:
        raise InvalidProblemError(f"{path}: its header is invalid: {error}") from None
    return KernelSource(problem.operator, problem, config, text)


def _print(report: Report, as_json: bool) -> None:
    from tlxgen.simulator.check import describe, to_json

    if as_json:
        typer.echo(json.dumps(to_json(report)))
    else:
        for line in describe(report):
            typer.echo(line)
    if not report.clean:
        raise typer.Exit(1)
