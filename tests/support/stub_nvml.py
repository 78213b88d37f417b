"""A stand-in for the module `pynvml`: an NVIDIA driver with given answers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class Nvml:
    """Answers each function by name; one without an answer raises `NVMLError`, and a callable answer is called."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def function(*_: object) -> Any:
            if name not in self._answers:
                raise self.NVMLError(name)
            answer = self._answers[name]
            return answer() if callable(answer) else answer

        return function


def install(monkeypatch: pytest.MonkeyPatch, *, driver: bool = True, **answers: Any) -> None:
    """Replaces `pynvml`; without `driver` nothing answers, as on a machine without a GPU."""
    started = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetHandleByUUID": "handle"} if driver else {}
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(**started | answers))
