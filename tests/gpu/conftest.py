"""What is in this folder needs a Hopper GPU, is marked `gpu`, and is skipped anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tlxgen.tuner.process import Child

_FOLDER = Path(__file__).parent


def _reason_to_skip() -> str:
    try:
        import torch
    except ImportError:
        return "needs torch built for CUDA, and a Hopper GPU"
    if torch.version.hip or not torch.cuda.is_available():
        return "needs a Hopper GPU: torch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        found = "{}.{}".format(*capability)
        return f"needs a Hopper GPU (capability 9.0): {torch.cuda.get_device_name()} has {found}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where it cannot run."""
    here = [item for item in items if _FOLDER in item.path.parents]
    if not here:
        return
    reason = _reason_to_skip()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """The process that owns the card."""
    child = Child()
    yield child
    child.kill()
