"""Running processes and their descendants, from /proc."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    state, _ = _state_and_parent(pid)
    return state not in {"", "Z", "X"}


def descendants(pid: int) -> set[int]:
    """Running processes that this one started, and theirs."""
    parents = {int(path.name): _state_and_parent(int(path.name))[1] for path in Path("/proc").glob("[0-9]*")}
    found, newer = set[int](), {pid}
    while newer:
        newer = {child for child, parent in parents.items() if parent in newer} - found
        found |= newer
    return {child for child in found if is_running(child)}


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return state, int(parent)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
