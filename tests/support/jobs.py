"""Jobs for child processes, in a module that parent and child import by one name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tlxgen.config import Config
from tlxgen.problem import Problem

_calls = 0


def pid() -> int:
    return os.getpid()


def count() -> int:
    """Number of calls in this process."""
    global _calls  # noqa: PLW0603 - state shared by jobs
    _calls += 1
    return _calls


def environment() -> dict[str, str]:
    return dict(os.environ)


def print_much() -> int:
    for _ in range(20_000):
        sys.stderr.write("a compiler that prints whole modules\n")
    return 1


@dataclass(frozen=True)
class Echo:
    value: object

    def __call__(self) -> object:
        return self.value


class TwoArgumentsError(Exception):
    """Pickles, and does not unpickle: its constructor takes other arguments than `args`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")


class HoldsALockError(Exception):
    """Does not pickle."""

    def __init__(self, text: str) -> None:
        import threading

        super().__init__(text)
        self.lock = threading.Lock()


def raise_value_error() -> None:
    raise ValueError("a job's own error")


def raise_compile_error() -> None:
    from tlxgen.errors import CompileError

    raise CompileError("ptxas", "out of registers")


def raise_two_arguments() -> None:
    raise TwoArgumentsError("kind", "told in two parts")


def raise_unpicklable() -> None:
    raise HoldsALockError("this one holds a lock")


def return_unpicklable() -> object:
    return lambda: None


def abort() -> None:
    sys.stderr.write("LLVM ERROR: an assertion\n")
    sys.stderr.flush()
    os.abort()


def kill_self() -> None:
    sys.stdout.write("last words\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_advice() -> None:
    """Like torch when CUDA fails."""
    sys.stderr.write("Traceback\ntorch.AcceleratorError: CUDA error: misaligned address\nFor debugging, try this.\n")
    sys.stderr.flush()
    os._exit(3)


def leave() -> None:
    raise SystemExit(3)


def sleep_forever() -> None:
    time.sleep(3600)


def ignore_signals_and_sleep() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sleep_forever()


def _write(note: Path, text: str) -> None:
    """Writes atomically."""
    part = note.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(note)


@dataclass(frozen=True)
class SleepWithAChild:
    """Starts a process, as a compiler starts ptxas, notes both ids, and never ends."""

    note: Path

    def __call__(self) -> None:
        other = subprocess.Popen(["sleep", "3600"])
        _write(self.note, f"{os.getpid()} {other.pid}")
        sleep_forever()


@dataclass(frozen=True)
class Sleep:
    """Notes its process id and sleeps."""

    note: Path

    def __call__(self) -> None:
        _write(self.note, str(os.getpid()))
        sleep_forever()


@dataclass(frozen=True)
class Compile:
    """Compiles a config as a launch would; returns its hash and its shared memory."""

    problem: Problem
    config: Config
    capability: tuple[int, int]

    def __call__(self) -> tuple[str, int]:
        from tlxgen import ops
        from tlxgen.codegen import loader
        from tlxgen.codegen.compile import compile_kernel
        from tlxgen.codegen.emit import emit

        operator = ops.get(self.problem.operator)
        module = loader.load(emit(operator, self.problem, self.config))
        inputs = operator.inputs(self.problem, "meta", 0)
        _, args = operator.arguments(module, inputs, operator.output(self.problem, inputs), num_sms=132)
        kernel = compile_kernel(module, args, self.capability)
        assert kernel.asm["cubin"]
        return str(kernel.hash), int(kernel.metadata.shared)
