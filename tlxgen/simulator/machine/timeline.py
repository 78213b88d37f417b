"""A Chrome trace of a run (chrome://tracing, Perfetto): each role's operations, waits and copies, in steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlxgen.simulator.machine.tasks import Task


class Timeline:
    """Collects the events of a run."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._rows: dict[str, tuple[int, int]] = {}
        self._waits: dict[str, tuple[str, int, int]] = {}

    def operation(self, task: Task, what: str, step: int) -> None:
        """A role executes an operation."""
        self._add(task, what, "work", step, 1, task.line)

    def copy(self, task: Task, what: str, start: int, end: int) -> None:
        """An asynchronous copy was under way."""
        self._add(task, what, "async", start, max(1, end - start), task.line)

    def wait_begins(self, task: Task, what: str, step: int) -> None:
        """A role starts to wait."""
        self._waits[task.name] = (what, step, task.line)

    def wait_ends(self, task: Task, step: int) -> None:
        """A role's wait is over."""
        what, start, line = self._waits.pop(task.name)
        self._add(task, what, "wait", start, max(1, step - start), line)

    def write(self, path: Path) -> None:
        """Writes the trace."""
        names: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
            for name, (pid, tid) in self._rows.items()
        ]
        path.write_text(json.dumps({"traceEvents": names + self.events}), encoding="utf-8")

    def _add(self, task: Task, what: str, category: str, start: int, duration: int, line: int) -> None:
        name = f"{task.name} async" if category == "async" else task.name
        pid, tid = self._rows.setdefault(name, (task.cta.number, len(self._rows)))
        event = {"name": what, "cat": category, "ph": "X", "ts": start, "dur": duration, "pid": pid, "tid": tid}
        self.events.append({**event, "args": {"line": line}})
