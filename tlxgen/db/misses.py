"""Problems without a tuned row that were requested: a bounded list for `tlxgen tune --untuned`.

The first problems of a size class are noted exactly, since a program with fixed shapes has few. Later ones are assumed
to be growing lengths; they count for the class's representative, once in a process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from tlxgen.problem import Problem
from tlxgen.space.size_classes import representative

#: Problems of one class that a process notes exactly.
EXACT = 4
#: Classes that are remembered; the least recently seen is forgotten first.
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
    """Forgets what this process noted."""
    with _LOCK:
        _NOTED.clear()
