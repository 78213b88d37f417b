"""The tuner among candidates that hang, crash and lie: each costs one trial, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable

from tlxgen import devices, ops, tune, tuning_cli
from tlxgen.config import Config
from tlxgen.errors import GpuLostError, TuningError
from tlxgen.keys import tuning_key
from tlxgen.measure import PROTOCOL
from tlxgen.store import Store
from tlxgen.tuning import Budget, TuneResult

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), str(HERE.parent)])
PROBLEM = ops.get("vector_add").problem((4096,))
KEY = tuning_key(PROBLEM, devices.target("h200").key)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuned.db") as store:
        yield store


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(stub_card.NOTES, str(folder))
    return folder


Run = Callable[..., TuneResult]


@pytest.fixture
def run(store: Store, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Tunes among these candidates, in real children; afterwards none of them may be left."""

    def run(configs: list[Config], trials: int = 200, seconds: float = 300) -> TuneResult:
        stub_card.install(monkeypatch.setattr, configs)
        try:
            return tune.tune(PROBLEM, store, budget=Budget(trials, seconds), workers=2)
        finally:
            assert wait_until(lambda: not any(is_running(pid) for pid in stub_card.pids())), "a child is left"

    return run


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


#: What a candidate does, and the class that its trial gets.
FAULTS = {
    "compile hang": "timeout",
    "compile abort": "compiler_crash",
    "compile segfault": "compiler_crash",
    "compile ptxas": "ptxas",
    "compile killed": "killed",
    "gate hang": "hang",
    "gate illegal": "launch_failed",
    "gate segfault": "launch_failed",
    "gate killed": "killed",
    "gate memory": "out_of_memory",
    "gate capture": "launch_failed",
    "timing hang": "hang",
    "timing memory": "out_of_memory",
    "timing capture": "launch_failed",
}
TRANSIENT = {"timeout", "killed", "out_of_memory"}  # they say more of the machine, and are tried again


@pytest.mark.slow
def test_each_fault_costs_one_trial_and_is_remembered(run: Run, store: Store) -> None:
    bad = {fault: stub_card.config(50 + i, fault) for i, fault in enumerate(FAULTS)}  # all faster, could they run
    good = stub_card.healthy(6)
    configs = [good[0], *list(bad.values())[:6], *good[1:4], *list(bad.values())[6:], *good[4:]]
    result = run(configs)
    assert result.record.config == good[0]
    assert result.state.failures == Counter(FAULTS.values())
    assert result.state.tried == len(configs)
    known = {trial.config: trial.status for trial in store.trials(KEY)}
    assert known == {**{bad[fault]: kind for fault, kind in FAULTS.items()}, **dict.fromkeys(good, "ok")}
    summary = tuning_cli.describe(PROBLEM, result)
    assert all(f"{n} {kind}" in summary for kind, n in Counter(FAULTS.values()).items())
    assert tuning_cli.as_dict(result)["failures"] == dict(Counter(FAULTS.values()))

    lasting = [*good, *(bad[fault] for fault, kind in FAULTS.items() if kind not in TRANSIENT)]
    before = len(stub_card.gated())
    again = run([*lasting, bad["gate memory"]])
    assert again.state.resumed == len(lasting)
    assert set(stub_card.gated()[before:]) == {config.id for config in [*good, bad["gate memory"]]}


def test_a_run_in_which_everything_fails_says_how_and_stores_nothing(run: Run, store: Store) -> None:
    with pytest.raises(TuningError, match=r"1 launch_failed, 1 ptxas; for example: .*illegal memory access"):
        run([stub_card.config(1, "gate illegal"), stub_card.config(1, "compile ptxas")])
    assert store.records() == []


def test_a_lost_gpu_ends_the_run_and_the_same_call_goes_on(run: Run, store: Store, notes: Path) -> None:
    good = stub_card.healthy(20)
    configs = [*good[:9], stub_card.config(50, "gate lost"), *good[9:]]  # in the second batch
    with pytest.raises(
        GpuLostError, match=r"no CUDA-capable device.* \(1 launch_failed, 1 gpu_lost\) are kept"
    ) as told:
        run(configs)
    assert "the best so far with 120.0 us; the same command goes on" in str(told.value)
    row = store.get(KEY)
    assert row is not None
    assert (row.config, row.protocol) == (good[0], f"{PROTOCOL}/look")
    kept = len(store.trials(KEY)) - 1  # the one that found the card gone is tried again
    (notes / "lost").unlink()
    result = run(configs)
    assert (result.state.resumed, result.state.tried) == (kept, len(configs))
    assert result.record.protocol == PROTOCOL


