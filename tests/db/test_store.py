"""What the database of tuned configs promises, whatever happens to its file."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlxgen.config import Config
from tlxgen.db import sqlite
from tlxgen.db.record import SCHEMA_VERSION, Trial, TunedRecord, TuningKey
from tlxgen.db.store import MEMORY, CacheWarning, Store
from tlxgen.devices import DeviceKey
from tlxgen.errors import CacheError

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
H200 = DeviceKey(gpu="h200", sm_count=132, capability="9.0")
TOOLCHAIN = "fbtriton 3.7.4, ptxas 12.9.86"


def a_key(m: int = 4096, **changes: Any) -> TuningKey:
    fields = {"operator": "gemm", "problem": {"m": m, "n": 4096}, "device": H200, "toolchain": TOOLCHAIN}
    return TuningKey.model_validate({**fields, **changes})


def a_record(m: int = 4096, block: int = 128, **changes: Any) -> TunedRecord:
    fields: dict[str, Any] = {
        "key": a_key(m),
        "config": Config(template="gemm_tma", params={"block_m": block, "persistent": True}),
        "origin": "measured",
        "source_hash": "c0de",
        "time_us": 100.0,
        "protocol": "1",
        "created": NOON,
    }
    return TunedRecord.model_validate({**fields, **changes})


def a_trial(block: int = 128, **changes: Any) -> Trial:
    config = Config(template="gemm_tma", params={"block_m": block})
    fields = {"config": config, "source_hash": "c0de", "status": "ok", "time_us": 5.0, "protocol": "1", "created": NOON}
    return Trial.model_validate({**fields, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"


@pytest.fixture
def store(file: Path) -> Iterator[Store]:
    with Store.open(file) as opened:
        yield opened


def in_memory() -> Store:
    return Store(sqlite.in_memory(), MEMORY, writable=False)


def edit(file: Path, sql: str, *values: Any) -> None:
    connection = sqlite3.connect(file)
    with connection:
        connection.execute(sql, values)
    connection.close()


def opened_with_one_warning(path: Path | None = None) -> tuple[Store, str]:
    with pytest.warns(CacheWarning) as caught:
        opened = Store.open(path)
    assert len(caught) == 1
    return opened, str(caught[0].message)


# Round trips.

texts = st.text(st.just(" ") | st.characters(exclude_categories=["C", "Z"]), max_size=12)  # what records take
positive = st.floats(min_value=1e-300, max_value=1e299)
not_negative = st.floats(min_value=0, max_value=1e299)
integers = st.integers(min_value=1, max_value=2**63 - 1)
values = st.booleans() | st.integers() | texts
devices = st.builds(DeviceKey, gpu=texts, sm_count=integers, capability=texts)
problems = st.dictionaries(texts, st.one_of(values, st.none(), st.lists(st.integers(), max_size=3)), max_size=4)
keys = st.builds(TuningKey, operator=texts, problem=problems, device=devices, toolchain=texts)
configs = st.builds(Config, template=texts, params=st.dictionaries(texts, values, max_size=5))
moments = st.datetimes(min_value=datetime(2000, 1, 1), timezones=st.just(timezone.utc))  # noqa: DTZ001
records = st.builds(
    TunedRecord,
    key=keys,
    config=configs,
    origin=st.sampled_from(["measured", "predicted"]),
    source_hash=texts,
    time_us=positive,
    spread_us=not_negative,
    peer=st.none() | texts,
    peer_us=st.none() | positive,
    error=st.none() | not_negative,
    error_peer=st.none() | not_negative,
    protocol=texts,
    versions=st.dictionaries(texts, texts, max_size=3),
    trials=integers,
    created=moments,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(records)
def test_any_record_comes_back_as_it_was_put(record: TunedRecord) -> None:
    with in_memory() as store:
        assert store.put(record)
        found = store.get(record.key)
    assert found == record
    assert found is not None
    assert found.config.params == record.config.params
    assert [type(value) for value in found.config.params.values()] == [type(v) for v in record.config.params.values()]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(keys, configs, texts, positive)
def test_any_trial_comes_back_as_it_was_added(key: TuningKey, config: Config, text: str, time_us: float) -> None:
    tried = Trial(config=config, source_hash=text, status="ok", time_us=time_us, protocol=text, message=text)
    failed = Trial(config=config, source_hash=text + "x", status="hang", protocol=text, message=text)
    with in_memory() as store:
        store.add_trial(key, tried)
        store.add_trial(key, failed)
        assert store.trials(key) == [tried, failed]


@given(keys, st.data())
def test_every_field_of_a_key_changes_its_id(key: TuningKey, data: st.DataObject) -> None:
    fields = {"operator": texts, "problem": problems, "device": devices, "toolchain": texts}
    name = data.draw(st.sampled_from(sorted(fields)))
    other = key.model_copy(update={name: data.draw(fields[name])})
    other = TuningKey.model_validate(other.model_dump())
    same = json.dumps(key.model_dump(), sort_keys=True) == json.dumps(other.model_dump(), sort_keys=True)
    assert (key.id == other.id) is same


@pytest.mark.parametrize(
    "changes",
    [
        {"operator": "attention"},
        {"problem": {"m": 4096, "n": 8192}},
        {"problem": {"m": 4096, "n": 4096, "dtype": "bf16"}},
        {"device": H200.model_copy(update={"gpu": "h100"})},
        {"device": H200.model_copy(update={"sm_count": 114})},
        {"device": H200.model_copy(update={"capability": "10.0"})},
        {"toolchain": "fbtriton 3.7.5+gitdeadbeef, ptxas 12.9.86"},
    ],
)
def test_a_row_is_found_under_its_own_key_only(store: Store, changes: dict[str, Any]) -> None:
    store.put(a_record())
    assert store.get(a_key()) is not None
    assert store.get(a_key(**changes)) is None


# Which row stays.


def test_a_predicted_record_never_displaces_a_measured_one(store: Store) -> None:
    assert store.put(a_record(origin="predicted"))
    assert store.put(a_record(time_us=200.0))
    assert not store.put(a_record(origin="predicted", time_us=1.0))
    assert store.get(a_key()) == a_record(time_us=200.0)


def test_the_tuner_s_word_replaces_even_a_faster_row(store: Store) -> None:
    store.put(a_record(time_us=1.0))
    assert store.put(a_record(time_us=2.0, created=NOON - timedelta(days=1)))
    assert store.get(a_key()) == a_record(time_us=2.0, created=NOON - timedelta(days=1))


FASTER: dict[str, Any] = {"time_us": 50.0, "created": NOON - timedelta(days=1)}
NEWER: dict[str, Any] = {"time_us": 150.0, "created": NOON + timedelta(days=1)}


@pytest.mark.parametrize(
    ("policy", "change", "stored"),
    [
        ("faster", FASTER, 1),
        ("faster", NEWER, 0),
        ("newer", FASTER, 0),
        ("newer", NEWER, 1),
        ("newer", {"created": datetime(2026, 1, 2)}, 1),  # noqa: DTZ001  # a time without a zone is taken as UTC
        ("keep", FASTER, 0),
        ("keep", NEWER, 0),
        ("faster", {"origin": "predicted", "time_us": 1.0}, 0),
    ],
)
def test_merge_policies(
    store: Store, policy: Literal["faster", "newer", "keep"], change: dict[str, Any], stored: int
) -> None:
    store.put(a_record())
    assert store.merge([a_record(**change), a_record(m=1)], policy, "user") == stored + 1
    assert (store.get(a_key()) != a_record()) is bool(stored)


@pytest.mark.parametrize("policy", ["faster", "newer", "keep"])
def test_measured_beats_predicted_under_every_policy(store: Store, policy: Literal["faster", "newer", "keep"]) -> None:
    store.put(a_record(origin="predicted", time_us=1.0, created=NOON + timedelta(days=9)))
    assert store.merge([a_record()], policy, "user") == 1


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(records, max_size=4), st.sampled_from(["faster", "newer", "keep"]))
def test_merging_twice_changes_nothing(rows: list[TunedRecord], policy: Literal["faster", "newer", "keep"]) -> None:
    with in_memory() as store:
        store.merge(rows, policy, "user")
        before = store.records()
        assert store.merge(rows, policy, "user") == 0
        assert store.records() == before


def test_shipped_rows_never_displace_what_the_user_measured(store: Store) -> None:
    store.put(a_record())
    assert store.merge([a_record(**NEWER)], "newer", "shipped") == 0
    assert store.merge([a_record(m=1)], "newer", "shipped") == 1
    assert store.merge([a_record(m=1, **NEWER)], "newer", "shipped") == 1  # one shipped row and the next


def test_a_merge_is_all_or_nothing(store: Store) -> None:
    with pytest.raises(CacheError, match="finite times"):
        store.merge([a_record(m=1), a_record(m=2).model_copy(update={"time_us": 1e305})], "faster", "user")
    assert store.records() == []


# Rows that cannot be served.


@pytest.mark.parametrize(
    "assignment",
    [
        "config = '{'",
        "config = 'null'",
        'config = \'{"template": "x", "params": {"a": 1.5}}\'',
        'config = \'{"template": "x", "params": {}, "later": 1}\'',
        "problem = 'not json'",
        "problem = '{\"m\": 1}'",  # of another key
        "sm_count = 66",  # of another key
        "versions = '[]'",
        "created = 'yesterday'",
    ],
)
def test_a_defective_row_is_a_miss_with_a_warning(store: Store, file: Path, assignment: str) -> None:
    store.put(a_record())
    store.put(a_record(m=1))
    edit(file, f"UPDATE tuned SET {assignment} WHERE key_id = ?", a_key().id)
    with pytest.warns(CacheWarning, match="prune"):
        assert store.records() == [a_record(m=1)]
    with pytest.warns(CacheWarning, match=a_key().id):
        assert store.get(a_key()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get(a_key()) is None  # marked bad, so told once
    assert list(store.defective()) == [a_key().id]
    assert store.put(a_record())
    assert store.get(a_key()) == a_record()


def test_a_bad_row_is_kept_and_not_served(store: Store, file: Path) -> None:
    store.put(a_record())
    store.mark_bad(a_key(), "needs 400 KB of shared memory")
    with Store.open(file) as later:
        assert later.get(a_key()) is None
        assert later.records() == []
        assert later.defective() == {a_key().id: "needs 400 KB of shared memory"}


def test_only_other_code_or_a_measurement_revives_a_bad_row(store: Store) -> None:
    store.put(a_record())
    store.mark_bad(a_key(), "hangs")
    assert store.merge([a_record(**NEWER)], "newer", "user") == 0
    assert not store.put(a_record(origin="predicted"))
    assert store.put(a_record(origin="predicted", block=64))
    store.mark_bad(a_key(), "hangs too")
    assert store.put(a_record())
    assert store.get(a_key()) == a_record()


POSITIVE = ["0", "-1", "9e999", "1e300", "'fast'"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("time_us", value) for value in [*POSITIVE, "NULL"]),
        *(("peer_us", value) for value in POSITIVE),
        ("spread_us", "-1"),
        ("error", "-0.1"),
        ("error_peer", "9e999"),
        ("sm_count", "0"),
        ("trials", "-1"),
        ("origin", "'guessed'"),
        ("source", "'friend'"),
        ("key_id", "'short'"),
        ("config", "NULL"),
    ],
)
def test_impossible_rows_are_refused_by_the_file_itself(store: Store, file: Path, column: str, value: str) -> None:
    store.put(a_record())
    with pytest.raises(sqlite3.IntegrityError):
        edit(file, f"UPDATE tuned SET {column} = {value}")


@pytest.mark.parametrize("time_us", ["0", "-1", "9e999", "NULL"])
def test_no_trial_is_ok_without_a_finite_time(store: Store, file: Path, time_us: str) -> None:
    store.add_trial(a_key(), a_trial())
    with pytest.raises(sqlite3.IntegrityError):
        edit(file, f"UPDATE trials SET time_us = {time_us}")
    with pytest.raises(CacheError, match="finite times"):
        store.add_trial(a_key(), a_trial(time_us=None))


# Trials, misses, removal.


def test_trials_are_kept_apart_by_code_and_protocol(store: Store) -> None:
    failed = a_trial(64, status="out_of_resources", time_us=None, message="needs 400 KB")
    other_code, other_protocol = a_trial(source_hash="0th3r"), a_trial(protocol="2")
    for trial in (a_trial(), failed, other_code, other_protocol):
        store.add_trial(a_key(), trial)
    assert store.trials(a_key()) == [a_trial(), failed, other_code, other_protocol]
    assert store.trials(a_key(), protocol="2") == [other_protocol]
    assert store.trials(a_key(m=1)) == []
    store.add_trial(a_key(), a_trial(time_us=4.0))
    assert a_trial() not in store.trials(a_key())


def test_a_trial_may_take_the_place_of_one_of_another_protocol(store: Store) -> None:
    others = [a_trial(protocol="rough", source_hash="0th3r"), a_trial(64, protocol="rough"), a_trial(protocol="2")]
    for trial in (a_trial(protocol="rough"), *others):
        store.add_trial(a_key(), trial)
    store.add_trial(a_key(m=1), a_trial(protocol="rough"))
    store.add_trial(a_key(), a_trial(), instead_of="rough")
    assert store.trials(a_key()) == [*others, a_trial()], "that of the same config and code alone"
    assert store.trials(a_key(m=1)) == [a_trial(protocol="rough")]


def test_a_trial_that_is_refused_takes_no_place(store: Store) -> None:
    store.add_trial(a_key(), a_trial(protocol="rough"))
    with pytest.raises(CacheError, match="finite times"):
        store.add_trial(a_key(), a_trial(time_us=None), instead_of="rough")
    assert store.trials(a_key()) == [a_trial(protocol="rough")]


def test_a_kill_loses_no_trial(file: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from tlxgen.db.record import Trial, TuningKey\n"
        "from tlxgen.db.store import Store; store = Store.open(Path(sys.argv[1]))\n"
        "store.add_trial(TuningKey.model_validate_json(sys.argv[2]), Trial.model_validate_json(sys.argv[3]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    arguments = [str(file), a_key().model_dump_json(), a_trial().model_dump_json()]
    assert subprocess.run([sys.executable, "-c", script, *arguments], check=False).returncode == -9
    with Store.open(file) as store:
        assert store.trials(a_key()) == [a_trial()]


def test_misses_are_counted_until_the_problem_is_tuned(store: Store) -> None:
    for m in (1, 2, 2):
        store.note_untuned(a_key(m))
    assert store.untuned() == [(a_key(2), 2), (a_key(1), 1)]
    store.put(a_record(m=2))
    assert store.untuned() == [(a_key(1), 1)]


def test_delete_forgets_a_row_and_its_trials(store: Store) -> None:
    store.put(a_record())
    store.put(a_record(m=1))
    store.add_trial(a_key(), a_trial())
    assert store.delete([a_key(), a_key(m=1).id, a_key(m=2)]) == 2
    assert store.records() == []
    assert store.trials(a_key()) == []


def test_records_are_filtered_and_sorted(store: Store) -> None:
    h100 = a_key(device=H200.model_copy(update={"gpu": "h100"}))
    other = a_key(operator="attention")
    for record in (a_record(), a_record(key=h100), a_record(key=other, origin="predicted")):
        store.put(record)
    assert [record.key for record in store.records()] == [other, h100, a_key()]
    assert [record.key for record in store.records(gpu="h100")] == [h100]
    assert [record.key for record in store.records(operator="gemm", gpu="h200")] == [a_key()]
    assert [record.key for record in store.records(origin="predicted")] == [other]
    assert store.records(operator="'; DROP TABLE tuned; --") == []


# The file.


def test_the_file_uses_wal_and_the_current_schema(store: Store, file: Path) -> None:
    assert (store.writable, store.location) == (True, str(file))
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    connection.close()
    assert len(sqlite._MIGRATIONS) == SCHEMA_VERSION


def test_the_default_place_is_the_user_s_cache_which_is_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TLXGEN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    with Store.open() as store:
        assert store.location == str(tmp_path / "a" / "b" / "tlxgen" / "tuned.db")
        assert store.writable


def test_tlxgen_cache_names_another_place(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("TLXGEN_CACHE", str(file.parent))
    with Store.open() as store:
        assert store.location == str(file)


MANY = """
import multiprocessing, sys
from pathlib import Path
from tlxgen.db.record import TunedRecord, TuningKey
from tlxgen.db.store import Store

