"""Nobody can go on: who waits for what, who could have helped, and the circle if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlxgen.simulator.findings import Finding
from tlxgen.simulator.machine.barriers import Mbarrier
from tlxgen.simulator.machine.tasks import Task


def explain(tasks: Sequence[Task], roles: Mapping[str, Task]) -> list[Finding]:
    """The deadlock as one finding that names every waiting role, and further findings where its cause is known."""
    stuck = [task for task in tasks if task.waiting is not None and not task.joining]
    lines = ["nobody can go on"]
    for task in stuck:
        assert task.waiting is not None
        partners = [name for name in task.waiting.partners() if name != task.name]
        seen = f"{', '.join(partners)} came there before" if partners else "nobody has come there yet"
        lines.append(f"    {task.place}: {task.waiting.what()}; {seen}")
    circle = _circle(stuck)
    if circle:
        lines.append("    circle: " + " -> ".join([*circle, circle[0]]))
    findings = [Finding("deadlock", "\n".join(lines), stuck[0].place)]
    for task in stuck:
        findings += _causes(task, roles)
    return findings


def _causes(task: Task, roles: Mapping[str, Task]) -> list[Finding]:
    assert task.waiting is not None
    barrier = task.waiting.barrier
    partners = [roles[name] for name in task.waiting.partners() if name != task.name and name in roles]
    causes = []
    if isinstance(barrier, Mbarrier) and not barrier.phases.pending and barrier.phases.missing_bytes:
        missing = barrier.phases.missing_bytes
        more = "more bytes are expected than come" if missing > 0 else "more bytes come than are expected"
        message = f"{barrier.name}: {abs(missing)} {more}, so phase {barrier.phases.completed} never completes"
        causes.append(Finding("wrong_byte_count", message, task.place))
    if partners and all(partner.ended for partner in partners):
        names = " and ".join(partner.name for partner in partners)
        ended = f"{names} {'has' if len(partners) == 1 else 'have'} ended"
        message = f"waits for more rounds than there are: {ended}"
        causes.append(Finding("roles_out_of_step", message, task.place))
    return causes


def _circle(stuck: Sequence[Task]) -> list[str]:
    """Roles each of which waits for the next, going by who came to its barrier before; empty if that closes none."""
    waits_for = {
        task.name: [name for name in task.waiting.partners() if name != task.name] for task in stuck if task.waiting
    }
    for first in waits_for:
        path, name = [first], first
        while True:
            following = [n for n in waits_for.get(name, []) if n in waits_for]
            if not following:
                break
            name = following[0]
            if name in path:
                return path[path.index(name) :]
            path.append(name)
    return []