class Command:
    """`tlxgen tune` on the stub card, in a process of its own."""

    def __init__(self, folder: Path, trials: int, n: int = 130, limit: float = stub_card.LIMIT_S) -> None:
        call = f"stub_card.command(Path({str(folder)!r}), {n}, {limit})"
        script = f"from pathlib import Path; import stub_card; {call}"
        words = ["tune", "vector_add", "4096", "--trials", str(trials), "--workers", "1", "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            env={**os.environ, "PYTHONPATH": PATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_trials(self, folder: Path, n: int) -> None:
        assert wait_until(lambda: finished(folder) >= n or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()

    def kill(self) -> None:
        """SIGKILL, and with it goes the child that measures."""
        self.process.kill()
        self.process.communicate()
        assert wait_until(lambda: not any(is_running(pid) for pid in stub_card.pids())), "SIGKILL left a child"

    def end(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        answer: dict[str, Any] = json.loads(out)
        return answer


def finished(folder: Path) -> int:
    """Distinct finished trials in the database."""
    if not (folder / "tuned.db").exists():
        return 0
    connection = sqlite3.connect(folder / "tuned.db")
    try:
        (count,) = connection.execute("SELECT count(DISTINCT config_id) FROM trials").fetchone()
    except sqlite3.OperationalError:  # no table yet
        return 0
    finally:
        connection.close()
    return int(count)


@pytest.mark.slow
def test_signals_lose_nothing_finished_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = Command(tmp_path, 112)
    command.wait_for_trials(tmp_path, 9)  # the second batch: the best of the first is kept
    command.kill()
    known = finished(tmp_path)
    with Store.open(tmp_path / "tuned.db") as store:
        row = store.get(KEY)
    assert row is not None
    assert row.protocol == f"{PROTOCOL}/look"
    for number in (signal.SIGTERM, signal.SIGINT):
        command = Command(tmp_path, 112)
        command.wait_for_trials(tmp_path, known + 8)
        command.process.send_signal(number)
        answer = command.end()
        assert answer["interrupted"] is True
        assert answer["resumed"] == known
        known = finished(tmp_path)
        assert known - 1 <= answer["tried"] <= known < 112, "one may have been kept and not counted yet"
        assert answer["config"] == stub_card.config(120).model_dump()
        assert not any(is_running(pid) for pid in stub_card.pids())
    answer = Command(tmp_path, 112).end()
    assert (answer["interrupted"], answer["resumed"], answer["tried"]) == (False, known, 112)
    assert finished(tmp_path) == 112


def trials_by_protocol(folder: Path) -> dict[str, list[str]]:
    """Ids of the candidates with a trial, in the order they were kept in."""
    with Store.open(folder / "tuned.db") as store:
        trials = store.trials(KEY)
    protocols = {trial.protocol for trial in trials}
    return {one: [trial.config.id for trial in trials if trial.protocol == one] for one in protocols}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["timing", "gate"])
def test_sigkill_loses_at_most_the_trial_in_flight(job: str, tmp_path: Path, notes: Path) -> None:
    """In the middle of the second of three batches, of eight, eight and four candidates."""
    ids = [config.id for config in stub_card.healthy(20)]
    (notes / "hold").write_text(f"{job} {ids[12]}")
    command = Command(tmp_path, trials=20, n=20, limit=60)
    assert wait_until(lambda: stub_card.held() or command.process.poll() is not None)
    command.kill()
    in_flight = {"timing": [], "gate": [ids[12]]}[job]
    assert stub_card.gated() == ids[: {"timing": 16, "gate": 13}[job]]
    kept = [name for name in stub_card.gated() if name not in in_flight]
    assert trials_by_protocol(tmp_path) == {PROTOCOL: kept[:8], f"{PROTOCOL}/gate": kept[8:]}

    (notes / "hold").unlink()
    before = len(stub_card.gated())
    answer = Command(tmp_path, trials=20, n=20).end()
    assert (answer["resumed"], answer["tried"], answer["failures"]) == (len(kept), 20, {})
    assert answer["config"] == stub_card.config(120).model_dump()
    assert trials_by_protocol(tmp_path) == {PROTOCOL: ids}, "one look each: none lost, none twice, none rough"
    assert stub_card.gated()[before:][:12] == ids[8:], "the untimed first, then the rest"


TUNE = """
import sys
from pathlib import Path
import stub_card
from tlxgen import ops, tune
from tlxgen.store import Store

def tuned(path):
    stub_card.install(setattr, stub_card.healthy(3))
    with Store.open(Path(path)) as store:
        result = tune.tune(ops.get("vector_add").problem((4096,)), store, workers=1)
    assert result.record.config == stub_card.config(120), result
    open(path + ".runs", "a").write("run ")
"""
CALL = "tuned(sys.argv[1])\n"
CONTEXTS = {
    "a script without a main guard": TUNE + CALL,
    "a notebook": f"cells = {{'__name__': '__main__'}}\nexec({TUNE!r}, cells)\nexec({CALL!r}, cells)\n",
}
SPAWNED = """
import multiprocessing, sys
sys.path.insert(0, {folder!r})
if __name__ == "__main__":
    from tuned_there import tuned
    child = multiprocessing.get_context("spawn").Process(target=tuned, args=(sys.argv[1],), daemon=True)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("context", [*CONTEXTS, "a spawned child"])
def test_tuning_works_from(context: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CONTEXTS.get(context, SPAWNED.format(folder=str(tmp_path))))
    (tmp_path / "tuned_there.py").write_text(TUNE)
    start = ["-c", script.read_text()] if context == "a notebook" else [str(script)]
    done = subprocess.run(
        [sys.executable, *start, str(tmp_path / "own.db")],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own.db.runs").read_text() == "run "
    assert not any(is_running(pid) for pid in stub_card.pids())
