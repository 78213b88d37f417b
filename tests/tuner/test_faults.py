"""Whole runs with candidates that hang and crash, signals, a lost GPU, and resumption, in real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable

from tests.support.processes import is_running, wait_until
from tests.support.tuner_runs import (
    Machine,
    bad_candidates_cost_a_trial_each,
    run_to_the_end,
    script,
    signals_lose_nothing_finished,
)
from tlxgen import devices, ops
from tlxgen.cli import tune as tuning_cli
from tlxgen.config import Config
from tlxgen.db.record import tuning_key
from tlxgen.db.store import Store
from tlxgen.errors import GpuLostError, TuningError
from tlxgen.tuner import tune
from tlxgen.tuner.measure import PROTOCOL
from tlxgen.tuner.result import Budget, TuneResult

PROBLEM = ops.get("vector_add").problem((4096,))
KEY = tuning_key(PROBLEM, devices.target("h200").key)


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(stub_card.NOTES, str(folder))
    return folder


Run = Callable[..., TuneResult]


@pytest.fixture
def run(store: Store, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Tunes these candidates in real children, none of which may be left afterwards."""

    def run(configs: list[Config], trials: int = 200, seconds: float = 300) -> TuneResult:
        stub_card.install(monkeypatch.setattr, configs)
        try:
            return tune.tune(PROBLEM, store, budget=Budget(trials, seconds), workers=2, limit=stub_card.LIMIT_S)
        finally:
            assert wait_until(lambda: not any(is_running(pid) for pid in stub_card.pids())), "a child is left"

    return run


#: Fault of a candidate → class of its trial.
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
TRANSIENT = {"timeout", "killed", "out_of_memory"}  #: tried again


@pytest.mark.slow
def test_each_fault_costs_one_trial_and_is_stored(run: Run, store: Store) -> None:
    bad = {fault: stub_card.config(50 + i, fault) for i, fault in enumerate(FAULTS)}  # all would be faster
    good = stub_card.healthy(6)
    result = bad_candidates_cost_a_trial_each(run, store, good, {bad[fault]: kind for fault, kind in FAULTS.items()})
    assert result.record.config == good[0]
    summary = tuning_cli.describe(PROBLEM, result)
    assert all(f"{n} {kind}" in summary for kind, n in Counter(FAULTS.values()).items())
    assert tuning_cli.as_dict(result)["failures"] == dict(Counter(FAULTS.values()))

    lasting = [*good, *(bad[fault] for fault, kind in FAULTS.items() if kind not in TRANSIENT)]
    before = len(stub_card.gated())
    again = run([*lasting, bad["gate memory"]])
    assert again.state.resumed == len(lasting)
    assert set(stub_card.gated()[before:]) == {config.id for config in [*good, bad["gate memory"]]}


def test_run_without_a_working_candidate_counts_failures_and_stores_nothing(run: Run, store: Store) -> None:
    with pytest.raises(TuningError, match=r"1 launch_failed, 1 ptxas; for example: .*illegal memory access"):
        run([stub_card.config(1, "gate illegal"), stub_card.config(1, "compile ptxas")])
    assert store.records() == []


def test_lost_gpu_ends_the_run_and_the_same_call_resumes_it(run: Run, store: Store, notes: Path) -> None:
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
    kept = len(store.trials(KEY)) - 1  # the one that found the GPU lost is tried again
    (notes / "lost").unlink()
    result = run(configs)
    assert (result.state.resumed, result.state.tried) == (kept, len(configs))
    assert result.record.protocol == PROTOCOL


def machine(folder: Path, n: int = 130, limit: float = stub_card.LIMIT_S, fault: str = "none") -> Machine:
    """A stub GPU, with `n` healthy candidates, the first the best, and one with a fault."""
    place = f"Path({str(folder)!r})"
    start = (
        "from pathlib import Path; import stub_card; from tests.support.tuner_runs import note_gates; "
        f"note_gates({place}); stub_card.command({place}, {n}, {fault!r})"
    )
    return Machine(folder, KEY, ("vector_add", "4096", "--workers", "1", "--limit", str(limit)), start)


