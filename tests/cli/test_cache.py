"""`tlxgen cache`."""

from __future__ import annotations

import functools
import json
import sqlite3
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import records
from tests.support.records import NOON, problem_of
from tlxgen import paths
from tlxgen.cli.cache import app
from tlxgen.db.record import Trial, TunedRecord
from tlxgen.db.shipped import dump, load
from tlxgen.db.store import MEMORY, Store
from tlxgen.errors import CacheError, TlxgenError

a_record = functools.partial(records.a_record, peer="cublas", peer_us=104.0)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuned.db"
    monkeypatch.setenv("TLXGEN_CACHE", str(path))
    monkeypatch.setattr(paths, "SHIPPED_CACHE", tmp_path / "shipped")
    return path


def put(*records: TunedRecord, file: Path | None = None) -> None:
    with Store.open(file) as store:
        for record in records:
            store.put(record)


def kept() -> list[TunedRecord]:
    with Store.open() as store:
        return store.records()


def run(*arguments: Any, answer: str | None = None) -> SimpleNamespace:
    """Output, errors and status of a command."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(out=result.stdout, err=result.stderr, code=result.exit_code)


def refused(*arguments: Any) -> TlxgenError:
    with pytest.raises(TlxgenError) as told:
        run(*arguments)
    assert "\n" not in str(told.value)
    return told.value


def test_list_prints_one_line_per_row_into_a_pipe() -> None:
    put(a_record(1), a_record(2, "attention"), a_record(3, gpu="h100", peer=None, peer_us=None))
    lines = run("list").out.splitlines()
    assert len(lines) == 4
    assert lines[0].split() == ["key", "operator", "problem", "gpu", "config", "origin", "µs", "vs", "peer"]
    gemm = next(line for line in lines if a_record(1).key.id[:12] in line)
    for part in (
        "1 4096 4096 bf16 nn",
        "h200",
        "gemm_vanilla block_m=128 stages=4",
        "measured",
        "100.00",
        "1.040 cublas",
    ):
        assert part in gemm


def test_unknown_problem_is_shown_field_by_field() -> None:
    """A row of another version of tlxgen."""
    key = a_record(77).key.model_copy(update={"problem": {"m": 77, "layout": "nn"}})
    put(a_record(key=key))
    assert "layout=nn m=77" in run("list").out


def test_list_filters_and_prints_json() -> None:
    put(a_record(1), a_record(2, "attention"), a_record(3, gpu="h100"))
    (row,) = json.loads(run("list", "--operator", "gemm", "--gpu", "h200", "--json").out)
    assert (row["key_id"], row["time_us"], row["ratio"]) == (a_record(1).key.id, 100.0, 1.04)
    assert row["config_id"] == a_record(1).config.id
    assert run("list", "--operator", "nothing", "--json").out == "[]\n"


def test_empty_list_is_a_remark_on_stderr(file: Path) -> None:
    done = run("list")
    assert (done.out, done.code) == ("", 0)
    assert str(file) in done.err


def test_shipped_rows_are_listed(tmp_path: Path) -> None:
    (tmp_path / "shipped").mkdir()
    dump([a_record()], tmp_path / "shipped" / "h200.jsonl")
    assert a_record().key.id[:12] in run("list").out


def test_show_takes_a_unique_prefix() -> None:
    put(a_record(1), a_record(2))
    shown = json.loads(run("show", a_record(2).key.id[:8].upper()).out)
    assert shown["key"]["problem"] == problem_of(2)
    assert "give more digits" in str(refused("show", ""))
    unknown = refused("show", "feedfeed")
    assert "'feedfeed'" in str(unknown)
    assert unknown.exit_code == 2


def test_show_says_why_a_row_is_bad() -> None:
    put(a_record())
    with Store.open() as store:
        store.mark_bad(a_record().key, "needs 400 KB of shared memory")
    assert "400 KB" in str(refused("show", a_record().key.id))


def test_export_and_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(a_record(1), a_record(2), a_record(3, gpu="h100"))
    file = tmp_path / "h200.jsonl"
    assert "2 rows" in run("export", file, "--gpu", "h200").out
    assert load(file) == sorted([a_record(1), a_record(2)], key=lambda record: str(record.key.problem["M"]))
    monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "elsewhere.db"))
    assert "2 of 2 rows" in run("import", file).out
    assert [record.key for record in kept()] == [a_record(1).key, a_record(2).key]
    assert "0 of 2 rows" in run("import", file).out


def test_export_of_nothing_writes_nothing(tmp_path: Path) -> None:
    assert refused("export", tmp_path / "none.jsonl").exit_code == 2
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(("policy", "time_us"), [("faster", 50.0), ("newer", 100.0), ("keep", 100.0)])
def test_import_policies(tmp_path: Path, policy: str, time_us: float) -> None:
    put(a_record())
    dump([a_record(time_us=50.0, created=NOON - timedelta(days=1))], tmp_path / "rows.jsonl")
    run("import", tmp_path / "rows.jsonl", "--policy", policy)
    assert [record.time_us for record in kept()] == [time_us]


def test_unknown_policy_is_bad_input(tmp_path: Path) -> None:
    assert run("import", tmp_path / "rows.jsonl", "--policy", "best").code == 2


def test_import_refuses_bad_lines_and_takes_the_others(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    dump([a_record()], file)
    good = file.read_text()
    steering = good.replace("gemm_vanilla", "gemm\\u001b[2J")
    file.write_text("{}\n" + good + steering + "nonsense\n")
    result = run("import", file)
    assert result.code == 1
    assert "1 of 1 rows" in result.out
    assert "3 lines refused" in result.out
    told = result.err.splitlines()
    assert [line.split(" is refused: ")[0] for line in told] == [f"{file}, line {n}" for n in (1, 3, 4)]
    assert all(map(str.isprintable, told))
    assert kept() == [a_record()]
    assert refused("import", tmp_path / "missing.jsonl").exit_code == 2


def test_merge_reads_databases_and_json_lines_without_changing_them(tmp_path: Path) -> None:
    other, rows = tmp_path / "other", tmp_path / "rows"
    put(a_record(1, time_us=50.0), a_record(2, gpu="h100"), file=other)
    dump([a_record(3)], rows)
    put(a_record(1))
    before = other.read_bytes(), rows.read_bytes()
    assert "3 of 3 rows" in run("merge", other, rows, "--policy", "faster").out
    assert {record.key.device.gpu for record in kept()} == {"h100", "h200"}  # rows keep their own device
    assert (other.read_bytes(), rows.read_bytes()) == before
    broken = tmp_path / "broken"
    broken.write_bytes(b"SQLite format 3\0" + b"\xff" * 100)
    assert "cannot be read" in str(refused("merge", broken))


def test_prune_removes_defective_rows_only(file: Path) -> None:
    put(a_record(1), a_record(2), a_record(3))
    with Store.open() as store:
        store.mark_bad(a_record(1).key, "needs 400 KB of shared memory")
    connection = sqlite3.connect(file)
    with connection:
        connection.execute("UPDATE tuned SET config = '{' WHERE key_id = ?", (a_record(2).key.id,))
    connection.close()
    done = run("prune", "--yes")
    assert done.out == "2 rows removed\n"
    assert "400 KB" in done.err
    assert kept() == [a_record(3)]
    assert run("prune").out == "0 rows removed\n"


def test_prune_asks_first() -> None:
    put(a_record())
    with Store.open() as store:
        store.mark_bad(a_record().key, "hangs")
    assert run("prune", answer="n\n").code == 1
    with Store.open() as store:
        assert store.defective() != {}
    assert run("prune", answer="y\n").out.endswith("1 rows removed\n")


@pytest.fixture
def one_stale_row(monkeypatch: pytest.MonkeyPatch) -> TunedRecord:
    stale = a_record(1)
    put(stale, a_record(2))
    with Store.open() as store:
        store.add_trial(
            stale.key, Trial(config=stale.config, source_hash="c0de", status="ok", time_us=1.0, protocol="1")
        )

    def why_stale(record: TunedRecord) -> str | None:
        return "tuned with fbtriton 3.7.4" if record == stale else None

    monkeypatch.setattr("tlxgen.db.validity.why_stale", why_stale)
    return stale


def test_stale_lists_rows_and_reasons(one_stale_row: TunedRecord) -> None:
    table = run("stale").out
    assert one_stale_row.key.id[:12] in table
    assert "tuned with fbtriton 3.7.4" in table
    (row,) = json.loads(run("stale", "--json").out)
    assert (row["key_id"], row["stale"]) == (one_stale_row.key.id, "tuned with fbtriton 3.7.4")


def test_stale_rows_are_pruned_on_request(one_stale_row: TunedRecord) -> None:
    assert run("prune", "--yes").out == "0 rows removed\n"
    assert run("prune", "--stale", "--yes").out == "1 rows removed\n"
    assert kept() == [a_record(2)]
    with Store.open() as store:
        assert store.trials(one_stale_row.key) == []
    done = run("stale")
    assert (done.out, done.err) == ("", "no row is stale\n")


def test_untuned_lists_the_most_wanted_first() -> None:
    assert run("untuned").out == ""
    with Store.open() as store:
        for m in (1, 2, 2):
            store.note_untuned(a_record(m).key)
    lines = run("untuned").out.splitlines()
    assert [line.split()[0] for line in lines] == ["count", "2", "1"]
    rows = json.loads(run("untuned", "--json").out)
    assert [(row["problem"]["M"], row["count"]) for row in rows] == [(2, 2), (1, 1)]


def test_path_does_not_create_the_file(file: Path) -> None:
    assert run("path").out == f"{file}\n"
    assert not file.exists()


@pytest.mark.parametrize("command", [["import"], ["merge"], ["prune"]])
def test_commands_that_write_refuse_an_unwritable_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    dump([a_record()], tmp_path / "rows.jsonl")
    monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "missing" / "tuned.db"))
    files = [] if command == ["prune"] else [tmp_path / "rows.jsonl"]
    error = refused(*command, *files)
    assert isinstance(error, CacheError)
    assert "TLXGEN_CACHE" in str(error)


def test_commands_that_read_use_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "missing" / "tuned.db"))
    with pytest.warns(UserWarning, match="TLXGEN_CACHE"):
        assert MEMORY in run("list").err
