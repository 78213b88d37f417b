"""Replays of calls on a stub GPU: their order and their times."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import replays

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUGH_US = {"fast": 110.0, "slow": 1000.0}  #: of one call from the host
GPU_US = {"fast": 50.0, "slow": 900.0}  #: of one call in a graph


class StubGpu:
    """Replaces `torch` and `time`: a clock that calls and replays advance."""

    def __init__(self) -> None:
        self.us = 0.0
        self.log: list[str] = []
        self.recording: list[str] | None = None
        self.cuda = SimpleNamespace(
            CUDAGraph=self._graph, graph=self._capture, Event=self._event, synchronize=self._wait
        )

    def call(self, name: str) -> Any:
        def one() -> torch.Tensor:
            if self.recording is None:
                self.us += ROUGH_US[name]
            else:
                self.recording.append(name)
            return torch.zeros(())

        return one

    def perf_counter(self) -> float:
        return self.us * 1e-6

    def _graph(self) -> SimpleNamespace:
        calls: list[str] = []

        def replay() -> None:
            self.log.append(calls[0])
            self.us += sum(GPU_US[name] for name in calls)

        return SimpleNamespace(calls=calls, replay=replay)

    @contextmanager
    def _capture(self, graph: SimpleNamespace) -> Iterator[None]:
        self.recording = graph.calls
        yield
        self.recording = None

    def _event(self, *, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(us=0.0)
        event.record = lambda: setattr(event, "us", self.us)
        event.elapsed_time = lambda stop: (stop.us - event.us) * 1e-3
        return event

    def _wait(self) -> None:
        self.log.append("wait")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StubGpu:
    found = StubGpu()
    monkeypatch.setattr(replays, "torch", found)
    monkeypatch.setattr(replays, "time", found)
    return found


def test_a_sample_is_the_time_of_one_call(gpu: StubGpu) -> None:
    found = replays.samples({name: gpu.call(name) for name in GPU_US})
    assert list(found) == list(GPU_US)
    for name, times in found.items():
        assert times == pytest.approx([GPU_US[name]] * replays.ROUNDS)


def test_a_graph_has_enough_calls_for_a_sample(gpu: StubGpu) -> None:
    launches = {name: replays.captured(gpu.call(name))[1] for name in ROUGH_US}
    assert launches == {"fast": 4, "slow": 1}


def test_order_is_reversed_each_round_between_untimed_replays(gpu: StubGpu) -> None:
    replays.samples({name: gpu.call(name) for name in GPU_US})
    rounds = " ".join(gpu.log).split(" wait")[-replays.ROUNDS - 1 : -1]
    assert [one.split() for one in rounds[:2]] == [
        ["fast", "slow", "fast", "fast"],  # the first and the last are not timed
        ["fast", "fast", "slow", "fast"],
    ]
    assert len(rounds) == replays.ROUNDS
