"""Times of candidates relative to the library's in the same rounds, and signs that another process used the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlxgen.tuner.measure import PEER

#: Interquartile range of the library's times over their median beyond which a final does not count. On an H200 it is
#: 0.002 to 0.11 alone and 0.002 to 0.09 beside a loading process: other processes are counted, not inferred from it.
_MAX_PEER_SPREAD = 0.25


@dataclass(frozen=True)
class Timing:
    """Times of a candidate and of the library (the peer) in the same rounds; microseconds."""

    time_us: float
    spread_us: float  #: interquartile range
    peer_us: float
    samples: tuple[float, ...]
    peer_samples: tuple[float, ...]

    @property
    def relative(self) -> float:
        """Time over the peer's: comparable between measurements, although GPUs slow down as they warm."""
        return self.time_us / self.peer_us

    @property
    def peer_spread(self) -> float:
        """Interquartile range of the peer's times over their median."""
        return iqr(self.peer_samples) / self.peer_us


def timings(samples: dict[str, list[float]]) -> dict[str, Timing]:
    """The `Timing` of each candidate of one measurement, by name.

    The peer's time is its median. A candidate's is the peer's times the median of the rounds' ratios: where the clock
    jumps between rounds, two separate medians may come from different clocks.
    """
    if not samples:
        return {}
    peer = samples[PEER]
    peer_us = statistics.median(peer)
    return {
        name: Timing(peer_us * statistics.median(ratios(peer, times)), iqr(times), peer_us, tuple(times), tuple(peer))
        for name, times in samples.items()
        if name != PEER
    }


def ratios(base: Sequence[float], times: Sequence[float]) -> list[float]:
    """`times / base`, round by round."""
    return [time / of for of, time in zip(base, times, strict=True)]


def iqr(times: Sequence[float]) -> float:
    """Interquartile range; of fewer than four values their range."""
    if len(times) < 4:
        return max(times) - min(times)
    first, _, third = statistics.quantiles(times, n=4)
    return third - first


def disturbance(timed: Iterable[Timing], newcomers: int = 0, *, gpu_busy: bool = False) -> str:
    """The sign that another process used the GPU during a measurement; empty if there is none."""
    if gpu_busy:
        return "other processes were loading this GPU before"
    if newcomers > 0:
        return f"{newcomers} process(es) began to compute on this GPU meanwhile"
    spread = max((timing.peer_spread for timing in timed), default=0.0)
    if spread > _MAX_PEER_SPREAD:
        return f"the library's own times scatter by {spread:.0%}"
    return ""
