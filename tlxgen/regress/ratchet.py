"""What was true of a file of tuned configs and must stay so, kept beside it: `h200.ratchet.json` for `h200.jsonl`.

Beside it and not in the rows, because these facts follow from code and compiler: any machine can find them again. A row
is evidence of a measurement, and what is not measured never rewrites it. The facts in it would also give a file of
rows another hash, by which every user's database would import it anew. Each row's ratio to the library is here a second
time, so that one that was tuned anew and is slower does not slip in among others.

A ratchet turns one way by itself: facts may become better, shapes may be added. Everything else is an edit of this file
that a review sees, made by `tlxgen regress --update` or, where a shape is given up, by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from tlxgen.codegen.facts import Facts
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord
from tlxgen.errors import CacheError, InvalidProblemError, OutputError
from tlxgen.ops import suites
from tlxgen.regress.findings import Finding, Outcome, Row
from tlxgen.regress.retime import LEAST_FALL
from tlxgen.regress.rows import is_final

Fact: TypeAlias = int | tuple[str, ...]

#: Instructions that a kernel is built on: fewer are as wrong as more.
_EXACT = frozenset({"hgmma", "tma_loads", "tma_stores", "setmaxnreg", "stmatrix"})

#: How far the other facts may rise. ptxas allocates registers by eights; 1 KB of shared memory is staging and padding.
_SLACK = {"registers": 8, "shared_bytes": 1024}

_UPDATE = "if it is meant, `tlxgen regress --update` records it"


class Kept(BaseModel):
    """The facts of one row's binary, the code (`source_hash`) that they are of, and the ratio that the row claims."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    row: str
    code: str
    ratio: float | None = None  #: the library's time over the kernel's; None where no final has found it
    facts: dict[str, Fact]


class Ratchet(BaseModel):
    """What must stay true of one file.

    Attributes:
        rows: by the id of their key.
        shapes: names of rows (problem and GPU) that the file must have, whatever their key and config.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    rows: dict[str, Kept] = {}
    shapes: tuple[str, ...] = ()


def path_of(file: Path) -> Path:
    """Where the ratchet of a file of tuned configs is."""
    return file.with_suffix(".ratchet.json")


def load(path: Path) -> Ratchet | None:
    """The ratchet, or None where there is none.

    Raises:
        CacheError: it cannot be read, or is something else.
    """
    try:
        return Ratchet.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        told = " ".join(str(error).split())[:300]
        raise CacheError(f"{path}: {told}; correct it, or remove it and run `tlxgen regress --update`") from None


def dump(ratchet: Ratchet, path: Path) -> None:
    """Writes a ratchet, a fact a line, so that a review sees what has changed.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        shipped.write(path, json.dumps(ratchet.model_dump(mode="json"), indent=1) + "\n")
    except CacheError as error:
        raise OutputError(str(error)) from error


def compare(
    ratchet: Ratchet | None, file: Path, outcomes: Sequence[Outcome], *, required: bool = False
) -> list[Outcome]:
    """The outcomes of a file with what the ratchet finds, and one more for each row that is gone.

    A file without a ratchet gets a remark, unless one is required: it has not asked to be held against anything.
    """
    if ratchet is None:
        what = "no facts stored: registers, instructions and shapes are held against nothing"
        remark = Finding(
            "unrecorded", what, f"`tlxgen regress --update` stores them in {path_of(file).name}", red=required
        )
        return [*outcomes, Outcome(Row(file, 0, "all rows"), (remark,))]
    compared = [_compared(ratchet, outcome) for outcome in outcomes]
    present = {outcome.row.name for outcome in outcomes}
    uncovered = [name for name in ratchet.shapes if name not in present]
    gone = sorted({kept.row for kept in ratchet.rows.values()} - present - set(uncovered))
    return [
        *compared,
        *(Outcome(Row(file, 0, name), (_uncovered(name, path_of(file)),)) for name in uncovered),
        *(Outcome(Row(file, 0, name), (_gone(),)) for name in gone),
    ]


def _uncovered(name: str, path: Path) -> Finding:
    remedy = f"put the row back, or tune the shape again; to give the shape up, take it out of {path.name}"
    return Finding("coverage", f"no row for {name}, which had one", remedy)


def _gone() -> Finding:
    return Finding("removed", "the row had facts in the ratchet, and is gone", f"put it back; {_UPDATE}")


def _compared(ratchet: Ratchet, outcome: Outcome) -> Outcome:
    record, facts = outcome.row.record, outcome.facts
    if record is None or facts is None:
        return outcome
    kept = ratchet.rows.get(record.key.id)
    if kept is not None:  # whatever the kernel: a ratio is of the problem
        outcome = outcome.adding(*_of_ratio(kept.ratio, _ratio(record)))
    if kept is None or kept.code != record.source_hash:
        what = "no facts stored" if kept is None else "the stored facts are of another kernel of this problem"
        return outcome.adding(Finding("unrecorded", what, "`tlxgen regress --update` stores those of its binary"))
    worse, better = _differences(kept.facts, _plain(facts))
    if worse:
        remedy = f"look for what changed in the compiler's surroundings; {_UPDATE}"
        outcome = outcome.adding(Finding("facts", ", ".join(worse), remedy))
    if better:
        what = f"better than stored: {', '.join(better)}"
        outcome = outcome.adding(Finding("facts", what, "`tlxgen regress --update` keeps it so", red=False))
    return outcome


