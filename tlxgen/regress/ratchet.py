"""Ratchets: facts, ratios and shapes that must stay, in `h200.ratchet.json` for the rows of `h200.jsonl`.

Facts of a row's binary follow from code and compiler, so any machine can find them again; the row itself is evidence of
a measurement, which nothing else may rewrite. In the file of rows they would also change its hash, by which databases
know what they have imported. Each row's ratio to the library is kept too, so that a review sees a slower row.

`tlxgen regress --update` records changes, except that shapes are only added: giving one up is an edit by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from tlxgen.db import shipped
from tlxgen.errors import CacheError, InvalidProblemError, OutputError
from tlxgen.ops import suites
from tlxgen.regress.findings import Finding, Outcome, Row
from tlxgen.regress.retime import LEAST_FALL
from tlxgen.regress.rows import is_final

Fact: TypeAlias = int | tuple[str, ...]

#: Counts of instructions that a kernel is built on: fewer are as wrong as more.
_EXACT = frozenset({"hgmma", "tma_loads", "tma_stores", "setmaxnreg", "stmatrix"})

#: How far other facts may rise. ptxas allocates registers by eights; 1 KB of shared memory is staging and padding.
_SLACK = {"registers": 8, "shared_bytes": 1024}

_UPDATE = "if it is meant, `tlxgen regress --update` records it"


class Kept(BaseModel):
    """What is stored of one row: its code (`source_hash`), the facts of its binary, and its ratio to the library."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    row: str
    code: str
    ratio: float | None = None  #: None if the row comes from no final
    facts: dict[str, Fact]


class Ratchet(BaseModel):
    """What must stay true of one file.

    Attributes:
        rows: by the id of their key.
        shapes: names of rows (problem and GPU) that the file must have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    rows: dict[str, Kept] = {}
    shapes: tuple[str, ...] = ()


def path_of(file: Path) -> Path:
    """The path of a file's ratchet."""
    return file.with_suffix(".ratchet.json")


def load(path: Path) -> Ratchet | None:
    """The ratchet, or None if there is none.

    Raises:
        CacheError: it cannot be read, or is invalid.
    """
    try:
        return Ratchet.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        why = " ".join(str(error).split())[:300]
        raise CacheError(f"{path}: {why}; correct it, or remove it and run `tlxgen regress --update`") from None


def dump(ratchet: Ratchet, path: Path) -> None:
    """Writes a ratchet, one fact per line, so that a review sees what has changed.

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
    """The outcomes with the ratchet's findings, and an outcome for each missing row.

    A file without a ratchet gets a finding, which is red if one is `required`.
    """
    path = path_of(file)
    if ratchet is None:
        what = "no facts stored: registers, instructions and shapes are not compared"
        missing = Finding("unrecorded", what, f"`tlxgen regress --update` stores them in {path.name}", red=required)
        return [*outcomes, Outcome(Row(file, 0, "all rows"), (missing,))]
    present = {outcome.row.name for outcome in outcomes}
    remedy = f"put the row back, or tune the shape again; to give the shape up, take it out of {path.name}"
    found = {
        name: Finding("coverage", f"no row for {name}, which had one", remedy)
        for name in ratchet.shapes
        if name not in present
    }
    removed = Finding("removed", "the row had facts in the ratchet, and is gone", f"put it back; {_UPDATE}")
    for name in sorted({kept.row for kept in ratchet.rows.values()} - present):
        found.setdefault(name, removed)
    missing_rows = [Outcome(Row(file, 0, name), (finding,)) for name, finding in found.items()]
    return [*(_compared(ratchet, outcome) for outcome in outcomes), *missing_rows]


def _compared(ratchet: Ratchet, outcome: Outcome) -> Outcome:
    now = _kept(outcome)
    if now is None or outcome.row.record is None:
        return outcome
    before = ratchet.rows.get(outcome.row.record.key.id)
    if before is not None:  # of any code, since a ratio belongs to the problem
        outcome = outcome.adding(*_of_ratio(before.ratio, now.ratio))
    if before is None or before.code != now.code:
        what = "no facts stored" if before is None else "the stored facts are of another kernel of this problem"
        return outcome.adding(Finding("unrecorded", what, "`tlxgen regress --update` stores those of its binary"))
    worse, better = _differences(before.facts, now.facts)
    if worse:
        remedy = f"look for a change of the compiler or its options; {_UPDATE}"
        outcome = outcome.adding(Finding("facts", ", ".join(worse), remedy))
    if better:
        what = f"better than stored: {', '.join(better)}"
        outcome = outcome.adding(Finding("facts", what, "`tlxgen regress --update` keeps it so", red=False))
    return outcome


def _kept(outcome: Outcome) -> Kept | None:
    """What is to be stored of a sound row; None of others."""
    record, facts = outcome.row.record, outcome.facts
    if record is None or facts is None:
        return None
    ratio = round(record.ratio, 4) if record.ratio is not None and is_final(record) else None
    return Kept(row=outcome.row.name, code=record.source_hash, ratio=ratio, facts=facts.model_dump())


def _of_ratio(before: float | None, now: float | None) -> Iterator[Finding]:
    """The finding on a row's ratio, if it differs from the stored one."""
    if before is None or now is None:
        return
    what = f"the row says {now:.3f} of the library's speed, and said {before:.3f}"
    if now < before * (1 - LEAST_FALL):
        remedy = f"tune again on a quiet GPU, or see which library has become faster; {_UPDATE}"
        yield Finding("ratio", what, remedy)
    elif now > before * (1 + LEAST_FALL):
        yield Finding("ratio", what, "`tlxgen regress --update` keeps it so", red=False)