def work(number, start, path, text):
    base = TunedRecord.model_validate_json(text)
    start.wait()
    with Store.open(path, read_only_ok=number % 2 == 0) as store:
        assert store.writable
        for step in range(10):
            key = TuningKey(**{**base.key.model_dump(), "problem": {"number": number, "step": step}})
            assert store.put(base.model_copy(update={"key": key})) and store.get(key) is not None
            store.note_untuned(base.key)

context = multiprocessing.get_context("fork")
for round in range(3):
    start = context.Barrier(16)
    path = Path(sys.argv[1]) / f"{round}.db"
    workers = [context.Process(target=work, args=(n, start, path, sys.argv[2])) for n in range(16)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert all(worker.exitcode == 0 for worker in workers)
"""


def test_sixteen_processes_create_one_file_at_once_and_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", MANY, str(tmp_path), a_record().model_dump_json()]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for number in range(3):
        connection = sqlite3.connect(tmp_path / f"{number}.db")
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM tuned").fetchone() == (160,)
        connection.close()


def test_threads_share_a_store(store: Store) -> None:
    def work(thread: int) -> None:
        for step in range(10):
            store.put(a_record(m=1 + 100 * thread + step))
            assert store.get(a_key(m=1 + 100 * thread + step)) is not None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.records()) == 80


class Holder:
    """Another program that has the file to itself."""

    def __init__(self, file: Path, journal: str) -> None:
        self.connection = sqlite3.connect(file, isolation_level=None)
        self.connection.execute(f"PRAGMA journal_mode={journal}")
        self.connection.execute("BEGIN EXCLUSIVE")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.5)
    monkeypatch.setattr(sqlite, "IMPATIENT_SECONDS", 0.05)


def test_a_writer_elsewhere_does_not_keep_readers_out(file: Path, impatient: None) -> None:
    Store.open(file).close()
    edit(file, "INSERT INTO untuned VALUES ('x', ?, 1, '')", a_key(m=9).model_dump_json())
    holder = Holder(file, "wal")
    with Store.open(file) as store:
        assert store.writable
        assert store.get(a_key()) is None
        start = time.monotonic()
        store.note_untuned(a_key())
        assert time.monotonic() - start < 0.45
        with pytest.raises(CacheError, match="another process holds it"):
            store.put(a_record())
        assert store.untuned() == [(a_key(m=9), 1)]
        with pytest.warns(CacheWarning, match="in this process only"):
            store.mark_bad(a_key(), "hangs")
    holder.connection.close()


def test_a_file_that_never_comes_free_is_replaced_by_memory(file: Path, impatient: None) -> None:
    Store.open(file).close()
    holder = Holder(file, "delete")
    with pytest.raises(CacheError, match="locked"):
        Store.open(file, read_only_ok=False)
    store, told = opened_with_one_warning(file)
    assert (store.location, store.writable) == (MEMORY, False)
    assert "locked" in told
    store.close()
    holder.connection.close()


def test_a_miss_where_the_lock_is_not_given_in_time(file: Path, impatient: None) -> None:
    with Store.open(file) as store:
        store._db.conn.execute("PRAGMA journal_mode=DELETE")
        holder = Holder(file, "delete")
        with pytest.warns(CacheWarning, match="locked"):
            assert store.get(a_key()) is None
        holder.connection.close()


def refusing_to_write(monkeypatch: pytest.MonkeyPatch, *, without_immutable: bool = True) -> None:
    """Connections as they are where the file cannot be written, whoever runs the tests."""
    real = sqlite.connect

    def connect(target: str, *, uri: bool = False) -> Any:
        if not uri and target != MEMORY:
            if not Path(target).exists():
                raise sqlite3.OperationalError("unable to open database file")
            return real(f"file:{target}?mode=ro", uri=True)
        if not without_immutable and "immutable" not in target and target != MEMORY:
            raise sqlite3.OperationalError("unable to open database file")
        return real(target, uri=uri)

    monkeypatch.setattr(sqlite, "connect", connect)


@pytest.mark.parametrize("without_immutable", [True, False])
def test_a_file_that_cannot_be_written_is_read(
    monkeypatch: pytest.MonkeyPatch, file: Path, without_immutable: bool
) -> None:
    with Store.open(file) as store:
        store.put(a_record())
    before = file.read_bytes()
    refusing_to_write(monkeypatch, without_immutable=without_immutable)
    with pytest.raises(CacheError, match="readonly database; set TLXGEN_CACHE"):
        Store.open(file, read_only_ok=False)
    store, told = opened_with_one_warning(file)
    assert (store.location, store.writable) == (str(file), False)
    assert "TLXGEN_CACHE" in told
    assert store.get(a_key()) == a_record()
    store.mark_bad(a_key(), "hangs")  # holds for this process
    assert store.get(a_key()) is None
    store.note_untuned(a_key(m=1))
    store.close()
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir() if "-journal" in path.name] == []


def test_nothing_can_be_created_there(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    refusing_to_write(monkeypatch)
    store, told = opened_with_one_warning(file)
    assert (store.location, store.writable) == (MEMORY, False)
    assert "TLXGEN_CACHE" in told
    assert store.put(a_record())
    assert store.get(a_key()) == a_record()
    store.close()


def test_a_full_disk_is_told_before_tuning_starts(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    real = sqlite.connect

    def connect(target: str, *, uri: bool = False) -> Any:
        db = real(target, uri=uri)
        if target == str(file):
            db.conn.execute("PRAGMA max_page_count = 1")
        return db

    monkeypatch.setattr(sqlite, "connect", connect)
    with pytest.raises(CacheError, match="full"):
        Store.open(file, read_only_ok=False)
    store, _ = opened_with_one_warning(file)
    assert store.location == MEMORY
    store.close()


def test_a_missing_directory_is_told_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "not mounted" / "tuned.db"))
    with pytest.raises(CacheError, match="does not exist"):
        Store.open(read_only_ok=False)
    store, told = opened_with_one_warning()
    assert store.location == MEMORY
    assert "TLXGEN_CACHE" in told
    assert list(tmp_path.iterdir()) == []
    store.close()


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "TLXGEN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)


@pytest.mark.parametrize("override", [None, "~/tuned.db"])
def test_without_a_home_nothing_lands_in_the_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, override: str | None
) -> None:
    no_home(monkeypatch)
    if override:
        monkeypatch.setenv("TLXGEN_CACHE", override)
    monkeypatch.chdir(tmp_path)
    store, told = opened_with_one_warning()
    assert store.location == MEMORY
    assert "TLXGEN_CACHE" in told
    with pytest.raises(CacheError, match="TLXGEN_CACHE"):
        Store.open(read_only_ok=False)
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_home_is_the_root_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("XDG_CACHE_HOME", "TLXGEN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(Path, "mkdir", refused)
    store, told = opened_with_one_warning()
    assert store.location == MEMORY
    assert "/.cache/tlxgen" in told
    store.close()


class WithoutWal(sqlite3.Connection):
    """SQLite on a file system that shares no memory among processes."""

    answer = "refused"

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql.lower().endswith("journal_mode=wal"):
            if self.answer == "refused":
                raise sqlite3.OperationalError("locking protocol")
            sql = "PRAGMA journal_mode"
        return super().execute(sql, *parameters)


@pytest.mark.parametrize("answer", ["refused", "delete"])
def test_where_wal_does_not_work_the_plain_journal_does(
    monkeypatch: pytest.MonkeyPatch, file: Path, answer: str
) -> None:
    monkeypatch.setattr(WithoutWal, "answer", answer)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=WithoutWal))
    with pytest.warns(CacheWarning, match="TLXGEN_CACHE"):
        store = Store.open(file, read_only_ok=False)
    assert store.writable
    assert store._db.conn.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    store.put(a_record())
    assert store.get(a_key()) == a_record()
    store.close()


def test_damage_found_later_is_a_miss(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(file) as store:
        store.put(a_record())
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    monkeypatch.setattr(sqlite, "_refuse_damaged", lambda db: None)  # it comes after the look at the whole file
    with Store.open(file) as store, pytest.warns(CacheWarning, match="TLXGEN_CACHE"):
        assert store.get(a_key()) is None


def test_a_snapshot_neither_changes_nor_follows_the_file(store: Store, file: Path) -> None:
    store.put(a_record())
    with Store.snapshot(file) as copy:
        assert copy.records() == [a_record()]
        assert not copy.writable
        copy.delete([a_key()])
    assert store.records() == [a_record()]
    with pytest.raises(CacheError, match="cannot be read"):
        Store.snapshot(file.with_name("missing.db"))
    assert not file.with_name("missing.db").exists()


def test_a_closed_store_refuses(file: Path) -> None:
    store = Store.open(file)
    store.close()
    store.close()
    with pytest.raises(CacheError):
        store.put(a_record())
