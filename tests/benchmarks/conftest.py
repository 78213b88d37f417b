"""Fixtures that run a benchmark script in this process on a stub H200, and time kernels on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # tests/conftest.py makes it importable

from benchmarks import harness
from tlxgen import devices
from tlxgen.tuner.measure import DeviceReport
from tlxgen.tuner.runner import Runner

REPORT = DeviceReport(devices.target("h200"), {"torch": "2", "cuda": "13", "driver": "580"}, 0.0, 1.0)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """`run(script, *words)` returns the results file, with its name as `file` and the script's output as `printed`.

    `ends` is a pattern of the message that the script exits with.
    """
    monkeypatch.setattr(devices, "detect", lambda _=None: REPORT.gpu)
    monkeypatch.setattr(harness, "Setup", lambda *_, **__: lambda: REPORT)

    def run(script: ModuleType, *words: str, ends: str = "") -> dict[str, Any]:
        output = tmp_path / "results"
        monkeypatch.setattr(sys, "argv", [script.__name__, *words, "-o", str(output)])
        if ends:
            with pytest.raises(SystemExit, match=ends):
                script.main()
        else:
            script.main()
        (path,) = output.iterdir()
        return {**json.loads(path.read_text()), "file": path.name, "printed": capsys.readouterr().out}

    return run


@pytest.fixture
def stub_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners time stub configs; no other libraries are installed."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv(stub_card.NOTES, str(tmp_path / "notes"))
    stub_card.install(monkeypatch.setattr, stub_card.healthy(8))
    monkeypatch.setattr(harness, "emit", stub_card.emit)
    monkeypatch.setattr(Runner, "invite", lambda _: ())