def _differences(stored: dict[str, Fact], found: dict[str, Fact]) -> tuple[list[str], list[str]]:
    """The facts that became worse, and those that became better, beyond the slack."""
    worse, better = [], []
    for name, now in found.items():
        before = stored.get(name)
        if before is None:
            worse.append(f"{name}: {_shown(now)}, none stored")
        elif isinstance(before, int) and isinstance(now, int):
            change = f"{name} {before} → {now}"
            if now > before + _SLACK.get(name, 0) or (now < before and name in _EXACT):
                worse.append(change)
            elif now < before - _SLACK.get(name, 0):
                better.append(change)
        elif now != before:
            fewer = isinstance(before, tuple) and isinstance(now, tuple) and set(now) <= set(before)
            (better if fewer else worse).append(f"{name} {_shown(before)} → {_shown(now)}")
    return worse, better


def _shown(fact: Fact | float | None) -> str:
    if fact is None:
        return "none stored"
    return str(fact) if isinstance(fact, int | float) else ", ".join(fact) or "none"


def updated(
    ratchet: Ratchet | None, outcomes: Sequence[Outcome], suite_labels: Iterable[str] = ()
) -> tuple[Ratchet, list[str]]:
    """The ratchet of the rows as they are now, and its changes, one line each.

    What is stored of rows that failed a check stays, and shapes are only added.
    """
    before = ratchet or Ratchet()
    records = [(outcome.row.record.key.id, outcome) for outcome in outcomes if outcome.row.record is not None]
    present = {key for key, _ in records}
    rows = {key: kept for key, kept in before.rows.items() if key in present}
    changes = [f"{kept.row}: the row is gone, and its facts" for key, kept in before.rows.items() if key not in present]
    for key, outcome in records:
        now = _kept(outcome)
        change = now and _change(rows.get(key), now)
        if now and change:
            rows[key] = now
            changes.append(f"{now.row}: {change}")
    wanted = set(suite_labels)
    covered = {o.row.name for o in outcomes if o.facts and o.row.name.rsplit(" on ", 1)[0] in wanted}
    changes += [f"{name}: must have a row from now on" for name in sorted(covered - set(before.shapes))]
    ordered = dict(sorted(rows.items(), key=lambda item: (item[1].row, item[0])))
    return Ratchet(rows=ordered, shapes=tuple(sorted(covered | set(before.shapes)))), changes


def _change(before: Kept | None, now: Kept) -> str:
    """The differences, as text; empty if there are none."""
    if before is None:
        return "facts stored"
    ratio = [f"ratio {_shown(before.ratio)} → {_shown(now.ratio)}"] if before.ratio != now.ratio else []
    if before.code != now.code:
        return ", ".join(["facts of another kernel stored", *ratio])
    names = sorted(before.facts.keys() | now.facts.keys())
    old, new = before.facts.get, now.facts.get
    return ", ".join([*ratio, *(f"{n} {_shown(old(n))} → {_shown(new(n))}" for n in names if old(n) != new(n))])


def suite_labels(folder: Path) -> set[str]:
    """Labels of all problems in a folder of suites (`benchmarks/suites`).

    Raises:
        CacheError: a suite cannot be read.
    """
    try:
        return {problem.label for file in sorted(folder.glob("*.yaml")) for problem in suites.problems(file)}
    except InvalidProblemError as error:
        raise CacheError(str(error)) from None
