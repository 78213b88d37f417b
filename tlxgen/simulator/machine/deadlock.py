"""The report of a deadlock: what each role waits for, who has arrived there before, and the cycle if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlxgen.simulator.findings import Finding
from tlxgen.simulator.machine.barriers import Mbarrier
from tlxgen.simulator.machine.tasks import Task


def explain(tasks: Sequence[Task], roles: Mapping[str, Task]) -> list[Finding]:
    """The deadlock as one finding that names every waiting role, and one for each known cause."""
    stuck = [task for task in tasks if task.waiting is not None and not task.joining]
    lines = ["no role can continue"]
    for task in stuck:
        assert task.waiting is not None
        partners = _partners(task)
        seen = f"earlier arrivals by {', '.join(partners)}" if partners else "no arrivals so far"
        lines.append(f"    {task.place}: {task.waiting.what()}; {seen}")
    cycle = _cycle(stuck)
    if cycle:
        lines.append("    cycle: " + " -> ".join([*cycle, cycle[0]]))
    findings = [Finding("deadlock", "\n".join(lines), stuck[0].place)]
    for task in stuck:
        findings += _causes(task, roles)
    return findings


def _partners(task: Task) -> list[str]:
    """Other roles that have arrived where this one waits."""
    return [name for name in task.waiting.partners() if name != task.name] if task.waiting else []


def _causes(task: Task, roles: Mapping[str, Task]) -> list[Finding]:
    assert task.waiting is not None
    barrier = task.waiting.barrier
    partners = [roles[name] for name in _partners(task) if name in roles]
    causes = []
    if isinstance(barrier, Mbarrier) and not barrier.phases.pending and barrier.phases.missing_bytes:
        missing = barrier.phases.missing_bytes
        more = "more bytes are expected than come" if missing > 0 else "more bytes come than are expected"
        message = f"{barrier.name}: {abs(missing)} {more}, so phase {barrier.phases.completed} never completes"
        causes.append(Finding("wrong_byte_count", message, task.place))
    if partners and all(partner.ended for partner in partners):
        names = " and ".join(partner.name for partner in partners)
        ended = f"{names} {'has' if len(partners) == 1 else 'have'} ended"
        causes.append(Finding("roles_out_of_step", f"waits for more rounds than there are: {ended}", task.place))
    return causes


def _cycle(stuck: Sequence[Task]) -> list[str]:
    """Roles each of which waits for the next, following the first partner of each; empty if that closes no cycle."""
    waits_for = {task.name: _partners(task) for task in stuck}
    for first in waits_for:
        path, name = [first], first
        while following := [n for n in waits_for[name] if n in waits_for]:
            name = following[0]
            if name in path:
                return path[path.index(name) :]
            path.append(name)
    return []
