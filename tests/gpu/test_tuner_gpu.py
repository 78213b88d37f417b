"""Whole runs of the tuner on a GPU: with bad candidates, interrupted, and beside the caller's own computation.

The conditions are in `tests/support/tuner_runs.py`; `tests/tuner/test_faults.py` checks them on the stub GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.tuner_runs import (
    Machine,
    bad_candidates_cost_a_trial_each,
    run_to_the_end,
    script,
    signals_lose_nothing_finished,
)
from tlxgen import devices, ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config
from tlxgen.db.record import tuning_key
from tlxgen.db.store import Store
from tlxgen.space.candidates import candidates
from tlxgen.tuner import gpu_lock, tune
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.measure import PROTOCOL, Verdict
from tlxgen.tuner.result import Budget, TuneResult
from tlxgen.tuner.runner import Runner

torch = pytest.importorskip("torch")

GEMM = ops.get("gemm")
SIZES = (256, 256, 256)  # of which no row comes with tlxgen: it would be compared with what a run finds
PROBLEM = GEMM.problem(SIZES)
TARGET = devices.target("h200")

#: More than the first launch of a new process takes, on cores that others load too.
LIMIT_S = 30.0


def of(template: str, n: int) -> list[Config]:
    """The model's favourites of a template."""
    return candidates(PROBLEM, TARGET, (template,))[:n]


GOOD = [*of("gemm_vanilla", 2), *of("gemm_tma_pingpong", 2)]
(ENDLESS,) = of("gemm_tma_cooperative", 1)
OUTSIDE, HALF = of("gemm_vanilla", 4)[2:]

#: What is wrong with a config's kernel, in place of what.
BROKEN = {
    ENDLESS: ("tlx.barrier_expect_bytes(full[stage]", "tlx.barrier_expect_bytes(empty[stage]"),  # full never completes
    OUTSIDE: ("tl.store(c_ptrs, x", "tl.store(c_ptrs + (1 << 40), x"),
    HALF: ("mask=inside", "mask=inside & (cols[None, :] < N // 2)"),
}


def broken(config: Config) -> KernelSource:
    """What the template emits, with its fault if it has one."""
    source = emit(GEMM, PROBLEM, config)
    if config not in BROKEN:
        return source
    old, new = BROKEN[config]
    assert old in source.text
    return KernelSource(source.operator, source.problem, config, source.text.replace(old, new))


#: Other tests may load the card meanwhile, which is none of these tests' business.
ALONE = "from tlxgen.tuner import tune as tuner; tuner.disturbance = lambda *_, **__: ''"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "disturbance", lambda *_, **__: "")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuned.db") as store:
        yield store


Run = Callable[[list[Config]], TuneResult]


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the candidates that came to a gate."""
    names: list[str] = []
    gate = Runner.gate

    def noted(card: Runner, name: str, source: KernelSource) -> Verdict:
        names.append(name)
        return gate(card, name, source)

    monkeypatch.setattr(Runner, "gate", noted)
    return names


@pytest.fixture
def runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Run]:
    """Hands these candidates to the tuner, and faults to some of them; is told whether the simulator stands before."""

    def runs(simulate: bool) -> Run:
        def run(configs: list[Config]) -> TuneResult:
            monkeypatch.setattr(tune, "candidates", lambda *_: configs)
            monkeypatch.setattr(tune, "emit", lambda operator, problem, config: broken(config))
            with CompilePool((9, 0), timeout=300.0, simulate=simulate) as pool:  # whatever else these cores do
                return tune.tune(PROBLEM, store, budget=Budget(100, 300), pool=pool, limit=LIMIT_S)

        return run

    return runs


def free_bytes() -> int:
    """Of the card's memory, as the driver counts it for all processes."""
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def others_compute() -> bool:
    """Whether other processes than this one have memory on the card, which they take and give back as they like."""
    return gpu_lock.other_processes(devices.uuid()) > 1


def test_bad_candidates_cost_a_trial_each_and_leave_nothing(
    runs: Callable[[bool], Run], store: Store, gated: list[str]
) -> None:
    """A hang, an access outside of all memory, half a result."""
    torch.ones(1, device="cuda")
    before = free_bytes()
    bad = {ENDLESS: "hang", OUTSIDE: "launch_failed", HALF: "wrong_result"}
    bad_candidates_cost_a_trial_each(runs(False), store, GOOD, bad)
    given_back = wait_until(lambda: free_bytes() > before - 64 * 2**20)
    assert given_back or others_compute(), "a process has left memory on the card"
    assert torch.ones(1000, device="cuda").sum().item() == 1000

    assert {config.id for config in bad} < set(gated)
    gated.clear()
    again = runs(False)([*GOOD, *bad])
    assert (again.state.resumed, again.state.tried) == (len(GOOD) + len(bad), len(GOOD) + len(bad))
    assert set(gated) == {config.id for config in GOOD}, "the bad ones are remembered"


def test_the_simulator_keeps_a_deadlock_from_the_card(
    runs: Callable[[bool], Run], store: Store, gated: list[str]
) -> None:
    result = bad_candidates_cost_a_trial_each(runs(True), store, GOOD[:2], {ENDLESS: "unsafe"})
    assert "deadlock" in result.state.sample_error
    assert set(gated) == {config.id for config in GOOD[:2]}


def test_signals_lose_nothing_finished_and_the_same_command_goes_on(tmp_path: Path) -> None:
    gpu = devices.detect()
    assert gpu is not None
    start = (
        "import os; from pathlib import Path; from tests.support.tuner_runs import note_gates; from tlxgen import cli; "
        f"note_gates(Path({str(tmp_path)!r})); os.cpu_count = lambda: 4; {ALONE}; cli.main()"
    )
    words = ("gemm", *map(str, SIZES))
    answer = signals_lose_nothing_finished(Machine(tmp_path, tuning_key(PROBLEM, gpu.key), words, start), trials=32)
    assert answer["origin"] == "measured"
    assert answer["ratio"] > 0


def test_tuning_works_after_its_process_has_used_the_card_which_goes_on_working(store: Store) -> None:
    a = torch.randn(512, 512, device="cuda")
    before = a @ a
    stream = torch.cuda.Stream()
    result = tune.tune(PROBLEM, store, budget=Budget(8, 60), templates=("gemm_vanilla",))
    assert result.record.protocol == PROTOCOL
    assert torch.allclose(a @ a, before)
    with torch.cuda.stream(stream):
        later = a @ a
    torch.cuda.synchronize()
    assert torch.allclose(later, before)


def test_tuning_works_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """And after that script has used the card."""
    file = tmp_path / "script.py"
    use = f"{ALONE}\nimport torch\nassert torch.ones(4, device='cuda').sum().item() == 4"
    file.write_text(script(use, f'ops.get("gemm").problem({SIZES})', 8) + "tuned(sys.argv[1])\n")
    run_to_the_end([str(file)], tmp_path / "own.db")
