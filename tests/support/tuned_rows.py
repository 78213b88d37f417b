"""Two shipped rows, variants of them, and compilers that find given facts, for tests of the regression gate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlxgen import ops, paths
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.codegen.facts import Facts
from tlxgen.config import Config
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord
from tlxgen.errors import CompileError
from tlxgen.regress import rows
from tlxgen.regress.findings import Finding, Outcome, Row

SHIPPED = paths.SHIPPED_CACHE / "h200.jsonl"
GEMM = next(r for r in shipped.load(SHIPPED) if [r.key.problem.get(n) for n in "MNK"] == [4096, 4096, 14336])
VECTOR = next(r for r in shipped.load(SHIPPED) if r.key.operator == "vector_add")
RATIO = GEMM.ratio or 0.0
FACTS = Facts(
    registers=168,
    spill_bytes=0,
    stack_bytes=0,
    shared_bytes=200_000,
    hgmma=32,
    tma_loads=2,
    tma_stores=8,
    setmaxnreg=8,
    stmatrix=32,
    local_loads=0,
    local_stores=0,
    loop_conversions=0,
)


def row(record: TunedRecord, line: int = 1) -> Row:
    return Row(Path("h200.jsonl"), line, rows.row_name(record), record)


def with_key(record: TunedRecord, **key: Any) -> TunedRecord:
    return record.model_copy(update={"key": record.key.model_copy(update=key)})


def with_params(record: TunedRecord, **params: Any) -> TunedRecord:
    config = Config(template=record.config.template, params={**record.config.params, **params})
    return record.model_copy(update={"config": config})


def with_code_of(record: TunedRecord, **params: Any) -> TunedRecord:
    """The record with other parameters and their code, like a row of another tuning run."""
    other, operator = with_params(record, **params), ops.get(record.key.operator)
    source = emit(operator, operator.problem(record.key.problem), other.config)
    return other.model_copy(update={"source_hash": source.code_hash})


def slower(record: TunedRecord, times: float) -> TunedRecord:
    return record.model_copy(update={"time_us": record.time_us * times})


def finds(facts: Facts = FACTS) -> rows.Compile:
    """Compilers that find the same facts in every binary."""
    return lambda jobs: [Binary(source, facts, 0.5) for source, _ in jobs]


def fails(error: CompileError) -> rows.Compile:
    return lambda jobs: [error for _ in jobs]


def outcomes_of(*records: TunedRecord, facts: Facts = FACTS) -> list[Outcome]:
    return rows.examine([row(record, line) for line, record in enumerate(records, 1)], finds(facts))


def finding_of(record: TunedRecord, compile_all: rows.Compile | None = None) -> Finding:
    """The finding of a row with one defect."""
    (outcome,) = rows.examine([row(record)], compile_all or finds())
    (finding,) = outcome.findings
    assert outcome.red
    assert finding.remedy
    return finding


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def lines_of(folder: Path) -> list[str]:
    """The lines of a copy of the shipped file, first the row into which tests put faults."""
    lines = (folder / "h200.jsonl").read_text().splitlines()
    return sorted(lines, key=lambda line: '"K":1024,"M":1024,"N":1024' not in line)


def write_lines(folder: Path, lines: Sequence[str]) -> None:
    (folder / "h200.jsonl").write_text("".join(f"{line}\n" for line in lines))
