"""Gate and timing of `tlxgen.tuner.measure` on the CPU: bad kernels are rejected, and the order of timing is fair."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_card  # type: ignore[import-not-found] # conftest.py makes it importable

from tlxgen import ops
from tlxgen.codegen.emit import KernelSource
from tlxgen.db.store import Store
from tlxgen.errors import TuningError
from tlxgen.tuner import compile_pool, measure, tune
from tlxgen.tuner.measure import PEER, Measure, Session
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import timings

VECTORS = ops.get("vector_add").problem((4096,))
MATRICES = ops.get("gemm").problem((64, 48, 136))

RIGHT = "out.copy_(x + y)"


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = stub_card.CpuChild()
    yield child
    child.kill()


@pytest.fixture
def runner(child: Child) -> Runner:
    """A runner with one good candidate, `healthy`."""
    runner = Runner("vector_add", VECTORS, seed=5, limit=20.0, child=child)
    runner.setup()
    assert runner.gate("healthy", stub_card.cpu_kernel(VECTORS)).status == "ok"
    return runner


#: Body of a bad kernel, status of its verdict, and part of the message.
BAD = {
    "writes the first half": ("out[:2048] = (x + y)[:2048]", "wrong_result", "2048 of 4096 elements are NaN"),
    "writes the second half": ("out[2048:] = (x + y)[2048:]", "wrong_result", "2048 of 4096 elements are NaN"),
    "writes nothing": ("pass", "wrong_result", "4096 of 4096 elements are NaN"),
    "writes NaN": ('out.fill_(float("nan"))', "wrong_result", "4096 of 4096 elements are NaN"),
    "writes one infinity": (f'{RIGHT}\nout[77] = float("inf")', "wrong_result", "1 of 4096 elements are inf"),
    "writes at the first launch only": (f"if calls == 1: {RIGHT}", "unstable_result", "a race"),
    "gives other results once": (f"{RIGHT}\nif calls == 3: out[5] *= 1.01", "unstable_result", "results: a race"),
    "reads its neighbour's elements": ("out.copy_(x.roll(1) + y)", "wrong_result", "relative error"),
    "is right on zeros only": ("out.copy_(x * y)", "wrong_result", "relative error"),
    "changes an input": (f"{RIGHT}\ny[9] += 1", "wrong_result", "wrote to its input y"),
    "adds up in an input": ("x += y\nout.copy_(x)", "wrong_result", "wrote to its input x"),
    "writes NaN to both inputs": (f"{RIGHT}\nx[0] = y[1] = torch.nan", "wrong_result", "wrote to its input x, y"),
    "writes past the end": (
        f"{RIGHT}\nout.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()",
        "wrong_result",
        "before or after the output",
    ),
    "writes before the beginning": (
        f"{RIGHT}\nout.as_strided((1,), (1,), out.storage_offset() - 1).zero_()",
        "wrong_result",
        "before or after the output",
    ),
    "runs out of memory": ('raise torch.cuda.OutOfMemoryError("2 TiB")', "out_of_memory", "2 TiB"),
    "is refused by its launcher": ('raise ValueError("no such argument")', "launch_failed", "no such argument"),
    "raises with an input changed": (
        'x.zero_()\nif calls == 2: raise ValueError("halfway")',
        "launch_failed",
        "halfway",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_kernel_is_rejected_and_harms_no_other(name: str, runner: Runner) -> None:
    body, status, words = BAD[name]
    verdict = runner.gate("bad", stub_card.cpu_kernel(VECTORS, body))
    assert (verdict.status, words in verdict.message) == (status, True), verdict
    assert runner.gate("next", stub_card.cpu_kernel(VECTORS)).status == "ok"
    assert set(runner.measure(["healthy", "next", "bad"], 2)) == {"healthy", "next", PEER}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("c.copy_(a[:, :128].float() @ b[:128].float())", "relative error"),
        ("c.copy_(a[:, :-1].float() @ b[:-1].float())", "relative error"),
        ("c.copy_(a.float() @ b.float())\nc[17] = c[16]", "relative error"),
        ("c.copy_(a.float() @ b.float())\nb[3, 4] = 0", "wrote to its input b"),
    ],
    ids=["drops the last tile of K", "drops the last element of K", "repeats a row", "changes an element of B"],
)
def test_bad_matrix_product_is_rejected(body: str, words: str, child: Child) -> None:
    runner = Runner("gemm", MATRICES, seed=5, limit=20.0, child=child)
    runner.setup()
    verdict = runner.gate("bad", stub_card.cpu_kernel(MATRICES, body))
    assert (verdict.status, words in verdict.message) == ("wrong_result", True), verdict
    assert runner.gate("good", stub_card.cpu_kernel(MATRICES)).status == "ok"


def test_gate_and_setup_take_rough_times(runner: Runner) -> None:
    assert runner.gate("next", stub_card.cpu_kernel(VECTORS, time_us="7.0")).launch_us == pytest.approx(7.0)
    assert runner.setup().peer_launch_us == 1.0, "the least; the stub's library takes no time outside of graphs"


def test_illegal_access_ends_the_process_and_the_next_is_clean(runner: Runner) -> None:
    verdict = runner.gate("bad", stub_card.cpu_kernel(VECTORS, "stub_card.gpu.fault()"))
    assert (verdict.status, "exit status 3" in verdict.message) == ("launch_failed", True)
    assert "illegal memory access" in verdict.message
    assert not runner.child.alive
    assert set(runner.measure(["healthy"], 2)) == {"healthy", PEER}


@pytest.fixture
def tuned(tmp_path: Path, child: Child, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Tunes with these kernels as candidates."""
    from tests.support.recorded import InstantPool

    def tuned(*sources: KernelSource) -> Any:
        by_config = {source.config: source for source in sources}
        monkeypatch.setattr(tune, "Runner", lambda name, problem, seed, _: Runner(name, problem, seed, child=child))
        monkeypatch.setattr(compile_pool, "CompilePool", lambda *_, **__: InstantPool())
        monkeypatch.setattr(tune, "candidates", lambda *_: list(by_config))
        monkeypatch.setattr(tune, "emit", lambda operator, problem, config: by_config[config])
        with Store.open(tmp_path / "tuned.db") as store:
            try:
                return tune.tune(VECTORS, store)
            finally:
                assert len(store.records()) == len({source for source in sources if RIGHT in source.text})

    return tuned


