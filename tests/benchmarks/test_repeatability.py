"""The repeatability benchmark, whole, on the stub card: each part writes what it found, and what it says follows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable

from benchmarks import repeatability
from benchmarks.load import Load, beside
from benchmarks.repeatability import orders, shipped_config, strangers, top
from tlxgen import devices, ops, paths
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.shipped import dump
from tlxgen.errors import TuningError
from tlxgen.space.candidates import candidates
from tlxgen.tuner import gpu_lock, tune
from tlxgen.tuner.timing import Timing

H200 = devices.target("h200")
LABEL = "gemm 512 4096 4096 bf16 nn"
HEALTHY = stub_card.healthy(20)

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Run:
    """Runs one part of the script in this process, on stub cards; what it wrote."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv(stub_card.NOTES, str(tmp_path / "notes"))
    stub_card.install(monkeypatch.setattr, HEALTHY)
    monkeypatch.setattr(repeatability, "Child", stub_card.StubChild)
    monkeypatch.setattr(repeatability, "candidates", lambda *_: HEALTHY)
    monkeypatch.setattr(repeatability, "emit", stub_card.emit)
    monkeypatch.setattr(repeatability, "LOADS", {"none": None, "steady": Load(0.0, device="cpu", size=32)})
    monkeypatch.setattr(devices, "uuid", lambda: "stub")
    counts = iter([1, 1, 2])
    monkeypatch.setattr(gpu_lock, "other_processes", lambda _: next(counts))

    def run(part: str, *words: str, problem: str = LABEL) -> dict[str, Any]:
        output = tmp_path / "results"
        argv = ["repeatability", "--only", part, "--problem", problem, "-o", str(output), *words]
        monkeypatch.setattr(sys, "argv", argv)
        repeatability.main()
        (path,) = output.glob(f"*-repeatability-{part}-*-h200.json")
        written: dict[str, Any] = json.loads(path.read_text())
        return written

    return run


