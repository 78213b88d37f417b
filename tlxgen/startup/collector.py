"""A first launch without the garbage collector.

What imports make stays, so there is nothing to collect. But enough of it sets off a full collection, which walks all
that torch has made, 80 ms, to find nothing. Put off, it comes when the GPU has something to do already. What was made
meanwhile counts as old then: so many young objects would be looked at as soon as a block ends, 15 ms in all.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Modules after whose import young objects count as old. One kernel's is not enough: a process may load hundreds, and
#: garbage of the user's that is young has to wait each time for a full collection.
_MANY = 5

_STATE = {"paused": False}


def _in_child() -> None:
    """After a fork: the blocks of other threads never end here."""
    if _STATE["paused"]:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextmanager
def paused() -> Iterator[None]:
    """No collections until such a block of any thread ends; then as the user has it.

    Blocks of two threads may overlap: the first turns collections off, and on again when it ends, which costs the other
    time and nothing else. Nobody waits or counts, so that no interrupt can leave them off.
    """
    enabled, modules = gc.isenabled(), len(sys.modules)
    try:
        if enabled:
            _STATE["paused"] = True
            gc.disable()
        yield
    finally:
        if enabled:
            try:
                if len(sys.modules) >= modules + _MANY:
                    _age()
            finally:
                gc.enable()
                _STATE["paused"] = False


def _age() -> None:
    """Makes old objects of all, without a look at any."""
    if not gc.get_freeze_count():  # else the user has frozen some, which are to stay so
        gc.freeze()
        gc.unfreeze()
