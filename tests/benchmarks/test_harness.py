"""Shared steps of the benchmarks: missing GPU, results files, means."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Results
from tlxgen import devices

NEED_A_GPU: dict[str, list[str]] = {
    "cold_start": [],
    "moe": [],
    "nearest": [],
    "overhead": [],
    "suite": ["benchmarks/suites/gemm.yaml"],
    "varlen": [],
}


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_a_script_without_a_gpu_ends_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "detect", lambda _=None: None)
    monkeypatch.setattr(sys, "argv", [name, *NEED_A_GPU[name], "-o", str(tmp_path)])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, and torch sees none here"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_results_are_written_after_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "new", "name", more={"rounds": 3})
    for number in (1, 2):
        results.add({"number": number}, f"line {number}")
        assert f'"number": {number}' in results.path.read_text()
    assert capsys.readouterr().out == "line 1\nline 2\n"
    assert results.path.name.endswith("-name.json")
    assert '"rounds": 3' in results.path.read_text()


def test_means_are_geometric() -> None:
    assert harness.mean_and_least([0.5, 2.0]) == "geometric mean 1.000, least 0.500 of 2"
    assert harness.mean_and_least([]) == "no ratios"
