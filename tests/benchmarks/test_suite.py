"""The benchmark of suites: every shape of every file comes to be measured, and fast enough or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks import suite
from tlxgen import paths
from tlxgen.ops import suites
from tlxgen.problem import Problem

FILES = sorted(paths.SUITES.glob("*.yaml"))
UNEVEN = """
operator: grouped_gemm
options: {dtype: bf16, layout: nt}
shapes:
  - {sizes: [2, 64, 32, 16], at_least: 1.5}
  - {sizes: [2, 64, 32, 16], options: {form: 2d2d, layout: tn}, at_least: 3.0}
"""

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def measured() -> list[Problem]:
    """Problems, in the order in which they were measured."""
    return []


@pytest.fixture
def run(measured: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The script in this process, where every kernel is twice as fast as the peer; its rows."""
    written: list[list[dict[str, Any]]] = []

    def measure(problem: Problem, *_: Any, **__: Any) -> tuple[Any, list[dict[str, Any]]]:
        measured.append(problem)
        return None, [{"kind": "tuned", "time_us": 1.0, "ratio": 2.0, "config_short": "-"}]

    def write(folder: Path, name: str, report: Any, rows: list[dict[str, Any]]) -> Path:
        written.append(list(rows))
        return folder / name

    monkeypatch.setattr(suite, "Child", lambda: SimpleNamespace(kill=lambda: None))
    monkeypatch.setattr(suite, "measure", measure)
    monkeypatch.setattr(suite, "write", write)

    def run(file: Path, *words: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["suite", str(file), *words])
        suite.main()
        return written[-1]

    return run


def test_there_are_files() -> None:
    assert {path.stem for path in FILES} >= {"attention", "attention_varlen", "gemm", "grouped_gemm", "vector_add"}


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_shape_is_measured_and_held_to_its_own_ratio(file: Path, run: Run, measured: list[Problem]) -> None:
    rows = run(file)
    assert measured == suites.problems(file)
    shapes = yaml.safe_load(file.read_text())["shapes"]
    assert [row["at_least"] for row in rows] == [shape["at_least"] for shape in shapes]


def test_a_shape_may_have_another_option_than_its_suite(run: Run, measured: list[Problem], tmp_path: Path) -> None:
    (tmp_path / "uneven.yaml").write_text(UNEVEN)
    with pytest.raises(SystemExit, match="1 shape"):
        run(tmp_path / "uneven.yaml")
    assert [problem.layout for problem in measured] == ["nt", "tn"]  # type: ignore[attr-defined]


def test_words_choose_shapes_with_their_ratios(run: Run, measured: list[Problem], tmp_path: Path) -> None:
    (tmp_path / "uneven.yaml").write_text(UNEVEN)
    (row,) = run(tmp_path / "uneven.yaml", "--only", " nt")
    assert (len(measured), row["at_least"]) == (1, 1.5)
