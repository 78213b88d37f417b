"""Requirements on runs of the tuner with faults, signals and resumption, for the stub GPU and for a real one."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import descendants, is_running, wait_until
from tlxgen.codegen.emit import KernelSource
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord, TuningKey
from tlxgen.db.store import Store
from tlxgen.tuner.measure import PROTOCOL, Verdict
from tlxgen.tuner.result import TuneResult

ROOT = Path(__file__).parents[2]
#: PYTHONPATH of processes: this tree first.
PATH = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

#: File of `note_gates` in the database's folder.
_GATES = "gates"


def note_gates(folder: Path) -> None:
    """Makes this process write the id of each candidate to a file before it gates it."""
    from tlxgen.tuner.runner import Runner

    gate = Runner.gate

    def noted(card: Runner, name: str, source: KernelSource) -> Verdict:
        with (folder / _GATES).open("a") as log:
            log.write(f"{name}\n")
        return gate(card, name, source)

    Runner.gate = noted  # type: ignore[assignment, method-assign]


@dataclass(frozen=True)
class Machine:
    """A database, a problem, and a way to run `tlxgen tune` on it.

    Attributes:
        folder: of the database.
        key: of the problem.
        words: problem and options of every run.
        start: Python code that does what `tlxgen` does with `sys.argv`, in batches of eight and with `note_gates`.
    """

    folder: Path
    key: TuningKey
    words: tuple[str, ...]
    start: str

    def command(self, trials: int) -> Command:
        """A started run."""
        return Command(self, ["tune", *self.words, "--trials", str(trials), "--json"])

    def row(self) -> TunedRecord | None:
        """The row of the problem."""
        with Store.open(self.folder / "tuned.db") as store:
            return store.get(self.key)

    def tried(self) -> set[str]:
        """Ids of candidates with a trial."""
        if not (self.folder / "tuned.db").exists():
            return set()
        connection = sqlite3.connect(self.folder / "tuned.db")
        try:
            return {name for (name,) in connection.execute("SELECT config_id FROM trials")}
        except sqlite3.OperationalError:  # no table yet
            return set()
        finally:
            connection.close()

    def gated(self) -> list[str]:
        """Ids of candidates whose gates have begun, in order."""
        return (self.folder / _GATES).read_text().split()


class Command:
    """`tlxgen tune` in a process of its own."""

    def __init__(self, machine: Machine, words: Sequence[str]) -> None:
        self.machine = machine
        # Tests that were started in the background may ignore Ctrl-C, which children inherit.
        script = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{machine.start}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            env={**os.environ, "PYTHONPATH": PATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_trials(self, n: int) -> None:
        """Waits until so many trials are stored; the run must not have ended by then."""
        assert wait_until(lambda: len(self.machine.tried()) >= n or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.process.communicate()

    def kill(self) -> None:
        """Sends SIGKILL, after which no process that it started may be left."""
        started = descendants(self.process.pid)
        self.process.kill()
        self.process.communicate()
        assert wait_until(lambda: not any(map(is_running, started))), "SIGKILL left a process"

    def end(self) -> dict[str, Any]:
        """Waits for the end; returns the answer."""
        started = descendants(self.process.pid)
        out, err = self.process.communicate(timeout=400)
        assert self.process.returncode == 0, err
        assert wait_until(lambda: not any(map(is_running, started))), "a process is left"
        answer: dict[str, Any] = json.loads(out)
        return answer


def signals_lose_nothing_finished(machine: Machine, trials: int) -> dict[str, Any]:
    """Sends SIGKILL, SIGTERM and Ctrl-C, each in the middle of a search, and runs the same command; its answer."""
    command = machine.command(trials)
    command.wait_for_trials(9)  # the second batch: the best of the first is kept
    command.kill()
    kept = machine.tried()
    assert kept >= set(machine.gated()[:-1]), "more than the trial in flight is lost"
    row = machine.row()
    assert row is not None
    assert row.protocol == f"{PROTOCOL}/look"
    for number in (signal.SIGTERM, signal.SIGINT):
        command = machine.command(trials)
        command.wait_for_trials(len(kept) + 2)
        command.process.send_signal(number)
        answer = command.end()
        assert answer["interrupted"] is True
        assert answer["resumed"] == len(kept)
        kept = machine.tried()
        assert len(kept) - 1 <= answer["tried"] <= len(kept) < trials, "one may be stored and not counted yet"
        row = machine.row()
        assert row is not None
        assert (row.protocol, row.config.model_dump()) == (PROTOCOL, answer["config"])
    answer = machine.command(trials).end()
    assert (answer["interrupted"], answer["resumed"], answer["tried"]) == (False, len(kept), trials)
    assert len(machine.tried()) == trials
    return answer


def bad_candidates_cost_a_trial_each(
    run: Callable[[list[Config]], TuneResult],
    store: Store,
    good: Sequence[Config],
    bad: Mapping[Config, str],
) -> TuneResult:
    """One run with good candidates and bad ones among them, given with the class that the trial must get."""
    half = len(bad) // 2
    configs = [good[0], *list(bad)[:half], *good[1:-1], *list(bad)[half:], good[-1]]
    before = descendants(os.getpid())
    result = run(configs)
    assert wait_until(lambda: descendants(os.getpid()) <= before), "a process is left"
    assert result.record.config in good
    assert result.state.failures == Counter(bad.values())
    assert result.state.tried == len(configs)
    known = {trial.config: trial.status for trial in store.trials(result.record.key)}
    assert known == {**bad, **dict.fromkeys(good, "ok")}
    assert store.get(result.record.key) == result.record
    return result


def script(install: str, problem: str, trials: int) -> str:
    """A script without a main guard, which tunes into a given file and then notes that it ran."""
    return f"""
import sys
from pathlib import Path
{install}
from tlxgen import ops
from tlxgen.tuner import tune
from tlxgen.db.store import Store
from tlxgen.tuner.result import Budget

def tuned(path):
    with Store.open(Path(path)) as store:
        tune.tune({problem}, store, budget=Budget({trials}, 600))
    open(path + ".runs", "a").write("run ")
"""


def run_to_the_end(words: Sequence[str], database: Path) -> None:
    """Runs Python with these words and a database, which must tune once."""
    done = subprocess.run(
        [sys.executable, *words, str(database)],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert database.with_name(f"{database.name}.runs").read_text() == "run "
    with Store.open(database) as store:
        assert [record.protocol for record in store.records()] == [PROTOCOL]
