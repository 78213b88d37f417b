"""The pause of the garbage collector during a first launch.

Imports create objects that stay. Enough of them start a full collection, which visits all of torch's objects (80 ms)
and finds nothing. After the pause it happens while the GPU is busy. The new objects then count as old; otherwise a
collection would visit them at the end of the pause (15 ms).
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
    """After a fork, where the blocks of other threads never end."""
    if _STATE["paused"]:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextmanager
def paused() -> Iterator[None]:
    """No collections until such a block of any thread ends; then the user's setting.

    Blocks of two threads may overlap: the first one's end turns collections on again, which only costs the other time.
    There is no lock or count, so an interrupt cannot leave them off.
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
    """Marks all objects as old without visiting them."""
    if not gc.get_freeze_count():  # else the user has frozen some, which are to stay so
        gc.freeze()
        gc.unfreeze()
