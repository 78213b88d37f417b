"""The cache among processes, disks and files that are not as they should be: it serves, and loses nothing."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support import records
from tests.support.processes import wait_until
from tests.support.records import NOON
from tlxgen import ops, paths
from tlxgen.cli.cache import _merge
from tlxgen.config import Config
from tlxgen.db import aside, shipped, sqlite, validity
from tlxgen.db.record import SCHEMA_VERSION, Trial
from tlxgen.db.shipped import dump, import_shipped
from tlxgen.db.store import MEMORY, CacheWarning, Store
from tlxgen.devices import DeviceKey
from tlxgen.errors import CacheError

ROOT = Path(__file__).parents[2]
a_record = functools.partial(records.a_record, protocol="graph-2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "db").mkdir()
    return tmp_path / "db" / "tuned.db"


@pytest.fixture
def filled(file: Path) -> Path:
    """A database of forty rows and as many trials."""
    with Store.open(file) as store:
        for m in range(1, 41):
            store.put(a_record(m))
            trial = Trial(config=a_record().config, source_hash=str(m), status="ok", time_us=1.0, protocol="graph-2")
            store.add_trial(a_record().key, trial)
    return file


def opened(path: Path, **options: Any) -> tuple[Store, list[str]]:
    """A store, and what was told on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store.open(path, **options)
    return store, [str(warning.message) for warning in caught]


