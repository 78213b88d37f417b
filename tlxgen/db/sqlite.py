"""The SQLite file of the store: its path, opening, tables and transactions.

It handles what makes SQLite hard to share: processes that create one file at the same moment, a change of journal
that does not wait for locks, file systems without shared memory, read-only media. A file that is not a tlxgen database
is moved aside (`tlxgen.db.aside`).

SQLite behaviour relied on: https://sqlite.org/wal.html, https://sqlite.org/uri.html and
https://sqlite.org/lang_transaction.html.
"""

from __future__ import annotations

import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tlxgen import paths
from tlxgen.db import aside
from tlxgen.db.record import SCHEMA_VERSION
from tlxgen.errors import CacheError

#: How long a statement waits for another process's transaction.
BUSY_SECONDS = 30.0
#: The same for notes that a kernel call writes.
IMPATIENT_SECONDS = 0.2
MEMORY = ":memory:"
WAY_OUT = "set TLXGEN_CACHE to a file in a directory that can be written"

#: Statements from version i to i + 1. Released ones are never changed; changes are appended.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE IF NOT EXISTS tuned (
            key_id TEXT PRIMARY KEY NOT NULL CHECK (length(key_id) = 32),
            operator TEXT NOT NULL,
            problem TEXT NOT NULL,
            gpu TEXT NOT NULL,
            sm_count INTEGER NOT NULL CHECK (sm_count > 0),
            capability TEXT NOT NULL,
            toolchain TEXT NOT NULL,
            config TEXT NOT NULL,
            config_id TEXT NOT NULL,
            origin TEXT NOT NULL CHECK (origin IN ('measured', 'predicted')),
            source_hash TEXT NOT NULL,
            time_us REAL NOT NULL CHECK (time_us > 0 AND time_us < 1e300),
            spread_us REAL NOT NULL CHECK (spread_us >= 0 AND spread_us < 1e300),
            peer TEXT,
            peer_us REAL CHECK (peer_us > 0 AND peer_us < 1e300),
            error REAL CHECK (error >= 0 AND error < 1e300),
            error_peer REAL CHECK (error_peer >= 0 AND error_peer < 1e300),
            protocol TEXT NOT NULL,
            versions TEXT NOT NULL,
            trials INTEGER NOT NULL CHECK (trials >= 0),
            created TEXT NOT NULL,
            source TEXT NOT NULL CHECK (source IN ('user', 'shipped')),
            bad TEXT)""",
        "CREATE INDEX IF NOT EXISTS tuned_by_operator ON tuned (operator, gpu)",
        """CREATE TABLE IF NOT EXISTS trials (
            key_id TEXT NOT NULL CHECK (length(key_id) = 32),
            config_id TEXT NOT NULL,
            source_hash TEXT NOT NULL,
            protocol TEXT NOT NULL,
            status TEXT NOT NULL,
            time_us REAL CHECK (time_us > 0 AND time_us < 1e300),
            peer_us REAL CHECK (peer_us > 0 AND peer_us < 1e300),
            message TEXT NOT NULL,
            config TEXT NOT NULL,
            created TEXT NOT NULL,
            PRIMARY KEY (key_id, config_id, source_hash, protocol),
            CHECK (status != 'ok' OR time_us IS NOT NULL))""",
        """CREATE TABLE IF NOT EXISTS untuned (
            key_id TEXT PRIMARY KEY NOT NULL,
            key TEXT NOT NULL,
            count INTEGER NOT NULL CHECK (count > 0),
            last_seen TEXT NOT NULL)""",
        """CREATE TABLE IF NOT EXISTS imports (
            content_hash TEXT PRIMARY KEY NOT NULL,
            name TEXT NOT NULL,
            rows INTEGER NOT NULL CHECK (rows >= 0),
            created TEXT NOT NULL)""",
    ),
)


class CacheWarning(UserWarning):
    """The database or one of its rows could not be used; kernels still run, perhaps slower."""


class UnusableFileError(CacheError):
    """The file is damaged, of another program or of a later version, and has to be replaced."""


class Connection:
    """The part of `sqlite_utils.Database` that reading needs, without its import, to make first launches short."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self.conn = conn

    def query(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Iterator[dict[str, Any]]:
        """Rows as dictionaries."""
        cursor = self.conn.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return (dict(zip(names, row, strict=True)) for row in cursor)

    def execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        """One statement."""
        return self.conn.execute(sql, values)

    def table(self, name: str) -> Any:
        """A table of `sqlite_utils`."""
        from sqlite_utils import Database

        return Database(self.conn, execute_plugins=False).table(name)

    def table_names(self) -> list[str]:
        """All tables."""
        return [str(row[0]) for row in self.conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]

    def close(self) -> None:
        """Ends it."""
        self.conn.close()


def checked_place(path: Path | None) -> Path:
    """The database's path, with its directory created."""
    try:
        place = path or paths.database_path()
    except RuntimeError as error:  # `~` in TLXGEN_CACHE without a home directory
        raise CacheError(str(error)) from None
    own = paths.user_cache_dir()
    if own in place.parents:
        if not own.is_absolute():  # nothing names a home: a file here would land in whatever directory is current
            raise CacheError("the home directory is not known (HOME is not set)")
        place.parent.mkdir(parents=True, exist_ok=True)
    elif not place.parent.is_dir():
        raise CacheError(f"the directory {place.parent} does not exist (create it)")
    return place


def connect(target: str, *, uri: bool = False) -> Connection:
    """A connection that any thread may use and that waits for locks."""
    # Transactions are begun by hand: the driver's implicit ones start as readers, which cannot wait for a write lock.
    connection = sqlite3.connect(target, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None, uri=uri)
    connection.text_factory = _text  # by default, one damaged character makes every query that meets it raise
    return Connection(connection)


def _text(stored: bytes) -> str:
    return stored.decode(errors="replace")


def in_memory() -> Any:
    """An empty database in memory."""
    db = connect(MEMORY)
    migrate(db)
    return db


def read_copy(path: Path) -> Any:
    """A copy in memory of the file at `path`, brought to the current schema."""
    uri = path.resolve().as_uri()
    try:
        try:
            return _copied(f"{uri}?mode=ro")
        except sqlite3.OperationalError as error:
            if is_locked(error):  # mid-change: reading without locks could return half a row
                raise
            # WAL needs a file beside the database even to read it. On media that cannot have one, do without.
            return _copied(f"{uri}?mode=ro&immutable=1")
    except (CacheError, sqlite3.Error, UnicodeError) as error:
        raise CacheError(f"the tuned-config database {path} cannot be read: {error}; name another file") from error


def _copied(uri: str) -> Any:
    memory = connect(MEMORY)
    try:
        with closing(connect(uri, uri=True)) as source:
            _refuse_empty(source)
            source.conn.backup(memory.conn)
        migrate(memory)
    except BaseException:
        memory.close()
        raise
    return memory


def open_writable(path: Path, *, prove: bool) -> Any:
    """A connection that can write; `prove` writes once, so that a full disk is noticed now.

    An unusable file that no process has open is moved aside and replaced by a new one, with a warning.
    """
    if aside.size(path):
        try:
            return _opened(path, prove=prove)
        except UnusableFileError:
            pass
    with aside.alone(path.parent) as is_alone:
        # Once more, now that nobody else makes a file there or moves it: the first of many processes has done it.
        reason = "it is empty" if is_alone and aside.size(path) == 0 else ""
        if not reason:
            try:
                return _opened(path, prove=prove)
            except UnusableFileError as error:
                if not is_alone:
                    raise
                reason = str(error)
        place = aside.move(path)
        if place is None:
            raise UnusableFileError(f"{reason}, and it cannot be moved aside, or is in use")
        warn(f"the tuned-config database {path} cannot be used: {reason}; it is now {place}, and a new one is begun")
        return _opened(path, prove=prove)


def why_unusable(path: Path) -> str | None:
    """Why opening the file would move it aside, or None; changes nothing."""
    if aside.size(path) == 0:
        return "it is empty"
    try:
        with closing(connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            _version(db)
            _refuse_damaged(db)
    except (UnusableFileError, sqlite3.Error, UnicodeError) as error:
        return str(error) if isinstance(error, UnusableFileError) or _tells_damage(error) else None
    return None


def _opened(path: Path, *, prove: bool) -> Any:
    db = connect(str(path))
    try:
        version = _version(db)  # before anything is written: a file of a newer version stays as it is
        if version:
            _refuse_damaged(db)
        complaint = _set_journal(db)
        if prove or version < SCHEMA_VERSION:
            migrate(db)
        else:
            _probe(db)
    except BaseException as error:
        db.close()
        if _tells_damage(error):
            raise UnusableFileError(str(error)) from error
        raise
    if complaint:
        warn(
            f"{path}: SQLite's WAL does not work there ({complaint}), so processes that share the tuned-config "
            "database wait for each other; set TLXGEN_CACHE to a file on a local disk"
        )
    return db


def _version(db: Any) -> int:
    """The schema version, 0 for an empty file; refuses files of other programs and of later versions."""
    tables = db.table_names()  # looked at first: tables and version come into being together
    version = int(db.conn.execute("PRAGMA user_version").fetchone()[0])
    if version == 0 and tables:
        raise UnusableFileError("it is a database of another program")
    if version > SCHEMA_VERSION:
        raise UnusableFileError(
            f"it has schema version {version}, and this tlxgen knows {SCHEMA_VERSION} "
            "(upgrade tlxgen, or use another file)"
        )
    return version


def _tells_damage(error: BaseException) -> bool:
    """Whether SQLite's error is about the file's contents, not about disks, locks or rows."""
    if isinstance(error, sqlite3.OperationalError):
        return "unsupported file format" in str(error)
    return type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeError)  # a message quotes damaged text


def _refuse_damaged(db: Any) -> None:
    """Checks every page, 6 ms for each MB.

    Raises:
        UnusableFileError: a page is damaged, a table or column is missing, or a constraint differs.
    """
    # First, since SQLite's own check trips over statements that make no sense.
    unusable = {name for name, table in _layout().items() if not _serves(_table(db, name), table)}
    if unusable and _version(db) == SCHEMA_VERSION:
        raise UnusableFileError(f"it is damaged (no usable table {min(unusable)!r})")
    found = str(db.conn.execute("PRAGMA integrity_check(1)").fetchone()[0])
    if found != "ok":
        raise UnusableFileError(f"it is damaged ({' '.join(found.split())})")


@dataclass(frozen=True)
class _Table:
    """A table of the schema."""

    columns: frozenset[str]
    statement: str  #: that made it, rules of its columns among it


@cache
def _layout() -> dict[str, _Table]:
    """The tables of the current schema."""
    with closing(in_memory()) as db:
        return {name: _table(db, name) for name in db.table_names()}


def _serves(found: _Table, wanted: _Table) -> bool:
    """Whether it can serve as ours: it has additional columns, or was made by the same statement.

    SQLite does not notice a flipped bit in a statement, which may make a constraint that refuses every row.
    """
    return found.columns > wanted.columns or found == wanted


def _table(db: Any, name: str) -> _Table:
    sql = db.conn.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone()
    return _Table(frozenset(_columns(db, name)), str(sql[0]) if sql else "")


def _columns(db: Any, table: str) -> set[str]:
    return {row[1] for row in db.conn.execute(f"PRAGMA table_info({table})")}


def _set_version(db: Any, version: int) -> None:
    db.conn.execute(f"PRAGMA user_version = {version:d}")  # takes no placeholders


def _refuse_empty(db: Any) -> None:
    if _version(db) == 0:
        raise CacheError("it is empty")


def _set_journal(db: Any) -> str | None:
    """Sets WAL, in which readers and a writer do not wait for each other.

    Without WAL: the rollback journal, and SQLite's reason.
    """
    answer = _ask_for_wal(db)
    if answer == "wal":
        db.conn.execute("PRAGMA synchronous=NORMAL")  # in WAL as safe against kills, with far fewer waits for the disk
        return None
    mode = db.conn.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
    _probe(db)  # a file that cannot be written is another matter than one without WAL
    return f"{answer}; journal: {mode}"


def _ask_for_wal(db: Any) -> str:
    deadline = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < deadline:
        answer = _answer_to_wal(db)
        if answer is not None:
            return answer
        time.sleep(0.02)  # SQLite does not apply its busy timeout to a change of journal
    raise sqlite3.OperationalError("database is locked")


def _answer_to_wal(db: Any) -> str | None:
    try:
        return str(db.conn.execute("PRAGMA journal_mode=WAL").fetchone()[0])
    except sqlite3.OperationalError as error:
        return None if is_locked(error) else str(error)


def _probe(db: Any) -> None:
    """Fails if the file cannot be written. A lock held by another process proves that it can."""
    with busy_timeout(db, 0):
        try:
            db.conn.execute("BEGIN IMMEDIATE")
            _set_version(db, _version(db))  # in WAL even a read-only file lets a write transaction begin
        except sqlite3.OperationalError as error:
            if not is_locked(error):
                raise
        finally:
            if db.conn.in_transaction:
                db.conn.execute("ROLLBACK")


def migrate(db: Any) -> None:
    """Migrates the tables to `SCHEMA_VERSION` in one transaction; of several processes one does it."""
    with immediate(db):
        for statements in _MIGRATIONS[_version(db) :]:
            for statement in statements:
                db.conn.execute(statement)
        _set_version(db, SCHEMA_VERSION)


@contextmanager
def immediate(db: Any) -> Iterator[None]:
    """One write transaction. It takes its lock at the start: a reader that becomes a writer cannot wait for it."""
    db.conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.conn.execute("COMMIT")
    except BaseException:
        if db.conn.in_transaction:  # some errors end the transaction by themselves
            db.conn.execute("ROLLBACK")
        raise


@contextmanager
def busy_timeout(db: Any, seconds: float) -> Iterator[None]:
    """Limits the wait for each lock to `seconds`."""
    db.conn.execute(f"PRAGMA busy_timeout = {round(seconds * 1000):d}")
    try:
        yield
    finally:
        db.conn.execute(f"PRAGMA busy_timeout = {round(BUSY_SECONDS * 1000):d}")


def is_locked(error: Exception) -> bool:
    """Whether the error is a timeout of waiting for a lock."""
    # Text, because Python 3.10 has no error codes; "locking protocol" (WAL on a network file system) is no lock.
    return isinstance(error, sqlite3.OperationalError) and "is locked" in str(error)


def hint(error: Exception) -> str:
    """The remedy for an error of SQLite."""
    if isinstance(error, sqlite3.IntegrityError | OverflowError | UnicodeError):
        return "a row needs finite times above zero and text and numbers that SQLite can hold"
    if is_locked(error):
        return "another process holds it: wait for that one, or give this one a file of its own with TLXGEN_CACHE"
    return f"repair or move the file away, or {WAY_OUT}"


def warn(message: str) -> None:
    """Issues a `CacheWarning` on behalf of the caller's caller."""
    warnings.warn(message, CacheWarning, stacklevel=3)
