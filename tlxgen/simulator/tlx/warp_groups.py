"""`with tlx.async_tasks()`: starts the tasks of a CTA, and checks their registers and captured values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tlxgen.simulator.language.blocks import Block
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.machine.tasks import Task, Wait

_REGISTER_FILE = 65_536  # registers of a multiprocessor
_WARP_GROUP = 4  # warps
_LEAST_REGISTERS = 24


class AsyncTasks:
    """Collects tasks, then runs them until all have ended."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._parent = machine.task
        self._children: list[tuple[str, int, int, Callable[[], None], int]] = []
        self._partitions: list[int] = []  # warps of each
        self._registers: list[int | None] = []  # that each asks for

    def add(self, body: Callable[..., None], line: int, *args: Any, **options: Any) -> None:
        """One `with tlx.async_task(...)`: its code as a function, and the arguments of `async_task`."""
        m = self._machine
        self._check_captures(body, line)
        default = bool(args) and args[0] == "default"
        warps = self._parent.threads // 32 if default else int(options.get("num_warps") or 4)
        name = "default" if default else f"task@{line}"
        replicas = int(options.get("replicate", 1))
        registers = options.get("registers", options.get("num_regs"))
        if registers is not None and not (24 <= int(registers) <= 240 and int(registers) % 8 == 0):
            m.fail("out_of_budget", f"{registers} registers: a task has 24 to 240, in steps of 8")
        if not default:
            self._partitions += [warps] * replicas
            self._registers += [None if registers is None else int(registers)] * replicas
        for replica in range(replicas):
            self._children.append((f"{name}[{replica}]" if replicas > 1 else name, warps * 32, replica, body, line))

    def run(self) -> None:
        """Starts all tasks with their parent's knowledge; returns when they have ended, with theirs joined to it."""
        m, parent = self._machine, self._parent
        prefix = "" if m.grid == (1, 1, 1) else f"cta {parent.cta.number} "
        parent.cta.partitions = max(parent.cta.partitions, _with_padding(self._partitions))
        if parent.cta.used_cluster_barrier:
            message = "the warps of these tasks never arrived on the barrier of the cluster: no wait there passed"
            m.fail("deadlock", message)
        reason = _why_dropped(parent.threads // 32, self._partitions, self._registers)
        if reason:
            m.fail("out_of_budget", reason)
        known = parent.release()
        children: list[Task] = []
        for name, threads, replica, body, line in self._children:
            child = m.add_task(parent.cta, prefix + name, threads, body, known.copy())
            child.replica, child.line = replica, line
            children.append(child)
        parent.joining = True
        m.block(Wait(lambda: all(child.ended for child in children), lambda: "waits for its tasks to end"))
        parent.joining = False
        for child in children:
            parent.known.join(child.known)

    def _check_captures(self, body: Callable[..., None], line: int) -> None:
        """A task cannot use a tensor of the kernel: registers belong to the warps that wrote them."""
        cells = dict(zip(body.__code__.co_freevars, (c for c in body.__closure__ or ()), strict=True))
        defaults = dict(zip(body.__code__.co_varnames, body.__defaults__ or (), strict=False))
        values: dict[str, Any] = {**defaults}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # bound later, or never
                values[name] = cell.cell_contents
        for name, value in values.items():
            if isinstance(value, Block) and len(value.shape):
                self._machine.task.line = line
                self._machine.fail("capture", f"a task uses the tensor {name}, which was made outside of it")


def _with_padding(partitions: list[int]) -> int:
    """Number of partitions, with those that the compiler adds to fill the last warp group."""
    missing = -sum(partitions) % 4
    return len(partitions) + missing.bit_count()


def _why_dropped(num_warps: int, partitions: list[int], registers: list[int | None]) -> str | None:
    """Why the compiler would silently omit setmaxnreg (fbtriton's AllocateWarpGroups), or None."""
    asked = [count for count in registers if count is not None]
    if not asked:
        return None
    if len(asked) < len(registers):
        return "registers are asked for by some of the tasks: all of them have to, or none"
    groups = [_WARP_GROUP * -(-warps // _WARP_GROUP) for warps in partitions]
    warps = num_warps + sum(groups)
    each = _floor8(_REGISTER_FILE // (32 * warps))
    left = _floor8((each * warps - sum(n * w for n, w in zip(asked, groups, strict=True))) // num_warps)
    if left >= _LEAST_REGISTERS:
        return None
    return (
        f"the tasks ask for so many registers that {left} are left for the default task, which needs {_LEAST_REGISTERS}"
    )


def _floor8(count: int) -> int:
    """Registers are allocated in eights."""
    return count // 8 * 8
