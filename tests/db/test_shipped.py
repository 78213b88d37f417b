"""The JSON-lines files that carry tuned configs: their bytes, and the way of the shipped ones into the database."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.records import NOON, a_record
from tlxgen import paths
from tlxgen.config import Config
from tlxgen.db import sqlite
from tlxgen.db.shipped import dump, import_shipped, load
from tlxgen.db.store import MEMORY, CacheWarning, Store
from tlxgen.errors import CacheError


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(sqlite.in_memory(), MEMORY, writable=False) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "SHIPPED_CACHE", tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump") / "rows.jsonl"


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.sampled_from(["gemm", "attention"]), st.floats(1e-300, 1e299)),
        unique_by=lambda row: row[:2],
        max_size=5,
    ),
    st.randoms(),
)
def test_the_same_rows_give_the_same_bytes_and_come_back(scratch: Path, rows: list[Any], random: Any) -> None:
    records = [a_record(m, operator, time_us=time_us) for m, operator, time_us in rows]
    dump(records, scratch)
    content = scratch.read_bytes()
    random.shuffle(records)
    dump(records, scratch)
    assert scratch.read_bytes() == content
    assert sorted(load(scratch), key=lambda r: r.key.id) == sorted(records, key=lambda r: r.key.id)


def test_one_compact_object_a_line_sorted_by_operator_and_problem(folder: Path) -> None:
    file = folder / "h200.jsonl"
    dump([a_record(2), a_record(1), a_record(3, "attention")], file)
    lines = file.read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert keys == [
        record.key.model_dump(mode="json") for record in (a_record(3, "attention"), a_record(1), a_record(2))
    ]
    assert lines[0] == json.dumps(json.loads(lines[0]), sort_keys=True, separators=(",", ":"))
    assert file.read_bytes().endswith(b"}\n")
    assert list(folder.iterdir()) == [file]


def test_the_order_of_a_config_s_parameters_does_not_matter(folder: Path) -> None:
    swapped = Config(template="gemm_vanilla", params={"block_m": 128, "stages": 4})
    dump([a_record()], folder / "a")
    dump([a_record(config=swapped)], folder / "b")
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()


@pytest.mark.parametrize(
    "line", ["{", "[]", "null", '{"key": 1}', '{"time_us": -1}', "\udcff", '{"surprise": true}', "NaN"]
)
def test_a_bad_line_is_named_by_its_number(folder: Path, line: str) -> None:
    file = folder / "h200.jsonl"
    dump([a_record()], file)
    file.write_bytes(file.read_bytes() + b"\n" + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(CacheError, match=r"h200\.jsonl, line 3: .*export the file again") as told:
        load(file)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("time_us", ["0", "-1", "Infinity", "NaN", "null"])
def test_no_impossible_time_comes_in(folder: Path, time_us: str) -> None:
    file = folder / "h200.jsonl"
    dump([a_record(time_us=123.5)], file)
    file.write_text(file.read_text().replace("123.5", time_us))
    with pytest.raises(CacheError, match=r"line 1: .*time_us"):
        load(file)


def test_files_that_cannot_be_read_or_written(folder: Path) -> None:
    with pytest.raises(CacheError, match="cannot be read"):
        load(folder / "missing.jsonl")
    with pytest.raises(CacheError, match="cannot be written"):
        dump([], folder / "missing" / "rows.jsonl")
    (folder / "taken").mkdir()
    with pytest.raises(CacheError, match="cannot be written"):
        dump([], folder / "taken")
    assert [path.name for path in folder.iterdir()] == ["taken"]


def test_every_shipped_file_is_imported_once(store: Store, folder: Path) -> None:
    dump([a_record(1), a_record(2)], folder / "h200.jsonl")
    dump([a_record(1, gpu="h100")], folder / "h100.jsonl")
    assert import_shipped(store) == 3
    assert store.get(a_record(1).key) == a_record(1)
    store.delete([a_record(1).key])
    assert import_shipped(store) == 0
    assert store.get(a_record(1).key) is None  # what the user removed stays removed


def test_a_file_of_new_content_is_imported_again(store: Store, folder: Path) -> None:
    dump([a_record(time_us=90.0)], folder / "h200.jsonl")
    import_shipped(store)
    better = a_record(time_us=80.0, created=NOON + timedelta(days=1))
    dump([better], folder / "h200.jsonl")
    assert import_shipped(store) == 1
    assert store.get(better.key) == better


@pytest.mark.parametrize(
    ("own", "shipped", "replaced"),
    [
        ({}, {"created": NOON + timedelta(days=1), "time_us": 1.0}, False),
        ({}, {"origin": "predicted", "created": NOON + timedelta(days=1)}, False),
        ({"origin": "predicted"}, {"origin": "predicted", "created": NOON - timedelta(days=1)}, False),
        ({"origin": "predicted"}, {"origin": "predicted", "created": NOON + timedelta(days=1)}, True),
        ({"origin": "predicted"}, {"created": NOON - timedelta(days=1)}, True),
    ],
)
def test_the_user_s_own_measured_or_newer_rows_stay(
    store: Store, folder: Path, own: dict[str, Any], shipped: dict[str, Any], replaced: bool
) -> None:
    store.put(a_record(**own))
    dump([a_record(**shipped)], folder / "h200.jsonl")
    assert import_shipped(store) == int(replaced)


def test_a_bad_line_costs_one_row_and_one_warning(store: Store, folder: Path) -> None:
    file = folder / "h200.jsonl"
    dump([a_record(1), a_record(2)], file)
    file.write_text("{}\n" + file.read_text())
    with pytest.warns(CacheWarning, match="line 1 is skipped") as caught:
        assert import_shipped(store) == 2
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert import_shipped(store) == 0


def test_nothing_shipped_is_no_error(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_shipped(store) == 0
    monkeypatch.setattr(paths, "SHIPPED_CACHE", folder / "missing")
    assert import_shipped(store) == 0


def test_a_database_that_refuses_is_a_warning(store: Store, folder: Path) -> None:
    dump([a_record()], folder / "h200.jsonl")
    store.close()
    with pytest.warns(CacheWarning, match="are not used"):
        assert import_shipped(store) == 0


def test_what_ships_with_this_version_is_sound(store: Store, tmp_path: Path) -> None:
    for file in paths.SHIPPED_CACHE.glob("*.jsonl"):
        records = load(file)
        assert {record.key.device.gpu for record in records} <= {file.stem}
        dump(records, tmp_path / file.name)
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
