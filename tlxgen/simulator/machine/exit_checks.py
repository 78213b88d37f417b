"""What must be over when a role, a CTA or a launch ends: nothing under way, nothing unused, nobody coming late."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tlxgen.simulator.findings import Place
from tlxgen.simulator.machine.tasks import Cta, Task

if TYPE_CHECKING:
    from tlxgen.simulator.machine.machine import Machine


def check_task(machine: Machine, task: Task) -> None:
    """A role ends: it has waited for all that it started."""
    for queue in (task.dots, task.stores):
        left = queue.issued - queue.waited
        if left > 0:
            message = f"{task.name} ends, and has never waited for its last {queue.name}"
            machine.fail("unfinished_at_exit", message if left == 1 else f"{message} ({left} groups)", queue.place)
    if task.copies.waited < task.copies.issued or task.uncommitted:
        message = f"{task.name} ends, and has never waited for its last cp.async copies"
        place = task.copies.place or task.place
        machine.fail("unfinished_at_exit", f"{message}: they may write over the memory's next use", place)


def check_cta(machine: Machine, cta: Cta) -> None:
    """A CTA ends: no copy is on its way to it, and every phase that brought bytes was waited for."""
    place = cta.tasks[0].place
    if cta.in_flight:
        copies = "a copy" if cta.in_flight == 1 else f"{cta.in_flight} copies"
        message = f"the CTA ends with {copies} into its shared memory under way: no role has waited for the barrier"
        machine.fail("unfinished_at_exit", message, place)
    for barrier in itertools.chain.from_iterable(cta.barriers):
        allocated = Place(place.role, barrier.line)
        phases = barrier.phases
        if phases.missing_bytes and not barrier.in_flight:
            missing = phases.missing_bytes
            side = f"expects {missing} bytes more than come" if missing > 0 else f"gets {-missing} unexpected bytes"
            message = f"{barrier.name} {side} in phase {phases.completed}, which is open when the CTA ends"
            machine.fail("wrong_byte_count", message, allocated)
        if barrier.bytes_before and not barrier.waited:
            message = f"phase {phases.completed - 1} of {barrier.name} brought bytes that no role waited for"
            machine.fail("roles_out_of_step", message, allocated)


def check_remote_accesses(machine: Machine, ctas: Iterable[Cta]) -> None:
    """A launch ends: no CTA was reached from another one when its shared memory may have been somebody else's."""
    for cta in ctas:
        if cta.known_at_end is None:
            continue
        for access, what in cta.remote_accesses:
            if not access.finished(cta.known_at_end.finished):
                message = f"{what} may reach CTA {cta.number} after it has ended: it must wait for the last of them"
                machine.fail("unfinished_at_exit", message, access.place)
