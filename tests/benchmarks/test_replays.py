"""Calls timed beside each other, on a card that only counts: who is replayed when, and what a sample is."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import ahead, replays
from tlxgen import ops
from tlxgen.devices import target
from tlxgen.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUGH_US = {"fast": 110.0, "slow": 1000.0}  #: first looks
CARD_US = {"fast": 50.0, "slow": 900.0}  #: of one call on the card


class Card:
    """Stands in for `torch` and `time`: a clock that calls and replays move on."""

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
            self.us += sum(CARD_US[name] for name in calls)

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
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    monkeypatch.setattr(replays, "torch", found)
    monkeypatch.setattr(replays, "time", found)
    return found


def test_a_sample_is_the_time_of_one_call(card: Card) -> None:
    found = replays.samples({name: card.call(name) for name in CARD_US})
    assert list(found) == list(CARD_US)
    for name, times in found.items():
        assert times == pytest.approx([CARD_US[name]] * replays.ROUNDS)


def test_a_graph_holds_as_many_calls_as_fill_a_sample(card: Card) -> None:
    launches = {name: replays.captured(card.call(name))[1] for name in ROUGH_US}
    assert launches == {"fast": 4, "slow": 1}


def test_rounds_go_forth_and_back_away_from_synchronisation(card: Card) -> None:
    replays.samples({name: card.call(name) for name in CARD_US})
    rounds = " ".join(card.log).split(" wait")[-replays.ROUNDS - 1 : -1]
    assert [one.split() for one in rounds[:2]] == [
        ["fast", "slow", "fast", "fast"],  # the first and the last of a round are not timed
        ["fast", "fast", "slow", "fast"],
    ]
    assert len(rounds) == replays.ROUNDS


def test_a_kernel_that_does_not_compile_ahead_is_told_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_shipped_configs: None
) -> None:
    outcomes = iter([CompileError("ptxas", "no"), SimpleNamespace(seconds=1.5)])

    def submit(_: object) -> Future[Any]:
        future: Future[Any] = Future()
        outcome = next(outcomes)
        future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)
        return future

    @contextmanager
    def pool(capability: tuple[int, int]) -> Iterator[SimpleNamespace]:
        assert capability == (9, 0)
        yield SimpleNamespace(submit=submit)

    monkeypatch.setattr(ahead, "CompilePool", pool)
    problems = [ops.get("gemm").problem((size, 512, 512)) for size in (512, 1024, 512)]
    ahead.compile_served(problems, target("h200"))
    first, second = capsys.readouterr().out.splitlines()
    assert "gemm 512 512 512 bf16 nn" in first
    assert " default  ptxas " in first
    assert " default  1.5 s " in second
