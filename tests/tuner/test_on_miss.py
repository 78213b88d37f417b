"""`get_kernel(..., on_miss="tune")`: each problem is tuned once for all threads; a failed one is not tried again."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tlxgen
from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import target
from tlxgen.errors import GpuLostError, TuningError
from tlxgen.problem import Problem
from tlxgen.runtime import kernel, plans
from tlxgen.space.candidates import candidates
from tlxgen.tuner import gpu_lock, on_miss

H200 = target("h200")
GEMM = ops.get("gemm")


class Tuner:
    """Replaces `tune`: stores the third candidate, or fails."""

    def __init__(self) -> None:
        self.tuned: Counter[str] = Counter()
        self.error: Exception | None = None

    def __call__(self, problem: Problem, store: Store, **_: Any) -> None:
        self.tuned[problem.label] += 1
        if self.error is not None:
            raise self.error
        config = candidates(problem, H200)[2]
        code = emit(GEMM, problem, config).code_hash
        key = tuning_key(problem, H200.key)
        store.put(
            TunedRecord(key=key, config=config, origin="measured", source_hash=code, time_us=5.0, protocol="graph-2")
        )


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_shipped_configs: None) -> Tuner:
    made = Tuner()
    monkeypatch.setattr(on_miss, "tune", made)
    monkeypatch.setattr(kernel, "_current_device", lambda: 0)
    monkeypatch.setattr(devices, "detect", lambda _=None: H200)
    monkeypatch.setattr(devices, "uuid", lambda: "stub")
    monkeypatch.setattr(gpu_lock, "exclusive", functools.partial(gpu_lock.exclusive, folder=tmp_path))
    monkeypatch.setattr(plans, "is_capturing", lambda: False)
    kernel.forget()
    return made


def ask(m: int) -> kernel.Kernel:
    return tlxgen.get_kernel("gemm", (m, 512, 512), on_miss="tune")


def test_sixteen_threads_tune_each_of_four_problems_once(tuner: Tuner) -> None:
    start, origins = threading.Barrier(16), list[str]()

    def work(number: int) -> None:
        start.wait()
        origins.append(ask(512 + 64 * (number % 4)).origin)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert origins == ["tuned"] * 16
    assert sorted(tuner.tuned.values()) == [1] * 4


def test_problem_without_a_working_candidate_is_tuned_once(tuner: Tuner) -> None:
    tuner.error = TuningError("no candidate works")
    for _ in range(3):
        with pytest.raises(TuningError, match="no candidate works"):
            ask(512)
    assert tuner.tuned.total() == 1
    tuner.error = None
    assert ask(576).origin == "tuned"
    kernel.forget()
    assert ask(512).origin == "tuned"


def test_problem_is_tuned_again_after_a_lost_gpu(tuner: Tuner) -> None:
    tuner.error = GpuLostError("the GPU went away")
    with pytest.raises(GpuLostError):
        ask(512)
    tuner.error = None
    assert ask(512).origin == "tuned"


def test_row_of_other_code_does_not_count(tuner: Tuner) -> None:
    assert ask(512).origin == "tuned"
    with Store.open(read_only_ok=False) as store:
        record = store.get(tuning_key(GEMM.problem((512, 512, 512)), H200.key))
        assert record is not None
        store.delete([record.key])
        store.put(record.model_copy(update={"source_hash": "0" * 32}))
    kernel.forget()
    ask(512)
    assert tuner.tuned.total() == 2