def python(script: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process in which every warning is printed."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


# Many processes.

STORM = """
import multiprocessing, sqlite3, sys, time
from pathlib import Path
from tlxgen.db.record import TunedRecord, TuningKey
from tlxgen.db.store import Store

def key(base, number, step):
    return TuningKey(**{**base.key.model_dump(), "problem": {"number": number, "step": step}})

def work(number, start, path, text):
    base = TunedRecord.model_validate_json(text)
    start.wait()
    with Store.open(path, read_only_ok=number % 2 == 0) as store:
        assert store.writable
        for step in range(200):
            store.get(key(base, number, step // 10))
            if step % 10 == 0:
                record = base.model_copy(update={"key": key(base, number, step // 10)})
                assert store.put(record) and store.get(record.key) == record

def hold(start, path, seconds):
    start.wait()
    while not path.exists():
        time.sleep(0.001)
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    path.with_name("held").touch()
    time.sleep(seconds)
    connection.execute("COMMIT")
    path.with_name("held").unlink()

context = multiprocessing.get_context("fork")
path = Path(sys.argv[1])
start = context.Barrier(34)
workers = [context.Process(target=work, args=(n, start, path, sys.argv[2])) for n in range(32)]
holder = context.Process(target=hold, args=(start, path, float(sys.argv[3])))
for process in (*workers, holder):
    process.start()
print("ready", flush=True)
start.wait()
for process in (*workers, holder):
    process.join()
assert all(process.exitcode == 0 for process in (*workers, holder))
"""

#: Longer than a lock is waited for where nobody thought of it: Python's own limit is 5 s.
HELD_S = 10.0


@pytest.mark.slow
def test_thirty_two_processes_a_lock_and_a_listing_lose_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They open one file that is not there yet, while one holds its lock, and `tlxgen cache list` runs all the time."""
    monkeypatch.setenv("TLXGEN_CACHE", str(file))
    storm = subprocess.Popen(
        [sys.executable, "-W", "always", "-c", STORM, str(file), a_record().model_dump_json(), str(HELD_S)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert storm.stdout is not None
    assert storm.stdout.readline() == "ready\n"
    started = time.monotonic()
    assert wait_until(file.with_name("held").exists), "the first listing is to begin while the lock is held"
    listed: list[int] = []
    while storm.poll() is None:
        done = python("from tlxgen.cli import main; main()", "cache", "list", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        listed.append(sum("number" in row["key"]["problem"] for row in json.loads(done.stdout)))
    assert (storm.returncode, storm.communicate()[1]) == (0, "")
    assert time.monotonic() - started >= HELD_S
    assert listed == sorted(listed), "a row was there, and then was not"
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT count(*) FROM tuned WHERE problem LIKE '%number%'").fetchone() == (640,)
    connection.close()
    assert [path for path in file.parent.iterdir() if "aside" in path.name] == []


MEET = """
import multiprocessing, sys, warnings
from pathlib import Path
from tlxgen.db.record import TunedRecord, TuningKey
from tlxgen.db.store import Store

def work(number, start, path, text):
    base = TunedRecord.model_validate_json(text)
    key = TuningKey(**{**base.key.model_dump(), "problem": {"number": number}})
    start.wait()
    with Store.open(path) as store:
        assert store.writable and store.put(base.model_copy(update={"key": key}))

context = multiprocessing.get_context("fork")
start = context.Barrier(8)
workers = [context.Process(target=work, args=(n, start, Path(sys.argv[1]), sys.argv[2])) for n in range(8)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
assert all(worker.exitcode == 0 for worker in workers)
"""


@pytest.mark.parametrize("content", [b"", b"no database at all " * 500], ids=["empty", "text"])
def test_of_processes_that_meet_an_unusable_file_one_moves_it(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    done = python(MEET, file, a_record().model_dump_json())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("it is now") == 1
    assert [path.name for path in file.parent.iterdir() if "aside" in path.name] == ["tuned.db.aside-1"]
    assert file.with_name("tuned.db.aside-1").read_bytes() == content
    with Store.open(file) as store:
        assert len(store.records()) == 8


# Files that are not what they should be.


def foreign(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE places (url TEXT)")
    connection.close()


def newer(file: Path) -> None:
    Store.open(file).close()
    connection = sqlite3.connect(file)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


def without_a_table(file: Path) -> None:
    Store.open(file).close()
    connection = sqlite3.connect(file)
    connection.execute("ALTER TABLE trials RENAME TO trails")
    connection.close()


def with_another_rule(file: Path) -> None:
    """SQLite finds nothing wrong with it."""
    Store.open(file).close()
    file.write_bytes(file.read_bytes().replace(b"CHECK (length(key_id) = 32)", b"CHECK (length(key_id) = 22)", 1))


def test_a_column_of_somebody_elses_is_no_damage(file: Path) -> None:
    Store.open(file).close()
    connection = sqlite3.connect(file)
    connection.execute("ALTER TABLE tuned ADD COLUMN remark TEXT")
    connection.close()
    store, told = opened(file)
    assert store.put(a_record())
    assert (told, store.get(a_record().key)) == ([], a_record())
    store.close()


def cut_to(size: int) -> Callable[[Path], None]:
    def cut(file: Path) -> None:
        with Store.open(file) as store:
            for m in range(1, 41):
                store.put(a_record(m))
        file.write_bytes(file.read_bytes()[:size])

    return cut


UNUSABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (Path.touch, "it is empty"),
    "text": (lambda file: file.write_text("no database, but something " * 100), "not a database"),
    "noise": (lambda file: file.write_bytes(b"SQLite format 3\0" + b"\xff" * 4080), "not a database"),
    "cut after ten bytes": (cut_to(10), "not a database"),
    "cut after two pages": (cut_to(8192), "malformed|damaged"),
    "cut within a page": (cut_to(9000), "malformed|damaged"),
    "without a table": (without_a_table, "'trials'"),
    "with a rule that a flipped bit made another": (with_another_rule, "'trials'"),
    "of another program": (foreign, "another program"),
    "of a later version": (newer, "upgrade tlxgen"),
}


@pytest.mark.parametrize("read_only_ok", [True, False], ids=["run time", "tuner"])
@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_file_is_moved_aside_whole_and_named(kind: str, read_only_ok: bool, file: Path) -> None:
    make, reason = UNUSABLE[kind]
    make(file)
    before = file.read_bytes()
    store, told = opened(file, read_only_ok=read_only_ok)
    place = file.with_name("tuned.db.aside-1")
    assert len(told) == 1
    assert str(file) in told[0]
    assert str(place) in told[0]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(told[0])
    assert (store.writable, store.location) == (True, str(file))
    assert store.put(a_record())
    store.close()
    assert place.read_bytes() == before
    store, told = opened(file)
    assert (told, store.get(a_record().key)) == ([], a_record())
    store.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a database of twelve rows."""
    file = tmp_path_factory.mktemp("whole") / "tuned.db"
    with Store.open(file) as store:
        for m in range(12):
            store.put(a_record(m))
    return file.read_bytes()


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@example(place=2958, bit=0)
@given(place=st.integers(0, 99) | st.integers(0, 4095) | st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_a_row_or_moves_the_file_and_raises_nothing(
    file: Path, whole: bytes, place: int, bit: int
) -> None:
    content = bytearray(whole)
    content[place % len(content)] ^= 1 << bit
    for old in file.parent.iterdir():
        old.unlink()
    file.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Store.open(file) as store:
            found = [store.get(a_record(m).key) for m in range(12)]
            assert store.put(a_record(5, time_us=7.0))
            assert store.get(a_record(5).key) == a_record(5, time_us=7.0)
            store.records(), store.defective(), store.untuned()
    assert {record.config for record in found if record is not None} <= {a_record().config}
    moved = [path for path in file.parent.iterdir() if "aside" in path.name]
    assert all(path.read_bytes() == content for path in moved)
    assert moved or found.count(None) <= 1 or store.location == MEMORY


OPEN = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA journal_mode=WAL")
connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
print("open", flush=True)
sys.stdin.readline()
"""


def test_a_file_that_another_process_has_open_stays(file: Path) -> None:
    """Renamed under it, that process would go on to delete the new file's journal."""
    newer(file)
    before = file.read_bytes()
    user = subprocess.Popen(
        [sys.executable, "-c", OPEN, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdout is not None
    assert user.stdout.readline() == "open\n"
    store, told = opened(file)
    assert (store.location, len(told)) == (MEMORY, 1)
    assert "upgrade tlxgen" in told[0]
    assert "in use" in told[0]
    store.close()
    with pytest.raises(CacheError, match="in use"):
        Store.open(file, read_only_ok=False)
    user.communicate("\n")
    assert file.read_bytes() == before
    store, _ = opened(file)
    assert store.writable
    store.close()


def test_the_journal_goes_with_its_database(file: Path) -> None:
    """Left behind, it would be played back into the new one; without it, the old one would lose its last rows."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from tlxgen.db.record import TunedRecord; from tlxgen.db.store import Store\n"
        "store = Store.open(Path(sys.argv[1])); store.put(TunedRecord.model_validate_json(sys.argv[2]))\n"
        "store._db.conn.execute('PRAGMA user_version = 99'); os._exit(0)"
    )
    assert python(script, file, a_record().model_dump_json()).returncode == 0
    assert file.with_name("tuned.db-wal").stat().st_size > 0
    store, _ = opened(file)
    assert store.records() == []
    store.close()
    connection = sqlite3.connect(file.with_name("tuned.db.aside-1"))
    assert connection.execute("SELECT count(*) FROM tuned").fetchone() == (1,)
    connection.close()


def test_devices_and_folders_are_not_moved(tmp_path: Path) -> None:
    assert aside.size(Path("/dev/null")) is None
    store, told = opened(tmp_path)
    assert (store.location, len(told)) == (MEMORY, 1)
    store.close()
    assert tmp_path.is_dir()


# Places that cannot be written.

AS_SOMEBODY = """
import os, sys, warnings
from pathlib import Path
import sqlite_utils  # who has given up his rights may not be able to read where Python is installed
from tlxgen.db.record import TunedRecord
from tlxgen.db.store import Store
record = TunedRecord.model_validate_json(sys.argv[2])
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
with Store.open(Path(sys.argv[1])) as store:
    store.note_untuned(record.key)
    print(store.location, store.writable, store.get(record.key) == record)
    store.put(record)
    assert store.get(record.key) == record
"""


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder that other users can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "served"),
    [(0o555, 0o444, True), (0o555, 0o644, True), (0o777, 0o444, True), (0o755, 0o000, False), (0o000, 0o644, False)],
    ids=["all read-only", "read-only folder", "read-only file", "unreadable file", "unreadable folder"],
)
def test_what_cannot_be_written_is_read_and_the_rest_is_kept_in_memory(
    folder_mode: int, file_mode: int, served: bool, everybodys: Path
) -> None:
    """As another user, who owns neither the file nor its folder, where the tests may become one."""
    folder = everybodys
    file = folder / "tuned.db"
    with Store.open(file) as store:
        store.put(a_record())
    before = file.read_bytes()
    file.chmod(file_mode)
    folder.chmod(folder_mode)
    try:
        done = python(AS_SOMEBODY, file, a_record().model_dump_json(), cwd="/")
    finally:
        folder.chmod(0o755)
        file.chmod(0o644)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(file) if served else MEMORY, "False", str(served)]
    assert done.stderr.count("CacheWarning") == 1
    assert file.read_bytes() == before
    assert [path.name for path in folder.iterdir() if "aside" in path.name] == []


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from tlxgen.errors import CacheError
from tlxgen.db.record import TunedRecord
from tlxgen.db.store import Store
record = TunedRecord.model_validate_json(sys.argv[2])
opened_before = sys.argv[3] == "before"
store = Store.open(Path(sys.argv[1])) if opened_before else None
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
store = store or Store.open(Path(sys.argv[1]))
assert store.get(record.key) == record
store.note_untuned(record.key)
try:
    store.put(record.model_copy(update={"time_us": 1.0}))
except CacheError as error:
    assert opened_before, "a copy in memory takes it"
    print(error)
else:
    assert not store.writable
store.mark_bad(record.key, "hangs")
assert store.get(record.key) is None
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.close()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_disk_that_is_full_serves_what_it_has(filled: Path, when: str) -> None:
    """A limit on the size of files stands for the disk: not a byte can be written."""
    done = python(FULL_DISK, filled, a_record(1).model_dump_json(), when)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CacheWarning") == 1
    with Store.open(filled) as store:
        assert store.records() == sorted((a_record(m) for m in range(1, 41)), key=lambda row: str(row.key.problem))


# Rows from elsewhere.


def test_a_merge_keeps_what_each_row_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SHIPPED_CACHE", tmp_path / "nothing")
    h100 = DeviceKey(gpu="h100-pcie", sm_count=114, capability="9.0")
    theirs = [
        a_record(
            m,
            key=a_record(m).key.model_copy(update={"device": h100, "toolchain": "fbtriton 3.6.0"}),
            protocol="graph-1",
            versions={"driver": "535.1", "torch": "2.9"},
            created=NOON - timedelta(days=400),
            peer="cublas",
            peer_us=3.0,
            error=0.1,
            error_peer=0.2,
            trials=77,
        )
        for m in (1, 2)
    ]
    with Store.open(tmp_path / "other.db") as store:
        store.put(theirs[0])
    dump([theirs[1]], tmp_path / "rows.jsonl")
    monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "own.db"))
    with Store.open() as store:
        store.put(a_record(1))
    from tlxgen.cli.cache import PolicyName

    _merge([tmp_path / "other.db", tmp_path / "rows.jsonl"], PolicyName.faster)
    with Store.open() as store:
        assert [store.get(record.key) for record in (*theirs, a_record(1))] == [*theirs, a_record(1)]


GOOD = json.loads(a_record().model_dump_json())
HOSTILE = [
    "../../etc/passwd",
    "'; DROP TABLE tuned; --",
    "\x00",
    "{{ 7 * 7 }}",
    "1); import os #",
    "\ud800",
    "\x1b[2J",
    "",
]
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(HOSTILE)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A row with one thing wrong, as a line of JSON."""
    row = json.loads(json.dumps(GOOD))
    holder = draw(st.sampled_from([row, row["key"], row["key"]["device"], row["config"]]))
    name = draw(st.sampled_from(sorted(holder)))
    if draw(st.booleans()):
        del holder[name]
    else:
        holder[name] = draw(values)
    return json.dumps(row).encode()


lines = (
    spoiled()
    | values.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
    | st.builds(lambda cut: json.dumps(GOOD).encode()[:cut], st.integers(1, 300))
    | st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xef\xbb\xbf{}", b"1e999", b'"' + b"x" * 100_000, b"NaN"])
)


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(hostile=st.lists(lines, min_size=50, max_size=50))  # 10,000 lines in all
def test_hostile_lines_are_refused_one_by_one(
    hostile: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of a line is a record that can be stored, listed and judged, or it is refused by number."""
    file = tmp_path / "h200.jsonl"
    file.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *(line.replace(b"\n", b" ") for line in hostile)]) + b"\n")
    found = [shipped.of_use(line) for _, line in shipped.lines(file)]
    refused = [line for line in found if isinstance(line, str)]
    taken = {line.key.id: line for line in found if not isinstance(line, str)}
    assert a_record().key.id in taken
    assert all(reason and reason.isprintable() for reason in refused)
    monkeypatch.setattr(paths, "SHIPPED_CACHE", tmp_path)
    with warnings.catch_warnings(record=True) as told, Store(sqlite.in_memory(), MEMORY, writable=False) as store:
        warnings.simplefilter("always", CacheWarning)
        import_shipped(store)
        assert {record.key.id for record in store.records()} == set(taken)
        for record in store.records():
            validity.why_stale(record)
            assert store.get(record.key) == record
    assert sum("is skipped" in str(warning.message) for warning in told) == len(refused)


@pytest.mark.parametrize("operator", ["gemm", "attention", "vector_add"])
@pytest.mark.parametrize("value", [0, -1, 10**9, True, *HOSTILE])
def test_a_config_with_a_hostile_value_is_stale_and_emits_nothing(operator: str, value: Any) -> None:
    from tlxgen import devices
    from tlxgen.db.record import tuning_key
    from tlxgen.space.candidates import candidates

    shape = {"gemm": (512, 512, 512), "attention": (1, 8, 128, 64), "vector_add": (4096,)}[operator]
    problem = ops.get(operator).problem(shape)
    favourites = {config.template: config for config in candidates(problem, devices.target("h200"))}
    for config in favourites.values():
        for name in config.params:
            bad = Config(template=config.template, params={**config.params, name: value})
            key = tuning_key(problem, devices.target("h200").key)
            if isinstance(value, str) and not value.isprintable():
                with pytest.raises(ValueError, match="cannot be printed"):
                    a_record(key=key, config=bad)
                continue
            reason = validity.why_other_code(a_record(key=key, config=bad))
            assert reason is not None