def timing(*samples: float, peer_us: float = 100.0) -> Timing:
    middle = sorted(samples)[len(samples) // 2]
    return Timing(middle, 0.0, peer_us, samples, (peer_us,) * len(samples))


class TestTunings:
    def test_start_from_nothing_and_meet_in_one_measurement(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shipped = stub_card.config(150)
        monkeypatch.setattr(repeatability, "shipped_config", lambda *_: shipped)
        written = run("tunings", "--repeats", "2", "--trials", "12")
        first, second, known = written["rows"]
        assert [first["seed"], second["seed"], known["kind"]] == [0, 1, "shipped"]
        for entry in (first, second):
            assert (entry["tried"], entry["failures"], entry["disturbed"]) == (12, {}, "")
            assert entry["config"] == HEALTHY[0].model_dump()
            assert (entry["time_us"], entry["common_us"], entry["to_best"]) == (120.0, 120.0, 1.0)
        assert (known["config"], known["to_best"]) == (shipped.model_dump(), 1.25)
        assert (written["worst"], written["mean"], written["lost"], written["sampler"]) == (1.0, 1.0, 0, "tpe")
        assert "worst 1.0000, geometric mean 1.0000" in capsys.readouterr().out

    def test_have_one_process_own_the_card(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        children = []

        class Counted(stub_card.StubChild):  # type: ignore[misc] # see the import
            def _start(self) -> None:
                children.append(self)
                super()._start()

        monkeypatch.setattr(repeatability, "Child", Counted)
        run("tunings", "--repeats", "3", "--trials", "8")
        assert len(children) == 1
        assert not children[0].alive

    def test_differ_by_their_ratio_to_the_best_of_them(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        spaces = iter([HEALTHY[6:], HEALTHY[:6], HEALTHY[12:]])
        monkeypatch.setattr(tune, "candidates", lambda *_: next(spaces))
        written = run("tunings", "--repeats", "3", "--trials", "8")
        assert [entry["to_best"] for entry in written["rows"]] == [1.05, 1.0, 1.1]
        assert (written["worst"], written["mean"]) == (1.1, 1.0492)

    def test_are_written_one_by_one(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spaces = iter([HEALTHY, [stub_card.config(50, "compile ptxas")]])
        monkeypatch.setattr(tune, "candidates", lambda *_: next(spaces))
        with pytest.raises(TuningError):
            run("tunings", "--trials", "8")
        (path,) = (tmp_path / "results").iterdir()
        assert [entry["seed"] for entry in json.loads(path.read_text())["rows"]] == [0]

    def test_that_no_longer_pass_the_gate_are_lost_and_not_forgotten(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = stub_card.config(120, "gate memory")
        emitted = {HEALTHY[0]: stub_card.emit(ops.get("gemm"), None, broken)}
        monkeypatch.setattr(
            repeatability, "emit", lambda op, problem, one: emitted.get(one) or stub_card.emit(op, problem, one)
        )
        monkeypatch.setattr(repeatability, "shipped_config", lambda *_: HEALTHY[1])
        written = run("tunings", "--repeats", "2", "--trials", "8")
        assert [entry["to_best"] for entry in written["rows"]] == [None, None, 1.0]
        assert (written["worst"], written["mean"], written["lost"]) == (None, None, 2)


class TestShippedConfig:
    def test_is_the_measured_row_that_comes_with_tlxgen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paths, "SHIPPED_CACHE", tmp_path)
        problem = ops.get("gemm").problem((512, 4096, 4096))
        assert shipped_config(problem, H200) is None
        config = candidates(problem, H200)[0]
        record = TunedRecord(
            key=tuning_key(problem, H200.key),
            config=config,
            origin="measured",
            source_hash="0" * 32,
            time_us=25.0,
            protocol="graph-2",
        )
        dump([record], tmp_path / "h200.jsonl")
        assert shipped_config(problem, H200) == config


class TestOrder:
    def test_the_top_three_are_named_for_each_order(self, run: Run) -> None:
        written = run("order")
        assert [entry["order"] for entry in written["rows"]] == [
            "forth",
            "again",
            "back",
            *(f"shuffled {i}" for i in range(3)),
        ]
        for entry in written["rows"]:
            assert entry["top"] == [config.short for config in HEALTHY[:3]]
            assert (entry["shared"], entry["strangers"]) == (3, [])
            assert sorted(entry["relative"].values()) == [round(1.2 + i / 100, 4) for i in range(16)]

    def test_orders_are_of_the_same_names(self) -> None:
        names = list("abcdefgh")
        found = dict(orders(names))
        assert all(sorted(order) == names for order in found.values())
        assert len({tuple(order) for order in found.values()}) == len(found) - 1, "the first of them twice"

    def test_a_stranger_is_one_that_noise_does_not_explain(self) -> None:
        first = {name: timing(*[us] * 31) for name, us in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0, "e": 4.0}.items()}
        other = {**first, "d": timing(*[0.5] * 31), "e": timing(*[0.4] * 31)}
        assert top(other) == ["e", "d", "a"]
        assert strangers(first, other) == ["e"], "d is as fast as the first's third"
        assert strangers(first, first) == []


class TestContention:
    def test_is_measured_alone_and_in_company(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(repeatability, "MEASUREMENTS", 3)
        written = run("contention")
        assert [(entry["load"], entry["turn"]) for entry in written["rows"]] == [
            (load, turn) for load in ("none", "steady") for turn in range(3)
        ]
        quiet, loaded = written["summary"]["none"], written["summary"]["steady"]
        assert quiet == {"spread": [0.0] * 3, "told_by_spread": 0, "told": 0, "of": 3, "shift": 0.0, "cost": 0.0}
        assert loaded == {**quiet, "told": 3}, "the stub's times stay; the driver counts one process more"
        assert written["rows"][-1]["told"] == "1 process(es) began to compute on this GPU meanwhile"
        assert len(written["configs"]) == 8

    def test_says_what_choosing_by_such_times_would_cost(self) -> None:
        quiet = {"a": 1.0, "b": 1.02}
        samples = (80.0, 100.0, 100.0, 160.0)
        found = {"a": Timing(110.0, 0.0, 100.0, (), samples), "b": Timing(102.0, 0.0, 100.0, (), samples)}
        entry = repeatability._contention_row(found, quiet, newcomers=0)
        assert (entry["shift"], entry["cost"], entry["peer_spread"]) == (0.1, 0.02, 0.6)
        assert entry["told"] == entry["told_by_spread"] == "the library's own times scatter by 60%"


def test_a_load_lasts_until_it_is_taken_away() -> None:
    with beside(Load(0.01, device="cpu", size=16)):
        pass
    with pytest.raises(RuntimeError, match="did not begin"), beside(Load(0.01, device="nowhere", size=16, begin_s=0.1)):
        pass


def test_all_parts_of_the_default_problems_run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(repeatability, "MEASUREMENTS", 1)
    monkeypatch.setattr(gpu_lock, "other_processes", lambda _: 1)
    monkeypatch.setattr(sys, "argv", ["repeatability", "--repeats", "1", "--trials", "8", "-o", str(tmp_path / "all")])
    repeatability.main()
    assert len(list((tmp_path / "all").iterdir())) == len(repeatability.LABELS) * len(repeatability.PARTS)
