"""One tuner on a GPU at a time, and a look at who else is there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tlxgen.tuner import gpu_lock

HOLD = """
import sys
from pathlib import Path
from tlxgen.tuner import gpu_lock
with gpu_lock.exclusive("uuid", print, Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_second_tuner_waits_and_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    told: list[str] = []
    timer = threading.Timer(0.3, first.kill)  # the lock ends with its holder, however it ends
    timer.start()
    with gpu_lock.exclusive("uuid", told.append, tmp_path), gpu_lock.exclusive("another", told.append, tmp_path):
        assert first.wait(10) == -9
    assert len(told) == 1
    assert "waiting" in told[0]
    first.communicate()


def test_the_lock_is_for_all_users(tmp_path: Path) -> None:
    with gpu_lock.exclusive("uuid", print, tmp_path):
        (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize(
    ("script", "count"),
    [("echo 4711; echo 4712", 2), ("true", 0), ("echo failed; exit 9", 0), (None, 0)],
    ids=["two", "none", "a driver that fails", "no driver"],
)
def test_processes_on_the_gpu_are_counted(
    script: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep if script else None)
    assert gpu_lock.other_processes("uuid") == count


@pytest.mark.parametrize(
    ("script", "percent"),
    [("echo 97", 97), ("echo 0", 0), ("echo '[N/A]'", 0), ("echo failed; exit 9", 0)],
    ids=["busy", "idle", "unknown", "a driver that fails"],
)
def test_what_others_do_is_asked_of_the_driver(
    script: str, percent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_lock.load("uuid", settle=0.0) == percent
