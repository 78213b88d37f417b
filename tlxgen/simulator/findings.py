"""Findings of the simulator: their kinds, and one line of remedy for each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: Kind of finding → one line of remedy.
REMEDIES = {
    "deadlock": "give every wait its arrivals: check phases, arrive counts, expected bytes and trip counts",
    "data_race": "order the two: a barrier that the first role arrives on after its access, and the second waits for",
    "unwritten_shared": "wait for the barrier of the copy that fills this buffer, or write it first",
    "early_release": "wait first for what still reads the buffer: async_dot_wait, async_descriptor_store_wait",
    "early_accumulator": "read only what the wait gives back: acc = tlx.async_dot_wait(0, acc)",
    "missing_fence": 'put tlx.fence("async_shared") between local_store and the TMA operation that reads the buffer',
    "wrong_byte_count": "expect exactly the bytes of all boxes that signal this barrier in one phase",
    "wrong_thread_count": "give all waits and arrivals of a named barrier the sum of their tasks' threads",
    "barrier_reuse": "arrive again only after a wait that proves the phase before complete and seen",
    "unfinished_at_exit": "end the role with the wait: async_dot_wait, async_descriptor_store_wait, barrier_wait",
    "out_of_budget": "take less: a CTA has 232448 bytes and named barriers 0 to 15, a task 24 to 240 registers",
    "roles_out_of_step": "let every role walk the same tiles and K steps",
    "out_of_bounds": "mask the access, or clamp the index",
    "capture": "create the tensor inside the task: tasks share scalars, descriptors and buffers only",
    "unknown_instruction": "register its meaning beside the kernel: tlxgen.simulator.language.assembly.register",
    "launch": "correct the argument or launch option that the message names",
    "assume": "the compiler relies on tl.assume: correct the assumption or the caller",
    "device_assert": "the kernel's own assertion failed: correct what it checks, or the condition",
    "error": "correct the line: the kernel stops there",
    "wrong_result": "compare offsets, masks and K ranges with the reference",
    "limit": "check the condition of the loop: it may never end; a large problem may need higher limits",
}


@dataclass(frozen=True)
class Place:
    """A role and its line in the kernel's file; line 0 is no line."""

    role: str
    line: int

    def __str__(self) -> str:
        return f"{self.role} line {self.line}"


@dataclass(frozen=True)
class Finding:
    """One defect.

    Attributes:
        kind: one of `REMEDIES`.
        message: the defect, with the names of the source.
        place: line of the defect.
        other: line of its other side, such as the earlier access of a race.
    """

    kind: str
    message: str
    place: Place
    other: Place | None = None

    @property
    def remedy(self) -> str:
        """How to correct such a defect, in one line."""
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}: {self.message}\n    remedy: {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "remedy": self.remedy}
