"""`Child`: a process that runs jobs one at a time, each with a timeout, and may hang or crash without harm.

It is a fresh interpreter: no fork, which CUDA does not survive, and no re-import of the caller's script, so scripts
without a main guard work. Pebble and loky do neither, and lack three things that are needed here: the child's whole
process group (ptxas) is killed at a timeout, it dies with its parent, and a crash's output is in the error message.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

T = TypeVar("T")

_BOOT = """
import sys
sys.path.pop(0)
import json
sys.path[:] = json.loads(sys.argv[1])
from tlxgen.tuner.process import main
main(int(sys.argv[2]))
"""

#: Bytes at the end of a dead child's output in which the error message is looked for.
_TAIL = 2000


class ChildTimeoutError(Exception):
    """The job did not end in time; the child was killed."""


class ChildDiedError(Exception):
    """The child ended in the middle of a job; the message holds the last line of its output.

    Attributes:
        status: the exit status, negative for a signal; None if unknown.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def killed(self) -> bool:
        """Whether it was killed from outside: by a user, a batch system, or the kernel for lack of memory."""
        return self.status in {-signal.SIGKILL, -signal.SIGTERM}


#: The line of a traceback that names the exception.
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b: ")


class Child:
    """A process that is started by the first job, and again after it ended.

    A job is a picklable callable without arguments. Jobs of one child may share state through module globals. The child
    ends with the thread that started it, so that no hung kernel outlives its tuner.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: Any = None

    @property
    def alive(self) -> bool:
        """Whether the process runs, and so has the state of earlier jobs."""
        return self._process is not None and self._process.poll() is None

    def call(self, job: Callable[[], T], timeout: float) -> T:
        """The job's result.

        Raises:
            ChildTimeoutError: no result after `timeout` seconds; the child was killed.
            ChildDiedError: the process ended.
            Exception: the job's own.
        """
        if not self.alive:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps(job))
            if not self._connection.poll(timeout):
                self.kill()
                raise ChildTimeoutError(f"no result after {timeout:.0f} s")
            ok, result = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - our own child's bytes
        except (EOFError, OSError) as error:
            message, status = self._last_output()
            self.kill()
            raise ChildDiedError(message or f"the process ended: {error!r}", status) from None
        except KeyboardInterrupt:
            self.kill()  # its result would be taken for the next job's
            raise
        if ok:
            return result  # type: ignore[no-any-return]
        raise result

    def kill(self) -> None:
        """Kills the child and all processes that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        if self._log is not None:
            self._log.close()
        self._process = self._connection = self._log = None

    def _start(self) -> None:
        self.kill()
        self._connection, theirs = Pipe()
        # To a file, which is read only after a crash: a compiler that fails prints whole modules.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            # The child imports from where we do; `-m` would put the current directory first.
            [sys.executable, "-c", _BOOT, json.dumps(sys.path, default=str), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
            start_new_session=True,
        )
        theirs.close()

    def _last_output(self) -> tuple[str, int | None]:
        """Exit status and last line of a dead child, and the status alone."""
        if self._process is None or self._log is None:
            return "", None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL))
        tail = self._log.read().decode(errors="replace").strip().splitlines()
        # Advice may follow the line that names the exception, as in torch's CUDA errors.
        telling = [line for line in tail if _EXCEPTION.match(line)] or tail
        status = self._process.returncode
        return ": ".join([f"exit status {status}", *telling[-1:]]), status


def _die_with_parent() -> None:
    """Has Linux kill this process when its parent ends, even in a hung kernel (prctl(2), PR_SET_PDEATHSIG)."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(connection: Connection) -> None:
    """Runs jobs until the parent closes the connection."""
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own parent's bytes
        except EOFError:
            return
        try:
            answer = (True, job())
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            answer = (False, error)
        try:
            message = pickle.dumps(answer)
            if not answer[0]:
                pickle.loads(message)  # noqa: S301 - some exceptions pickle and do not unpickle
        except Exception:  # noqa: BLE001 - what cannot be pickled is sent as text
            message = pickle.dumps((False, RuntimeError(f"{type(answer[1]).__name__}: {answer[1]}")))
        connection.send_bytes(message)


def main(descriptor: int) -> None:
    """Entry point of the child: serves jobs from a connection that the parent opened."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _serve(Connection(descriptor))
