"""What a simulated run can find, and what to do about each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: Kind of finding → one line of remedy.
REMEDIES = {
    "deadlock": "give every wait its arrivals: check phases, arrive counts, expected bytes, and that roles loop alike",
    "data_race": "order the two accesses: a barrier that the first arrives on when it is done and the second waits for",
    "unwritten_shared": "wait for the copy that fills this buffer, or write it first",
    "early_release": "wait for the operation that still reads (async_dot_wait, async_descriptor_store_wait) first",
    "early_accumulator": "read the result of async_dot only through the async_dot_wait that retires it",
    "missing_fence": 'put tlx.fence("async_shared") between local_store and the TMA store',
    "wrong_byte_count": "expect exactly the bytes of all boxes that signal this barrier in one phase",
    "wrong_thread_count": "give all waits and arrivals of a named barrier the sum of their tasks' threads",
    "barrier_reuse": "arrive again only after a wait that proves the phase before complete and seen",
    "unfinished_at_exit": "wait for the operation before the role ends",
    "out_of_budget": "fewer stages or smaller tiles; a multiprocessor gives one CTA 232448 bytes and barriers 0 to 15",
    "roles_out_of_step": "let every role walk the same tiles and K steps",
    "out_of_bounds": "mask the access, or clamp the index",
    "capture": "create the tensor inside the task: tasks share scalars, descriptors and buffers only",
    "unknown_instruction": "register what the assembly means: tlxgen.simulator.assembly.register",
    "launch": "correct the launch",
    "assume": "the compiler builds on what tl.assume says: correct the assumption or the caller",
    "device_assert": "the kernel's own assertion failed",
    "error": "the kernel cannot run as written",
    "wrong_result": "compare offsets, masks and K ranges with the reference",
    "limit": "a loop may never end; raise the limit if the problem is large",
}


@dataclass(frozen=True)
class Place:
    """A line of the kernel's file, and the role that was there."""

    role: str
    line: int

    def __str__(self) -> str:
        return f"{self.role} line {self.line}"


@dataclass(frozen=True)
class Finding:
    """One defect: what, where, and where the other side of it is."""

    kind: str
    message: str
    place: Place
    other: Place | None = None

    @property
    def remedy(self) -> str:
        """One line: how such a defect is mended."""
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}: {self.message}\n    remedy: {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "remedy": self.remedy}
