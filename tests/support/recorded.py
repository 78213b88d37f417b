"""Recorded times in place of a GPU, and instant compilers, for whole runs of the tuner."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tlxgen import devices
from tlxgen.codegen.emit import KernelSource
from tlxgen.config import Config
from tlxgen.space.absent import completed
from tlxgen.tuner import measure
from tlxgen.tuner.measure import DeviceReport, Verdict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def table(sizes: tuple[int, int, int]) -> tuple[dict[Config, float], float]:
    """Microseconds of every working config, and of the library, as measured on an H200."""
    document = json.loads((RESULTS / "2026-11-29-exhaustive-gemm-h200.json").read_text())
    row = next(r for r in document["rows"] if tuple(r["problem"][n] for n in "MNK") == sizes)
    times = {
        completed(Config.from_short(entry["config"])): entry["time_us"]
        for entry in row["configs"]
        if entry["status"] == "ok"
    }
    return times, row["peer_us"]


@dataclass
class RecordedCard:
    """Replaces `tlxgen.tuner.runner.Runner`: gates and times from a table, with noise and faults."""

    times: dict[Config, float]
    peer_us: float
    noise: float = 0.005
    on_measure: Callable[[], None] = lambda: None
    luck: dict[Config, float] = field(default_factory=dict)  #: factors of the next times
    glitch: float = 1.0  #: factor of one sample per config and measurement
    falls: bool = False  #: whether every candidate fails while it is timed
    verdicts: dict[Config, Verdict] = field(default_factory=dict)
    launch_us: float = 1.0  #: rough time of every gate
    seed: int = 0
    limit: float = 20.0
    gated: list[Config] = field(default_factory=list)
    sources: dict[str, KernelSource] = field(default_factory=dict)
    faults: dict[str, Verdict] = field(default_factory=dict)
    child: Any = field(default_factory=lambda: SimpleNamespace(alive=True))
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    left: bool = False  #: whether another problem uses the child
    broken: BaseException | None = None  #: raised by `setup`

    @property
    def ready(self) -> bool:
        return self.child.alive and not self.left

    def leave(self) -> None:
        self.left = True

    def setup(self) -> DeviceReport:
        if self.broken is not None:
            raise self.broken
        self.left = False
        return DeviceReport(devices.target("h200"), {"torch": "recorded"}, 1.6e-3, self.peer_us)

    def gate(self, name: str, source: KernelSource) -> Verdict:
        self.gated.append(source.config)
        self.left = False  # it sets up again if it has to
        verdict = self.verdicts.get(source.config)
        if verdict is None:
            verdict = (
                Verdict("ok", error=1.6e-3, launch_us=self.launch_us)
                if source.config in self.times
                else Verdict("wrong_result", "no record")
            )
        if verdict.status == "ok":
            self.sources[name] = source
        return verdict

    def measure(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        self.on_measure()
        assert self.ready, "another problem is set up"
        if self.falls:
            return {}
        configs = {name: self.sources[name].config for name in names}
        times = {name: self.times[config] * self.luck.get(config, 1.0) for name, config in configs.items()}
        samples = {
            name: [time * self.rng.gauss(1.0, self.noise) for _ in range(rounds)]
            for name, time in {**times, measure.PEER: self.peer_us}.items()
        }
        for name in names if self.glitch != 1.0 else ():
            samples[name][self.rng.randrange(rounds)] *= self.glitch
        return samples

    def forget(self, names: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        self.child.alive = False


class InstantPool:
    """Replaces `CompilePool`: everything compiles at once, except `failures`."""

    failures: dict[Config, BaseException]

    def __init__(self, failures: dict[Config, BaseException] | None = None) -> None:
        self.failures = failures or {}
        self.submitted: list[KernelSource] = []

    def submit(self, source: KernelSource) -> Future[Any]:
        self.submitted.append(source)
        future: Future[Any] = Future()
        failure = self.failures.get(source.config)
        if failure is None:
            future.set_result(SimpleNamespace(source=source))
        else:
            future.set_exception(failure)
        return future

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass
