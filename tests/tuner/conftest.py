"""The database of the tuner's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tlxgen.db.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuned.db") as store:
        yield store
