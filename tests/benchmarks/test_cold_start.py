"""Benchmark of first calls, with torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import cold_start
from tlxgen import ops

_CPU = "torch.cuda.synchronize = lambda: None; tensors = [torch.randn(64, 64).bfloat16()] * 2"
CASE = cold_start.Case(ops.get("gemm").problem((64, 64, 64)), _CPU, "torch.mm(*tensors)")


def test_each_part_of_a_first_call_is_timed(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "CASES", (CASE,))
    written = run(cold_start, "--processes", "1")
    (row,) = written["rows"]
    assert list(row["parts_ms"]) == ["import", "get_kernel", "call", "wait"]
    assert all(ms >= 0 for ms in row["parts_ms"].values())
    least, median, largest = row["first_ms"]
    assert least == median == largest == pytest.approx(sum(row["parts_ms"].values()), abs=0.3)
    assert 0 < row["library_ms"][0] < least  # importing tlxgen alone takes longer than a small product
    assert row["origin"] == "torch"
    assert "gemm 64 64 64 bf16 nn" in written["printed"]
    assert (written["processes"], "-cold-start-h200.json" in written["file"]) == (1, True)


def test_the_error_of_a_failed_process_is_shown() -> None:
    broken = cold_start.Case(CASE.problem, "tensors = nowhere", CASE.library)
    with pytest.raises(SystemExit, match="NameError: name 'nowhere' is not defined"):
        cold_start.first_call(broken, "")