@pytest.mark.slow
def test_signals_lose_no_finished_trial_and_the_same_command_resumes(tmp_path: Path) -> None:
    answer = signals_lose_nothing_finished(machine(tmp_path), trials=112)
    assert answer["config"] == stub_card.config(120).model_dump()
    assert not any(is_running(pid) for pid in stub_card.pids())


def test_limit_sets_the_time_of_a_candidate(tmp_path: Path) -> None:
    started = time.monotonic()
    answer = machine(tmp_path, n=2, limit=2, fault="gate hang").command(3).end()
    assert (answer["tried"], answer["failures"]) == (3, {"hang": 1})
    assert time.monotonic() - started < 15, "the default is 20 s"
    with Store.open(tmp_path / "tuned.db") as store:
        (told,) = [trial.message for trial in store.trials(KEY) if trial.status == "hang"]
    assert told == "no result after 2 s: the process was killed"


def trials_by_protocol(folder: Path) -> dict[str, list[str]]:
    """Ids of candidates with a trial, in the order in which they were stored."""
    with Store.open(folder / "tuned.db") as store:
        trials = store.trials(KEY)
    protocols = {trial.protocol for trial in trials}
    return {one: [trial.config.id for trial in trials if trial.protocol == one] for one in protocols}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["timing", "gate"])
def test_sigkill_loses_at_most_the_trial_in_flight(job: str, tmp_path: Path, notes: Path) -> None:
    """In the middle of the second of three batches of eight, eight and four candidates."""
    ids = [config.id for config in stub_card.healthy(20)]
    (notes / "hold").write_text(f"{job} {ids[12]}")
    command = machine(tmp_path, n=20, limit=60).command(20)
    assert wait_until(lambda: stub_card.held() or command.process.poll() is not None)
    command.kill()
    in_flight = {"timing": [], "gate": [ids[12]]}[job]
    assert stub_card.gated() == ids[: {"timing": 16, "gate": 13}[job]]
    kept = [name for name in stub_card.gated() if name not in in_flight]
    assert trials_by_protocol(tmp_path) == {PROTOCOL: kept[:8], f"{PROTOCOL}/gate": kept[8:]}

    (notes / "hold").unlink()
    before = len(stub_card.gated())
    answer = machine(tmp_path, n=20).command(20).end()
    assert (answer["resumed"], answer["tried"], answer["failures"]) == (len(kept), 20, {})
    assert answer["config"] == stub_card.config(120).model_dump()
    assert trials_by_protocol(tmp_path) == {PROTOCOL: ids}, "each timed once"
    assert stub_card.gated()[before:][:12] == ids[8:], "the untimed first"


TUNE = script(
    "import stub_card; stub_card.install(setattr, stub_card.healthy(3))", 'ops.get("vector_add").problem((4096,))', 8
)
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
    file = tmp_path / "script.py"
    file.write_text(CONTEXTS.get(context, SPAWNED.format(folder=str(tmp_path))))
    (tmp_path / "tuned_there.py").write_text(TUNE)
    run_to_the_end(["-c", file.read_text()] if context == "a notebook" else [str(file)], tmp_path / "own.db")
    with Store.open(tmp_path / "own.db") as store:
        assert [record.config for record in store.records()] == [stub_card.config(120)]
    assert not any(is_running(pid) for pid in stub_card.pids())


#: Ends a process that forks: after CUDA is used, a fork has a broken context.
NO_FORK = """
import os

os.register_at_fork(before=lambda: os._exit(9))
"""


def test_tuner_forks_no_process(tmp_path: Path) -> None:
    """Neither as a function nor as a command."""
    run_to_the_end(["-c", NO_FORK + TUNE + CALL], tmp_path / "own.db")
    stub = machine(tmp_path, n=3)
    answer = replace(stub, start=f"{NO_FORK}\n{stub.start}").command(3).end()
    assert answer["tried"] == 3
    assert len(stub_card.pids()) >= 4, "two processes that measured, two that compiled"


@pytest.mark.parametrize(
    "fork",
    [
        "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
        "import subprocess\nsubprocess.run(['true'], preexec_fn=os.setsid)",
    ],
    ids=["multiprocessing", "subprocess"],
)
def test_fork_would_be_detected(fork: str) -> None:
    assert subprocess.run([sys.executable, "-c", NO_FORK + fork], check=False).returncode == 9
