"""Tuned configs as sorted JSON lines: the files of `cache/` that come with tlxgen, and those of `tlxgen cache export`.

These files are reviewed in pull requests: a new config is one changed line, and equal rows give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from tlxgen import paths
from tlxgen.db.record import TunedRecord
from tlxgen.db.store import CacheWarning, Store
from tlxgen.errors import CacheError


def dump(records: Iterable[TunedRecord], path: Path) -> None:
    """Writes `records` to `path`, sorted by operator and problem, one compact JSON object a line.

    The file is replaced atomically.

    Raises:
        CacheError: the file cannot be written.
    """
    write(path, "".join(f"{_line(record)}\n" for record in sorted(records, key=_order)))


def write(path: Path, content: str) -> None:
    """Replaces a file atomically.

    Raises:
        CacheError: the file cannot be written.
    """
    try:
        paths.write_atomically(path, content, make_folder=False)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error}; name a file in a directory that can be") from error


def load(path: Path) -> list[TunedRecord]:
    """The records of a file that `dump` wrote.

    Raises:
        CacheError: the file cannot be read, or a line of it holds no record; names the line.
    """
    records = []
    for number, found in lines(path):
        if isinstance(found, str):
            raise CacheError(f"{path}, line {number}: {found}; correct or remove the line, or export the file again")
        records.append(found)
    return records


def lines(path: Path) -> list[tuple[int, TunedRecord | str]]:
    """Each line's number with its record or its defect; empty lines are skipped.

    Raises:
        CacheError: the file cannot be read.
    """
    return list(_lines(_read(path)))


def import_shipped(store: Store) -> int:
    """Imports the shipped configs into `store`; returns the number of stored rows.

    Each file is imported once, identified by its content, so rows that the user removes stay removed. The user's own
    measurements and newer rows are never replaced. This runs before the first kernel: a defect of a file, a line or
    the database is a `CacheWarning`, and the rest is imported.
    """
    return sum(_import_file(store, path) for path in sorted(paths.SHIPPED_CACHE.glob("*.jsonl")))


def _import_file(store: Store, path: Path) -> int:
    try:
        content = _read(path)
        digest = hashlib.sha256(content).hexdigest()
        if store.imported(digest):
            return 0
        records = _usable(content, path)
        _make_way(store, records)
        stored = store.merge(records, policy="newer", source="shipped")
        store.note_import(digest, path.name, stored)
    except CacheError as error:
        _warn(f"the configs of {path.name} that come with tlxgen are not used: {error}")
        return 0
    return stored


def _make_way(store: Store, records: list[TunedRecord]) -> None:
    """Removes rows of outdated kernels that would keep a valid shipped row out."""
    from tlxgen.db.validity import why_other_code

    present = {record.key.id: record for record in store.records()}
    for record in records:
        old = present.get(record.key.id)
        if old is not None and why_other_code(old) is not None and why_other_code(record) is None:
            store.delete([record.key])


def _usable(content: bytes, path: Path) -> list[TunedRecord]:
    records = []
    for number, line in _lines(content):
        found = of_use(line)
        if isinstance(found, str):
            _warn(f"{path}, line {number} is skipped: {found}")
        else:
            records.append(found)
    return records


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error}; name a file that `tlxgen cache export` wrote") from error


def _lines(content: bytes) -> Iterator[tuple[int, TunedRecord | str]]:
    """Each line's number with its record or its defect; empty lines are skipped."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _parsed(line)


def of_use(found: TunedRecord | str) -> TunedRecord | str:
    """A line's record, or why this version cannot use it."""
    from tlxgen.db.validity import why_foreign

    why = None if isinstance(found, str) else why_foreign(found)
    return found if why is None else _plain(why)


def _plain(text: str) -> str:
    """One line without control characters."""
    return "".join(map(_visible, " ".join(text.split())[:300]))


def _parsed(line: bytes) -> TunedRecord | str:
    try:
        return TunedRecord.model_validate_json(line)
    except ValueError as error:
        return _plain(str(error))


def _visible(character: str) -> str:
    """The text with control characters escaped."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _line(record: TunedRecord) -> str:
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def _order(record: TunedRecord) -> tuple[str, str, str]:
    return record.key.operator, json.dumps(record.key.problem, sort_keys=True), record.key.id


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=2)
