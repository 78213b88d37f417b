"""Benchmark of neighbours' configs on the stub GPU: problems drawn, configs compared, summary."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable

from benchmarks import nearest, untuned
from benchmarks.nearest import measured, problems, shipped_rows_only, shortfalls, summary
from tlxgen import devices, ops
from tlxgen.config import Config
from tlxgen.db.nearest import distance
from tlxgen.errors import GpuLostError
from tlxgen.problem import Problem
from tlxgen.runtime import selection
from tlxgen.runtime.selection import Choice
from tlxgen.tuner import compile_pool, tune
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.timing import Timing

H200 = devices.target("h200")
BEST, NEIGHBOUR, DEFAULT = stub_card.config(120), stub_card.config(130), stub_card.config(156)

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, stub_gpu: None, run: Run) -> Run:
    """Runs the script with 8 trials a tuning; a neighbour serves every problem."""
    monkeypatch.setattr(nearest, "Child", stub_card.StubChild)
    served = Choice("nearest", NEIGHBOUR, note="tuned for gemm 8 8 8 bf16 nn")
    monkeypatch.setattr(selection, "select", lambda *_, **__: served)
    monkeypatch.setattr(nearest, "default_config", lambda *_: DEFAULT)
    monkeypatch.setattr(nearest, "emit", stub_card.emit)
    return lambda *words, **how: run(nearest, "--trials", "8", *words, **how)


def row(origin: str, **given: Any) -> dict[str, Any]:
    return {"origin": origin, "op": "gemm", **dict.fromkeys(("to_default", "to_tuned", "default_to_tuned")), **given}


class TestMeasuring:
    def test_the_served_config_is_compared_with_the_default_and_a_fresh_tuning(self, measure: Run) -> None:
        written = measure("--count", "2")
        assert [entry["op"] for entry in written["rows"]] == ["gemm", "attention"]
        for entry in written["rows"]:
            assert entry["us"] == {"served": 130.0, "default": 156.0, "tuned": 120.0}
            assert (entry["to_default"], entry["to_tuned"], entry["default_to_tuned"]) == (1.2, 0.9231, 0.7692)
            assert (entry["origin"], entry["note"]) == ("nearest", "tuned for gemm 8 8 8 bf16 nn")
            assert (entry["tried"], entry["disturbed"], entry["peer_us"]) == (8, "", 100.0)
            assert entry["configs"] == {"served": NEIGHBOUR.short, "default": DEFAULT.short, "tuned": BEST.short}
        assert (written["seed"], written["trials"], written["seconds"]) == (1, 8, 3.0)
        assert [(one["origin"], one["op"], one["problems"]) for one in written["summary"]] == [
            ("nearest", "all", 2),
            ("nearest", "gemm", 1),
            ("nearest", "attention", 1),
        ]
        assert "nearest  all             2  to_default 1.200 (least 1.200)  to_tuned 0.923" in written["printed"]
        assert written["file"] in written["printed"]

    def test_one_process_uses_the_gpu_and_one_pool_compiles(
        self, measure: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        measure("--operator", "gemm", "--count", "2")
        assert (len(children), len(pools)) == (1, 1)
        assert not children[0].alive

    def test_one_operator_has_its_own_file_and_the_same_problems_as_among_all(self, measure: Run) -> None:
        written = measure("--operator", "gemm", "--count", "2")
        assert "-nearest-gemm-h200" in written["file"]
        with shipped_rows_only():
            among_all = [one.problem for one in islice(problems(nearest.TURNS, H200, 1), 3)]
        assert [entry["problem"] for entry in written["rows"]] == [among_all[0].model_dump(), among_all[2].model_dump()]

    def test_a_config_in_several_roles_is_timed_once(self, measure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selection, "select", lambda *_, **__: Choice("default", BEST))
        monkeypatch.setattr(nearest, "default_config", lambda *_: BEST)
        (entry,) = measure("--count", "1", ends="never served")["rows"]
        assert set(entry["us"].values()) == {120.0}
        assert (entry["to_default"], entry["to_tuned"], entry["note"]) == (1.0, 1.0, "")

    def test_a_config_that_fails_the_gate_has_no_ratio(self, measure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nearest, "default_config", lambda *_: stub_card.config(156, "gate memory"))
        (entry,) = measure("--count", "1", ends="to_default 0.000 is below 1.0")["rows"]
        assert (entry["us"]["default"], entry["to_default"], entry["to_tuned"]) == (None, None, 0.9231)

    def test_a_problem_that_cannot_be_tuned_is_reported_and_the_next_measured(
        self, measure: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spaces = iter([[stub_card.config(50, "compile ptxas")], [BEST]])
        monkeypatch.setattr(tune, "candidates", lambda *_: next(spaces))
        first, second = measure("--count", "2")["rows"]
        assert "no candidate" in first["failure"]
        assert second["to_tuned"] == 0.9231

    def test_problems_are_written_one_by_one(
        self, measure: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        once = iter([tune.tune])

        def tune_once(*words: Any, **named: Any) -> Any:
            for tuner in once:
                return tuner(*words, **named)
            raise GpuLostError("the GPU is gone")

        monkeypatch.setattr(nearest, "tune", tune_once)
        with pytest.raises(GpuLostError):
            measure("--count", "3")
        (path,) = (tmp_path / "results").iterdir()
        assert len(json.loads(path.read_text())["rows"]) == 1

    def test_no_problem_is_started_after_the_time_limit(self, measure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter(range(0, 1000, 10))
        monkeypatch.setattr(nearest, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        written = measure("--within", "25")
        assert len(written["rows"]) == 2
        assert "stopped after 25 s: 2 of 50 problems measured" in written["printed"]


def test_only_shipped_rows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ["TLXGEN_CACHE"]
    with shipped_rows_only():
        assert os.environ["TLXGEN_CACHE"] != before
        assert measured("gemm", H200)
    assert os.environ["TLXGEN_CACHE"] == before
    monkeypatch.delenv("TLXGEN_CACHE")
    with shipped_rows_only():
        pass
    assert "TLXGEN_CACHE" not in os.environ


@pytest.fixture(scope="module")
def fifty() -> list[untuned.Drawn]:
    with shipped_rows_only():
        return list(islice(problems(nearest.TURNS, H200, 1), 50))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Problem]]:
    with shipped_rows_only():
        return {name: measured(name, H200) for name in untuned.OPERATORS}


class TestDrawing:
    def test_problems_differ_and_have_no_row(self, fifty: list[untuned.Drawn], rows: dict[str, list[Problem]]) -> None:
        found = [one.problem for one in fifty]
        assert len(set(found)) == 50
        assert not set(found) & {problem for some in rows.values() for problem in some}
        assert [sum(problem.operator == name for problem in found) for name in untuned.OPERATORS] == [25, 15, 10]

    def test_near_and_far_problems_alternate_and_differ_in_lengths_only(self, fifty: list[untuned.Drawn]) -> None:
        for name in untuned.OPERATORS:
            own = [one for one in fifty if one.problem.operator == name]
            assert [one.reach for one in own] == [("near", "far")[i % 2] for i in range(len(own))]
            near, far = (
                [distance(one.problem, one.around) for one in own if one.reach == reach] for reach in untuned.REACHES
            )
            assert max(near) < 2.0, "so that a neighbour may serve"
            assert 1.5 * sum(near) / len(near) < sum(far) / len(far) < float("inf")

    def test_a_seed_determines_the_problems(self, rows: dict[str, list[Problem]]) -> None:
        def some(seed: int) -> list[Problem]:
            return [one.problem for one in islice(untuned.drawn("gemm", rows["gemm"], H200, seed), 5)]

        assert some(1) == some(1) != some(2)

    def test_sizes_are_bounded(self, fifty: list[untuned.Drawn]) -> None:
        for one in fifty:
            sizes: Any = one.problem
            if one.problem.operator == "gemm":
                assert max(sizes.M, sizes.N, sizes.K) <= 8192
            if one.problem.operator == "attention":
                assert sizes.S <= 8192
            assert ops.get(one.problem.operator).bytes_moved(one.problem) < 8e9

    def test_no_rows_or_no_problem_left_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="around 0 rows"):
            next(untuned.drawn("gemm", [], H200, 1))
        monkeypatch.setattr(untuned, "_TRIES", 50)
        monkeypatch.setitem(untuned._IS_SMALL, "gemm", lambda problem: problem.M > 10**6)
        with pytest.raises(ValueError, match="around 1 rows"):
            next(untuned.drawn("gemm", [ops.get("gemm").problem((512, 512, 512))], H200, 1))


class TestSummary:
    def test_means_are_geometric_by_origin_and_operator(self) -> None:
        first, *others = summary(
            [
                row("default", to_default=1.0, to_tuned=0.8, default_to_tuned=0.8),
                row("nearest", to_default=2.0, to_tuned=1.0, default_to_tuned=0.5),
                row("nearest", op="attention", to_default=0.5, to_tuned=1.0, default_to_tuned=2.0),
            ]
        )
        assert (first["origin"], first["op"], first["problems"]) == ("nearest", "all", 2)
        assert first["to_default"] == {"mean": 1.0, "least": 0.5}
        assert [(one["origin"], one["op"]) for one in others] == [
            ("nearest", "gemm"),
            ("nearest", "attention"),
            ("default", "all"),
            ("default", "gemm"),
        ]
        assert shortfalls([first, *others]) == []

    @pytest.mark.parametrize(
        ("ratios", "short"),
        [
            ({"to_default": 1.01, "to_tuned": 0.95}, []),
            ({"to_default": 0.99, "to_tuned": 0.95}, ["nearest: to_default 0.990 is below 1.0"]),
            ({"to_default": 1.3, "to_tuned": 0.89}, ["nearest: to_tuned 0.890 is below 0.9"]),
        ],
    )
    def test_only_neighbours_below_the_limits_are_shortfalls(self, ratios: dict[str, float], short: list[str]) -> None:
        rows = [row("nearest", **ratios), row("default", to_default=1.0, to_tuned=0.1)]
        assert shortfalls(summary(rows)) == short

    def test_missing_ratios_are_left_out(self) -> None:
        failed = {"origin": "nearest", "op": "gemm", "failure": "no candidate works"}
        one, _ = summary([failed, row("nearest", to_default=1.5)])
        assert (one["problems"], one["to_default"], one["to_tuned"]) == (2, {"mean": 1.5, "least": 1.5}, None)

    def test_ratios_are_of_speeds(self) -> None:
        def timing(us: float) -> Timing:
            return Timing(us, 0.0, 100.0, (us,), (100.0,))

        configs: dict[str, Config | None] = {"served": BEST, "default": DEFAULT, "tuned": None}
        found = nearest.ratios(configs, {BEST.id: timing(50.0), DEFAULT.id: timing(100.0)})
        assert (found["to_default"], found["to_tuned"], found["configs"]["tuned"]) == (2.0, None, None)
