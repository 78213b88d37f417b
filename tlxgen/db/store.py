"""The database of tuned configs: one SQLite file that tuner, run time and command line share.

Many processes, hosts and versions use the file, and no defect of it may break a kernel call. At run time a read-only
file is read, an unreadable one is replaced by memory, and a row that cannot be parsed is a miss, each with one
`CacheWarning`. The tuner wants an error before it spends time on results that could not be stored
(`read_only_ok=False`).
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tlxgen.config import Config
from tlxgen.db import sqlite
from tlxgen.db.record import Origin, Trial, TunedRecord, TuningKey
from tlxgen.db.sqlite import MEMORY, WAY_OUT, CacheWarning, warn
from tlxgen.devices import DeviceKey
from tlxgen.errors import CacheError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MEMORY", "MOST_UNTUNED", "CacheWarning", "Policy", "Source", "Store"]

#: Keys that the list of misses holds.
MOST_UNTUNED = 1000

Policy: TypeAlias = Literal["faster", "newer", "keep"]
Source: TypeAlias = Literal["user", "shipped"]
Row: TypeAlias = dict[str, Any]


class Store:
    """The tuned-config database. Safe to share among threads; many processes may open the same file.

    Attributes:
        writable: False if rows put here do not outlive the process (a read-only file, or memory).
        location: the file, or `:memory:`.
    """

    def __init__(self, connected: Any, location: str, *, writable: bool) -> None:
        self.location = location
        self.writable = writable
        self._db = connected
        self._lock = threading.RLock()
        self._bad: set[str] = set()  # rows found bad of which the file did not take the note

    @classmethod
    def open(cls, path: Path | None = None, *, read_only_ok: bool = True) -> Store:
        """The database at `path`, by default `tlxgen.paths.database_path()`; created if missing.

        The user's own cache directory is created too; another place has to exist, since a mistyped name or a share that
        is not mounted should be told, not filled. A file that is damaged, empty, of another program or of a later
        version is moved aside, with one `CacheWarning` that names its new place.

        Args:
            path: the file.
            read_only_ok: take a read-only or in-memory database, with one `CacheWarning`, where the file cannot be
                written. A read-only file is read once, into memory: later changes by others are not seen.

        Raises:
            CacheError: the file cannot be written, and `read_only_ok` is False.
        """
        place = path
        try:
            place = sqlite.checked_place(path)
            return cls(sqlite.open_writable(place, prove=not read_only_ok), str(place), writable=True)
        except (CacheError, sqlite3.Error, OSError) as error:
            problem = f"the tuned-config database{f' {place}' if place else ''} cannot be written: {error}"
            if not read_only_ok:
                raise CacheError(f"{problem}; {WAY_OUT}") from error
            locked = sqlite.is_locked(error)
        # A file whose lock never came free is mid-change: reading it without locks could return half a row.
        if place is not None and not locked:
            with suppress(CacheError):
                store = cls.snapshot(place)
                warn(f"{problem}; it is read only and new results are lost at exit: {WAY_OUT}")
                return store
        warn(f"{problem}; tuned configs are kept in memory until exit: {WAY_OUT}")
        return cls(sqlite.in_memory(), MEMORY, writable=False)

    @classmethod
    def snapshot(cls, path: Path) -> Store:
        """A copy in memory of an existing database, which is neither written nor locked for long.

        Raises:
            CacheError: the file cannot be read, is no tlxgen database or is of a newer version.
        """
        return cls(sqlite.read_copy(path), str(path), writable=False)

    def get(self, key: TuningKey) -> TunedRecord | None:
        """The best config known for `key`, or None. Never raises; a defect is a miss with a `CacheWarning`."""
        if key.id in self._bad:
            return None
        try:
            rows = self._select("SELECT * FROM tuned WHERE key_id = ? AND bad IS NULL", (key.id,))
        except CacheError as error:
            warn(str(error))
            return None
        for row in rows:
            record = _record(row)
            if isinstance(record, TunedRecord):
                return record
            warn(f"row {key.id} of {self.location} is ignored: {record}; tune {key.operator} again to replace it")
            self.mark_bad(key, record)
        return None

    def put(self, record: TunedRecord, source: Source = "user") -> bool:
        """Stores `record` as the best of its key; True if it was stored.

        The tuner's record is the winner of a paired comparison, so it replaces the row whatever the two times are. A
        predicted record never replaces a measured one.

        Raises:
            CacheError: the row breaks a rule of the schema, or the file cannot be written any more.
        """
        return self._store([record], None, source) == 1

    def merge(self, records: Iterable[TunedRecord], policy: Policy, source: Source) -> int:
        """Stores the `records` that beat the existing rows, in one transaction; returns their number.

        Measured records beat predicted ones under any policy. Shipped records never replace the user's measurements.

        Raises:
            CacheError: as for `put`.
        """
        return self._store(records, policy, source)

    def _store(self, records: Iterable[TunedRecord], policy: Policy | None, source: Source) -> int:
        stored = 0
        with self._transaction() as db:
            for record in records:
                found = list(db.query("SELECT * FROM tuned WHERE key_id = ?", (record.key.id,)))
                if found and not _displaces(record, source, found[0], policy):
                    continue
                db.table("tuned").insert(_row(record, source), pk="key_id", replace=True)
                if record.origin == "measured":
                    db.execute("DELETE FROM untuned WHERE key_id = ?", (record.key.id,))
                self._bad.discard(record.key.id)
                stored += 1
        return stored

    def mark_bad(self, key: TuningKey, reason: str) -> None:
        """Marks the row of `key` as bad, so that it is not served. Never raises, since a kernel call is waiting."""
        try:
            with self._transaction(patient=False) as db:
                db.execute("UPDATE tuned SET bad = ? WHERE key_id = ?", (reason, key.id))
        except CacheError as error:
            self._bad.add(key.id)
            warn(f"row {key.id} is skipped in this process only: {error}")

    def add_trial(self, key: TuningKey, trial: Trial, instead_of: str | None = None) -> None:
        """Stores one trial, committed at once, so that a killed tuner loses no finished one.

        Args:
            key: what was tuned.
            trial: replaces an earlier one of the same config, code and protocol.
            instead_of: another protocol, whose trial of the same config and code it replaces as well.

        Raises:
            CacheError: as for `put`; status `ok` without a time breaks a rule too.
        """
        row = {
            "key_id": key.id,
            "config_id": trial.config.id,
            "source_hash": trial.source_hash,
            "protocol": trial.protocol,
            "status": trial.status,
            "time_us": trial.time_us,
            "peer_us": trial.peer_us,
            "message": trial.message,
            "config": _compact(trial.config.model_dump()),
            "created": trial.created.isoformat(),
        }
        with self._transaction() as db:
            db.execute(
                "DELETE FROM trials WHERE key_id = ? AND config_id = ? AND source_hash = ? AND protocol = ?",
                (key.id, trial.config.id, trial.source_hash, instead_of),
            )
            db.table("trials").insert(row, pk=("key_id", "config_id", "source_hash", "protocol"), replace=True)

    def trials(self, key: TuningKey, protocol: str | None = None) -> list[Trial]:
        """The trials of `key`, oldest first, of one timing protocol or of all; defective rows are skipped."""
        rows = self._select(
            "SELECT * FROM trials WHERE key_id = :key AND (:protocol IS NULL OR protocol = :protocol) ORDER BY rowid",
            {"key": key.id, "protocol": protocol},
        )
        found = [_trial(row) for row in rows]
        return [trial for trial in found if trial is not None]

    def note_untuned(self, key: TuningKey) -> None:
        """Counts a miss at run time. Never raises, and waits only briefly for locks.

        The list holds `MOST_UNTUNED` keys; a new one replaces the oldest of those with the least count.
        """
        with suppress(CacheError), self._transaction(patient=False) as db:
            db.execute(
                "INSERT INTO untuned (key_id, key, count, last_seen) VALUES (?, ?, 1, ?)"
                " ON CONFLICT (key_id) DO UPDATE SET count = count + 1, last_seen = excluded.last_seen",
                (key.id, _compact(key.model_dump()), _now()),
            )
            db.execute(
                "DELETE FROM untuned WHERE key_id IN (SELECT key_id FROM untuned WHERE key_id != ?"
                " ORDER BY count DESC, last_seen DESC, rowid DESC LIMIT -1 OFFSET ?)",
                (key.id, MOST_UNTUNED - 1),
            )

    def untuned(self) -> list[tuple[TuningKey, int]]:
        """Keys that were missed at run time, with their counts, largest first."""
        rows = self._select("SELECT * FROM untuned ORDER BY count DESC, key_id")
        found = [(_key(row), int(row["count"])) for row in rows]
        return [(key, count) for key, count in found if key is not None]

    def records(
        self, operator: str | None = None, gpu: str | None = None, origin: Origin | None = None
    ) -> list[TunedRecord]:
        """All usable rows, or those of an operator, GPU or origin, sorted; defective ones only cause a warning."""
        rows = self._select(
            "SELECT * FROM tuned WHERE bad IS NULL AND (:operator IS NULL OR operator = :operator)"
            " AND (:gpu IS NULL OR gpu = :gpu) AND (:origin IS NULL OR origin = :origin)"
            " ORDER BY operator, problem, gpu, toolchain, key_id",
            {"operator": operator, "gpu": gpu, "origin": origin},
        )
        found = []
        for row in rows:
            record = _record(row)
            if isinstance(record, TunedRecord):
                found.append(record)
            else:
                warn(f"row {row['key_id']} of {self.location} is ignored: {record}; `tlxgen cache prune` removes it")
        return [record for record in found if record.key.id not in self._bad]

    def defective(self) -> dict[str, str]:
        """Key ids of rows that `get` treats as misses, with reasons."""
        reasons = {}
        for row in self._select("SELECT * FROM tuned ORDER BY key_id"):
            record = _record(row)
            if row["bad"] is not None or isinstance(record, str):
                reasons[str(row["key_id"])] = str(row["bad"] or record)
        return reasons

    def delete(self, keys: Iterable[TuningKey | str]) -> int:
        """Deletes rows, given by key or key id, and their trials; returns the number of rows."""
        count = 0
        with self._transaction() as db:
            for key in keys:
                key_id = key.id if isinstance(key, TuningKey) else key
                count += db.execute("DELETE FROM tuned WHERE key_id = ?", (key_id,)).rowcount
                db.execute("DELETE FROM trials WHERE key_id = ?", (key_id,))
                self._bad.discard(key_id)
        return count

    def imported(self, content_hash: str) -> bool:
        """Whether a file of this content was imported before."""
        return bool(self._select("SELECT 1 FROM imports WHERE content_hash = ?", (content_hash,)))

    def note_import(self, content_hash: str, name: str, rows: int) -> None:
        """Records that a file was imported."""
        row = {"content_hash": content_hash, "name": name, "rows": rows, "created": _now()}
        with self._transaction() as db:
            db.table("imports").insert(row, pk="content_hash", replace=True)

    def close(self) -> None:
        """Closes the connection; a closed store allows only another `close`."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _select(self, sql: str, values: tuple[Any, ...] | dict[str, Any] = ()) -> list[Row]:
        with self._lock, self._told():
            return list(self._db.query(sql, values))

    @contextmanager
    def _transaction(self, *, patient: bool = True) -> Iterator[Any]:
        """One write transaction."""
        seconds = sqlite.BUSY_SECONDS if patient else sqlite.IMPATIENT_SECONDS
        with self._lock, self._told(), sqlite.busy_timeout(self._db, seconds), sqlite.immediate(self._db):
            yield self._db

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise CacheError(f"the tuned-config database {self.location}: {error}; {sqlite.hint(error)}") from error


