"""Benchmark of a call's host time, on meta tensors with launches that do nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks import overhead
from tlxgen import devices, functional, ops
from tlxgen.devices import target
from tlxgen.runtime import call_checks, kernel, plans

H200 = target("h200")


class Idle:
    """A launcher that launches nothing."""

    slim = True
    indices = None

    def __init__(self, *_: object) -> None:
        self.lock = threading.Lock()

    def dispatcher(self, *_: object) -> None:
        pass

    __call__ = dispatcher


@pytest.fixture(autouse=True)
def _stub_gpu(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
    """No memory, and launches that do nothing."""
    monkeypatch.setattr(plans, "Launcher", Idle)
    monkeypatch.setattr(plans, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(plans, "is_capturing", lambda: False)
    monkeypatch.setattr(plans, "raw_stream", lambda _: 0)
    monkeypatch.setattr(plans, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(call_checks, "refuse_other_devices", lambda *_: None)
    monkeypatch.setattr(kernel, "_current_device", lambda: 0)
    monkeypatch.setattr(devices, "detect", lambda _=None: H200)
    for name in ("gemm", "attention"):
        operator = ops.get(name)
        inputs = operator.inputs
        monkeypatch.setattr(operator, "inputs", lambda problem, _, seed, inputs=inputs: inputs(problem, "meta", seed))
    for name in ("attention", "matmul"):
        monkeypatch.setattr(functional, name, lambda *_, **__: None)  # which have no autocast for meta tensors
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "ROUNDS", 2)
    monkeypatch.setattr(overhead, "NEW_LENGTHS", 2)
    kernel.forget()
    yield
    kernel.forget()


def test_each_kind_of_call_is_timed_and_written(run: Callable[..., dict[str, Any]]) -> None:
    written = run(overhead)
    assert "-overhead-h200.json" in written["file"]
    assert written["file"] in written["printed"]
    assert [row["op"] for row in written["rows"]] == ["gemm", "attention", "attention"]
    for row in written["rows"]:
        assert set(row["host_us"]) == {"call", "torch", "functional", "call_out", "call_named", "get_kernel"}
        assert all(us > 0 for us in [*row["host_us"].values(), row["new_length_us"]])
        assert row["binaries"] >= 1
