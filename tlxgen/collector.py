"""A first launch without the garbage collector.

What imports make stays, so there is nothing to collect. But enough of it sets off a full collection, which walks all
that torch has made, 80 ms, to find nothing. Put off, it comes when the GPU has something to do already.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_STATE = {"blocks": 0, "enabled": False}


def _in_child() -> None:
    """After a fork: the blocks of other threads never end here."""
    global _LOCK  # noqa: PLW0603 - theirs may be held
    _LOCK = threading.Lock()
    if _STATE["blocks"] and _STATE["enabled"]:
        gc.enable()
    _STATE["blocks"] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextmanager
def paused() -> Iterator[None]:
    """No collections until the last such block of any thread ends; then as the user has it."""
    with _LOCK:  # blocks of two threads overlap: only the first knows how the user has it
        if not _STATE["blocks"]:
            _STATE["enabled"] = gc.isenabled()
            gc.disable()
        _STATE["blocks"] += 1
    try:
        yield
    finally:
        with _LOCK:
            _STATE["blocks"] = max(0, _STATE["blocks"] - 1)
            if not _STATE["blocks"] and _STATE["enabled"]:
                gc.enable()
