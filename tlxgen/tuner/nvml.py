"""Questions to the NVIDIA driver through NVML, each with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_LIMIT_S = 20.0


def ask(question: Callable[[Any], T]) -> T | None:
    """What `question` answers when called with the module `pynvml`; None if the driver is missing, fails or hangs.

    NVML may never return where a GPU fell off the bus, so it is called in a thread that is left behind then.
    """
    answers: list[T] = []

    def run() -> None:
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                answers.append(question(pynvml))
            finally:
                pynvml.nvmlShutdown()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return answers[0] if answers else None


def driver_version() -> str | None:
    """The driver's version; None if it does not answer."""
    return ask(lambda driver: str(driver.nvmlSystemGetDriverVersion()))
