"""The child process: whatever a job does to it, the parent goes on and nothing is left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
    def test_run_in_another_process(self, child: Child) -> None:
        assert child.call(jobs.pid, 30) != os.getpid()

    def test_of_one_child_share_state(self, child: Child) -> None:
        assert [child.call(jobs.count, 30) for _ in range(3)] == [1, 2, 3]
        assert len({child.call(jobs.pid, 30) for _ in range(3)}) == 1

    def test_see_the_childs_environment(self, child: Child) -> None:
        assert child.call(jobs.environment, 30)["PYTHONPATH"] == PATH

    def test_answer_with_large_results(self, child: Child) -> None:
        data = bytes(50_000_000)
        assert child.call(jobs.Echo(data), 60) == data

    def test_may_print_without_end(self, child: Child) -> None:
        assert child.call(jobs.print_much, 60) == 1

    def test_start_no_process_before_the_first(self, child: Child) -> None:
        assert not child.alive
        child.call(jobs.pid, 30)
        assert child.alive


class TestExceptions:
    def test_come_back_as_they_are(self, child: Child) -> None:
        with pytest.raises(ValueError, match="a job's own error"):
            child.call(jobs.raise_value_error, 30)
        assert child.call(jobs.count, 30) == 1

    def test_of_tlxgen_come_back_with_their_class_and_kind(self, child: Child) -> None:
        with pytest.raises(CompileError, match="out of registers") as caught:
            child.call(jobs.raise_compile_error, 30)
        assert caught.value.kind == "ptxas"
        assert child.call(jobs.count, 30) == 1

    @pytest.mark.parametrize("job", [jobs.raise_unpicklable, jobs.raise_two_arguments])
    def test_that_cannot_travel_come_back_as_text(self, job: object, child: Child) -> None:
        assert callable(job)
        words = "this one holds a lock" if job is jobs.raise_unpicklable else "told in two parts"
        with pytest.raises(RuntimeError, match=words) as caught:
            child.call(job, 30)
        assert job is jobs.raise_two_arguments or "HoldsALockError" in str(caught.value)
        assert child.call(jobs.count, 30) == 1

    def test_are_raised_for_results_that_cannot_travel(self, child: Child) -> None:
        with pytest.raises(RuntimeError, match="lambda"):
            child.call(jobs.return_unpicklable, 30)
        assert child.call(jobs.count, 30) == 1

    def test_are_raised_for_jobs_that_cannot_travel_and_the_child_lives(self, child: Child) -> None:
        child.call(jobs.count, 30)
        with pytest.raises(Exception, match=r"pickle|local object"):
            child.call(lambda: 1, 30)
        assert child.call(jobs.count, 30) == 2


class TestDeaths:
    def test_by_abort_come_with_the_last_words(self, child: Child) -> None:
        with pytest.raises(ChildDiedError, match=r"-6.*LLVM ERROR: an assertion"):
            child.call(jobs.abort, 30)

    def test_by_kill_come_with_the_last_words(self, child: Child) -> None:
        with pytest.raises(ChildDiedError, match=r"-9.*last words"):
            child.call(jobs.kill_self, 30)

    def test_say_what_happened_though_advice_follows(self, child: Child) -> None:
        with pytest.raises(
            ChildDiedError, match=r"exit status 3: torch.AcceleratorError: CUDA error: misaligned address$"
        ):
            child.call(jobs.end_with_advice, 30)

    def test_by_exit(self, child: Child) -> None:
        with pytest.raises(ChildDiedError, match="exit status 3"):
            child.call(jobs.leave, 30)

    def test_leave_room_for_the_next_child(self, child: Child) -> None:
        first = child.call(jobs.pid, 30)
        for job in (jobs.abort, jobs.kill_self, jobs.leave):
            with pytest.raises(ChildDiedError):
                child.call(job, 30)
            assert not child.alive
            assert child.call(jobs.pid, 30) != first
            assert child.call(jobs.count, 30) == 1  # a fresh process with fresh state

    def test_between_jobs_go_unnoticed(self, child: Child) -> None:
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
    def test_end_a_job_that_does_not_end(self, child: Child) -> None:
        pid = child.call(jobs.pid, 30)
        started = time.monotonic()
        with pytest.raises(ChildTimeoutError, match="1 s"):
            child.call(jobs.sleep_forever, 1)
        assert time.monotonic() - started < 5
        assert not is_running(pid)
        assert not child.alive

    def test_end_a_job_that_ignores_signals(self, child: Child) -> None:
        pid = child.call(jobs.pid, 30)
        with pytest.raises(ChildTimeoutError):
            child.call(jobs.ignore_signals_and_sleep, 1)
        assert not is_running(pid)

    def test_end_what_the_job_started(self, child: Child, tmp_path: Path) -> None:
        note = tmp_path / "pids"
        child.call(jobs.pid, 30)
        with pytest.raises(ChildTimeoutError):
            child.call(jobs.SleepWithAChild(note), 2)
        pids = [int(word) for word in note.read_text().split()]
        assert len(pids) == 2
        assert wait_until(lambda: not any(is_running(pid) for pid in pids))

    def test_leave_room_for_the_next_child(self, child: Child) -> None:
        with pytest.raises(ChildTimeoutError):
            child.call(jobs.sleep_forever, 1)
        assert child.call(jobs.count, 30) == 1


class TestKill:
    def test_ends_child_and_grandchildren_and_may_be_repeated(self, child: Child, tmp_path: Path) -> None:
        note = tmp_path / "pids"
        caught: list[BaseException] = []

        def call() -> None:
            try:
                child.call(jobs.SleepWithAChild(note), 60)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is looked at below
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        assert wait_until(note.exists)
        pids = [int(word) for word in note.read_text().split()]
        os.killpg(pids[0], signal.SIGKILL)
        thread.join(20)
        assert [type(error) for error in caught] == [ChildDiedError]
        assert wait_until(lambda: not any(is_running(pid) for pid in pids))
        child.kill()
        child.kill()

    def test_of_a_child_that_never_was(self) -> None:
        Child().kill()


class TestParents:
    def start(self, script: Path, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": PATH}
        return subprocess.Popen([sys.executable, str(script), *arguments], env=environment)

    def test_killed_in_the_middle_leave_no_orphan(self, tmp_path: Path) -> None:
        script, note = tmp_path / "parent.py", tmp_path / "pid"
        script.write_text(
            "import sys, jobs\n"
            "from pathlib import Path\n"
            "from tlxgen.tuner.process import Child\n"
            "Child().call(jobs.Sleep(Path(sys.argv[1])), 3600)\n"
        )
        parent = self.start(script, str(note))
        assert wait_until(note.exists, 30)
        pid = int(note.read_text())
        assert is_running(pid)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_running(pid)), "the child outlived its parent"

    def test_that_end_leave_no_orphan(self, tmp_path: Path) -> None:
        script, note = tmp_path / "parent.py", tmp_path / "pid"
        script.write_text(
            "import sys, jobs\n"
            "from tlxgen.tuner.process import Child\n"
            "open(sys.argv[1], 'w').write(str(Child().call(jobs.pid, 60)))\n"
        )
        assert self.start(script, str(note)).wait(60) == 0
        assert wait_until(lambda: not is_running(int(note.read_text())))

    def test_need_no_main_guard(self, tmp_path: Path) -> None:
        """The child does not import the caller's script again: it would start children without end."""
        script, note = tmp_path / "script.py", tmp_path / "runs"
        script.write_text(
            "import sys, jobs\n"
            "from tlxgen.tuner.process import Child\n"
            "open(sys.argv[1], 'a').write('run ')\n"
            "assert Child().call(jobs.count, 60) == 1\n"
        )
        assert self.start(script, str(note)).wait(60) == 0
        assert note.read_text() == "run "

    def test_may_stand_in_any_directory(self, tmp_path: Path) -> None:
        """What the parent can import, the child can, however the parent came by it."""
        script = tmp_path / "script.py"
        script.write_text(
            "import sys\n"
            "from pathlib import Path\n"
            f"sys.path[:0] = {PATH.split(os.pathsep)!r}\n"
            "sys.path.append(Path('nowhere'))  # as notebooks do, though Python itself skips it\n"
            "import jobs\n"
            "from tlxgen.tuner.process import Child\n"
            "assert Child().call(jobs.count, 60) == 1\n"
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_an_interrupted_job_does_not_answer_the_next_one(child: Child) -> None:
    """Ctrl-C in the middle of a job: its answer must not be taken for that of the job after it."""
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