def _row(record: TunedRecord, source: Source) -> Row:
    device = record.key.device.model_dump()
    plain = record.model_dump(exclude={"key", "config", "versions", "created"})
    return {
        "key_id": record.key.id,
        "operator": record.key.operator,
        "problem": json.dumps(record.key.problem, sort_keys=True, separators=(",", ":")),
        "toolchain": record.key.toolchain,
        **device,
        **plain,
        "config": _compact(record.config.model_dump()),
        "config_id": record.config.id,
        "versions": _compact(record.versions),
        "created": record.created.isoformat(),
        "source": source,
        "bad": None,
    }


def _record(row: Row) -> TunedRecord | str:
    """The record of a row, or its defect."""
    plain = set(TunedRecord.model_fields) - {"key", "config", "versions"}
    try:
        key = {
            "operator": row["operator"],
            "problem": json.loads(row["problem"]),
            "device": {name: row[name] for name in DeviceKey.model_fields},
            "toolchain": row["toolchain"],
        }
        config = Config.model_validate(json.loads(row["config"]))
        parts = {"key": key, "config": config, "versions": json.loads(row["versions"])}
        record = TunedRecord.model_validate({**parts, **{name: row[name] for name in plain}})
    except (ValueError, TypeError, RecursionError) as error:
        return _first_line(error)
    if record.key.id != row["key_id"]:
        return f"it is filed under another key than its own, {record.key.id}"
    return record if config.id == row["config_id"] else "its config is not the one that was stored"


