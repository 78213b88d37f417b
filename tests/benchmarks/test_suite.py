"""Suite benchmark: every shape of every suite is measured and held to its own ratio."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable
import yaml

from benchmarks import harness, suite
from tlxgen import paths
from tlxgen.ops import suites
from tlxgen.problem import Problem
from tlxgen.runtime import selection
from tlxgen.runtime.selection import Choice
from tlxgen.tuner.measure import DeviceReport

FILES = sorted(paths.SUITES.glob("*.yaml"))
UNEVEN = """
operator: grouped_gemm
options: {dtype: bf16, layout: nt}
shapes:
  - {sizes: [2, 64, 32, 16], at_least: 1.5}
  - {sizes: [2, 64, 32, 16], options: {form: 2d2d, layout: tn}, at_least: 3.0}
"""

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, run: Run) -> list[Problem]:
    """Problems in the order in which they were measured; each kernel is twice as fast as the peer."""
    problems: list[Problem] = []

    def measure(problem: Problem, *_: Any, **__: Any) -> tuple[DeviceReport, list[dict[str, Any]]]:
        problems.append(problem)
        return harness.device_report(), [{"kind": "tuned", "time_us": 1.0, "ratio": 2.0, "config_short": "-"}]

    monkeypatch.setattr(suite, "Child", lambda: SimpleNamespace(kill=lambda: None))
    monkeypatch.setattr(suite, "measure", measure)
    return problems


@pytest.fixture
def uneven(tmp_path: Path) -> str:
    """A suite whose second shape has options of its own."""
    path = tmp_path / "uneven.yaml"
    path.write_text(UNEVEN)
    return str(path)


def test_there_are_files() -> None:
    assert {path.stem for path in FILES} >= {"attention", "attention_varlen", "gemm", "grouped_gemm", "vector_add"}


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_shape_is_measured_and_held_to_its_own_ratio(file: Path, run: Run, measured: list[Problem]) -> None:
    written = run(suite, str(file))
    assert measured == suites.problems(file)
    shapes = yaml.safe_load(file.read_text())["shapes"]
    assert [row["at_least"] for row in written["rows"]] == [shape["at_least"] for shape in shapes]
    assert f"-{file.stem}-h200.json" in written["file"]


def test_a_slow_shape_ends_in_an_error(run: Run, measured: list[Problem], uneven: str) -> None:
    run(suite, uneven, ends="1 shape")
    assert [problem.layout for problem in measured] == ["nt", "tn"]  # type: ignore[attr-defined]


def test_only_selects_shapes_with_their_ratios(run: Run, measured: list[Problem], uneven: str) -> None:
    (row,) = run(suite, uneven, "--only", " nt")["rows"]
    assert (len(measured), row["at_least"]) == (1, 1.5)


def test_the_ratio_that_counts_is_to_the_fastest_library() -> None:
    assert suite.to_fastest({"ratio": 1.2}) == 1.2
    assert suite.to_fastest({"ratio": 1.2, "others": {"fa3": 0.9, "cudnn": 1.5}}) == 0.9


class TestMeasuring:
    @pytest.fixture(autouse=True)
    def _configs(self, monkeypatch: pytest.MonkeyPatch, stub_gpu: None) -> None:
        """The tuned kernel takes 80 us, the default 125 us, the peer 100 us."""
        monkeypatch.setattr(selection, "select", lambda *_: Choice("tuned", stub_card.config(80)))
        monkeypatch.setattr(suite, "default_config", lambda *_: stub_card.config(125))

    def measure(self, *, tuned_only: bool = False) -> list[dict[str, Any]]:
        child = stub_card.StubChild()
        try:
            return suite.measure(suites.problems("gemm")[0], child, 5, tuned_only=tuned_only)[1]
        finally:
            child.kill()

    def test_tuned_and_default_kernels_are_timed_beside_the_peer(self) -> None:
        rows = self.measure()
        assert [(row["kind"], row["time_us"], row["peer_us"]) for row in rows] == [
            ("tuned", 80.0, 100.0),
            ("default", 125.0, 100.0),
        ]
        assert [row["ratio"] for row in rows] == [1.25, 0.8]
        assert [row["kind"] for row in self.measure(tuned_only=True)] == ["tuned"]

    def test_a_kernel_that_fails_the_gate_ends_the_script(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suite, "default_config", lambda *_: stub_card.config(125, "gate memory"))
        with pytest.raises(SystemExit, match="a kernel failed the gate"):
            self.measure()