def test_output_of_the_candidate_before_does_not_help(tuned: Callable[..., Any]) -> None:
    halves = [stub_card.cpu_kernel(VECTORS, BAD[f"writes the {which} half"][0]) for which in ("first", "second")]
    with pytest.raises(TuningError, match="2 wrong_result"):
        tuned(*halves)


def test_kernel_that_is_fast_on_zeros_only_is_timed_on_other_inputs(tuned: Callable[..., Any]) -> None:
    tempting = stub_card.cpu_kernel(VECTORS, time_us="50.0 if x.any() else 0.1")
    assert tuned(tempting).record.time_us == pytest.approx(50.0)


def order_of(names: list[str], times: dict[str, float], seed: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names by measured time, on a GPU that slows down by a fifth and is slow after each synchronisation."""
    rng = random.Random(seed)
    monkeypatch.setattr(stub_card, "gpu", stub_card.VirtualGpu(drift=2e-6, cold=0.15))
    session = Session(*[None] * 10)  # type: ignore[arg-type]
    for name, time_us in {**times, PEER: 100.0}.items():
        graph = SimpleNamespace(replay=lambda us=time_us: stub_card.gpu.spend(us * rng.gauss(1.0, 0.003)))
        session.candidates[name] = measure._Candidate([], graph=graph, launches=1)
    monkeypatch.setattr(Session, "current", lambda: session)
    found = timings(Measure(tuple(names), 31)())
    return sorted(found, key=lambda name: found[name].time_us)


@pytest.mark.parametrize("seed", range(5))
def test_order_of_candidates_does_not_change_the_top_three(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With recorded times of an H200, one percent apart; the GPU's drift is ten times as large."""
    from tests.support.recorded import table

    stub_card.install_cpu(monkeypatch.setattr)
    recorded = sorted(table((4096, 4096, 4096))[0].values())
    times: dict[str, float] = {}
    for time_us in recorded:
        if not times or time_us > 1.01 * max(times.values()):
            times[f"{len(times)}"] = time_us
    names = list(times)[:12]
    random.Random(seed).shuffle(names)
    forth = order_of(names, times, seed, monkeypatch)
    back = order_of(names[::-1], times, seed + 1, monkeypatch)
    assert forth[:3] == back[:3] == ["0", "1", "2"]
