"""Times of any calls in the same rounds, as replays of CUDA graphs (`tlxgen.tuner.measure` has the reasons).

Inputs are not rotated: this is for calls that read more than L2 holds, or that read what the call before them wrote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ROUNDS = 15

_WARM_UP_S = 0.3
_SAMPLE_US = 400.0  # of one replay
_MAX_LAUNCHES = 32

Call = Callable[[], Tensor]


def samples(calls: Mapping[str, Call]) -> dict[str, list[float]]:
    """Microseconds of one call by name, one value a round; the order is reversed each round."""
    graphs = {name: captured(call) for name, call in calls.items()}
    until = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < until:
        for graph, _ in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in graphs}
    untimed, _ = next(iter(graphs.values()))
    for turn in range(ROUNDS):
        events = {}
        untimed.replay()  # times next to a synchronisation are too long
        for name in list(graphs) if turn % 2 else list(graphs)[::-1]:
            start, stop = events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            start.record()
            graphs[name][0].replay()
            stop.record()
        untimed.replay()
        torch.cuda.synchronize()
        for name, (start, stop) in events.items():
            found[name].append(start.elapsed_time(stop) * 1e3 / graphs[name][1])
    return found


def captured(call: Call) -> tuple[Any, int]:
    """A graph of several calls, and their number."""
    call()  # loads kernels
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    rough_us = (time.perf_counter() - started) * 1e6
    launches = max(1, min(_MAX_LAUNCHES, math.ceil(_SAMPLE_US / rough_us)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return graph, launches
