"""Reading of rows, and their checks without a GPU; the first check that fails is the row's finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from tlxgen import ops
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.validity import why_another, why_dead, why_other_code
from tlxgen.devices import TARGETS, DeviceKey, Gpu
from tlxgen.errors import CompileError, TlxgenError
from tlxgen.ops.command_line import command
from tlxgen.regress.findings import Finding, Outcome, Row
from tlxgen.space import search_space
from tlxgen.toolchain import toolchain
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.measure import PROTOCOL

#: A source, and the compute capability to compile it for.
Job: TypeAlias = tuple[KernelSource, tuple[int, int]]
Compile: TypeAlias = Callable[[Sequence[Job]], "list[Binary | CompileError]"]

#: Timeout of compilation and simulation of one kernel: longer than the tuner's, since a slow machine is no regression.
_SECONDS = 300.0


def read(file: Path) -> list[Row]:
    """The lines of a file of tuned configs, including those that hold no record.

    Raises:
        CacheError: the file cannot be read.
    """
    return [
        Row(file, line, f"line {line}", trouble=found)
        if isinstance(found, str)
        else Row(file, line, row_name(found), found)
        for line, found in shipped.lines(file)
    ]


def row_name(record: TunedRecord) -> str:
    """Problem and GPU of a row; of an unknown operator, the fields of the problem."""
    key = record.key
    try:
        label = ops.get(key.operator).problem(key.problem).label
    except TlxgenError:
        label = " ".join([key.operator, *(f"{field}={value}" for field, value in key.problem.items())])
    return f"{label} on {key.device.gpu}"


def examine(rows: Sequence[Row], compile_all: Compile) -> list[Outcome]:
    """The outcome of every row, in order; sound rows have the facts of their binaries."""
    by_key: dict[str, Row] = {}
    checked = [_checked(row, by_key) for row in rows]
    jobs = [found for found in checked if not isinstance(found, Finding)]
    binaries = iter(compile_all(jobs))
    outcomes = []
    for row, found in zip(rows, checked, strict=True):
        if isinstance(found, Finding):
            outcomes.append(Outcome(row, (found,)))
            continue
        binary = next(binaries)
        if isinstance(binary, Binary):
            outcomes.append(Outcome(row, _remarks(row.record), binary.facts, binary.seconds))
        else:
            outcomes.append(Outcome(row, (_not_compiled(found[0], binary),)))
    return outcomes


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> list[Binary | CompileError]:
    """Compiles and simulates the sources in parallel; the results are in order."""
    with ExitStack() as stack:
        pools = {
            capability: stack.enter_context(CompilePool(capability, workers, _SECONDS, simulate=True))
            for capability in {capability for _, capability in jobs}
        }
        return [_answer(future) for future in [pools[capability].submit(source) for source, capability in jobs]]


def _answer(future: Future[Binary]) -> Binary | CompileError:
    try:
        return future.result()
    except CompileError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug in one row must not hide findings on others
        return CompileError("compiler_error", f"{type(error).__name__}: {error}")


def _checked(row: Row, by_key: dict[str, Row]) -> Finding | Job:
    record = row.record
    if record is None:
        return Finding("schema", row.trouble, "correct or remove the line, or export the file again")
    found = _dead(record) or _wrong_key(record) or _duplicate(row, record, by_key) or _unverified(record)
    if found:
        return found
    operator, gpu = ops.get(record.key.operator), _gpu(record.key.device)
    problem = operator.problem(record.key.problem)
    try:
        illegal = search_space.why_illegal(operator, problem, record.config, gpu)
    except (TlxgenError, ArithmeticError) as error:  # in the search space, or in one of its formulas
        illegal = str(error)
    if illegal:
        return Finding("config", illegal, f"undo the change of the search space or of the row, or {tune_again(record)}")
    other = why_other_code(record)
    if other:
        remedy = f"undo the change if this kernel should not change; otherwise {tune_again(record)}"
        return Finding("code", other, remedy)
    return emit(operator, problem, record.config), gpu.capability


def _dead(record: TunedRecord) -> Finding | None:
    what = why_dead(record)
    if what is None:
        return None
    return Finding("dead", what, "remove the line, which nothing can use, or restore the operator or template")


def _wrong_key(record: TunedRecord) -> Finding | None:
    key, remedy = record.key, "restore the line as it was exported: keys are not edited by hand"
    try:
        problem, gpu = ops.get(key.operator).problem(key.problem), _gpu(key.device)
        another = why_another(record)
    except (TlxgenError, ValueError) as error:
        return Finding("key", f"invalid: {error}", remedy)
    if gpu.slug in TARGETS and key.device != TARGETS[gpu.slug].key:
        found, known = (f"{d.sm_count} SMs and capability {d.capability}" for d in (key.device, TARGETS[gpu.slug].key))
        return Finding("key", f"{gpu.slug} has {known}, not {found}", remedy)
    if another is not None:
        return Finding("key", another, remedy)
    if key.toolchain != toolchain():
        what = f"measured under {key.toolchain}, installed is {toolchain()}"
        return Finding("toolchain", what, f"install what it was measured under, or {tune_again(record)}")
    again = tuning_key(problem, key.device)
    if again.id != key.id:
        return Finding("key", f"its id is {key.id}, and look-ups use {again.id}", remedy)
    return None


def _duplicate(row: Row, record: TunedRecord, by_key: dict[str, Row]) -> Finding | None:
    first = by_key.setdefault(record.key.id, row)
    if first is row:
        return None
    return Finding("duplicate", f"{first.place} has the same key", "remove one of the two lines")


def _unverified(record: TunedRecord) -> Finding | None:
    """The finding on a row that no final has confirmed."""
    if record.origin != "measured":
        what = f"{record.origin}: its kernel never ran"
    elif "/" in record.protocol:
        what = f"{record.protocol}: provisional, which no final has confirmed"
    elif record.error is None:
        what = "the error of its results is missing"
    elif record.peer_us is None:
        what = "the library's time is missing"
    else:
        return None
    return Finding("unverified", what, tune_again(record))


def _gpu(device: DeviceKey) -> Gpu:
    """The GPU of a key; of an unknown one, SMs and capability, which are what legality depends on."""
    major, minor = device.capability.split(".")
    known = TARGETS.get(device.gpu, TARGETS["h100"])
    return replace(known, slug=device.gpu, sm_count=device.sm_count, capability=(int(major), int(minor)))


def is_final(record: TunedRecord) -> bool:
    """Whether the row's times come from a final of the current protocol; others are not compared."""
    return record.origin == "measured" and record.protocol == PROTOCOL


def _remarks(record: TunedRecord | None) -> tuple[Finding, ...]:
    if record is None or is_final(record):
        return ()
    what = f"{record.origin} by {record.protocol}, not in a final of {PROTOCOL}: its times are not compared"
    return (Finding("protocol", what, tune_again(record), red=False),)


def _not_compiled(source: KernelSource, error: CompileError) -> Finding:
    if error.kind == "unsafe":
        look = f"{command('check', source.problem)} --config '{source.config.short}'"
        return Finding("simulator", str(error).removeprefix("simulator: "), f"`{look}` shows all that it finds")
    if error.kind in {"timeout", "killed"}:
        remedy = "run again with fewer `--workers`: the machine was short of time or memory"
    else:
        tune = f"`{command('tune', source.problem)}`"
        remedy = f"undo the change of the compiler or its options, or remove the line and run {tune}"
    return Finding("compile", f"{error.kind}: {error}", remedy)


def tune_again(record: TunedRecord) -> str:
    """How to get a new row, as the end of a sentence."""
    problem = ops.get(record.key.operator).problem(record.key.problem)
    return f"run `{command('tune', problem)}` on {record.key.device.gpu} and export the row"
