"""`tlxgen` in this process, on a machine without a GPU, and rows in its database."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.cli import app
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """stderr without line breaks."""
        return " ".join(self.err.split())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Done]]:
    """Runs `tlxgen` with the given words."""
    before = signal.getsignal(signal.SIGTERM)

    def tlxgen(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["tlxgen", *map(str, words)])
        status = 0
        try:
            app.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(bool(end.code))
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    yield tlxgen
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def keep() -> Callable[..., TunedRecord]:
    """Stores a measured row of today's code for an H200, with changes."""

    def keep(problem: Any, config: Config, **changes: Any) -> TunedRecord:
        record = TunedRecord(
            key=tuning_key(problem, devices.target("h200").key),
            config=config,
            origin="measured",
            source_hash=emit(ops.get(problem.operator), problem, config).code_hash,
            time_us=1000.0,
            protocol="graph-2",
        ).model_copy(update=changes)
        with Store.open(read_only_ok=False) as store:
            store.delete([record.key])
            assert store.put(record)
        return record

    return keep
