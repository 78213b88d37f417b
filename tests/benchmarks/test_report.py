"""The README's table of the GEMM suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

README = f"# title\n\nbefore\n\n{report._OPEN}\nold\n{report._CLOSE}\n\nafter\n"


def row(kind: str, m: int, time_us: float, peer_us: float = 200.0, **changes: Any) -> dict[str, Any]:
    problem = {"M": m, "N": 512, "K": 256, "dtype": "bf16", "out_dtype": "bf16", "layout": "nn", "epilogue": "none"}
    params = {"group_m": 8, "block_m": 128, "block_n": 64, "block_k": 32, "num_stages": 5, "pdl": "early"}
    return {
        "kind": kind,
        "op": "gemm",
        "problem": {**problem, **changes},
        "config": {"template": "gemm_tma_pingpong", "params": params},
        "time_us": time_us,
        "spread": 2.0,
        "peer_us": peer_us,
        "ratio": round(peer_us / time_us, 4),
        "tflops": 123.4,
    }


def write(folder: Path, rows: list[dict[str, Any]], name: str = "2001-02-03-gemm-h200.json") -> Path:
    content = {
        "date": name[:10],
        "gpu": "h200",
        "sm_count": 132,
        "driver": "1.2.3",
        "versions": {"tlxgen": "0.0.1", "python": "3.12.3", "toolchain": "fbtriton 1, ptxas 2", "cuda": "13.0"},
        "protocol": "graph-2",
        "rows": rows,
    }
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(README, encoding="utf-8")
    return path


def ascii_text(readme: Path) -> str:
    return readme.read_text(encoding="utf-8").replace("\N{MULTIPLICATION SIGN}", "x")


def run(results: Path, readme: Path, *more: str) -> int:
    return report.main(["--results", str(results), "--readme", str(readme), *more])


def test_the_table_has_the_measured_numbers(results: Path, readme: Path) -> None:
    write(results, [row("tuned", 1024, 100.0), row("default", 1024, 250.0), row("tuned", 2048, 400.0)])
    assert run(results, readme) == 0
    text = ascii_text(readme)
    config = "tma_pingpong 128x64x32, 5 stages, group_m 8, pdl early"
    assert f"| 1024x512x256 | 100.0 | 200.0 | 2.000 | 123 | 0.800 | {config} |" in text
    assert f"| 2048x512x256 | 400.0 | 200.0 | 0.500 | 123 | - | {config} |" in text
    assert "tuned 1.000 over 2 shapes (least 0.500), default config 0.800 over 1 shape (least 0.800)" in text
    assert "Interquartile range of the rounds: 0.5% to 2.0% of the time." in text
    assert "One H200 (132 SMs), 2001-02-03, driver 1.2.3" in text
    assert "tlxgen 0.0.1, Python 3.12.3, fbtriton 1, ptxas 2, CUDA 13.0; protocol graph-2. All shapes bf16, nn." in text
    assert "benchmarks/results/2001-02-03-gemm-h200.json" in text


def test_only_text_between_the_markers_changes(results: Path, readme: Path) -> None:
    write(results, [row("tuned", 1024, 100.0)])
    run(results, readme)
    before = readme.read_bytes()
    run(results, readme)
    assert readme.read_bytes() == before
    text = ascii_text(readme)
    assert text.startswith(f"# title\n\nbefore\n\n{report._OPEN}\n")
    assert text.endswith(f"\n{report._CLOSE}\n\nafter\n")
    assert "old" not in text


def test_shapes_without_a_tuned_kernel_and_with_other_options_are_named(results: Path, readme: Path) -> None:
    rows = [row("default", 1024, 250.0), row("tuned", 1024, 50.0, out_dtype="fp32", epilogue="bias")]
    write(results, rows)
    run(results, readme)
    text = ascii_text(readme)
    assert "| 1024x512x256 bf16, nn | not tuned | 200.0 | - | - | 0.800 | - |" in text
    assert "| 1024x512x256 bf16, nn, fp32 out, bias | 50.0" in text
    assert "All shapes" not in text


def test_the_newest_file_of_the_suite_is_used(results: Path) -> None:
    write(results, [], "2001-02-03-gemm-h200.json")
    latest = write(results, [], "2001-11-03-gemm-h100-pcie.json")
    write(results, [], "2002-01-01-exhaustive-gemm-h200.json")
    write(results, [], "2002-01-01-exhaustive-gemm-4096x4096x4096-h200.json")
    assert report.newest(results) == latest


def test_without_results_the_table_is_replaced_by_a_hint(results: Path, readme: Path) -> None:
    write(results, [row("tuned", 1024, 100.0)], "2002-01-01-exhaustive-gemm-h200.json")
    assert run(results, readme) == 0
    text = ascii_text(readme)
    assert "Nothing has been measured yet" in text
    assert "|" not in text


def test_check_reports_an_old_table_and_changes_nothing(
    results: Path, readme: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(results, [row("tuned", 1024, 100.0)])
    assert run(results, readme, "--check") == 1
    assert ascii_text(readme) == README
    assert "out of date" in capsys.readouterr().err
    assert run(results, readme) == 0
    assert run(results, readme, "--check") == 0


@pytest.mark.parametrize(
    "text",
    ["no markers", f"{report._CLOSE}\n{report._OPEN}\n", README + README, f"{report._OPEN}\n"],
    ids=["none", "turned", "twice", "unfinished"],
)
def test_wrong_markers_are_refused(results: Path, readme: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    readme.write_text(text, encoding="utf-8")
    assert run(results, readme) == 2
    assert report._OPEN in capsys.readouterr().err
    assert ascii_text(readme) == text


ZERO = json.dumps({"rows": [{**row("tuned", 1024, 100.0), "time_us": 0.0}]})


@pytest.mark.parametrize("content", ["", "{}", "[1]", ZERO], ids=["empty", "no fields", "a list", "a time of zero"])
def test_an_invalid_results_file_is_refused_by_name(
    results: Path, readme: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "2001-02-03-gemm-h200.json").write_text(content, encoding="utf-8")
    assert run(results, readme) == 2
    assert "2001-02-03-gemm-h200.json" in capsys.readouterr().err


def test_the_readme_of_the_project_is_up_to_date() -> None:
    assert report.main(["--check"]) == 0
