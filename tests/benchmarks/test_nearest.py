"""The benchmark of `nearest`, whole, on the stub card: what is drawn, what is compared, and what it comes to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable

from benchmarks import nearest, repeatability, untuned
from benchmarks.nearest import Served, measured, problems, served, shipped_alone, shortfalls, summary
from tlxgen import devices, ops
from tlxgen.config import Config
from tlxgen.db.nearest import distance
from tlxgen.errors import GpuLostError
from tlxgen.problem import Problem
from tlxgen.runtime import selection
from tlxgen.tuner import compile_pool, tune
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.timing import Timing

H200 = devices.target("h200")
BEST, NEIGHBOUR, DEFAULT = stub_card.config(120), stub_card.config(130), stub_card.config(156)

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the script in this process, on stub cards; what it wrote. It exits with `code` at the end, if any."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv(stub_card.NOTES, str(tmp_path / "notes"))
    stub_card.install(monkeypatch.setattr, stub_card.healthy(8))
    monkeypatch.setattr(nearest, "Child", stub_card.StubChild)
    monkeypatch.setattr(nearest, "served", lambda *_: Served("nearest", NEIGHBOUR, "gemm 8 8 8 bf16 nn", 0.25))
    monkeypatch.setattr(nearest, "default_config", lambda *_: DEFAULT)
    monkeypatch.setattr(nearest, "emit", stub_card.emit)
    monkeypatch.setattr(repeatability, "emit", stub_card.emit)

    def run(*words: str, code: str = "") -> dict[str, Any]:
        output = tmp_path / "results"
        monkeypatch.setattr(sys, "argv", ["nearest", "--trials", "8", "-o", str(output), *words])
        if code:
            with pytest.raises(SystemExit, match=code):
                nearest.main()
        else:
            nearest.main()
        (path,) = output.glob("*-nearest*-h200.json")
        written: dict[str, Any] = json.loads(path.read_text())
        return {**written, "name": path.name}

    return run


def row(origin: str, **given: Any) -> dict[str, Any]:
    return {"origin": origin, "op": "gemm", **dict.fromkeys(("to_default", "to_tuned", "default_to_tuned")), **given}


class TestMeasuring:
    def test_compares_what_is_served_with_the_default_and_a_fresh_tuning(
        self, run: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        written = run("--count", "2")
        assert [entry["op"] for entry in written["rows"]] == ["gemm", "attention"]
        for entry in written["rows"]:
            assert entry["us"] == {"served": 130.0, "default": 156.0, "tuned": 120.0}
            assert (entry["to_default"], entry["to_tuned"], entry["default_to_tuned"]) == (1.2, 0.9231, 0.7692)
            assert (entry["origin"], entry["neighbour"], entry["distance"]) == ("nearest", "gemm 8 8 8 bf16 nn", 0.25)
            assert (entry["tried"], entry["disturbed"], entry["peer_us"]) == (8, "", 100.0)
            assert entry["configs"] == {"served": NEIGHBOUR.short, "default": DEFAULT.short, "tuned": BEST.short}
        assert (written["seed"], written["trials"], written["seconds"]) == (1, 8, 3.0)
        assert [(one["origin"], one["op"], one["problems"]) for one in written["summary"]] == [
            ("nearest", "all", 2),
            ("nearest", "gemm", 1),
            ("nearest", "attention", 1),
        ]
        printed = capsys.readouterr().out
        assert "nearest  all             2 of 2  to_default 1.200 (least 1.200)  to_tuned 0.923" in printed
        assert written["name"] in printed

    def test_has_one_process_own_the_card_and_one_pool_compile(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        children, pools = [], []

        class Counted(stub_card.StubChild):  # type: ignore[misc] # see the import
            def _start(self) -> None:
                children.append(self)
                super()._start()

        def pool(*words: Any, **named: Any) -> CompilePool:
            pools.append(CompilePool(*words, **named))
            return pools[-1]

        monkeypatch.setattr(nearest, "Child", Counted)
        monkeypatch.setattr(nearest, "CompilePool", pool)
        monkeypatch.setattr(compile_pool, "CompilePool", None)
        run("--operator", "gemm", "--count", "2")
        assert (len(children), len(pools)) == (1, 1)
        assert not children[0].alive

    def test_one_operator_has_a_file_of_its_own_and_the_problems_it_had_among_all(
        self, run: Run, tmp_path: Path
    ) -> None:
        written = run("--operator", "gemm", "--count", "2")
        assert "-nearest-gemm-h200" in written["name"]
        with shipped_alone():
            among_all = [one.problem for one in islice(problems(nearest.TURNS, H200, 1), 3)]
        assert [entry["problem"] for entry in written["rows"]] == [among_all[0].model_dump(), among_all[2].model_dump()]

    def test_of_one_config_under_several_names_there_is_one_time(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nearest, "served", lambda *_: Served("default", BEST))
        monkeypatch.setattr(nearest, "default_config", lambda *_: BEST)
        (entry,) = run("--count", "1", code="never served")["rows"]
        assert set(entry["us"].values()) == {120.0}
        assert (entry["to_default"], entry["to_tuned"], entry["distance"]) == (1.0, 1.0, None)

    def test_what_fails_its_gate_has_no_ratio(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nearest, "default_config", lambda *_: stub_card.config(156, "gate memory"))
        (entry,) = run("--count", "1", code="to_default 0.000 is below 1.0")["rows"]
        assert (entry["us"]["default"], entry["to_default"], entry["to_tuned"]) == (None, None, 0.9231)

    def test_a_problem_without_a_working_candidate_is_told_and_stops_no_other(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spaces = iter([[stub_card.config(50, "compile ptxas")], [BEST]])
        monkeypatch.setattr(tune, "candidates", lambda *_: next(spaces))
        first, second = run("--count", "2")["rows"]
        assert "no candidate" in first["failure"]
        assert second["to_tuned"] == 0.9231

    def test_problems_are_written_one_by_one(self, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        once = iter([tune.tune])

        def tune_once(*words: Any, **named: Any) -> Any:
            for tuner in once:
                return tuner(*words, **named)
            raise GpuLostError("the GPU is gone")

        monkeypatch.setattr(nearest, "tune", tune_once)
        with pytest.raises(GpuLostError):
            run("--count", "3")
        (path,) = (tmp_path / "results").iterdir()
        assert len(json.loads(path.read_text())["rows"]) == 1

    def test_none_is_begun_when_the_time_is_over(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        clock = iter(range(0, 1000, 10))
        monkeypatch.setattr(nearest, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert len(run("--within", "25")["rows"]) == 2
        assert "25 s are over: 2 of 50 problems were measured" in capsys.readouterr().out


class TestServed:
    def test_is_what_select_serves(self) -> None:
        with shipped_alone():
            problem = ops.get("gemm").problem((4000, 4096, 4096))
            found, choice = served(problem, H200), selection.select(problem, H200, note_miss=False)
            assert (found.origin, found.config) == (choice.origin, choice.config) == ("nearest", choice.config)
            assert f"{found.neighbour}, {found.distance:.2f} octaves" in choice.note
            far = served(ops.get("gemm").problem((64, 128, 128)), H200)
            assert (far.origin, far.distance, far.neighbour) == ("default", None, "")

    def test_knows_no_rows_but_those_that_are_shipped(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        before = os.environ["TLXGEN_CACHE"]
        with shipped_alone():
            assert os.environ["TLXGEN_CACHE"] != before
            assert measured("gemm", H200)
        assert os.environ["TLXGEN_CACHE"] == before
        monkeypatch.delenv("TLXGEN_CACHE")
        with shipped_alone():
            pass
        assert "TLXGEN_CACHE" not in os.environ


@pytest.fixture(scope="module")
def fifty() -> list[untuned.Drawn]:
    with shipped_alone():
        return list(islice(problems(nearest.TURNS, H200, 1), 50))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Problem]]:
    with shipped_alone():
        return {name: measured(name, H200) for name in untuned.OPERATORS}


class TestDrawing:
    def test_is_of_problems_without_a_row_each_once(
        self, fifty: list[untuned.Drawn], rows: dict[str, list[Problem]]
    ) -> None:
        found = [one.problem for one in fifty]
        assert len(set(found)) == 50
        assert not set(found) & {problem for some in rows.values() for problem in some}
        counts = [sum(problem.operator == name for problem in found) for name in untuned.OPERATORS]
        assert counts == [25, 15, 10]

    def test_changes_lengths_alone(self, fifty: list[untuned.Drawn]) -> None:
        assert all(distance(one.problem, one.around) < float("inf") for one in fifty)

    def test_is_near_and_far_by_turns(self, fifty: list[untuned.Drawn]) -> None:
        for name in untuned.OPERATORS:
            own = [one for one in fifty if one.problem.operator == name]
            assert [one.reach for one in own] == [("near", "far")[i % 2] for i in range(len(own))]
            near, far = (
                [distance(one.problem, one.around) for one in own if one.reach == reach] for reach in untuned.REACHES
            )
            assert max(near) < 2.0, "so that a neighbour may serve"
            assert sum(far) / len(far) > 1.5 * sum(near) / len(near)

    def test_is_the_same_for_a_seed_and_another_for_another(self, rows: dict[str, list[Problem]]) -> None:
        def some(seed: int) -> list[Problem]:
            return [one.problem for one in islice(untuned.drawn("gemm", rows["gemm"], H200, seed), 5)]

        assert some(1) == some(1) != some(2)

    def test_is_of_sizes_that_take_little_time(self, fifty: list[untuned.Drawn]) -> None:
        for one in fifty:
            sizes: Any = one.problem
            if one.problem.operator == "gemm":
                assert max(sizes.M, sizes.N, sizes.K) <= 8192
            if one.problem.operator == "attention":
                assert sizes.S <= 8192
            assert ops.get(one.problem.operator).bytes_moved(one.problem) < 8e9

    def test_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="around 0 rows"):
            next(untuned.drawn("gemm", [], H200, 1))

    def test_ends_where_there_is_nothing_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(untuned, "_TRIES", 50)
        monkeypatch.setitem(untuned._SMALL, "gemm", lambda problem: problem.M > 10**6)
        with pytest.raises(ValueError, match="around 1 rows"):
            next(untuned.drawn("gemm", [ops.get("gemm").problem((512, 512, 512))], H200, 1))


class TestSummary:
    def test_is_of_geometric_means_by_origin_and_operator(self) -> None:
        rows = [
            row("default", to_default=1.0, to_tuned=0.8, default_to_tuned=0.8),
            row("nearest", to_default=2.0, to_tuned=1.0, default_to_tuned=0.5),
            row("nearest", op="attention", to_default=0.5, to_tuned=1.0, default_to_tuned=2.0),
        ]
        first, *others = summary(rows)
        assert (first["origin"], first["op"], first["problems"]) == ("nearest", "all", 2)
        assert first["to_default"] == {"mean": 1.0, "least": 0.5}
        assert [(one["origin"], one["op"]) for one in others] == [
            ("nearest", "gemm"),
            ("nearest", "attention"),
            ("default", "all"),
            ("default", "gemm"),
        ]
        assert shortfalls(summary(rows)) == []

    @pytest.mark.parametrize(
        ("ratios", "short"),
        [
            ({"to_default": 1.01, "to_tuned": 0.95}, []),
            ({"to_default": 0.99, "to_tuned": 0.95}, ["nearest: to_default 0.990 is below 1.0"]),
            ({"to_default": 1.3, "to_tuned": 0.89}, ["nearest: to_tuned 0.890 is below 0.9"]),
        ],
    )
    def test_says_what_nearest_does_not_reach(self, ratios: dict[str, float], short: list[str]) -> None:
        rows = [row("nearest", **ratios), row("default", to_default=1.0, to_tuned=0.1)]
        assert shortfalls(summary(rows)) == short

    def test_leaves_out_what_was_lost(self) -> None:
        failed = {"origin": "nearest", "op": "gemm", "failure": "no candidate works"}
        one, _ = summary([failed, row("nearest", to_default=1.5)])
        assert (one["problems"], one["to_default"], one["to_tuned"]) == (2, {"mean": 1.5, "least": 1.5}, None)

    def test_times_of_one_card_are_compared(self) -> None:
        def timing(us: float) -> Timing:
            return Timing(us, 0.0, 100.0, (us,), (100.0,))

        configs: dict[str, Config | None] = {"served": BEST, "default": DEFAULT, "tuned": None}
        found = nearest.ratios(configs, {BEST: timing(50.0), DEFAULT: timing(100.0)})
        assert (found["to_default"], found["to_tuned"]) == (2.0, None)
        assert found["configs"]["tuned"] is None
