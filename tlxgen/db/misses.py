"""Problems that were asked for and have no tuned row: noted for `tlxgen tune --untuned`, but never without bound.

The first problems of a class of sizes are noted as they are, since a program of fixed shapes has few. What follows is
taken for a length that grows, and counts for the class's representative, once a process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from tlxgen.problem import Problem
from tlxgen.space.size_classes import representative

#: Problems of one class that a process notes as they are.
EXACT = 4
#: Classes that are remembered; the one not seen for longest is forgotten first.
_CLASSES = 4096

_LOCK = threading.Lock()
_NOTED: OrderedDict[Problem, set[Problem]] = OrderedDict()


def to_note(problem: Problem) -> Problem | None:
    """The problem to note for a miss of `problem`, or None if there is nothing new to note."""
    one = representative(problem)
    with _LOCK:
        noted = _NOTED.setdefault(one, set())
        _NOTED.move_to_end(one)
        if len(_NOTED) > _CLASSES:
            _NOTED.popitem(last=False)
        chosen = problem if len(noted - {one}) < EXACT else one
        if chosen in noted:
            return None
        noted.add(chosen)
        return chosen


def forget() -> None:
    """Notes everything anew."""
    with _LOCK:
        _NOTED.clear()
