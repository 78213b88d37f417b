"""`tlxgen regress` on a card: the shipped rows of its model give right results, and the gate tells a slow one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tlxgen import devices, paths
from tlxgen.cli import app
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord


@pytest.fixture
def record() -> TunedRecord:
    """A shipped row of this card's model, of a kernel that runs for some 0.2 ms."""
    gpu = devices.detect()
    assert gpu is not None
    rows = [record for file in paths.SHIPPED_CACHE.glob("*.jsonl") for record in shipped.load(file)]
    own = [record for record in rows if record.key.device == gpu.key and record.ratio and record.time_us > 100]
    if not own:
        pytest.skip(f"no shipped row is of {gpu.slug}")
    return min(own, key=lambda record: record.time_us)


def found(record: TunedRecord, folder: Path, status: int) -> list[str]:
    shipped.dump([record], folder / "rows.jsonl")
    words = ["regress", "--gpu", "--json", "--cache", str(folder / "rows.jsonl")]
    result = CliRunner().invoke(app.app, words)
    assert result.exit_code == status, result.output
    answer = json.loads(result.stdout)
    assert len(answer["timed"]) == 1
    return [finding["check"] for finding in answer["findings"] if finding["red"]]


def test_a_row_that_claims_no_more_than_is_true_is_green(record: TunedRecord, tmp_path: Path) -> None:
    """Five percent less than stored, since cards differ."""
    assert found(record.model_copy(update={"time_us": 1.05 * record.time_us}), tmp_path, 0) == []


def test_a_row_that_claims_more_than_is_true_is_red(record: TunedRecord, tmp_path: Path) -> None:
    assert found(record.model_copy(update={"time_us": 0.8 * record.time_us}), tmp_path, 1) == ["time"]
