"""Detection of races: accesses to shared or global memory that nothing orders, and reads of unwritten memory.

Each function records an access and yields what is wrong with it. The order comes from the vector clocks alone, so a
race is found whether or not the schedule at hand shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tlxgen.simulator.findings import Finding, Place
from tlxgen.simulator.machine.accesses import Access
from tlxgen.simulator.machine.clocks import Knowledge
from tlxgen.simulator.machine.global_memory import GlobalMemory, Storage
from tlxgen.simulator.machine.shared_memory import Tile


def in_shared_memory(tile: Tile, access: Access, known: Knowledge) -> Iterator[Finding]:
    """Records an access to a tile; yields `data_race`, `early_release` and `unwritten_shared`."""
    for old in tile.conflicts(access, known):
        if not old.write and not old.generic:
            kind, why = "early_release", f"{old} may still read it"
        elif old.in_flight or not old.generic:
            kind, why = "data_race", f"{old} may still be under way"
        else:
            kind, why = "data_race", f"nothing orders {old} before it"
        yield Finding(kind, f"{access.what} of {tile.name}, while {why}", access.place, old.place)
    if not access.write and not tile.written.all():
        unwritten = "parts of which were never written" if tile.written.any() else "which was never written"
        yield Finding("unwritten_shared", f"{access.what} of {tile.name}, {unwritten}", access.place)


def in_global_memory(
    memory: GlobalMemory, storage: Storage, elements: Any, access: Access, known: Knowledge
) -> Iterator[Finding]:
    """Records an access to elements of a storage, given by number; yields `data_race`."""
    for old in memory.note(storage, elements, access, known.finished):
        message = f"{access.what} of {storage.name}, while nothing orders {old} before it"
        yield Finding("data_race", message, access.place, old.place)


def without_fence(tile: Tile, what: str, place: Place, known: Knowledge) -> Iterator[Finding]:
    """Yields `missing_fence` for generic writes to a tile that TMA is about to read."""
    for old in tile.unfenced(known):
        message = f"{what} of {tile.name}: no fence has shown it {old}, so it may read what was there before"
        yield Finding("missing_fence", message, place, old.place)