def _trial(row: Row) -> Trial | None:
    fields = {name: row[name] for name in Trial.model_fields if name != "config"}
    try:
        return Trial.model_validate({**fields, "config": json.loads(row["config"])})
    except (ValueError, TypeError) as error:
        warn(f"trial {row['config_id']} of {row['key_id']} is ignored: {_first_line(error)}")
        return None


def _key(row: Row) -> TuningKey | None:
    try:
        return TuningKey.model_validate_json(row["key"])
    except (ValueError, TypeError) as error:
        warn(f"untuned key {row['key_id']} is ignored: {_first_line(error)}")
        return None


def _displaces(new: TunedRecord, source: Source, row: Row, policy: Policy | None) -> bool:
    old = _record(row)
    if isinstance(old, str):
        return True
    if row["bad"] is not None:  # the same code is bad still, unless the user has just measured it
        fresh = (new.config.id, new.source_hash) != (old.config.id, old.source_hash)
        return fresh or (policy is None and source == "user" and new.origin == "measured")
    if source == "shipped" and row["source"] == "user" and old.origin == "measured":
        return False
    if new.origin != old.origin:
        return new.origin == "measured"
    return _preferred(new, old, policy)


def _preferred(new: TunedRecord, old: TunedRecord, policy: Policy | None) -> bool:
    if policy == "faster":
        return new.time_us < old.time_us
    if policy == "newer":
        return _instant(new.created) > _instant(old.created)
    return policy is None


def _instant(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _first_line(error: Exception) -> str:
    """A validation error in one line, where pydantic writes several."""
    return " ".join(str(error).split())[:300]
