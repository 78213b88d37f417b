"""Checks at the end of a role, a CTA and a launch: no work under way, every phase waited for, no late remote access."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tlxgen.simulator.findings import Finding, Place
from tlxgen.simulator.machine.tasks import Cta, Task


def of_task(task: Task) -> Iterator[Finding]:
    """The role has waited for all asynchronous work that it started."""
    ends = f"{task.name} ends, and has never waited for its last"
    for queue in (task.dots, task.stores):
        left = queue.issued - queue.waited
        if left > 0:
            groups = f" ({left} groups)" if left > 1 else ""
            yield Finding("unfinished_at_exit", f"{ends} {queue.name}{groups}", queue.place or task.place)
    if task.copies.waited < task.copies.issued or task.uncommitted:
        message = f"{ends} cp.async copies: they may write over the memory's next use"
        yield Finding("unfinished_at_exit", message, task.copies.place or task.place)


def of_cta(cta: Cta) -> Iterator[Finding]:
    """No copy into the CTA's shared memory is under way, and every phase that brought bytes was waited for."""
    place = cta.tasks[0].place
    if cta.in_flight:
        copies = "a copy" if cta.in_flight == 1 else f"{cta.in_flight} copies"
        message = f"the CTA ends with {copies} into its shared memory under way: no role has waited for the barrier"
        yield Finding("unfinished_at_exit", message, place)
    for barrier in itertools.chain.from_iterable(cta.barriers):
        allocated = Place(place.role, barrier.line)
        phases = barrier.phases
        if phases.missing_bytes and not barrier.in_flight:
            missing = phases.missing_bytes
            side = f"expects {missing} bytes more than come" if missing > 0 else f"gets {-missing} unexpected bytes"
            message = f"{barrier.name} {side} in phase {phases.completed}, which is open when the CTA ends"
            yield Finding("wrong_byte_count", message, allocated)
        if barrier.bytes_before and not barrier.waited:
            message = f"phase {phases.completed - 1} of {barrier.name} brought bytes that no role waited for"
            yield Finding("roles_out_of_step", message, allocated)


def of_launch(ctas: Iterable[Cta]) -> Iterator[Finding]:
    """No CTA was accessed from another one after its end, when its shared memory may belong to the next CTA."""
    for cta in ctas:
        if cta.known_at_end is None:
            continue
        for access, what in cta.remote_accesses:
            if not access.finished(cta.known_at_end.finished):
                message = f"{what} may reach CTA {cta.number} after it has ended: it must wait for the last of them"
                yield Finding("unfinished_at_exit", message, access.place)
