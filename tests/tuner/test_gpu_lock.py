"""The lock of a GPU, and what the driver says of other processes on it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import stub_nvml
from tlxgen.tuner import gpu_lock, nvml

HOLD = """
import sys
from pathlib import Path
from tlxgen.tuner import gpu_lock
with gpu_lock.exclusive("uuid", print, Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_second_tuner_waits_with_a_message_until_the_first_is_killed(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    messages: list[str] = []
    threading.Timer(0.3, first.kill).start()
    with gpu_lock.exclusive("uuid", messages.append, tmp_path), gpu_lock.exclusive("other", messages.append, tmp_path):
        assert first.wait(10) == -9
    (message,) = messages
    assert "waiting" in message
    first.communicate()


def test_lock_file_is_writable_by_all_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with gpu_lock.exclusive("uuid", print, tmp_path):
            (file,) = tmp_path.iterdir()
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o666
    with gpu_lock.exclusive("uuid", print, tmp_path):
        assert list(tmp_path.iterdir()) == [file]


def fail() -> None:
    raise stub_nvml.Nvml.NVMLError("unknown error")


PROCESSES, LOAD = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetUtilizationRates"


@pytest.mark.parametrize(
    ("answers", "processes", "load"),
    [
        ({PROCESSES: ["one", "two"], LOAD: SimpleNamespace(gpu=97)}, 2, 97),
        ({PROCESSES: [], LOAD: SimpleNamespace(gpu=0)}, 0, 0),
        ({}, 0, 0),
        ({PROCESSES: ["one"], LOAD: SimpleNamespace(gpu=97), "nvmlDeviceGetHandleByUUID": fail}, 0, 0),
        ({"driver": False}, 0, 0),
        ({"nvmlInit": threading.Event().wait}, 0, 0),
    ],
    ids=["busy", "idle", "questions fail", "unknown GPU", "no driver", "driver hangs"],
)
def test_other_processes_and_load(
    answers: dict[str, Any], processes: int, load: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_nvml.install(monkeypatch, **answers)
    monkeypatch.setattr(nvml, "_LIMIT_S", 0.2 if "nvmlInit" in answers else 20.0)
    assert (gpu_lock.other_processes("uuid"), gpu_lock.load("uuid", settle=0.0)) == (processes, load)