def _of_ratio(before: float | None, now: float | None) -> Iterator[Finding]:
    """What a row claims now, if that is another thing than it did."""
    if before is None or now is None:
        return
    told = f"the row says {now:.3f} of the library's speed, and said {before:.3f}"
    if now < before * (1 - LEAST_FALL):
        remedy = f"tune again on a quiet card, or see which library has become faster; {_UPDATE}"
        yield Finding("ratio", told, remedy)
    elif now > before * (1 + LEAST_FALL):
        yield Finding("ratio", told, "`tlxgen regress --update` keeps it so", red=False)


def _ratio(record: TunedRecord) -> float | None:
    """To so many digits as a measurement has, so that the file can be read."""
    return round(record.ratio, 4) if record.ratio is not None and is_final(record) else None


def _differences(stored: dict[str, Fact], found: dict[str, Fact]) -> tuple[list[str], list[str]]:
    """What became worse and what became better, beyond the slack."""
    worse, better = [], []
    for name, now in found.items():
        before = stored.get(name)
        if before is None:
            worse.append(f"{name}: {_shown(now)}, none stored")
        elif isinstance(before, int) and isinstance(now, int):
            told = f"{name} {before} → {now}"
            if now > before + _SLACK.get(name, 0) or (now < before and name in _EXACT):
                worse.append(told)
            elif now < before - _SLACK.get(name, 0):
                better.append(told)
        elif now != before:
            told = f"{name} {_shown(before)} → {_shown(now)}"
            (worse if _more(before, now) else better).append(told)
    return worse, better


def _more(before: Fact, now: Fact) -> bool:
    return not (isinstance(before, tuple) and isinstance(now, tuple) and set(now) <= set(before))


def _shown(fact: Fact | float) -> str:
    return str(fact) if isinstance(fact, int | float) else ", ".join(fact) or "none"


def _plain(facts: Facts) -> dict[str, Fact]:
    return dict(facts.model_dump())


def updated(
    ratchet: Ratchet | None, outcomes: Sequence[Outcome], suite_labels: Iterable[str] = ()
) -> tuple[Ratchet, list[str]]:
    """The ratchet as the file's rows are now, and what has changed, a line each.

    Rows that failed a check keep what was stored of them, and shapes are only added.
    """
    before = ratchet or Ratchet()
    present = {record.key.id for record in _records(outcomes)}
    rows = {key: kept for key, kept in before.rows.items() if key in present}
    changes = [f"{kept.row}: the row is gone, and its facts" for key, kept in before.rows.items() if key not in present]
    for outcome in outcomes:
        record, facts = outcome.row.record, outcome.facts
        if record is None or facts is None:
            continue
        now = Kept(row=outcome.row.name, code=record.source_hash, ratio=_ratio(record), facts=_plain(facts))
        change = _change(rows.get(record.key.id), now)
        if change:
            rows[record.key.id] = now
            changes.append(f"{now.row}: {change}")
    wanted = set(suite_labels)
    covered = {outcome.row.name for outcome in outcomes if outcome.facts and _label(outcome.row) in wanted}
    changes += [f"{name}: must have a row from now on" for name in sorted(covered - set(before.shapes))]
    ordered = dict(sorted(rows.items(), key=lambda item: (item[1].row, item[0])))
    return Ratchet(rows=ordered, shapes=tuple(sorted(covered | set(before.shapes)))), changes


def _records(outcomes: Iterable[Outcome]) -> list[TunedRecord]:
    return [outcome.row.record for outcome in outcomes if outcome.row.record is not None]


def _label(row: Row) -> str:
    return row.name.rsplit(" on ", 1)[0]


def _change(before: Kept | None, now: Kept) -> str:
    """What is new, in words; empty if nothing is."""
    if before is None:
        return "facts stored"
    ratio = [f"ratio {_maybe(before.ratio)} → {_maybe(now.ratio)}"] if before.ratio != now.ratio else []
    if before.code != now.code:
        return ", ".join(["facts of another kernel stored", *ratio])
    names = sorted(before.facts.keys() | now.facts.keys())
    old, new = before.facts.get, now.facts.get
    return ", ".join([*ratio, *(f"{n} {_maybe(old(n))} → {_maybe(new(n))}" for n in names if old(n) != new(n))])


def _maybe(fact: Fact | float | None) -> str:
    return "none stored" if fact is None else _shown(fact)


def suite_labels(folder: Path) -> set[str]:
    """Labels of all problems of a folder of suites (`benchmarks/suites`).

    Raises:
        CacheError: a suite cannot be read.
    """
    try:
        return {problem.label for file in sorted(folder.glob("*.yaml")) for problem in suites.problems(file)}
    except InvalidProblemError as error:
        raise CacheError(str(error)) from None
