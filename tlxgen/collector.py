"""A first launch without the garbage collector.

What imports make stays, so there is nothing to collect. But enough of it sets off a full collection, which walks all
that torch has made, 80 ms, to find nothing. Put off, it comes when the GPU has something to do already. What was made
meanwhile counts as old then: so many young objects would be looked at as soon as a block ends, 15 ms in all.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Modules after whose import young objects count as old. One kernel's is not enough: a process may load hundreds, and
#: garbage of the user's that is young has to wait each time for a full collection.
_MANY = 5

_LOCK = threading.Lock()
_STATE = {"blocks": 0, "enabled": False, "modules": 0}


def _in_child() -> None:
    """After a fork: the blocks of other threads never end here."""
    global _LOCK  # noqa: PLW0603 - theirs may be held
    _LOCK = threading.Lock()
    if _STATE["blocks"] and _STATE["enabled"]:
        gc.enable()
    _STATE["blocks"] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _age() -> None:
    """Makes old objects of all, without a look at any."""
    if not gc.get_freeze_count():  # else the user has frozen some, which are to stay so
        gc.freeze()
        gc.unfreeze()


@contextmanager
def paused() -> Iterator[None]:
    """No collections until the last such block of any thread ends; then as the user has it."""
    with _LOCK:  # blocks of two threads overlap: only the first knows how the user has it
        if not _STATE["blocks"]:
            _STATE["enabled"], _STATE["modules"] = gc.isenabled(), len(sys.modules)
            gc.disable()
        _STATE["blocks"] += 1
    try:
        yield
    finally:
        with _LOCK:
            _STATE["blocks"] = max(0, _STATE["blocks"] - 1)
            if not _STATE["blocks"] and _STATE["enabled"]:
                if len(sys.modules) >= _STATE["modules"] + _MANY:
                    _age()
                gc.enable()
