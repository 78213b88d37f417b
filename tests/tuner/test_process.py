"""`Child`: whatever a job does to its process, the parent goes on and no process is left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs  # type: ignore[import-not-found] # conftest.py makes it importable
import pytest

from tests.support.processes import is_running, wait_until
from tlxgen.errors import CompileError
from tlxgen.tuner.process import Child, ChildDiedError, ChildTimeoutError

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)])


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child({"PYTHONPATH": PATH})
    yield child
    child.kill()


class TestJobs:
    def test_run_in_one_other_process_and_share_state(self, child: Child) -> None:
        assert not child.alive, "started by the first job"
        assert [child.call(jobs.count, 30) for _ in range(3)] == [1, 2, 3]
        (pid,) = {child.call(jobs.pid, 30) for _ in range(3)}
        assert pid != os.getpid()
        assert child.alive

    def test_see_the_environment_of_the_child(self, child: Child) -> None:
        assert child.call(jobs.environment, 30)["PYTHONPATH"] == PATH

    def test_may_return_large_results(self, child: Child) -> None:
        data = bytes(50_000_000)
        assert child.call(jobs.Echo(data), 60) == data

    def test_may_print_without_end(self, child: Child) -> None:
        assert child.call(jobs.print_much, 60) == 1


class TestExceptions:
    @pytest.mark.parametrize(
        ("job", "kind", "match"),
        [
            (jobs.raise_value_error, ValueError, "a job's own error"),
            (jobs.raise_compile_error, CompileError, "out of registers"),
            (jobs.raise_unpicklable, RuntimeError, "HoldsALockError: this one holds a lock"),
            (jobs.raise_two_arguments, RuntimeError, "told in two parts"),
            (jobs.return_unpicklable, RuntimeError, "lambda"),
            (lambda: 1, Exception, r"pickle|local object"),
        ],
        ids=["own", "of tlxgen", "unpicklable", "cannot be unpickled", "unpicklable result", "unpicklable job"],
    )
    def test_are_raised_in_the_parent_and_the_child_goes_on(
        self, job: Callable[[], object], kind: type[Exception], match: str, child: Child
    ) -> None:
        assert child.call(jobs.count, 30) == 1
        with pytest.raises(kind, match=match) as caught:
            child.call(job, 30)
        assert getattr(caught.value, "kind", "ptxas") == "ptxas"
        assert child.call(jobs.count, 30) == 2


class TestDeaths:
    @pytest.mark.parametrize(
        ("job", "match"),
        [
            (jobs.abort, r"-6.*LLVM ERROR: an assertion"),
            (jobs.kill_self, r"-9.*last words"),
            (jobs.end_with_advice, r"exit status 3: torch.AcceleratorError: CUDA error: misaligned address$"),
            (jobs.leave, "exit status 3"),
        ],
        ids=["abort", "kill", "exit with advice after the error", "exit"],
    )
    def test_raise_the_last_output_and_the_next_job_has_a_new_process(
        self, job: Callable[[], object], match: str, child: Child
    ) -> None:
        first = child.call(jobs.pid, 30)
        with pytest.raises(ChildDiedError, match=match):
            child.call(job, 30)
        assert not child.alive
        assert child.call(jobs.pid, 30) != first
        assert child.call(jobs.count, 30) == 1

    def test_between_jobs_are_not_noticed(self, child: Child) -> None:
        pid = child.call(jobs.pid, 30)
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not child.alive)
        assert child.call(jobs.pid, 30) != pid

    def test_leave_no_open_files(self, child: Child) -> None:
        child.call(jobs.pid, 30)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with pytest.raises(ChildDiedError):
                child.call(jobs.leave, 30)
            child.call(jobs.pid, 30)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


class TestTimeouts:
    @pytest.mark.parametrize("job", [jobs.sleep_forever, jobs.ignore_signals_and_sleep])
    def test_kill_the_child(self, job: Callable[[], object], child: Child) -> None:
        pid = child.call(jobs.pid, 30)
        started = time.monotonic()
        with pytest.raises(ChildTimeoutError, match="1 s"):
            child.call(job, 1)
        assert time.monotonic() - started < 5
        assert not is_running(pid)
        assert not child.alive
        assert child.call(jobs.count, 30) == 1

    def test_kill_processes_that_the_job_started(self, child: Child, tmp_path: Path) -> None:
        note = tmp_path / "pids"
        child.call(jobs.pid, 30)
        with pytest.raises(ChildTimeoutError):
            child.call(jobs.SleepWithAChild(note), 2)
        pids = [int(word) for word in note.read_text().split()]
        assert len(pids) == 2
        assert wait_until(lambda: not any(map(is_running, pids)))


class TestKill:
    def test_ends_child_and_grandchildren_and_may_be_repeated(self, child: Child, tmp_path: Path) -> None:
        note = tmp_path / "pids"
        caught: list[BaseException] = []

        def call() -> None:
            try:
                child.call(jobs.SleepWithAChild(note), 60)
            except BaseException as error:  # noqa: BLE001 - checked below
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        assert wait_until(note.exists)
        pids = [int(word) for word in note.read_text().split()]
        os.killpg(pids[0], signal.SIGKILL)
        thread.join(20)
        assert [type(error) for error in caught] == [ChildDiedError]
        assert wait_until(lambda: not any(map(is_running, pids)))
        child.kill()
        child.kill()

    def test_may_precede_the_first_job(self) -> None:
        Child().kill()


class TestParents:
    """Scripts that start a child."""

    IMPORTS = "import sys, jobs\nfrom pathlib import Path\nfrom tlxgen.tuner.process import Child\n"

    @pytest.fixture
    def script(self, tmp_path: Path) -> Path:
        return tmp_path / "script.py"

    @pytest.fixture
    def note(self, tmp_path: Path) -> Path:
        return tmp_path / "note"

    def start(self, script: Path, note: Path, body: str) -> subprocess.Popen[bytes]:
        script.write_text(self.IMPORTS + body)
        return subprocess.Popen([sys.executable, str(script), str(note)], env={**os.environ, "PYTHONPATH": PATH})

    def test_that_are_killed_leave_no_orphan(self, script: Path, note: Path) -> None:
        parent = self.start(script, note, "Child().call(jobs.Sleep(Path(sys.argv[1])), 3600)\n")
        assert wait_until(note.exists, 30)
        pid = int(note.read_text())
        assert is_running(pid)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_running(pid)), "the child outlived its parent"

    def test_that_end_leave_no_orphan(self, script: Path, note: Path) -> None:
        body = "Path(sys.argv[1]).write_text(str(Child().call(jobs.pid, 60)))\n"
        assert self.start(script, note, body).wait(60) == 0
        assert wait_until(lambda: not is_running(int(note.read_text())))

    def test_need_no_main_guard(self, script: Path, note: Path) -> None:
        """The child does not import the caller's script, which would start children without end."""
        body = "open(sys.argv[1], 'a').write('run ')\nassert Child().call(jobs.count, 60) == 1\n"
        assert self.start(script, note, body).wait(60) == 0
        assert note.read_text() == "run "

    def test_share_their_import_path_in_any_directory(self, script: Path, tmp_path: Path) -> None:
        script.write_text(
            "import sys\n"
            "from pathlib import Path\n"
            f"sys.path[:0] = {PATH.split(os.pathsep)!r}\n"
            "sys.path.append(Path('nowhere'))  # as notebooks do, though Python itself skips it\n"
            f"{self.IMPORTS}"
            "assert Child().call(jobs.count, 60) == 1\n"
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_result_of_an_interrupted_job_is_not_taken_for_the_next_ones(child: Child) -> None:
    child.call(jobs.count, 30)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            child.call(functools.partial(time.sleep, 1.0), 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert child.call(jobs.count, 30) == 1, "a new child, with nothing left over"
