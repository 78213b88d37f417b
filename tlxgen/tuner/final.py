"""Who wins: a paired comparison of the leaders, in which a lead must exceed the noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence

from tlxgen.config import Config
from tlxgen.tuner.card import Timing

_RESAMPLES = 2000
_ALIKE = 0.005
_ERROR_RATE = 0.05  # of calling noise a lead, over all comparisons of one final


def lead_is_noise(faster: Sequence[float], slower: Sequence[float], comparisons: int = 1, seed: int = 0) -> bool:
    """Whether the bootstrap interval of the paired ratio `slower / faster` reaches down to 1.

    Both hold one time for each round, in the order of the rounds (Efron and Tibshirani, An Introduction to the
    Bootstrap, percentile interval of the median). The fastest of many is fast by luck as well: the interval is widened
    for the number of comparisons (Bonferroni).
    """
    ratios = [b / a for a, b in zip(faster, slower, strict=True)]
    rng = random.Random(seed)  # noqa: S311 - statistics, not secrets
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return medians[int(_ERROR_RATE / comparisons / 2 * _RESAMPLES)] <= 1.0


def winner(timed: Mapping[Config, Timing], incumbent: Config | None = None) -> Config:
    """The fastest config, or one that the noise cannot tell from it: the incumbent, else the simplest.

    All timings must come from one measurement, so that their rounds pair up.
    """
    fastest = min(timed, key=lambda config: timed[config].time_us)
    equals = [
        config
        for config, timing in timed.items()
        if config == fastest or lead_is_noise(timed[fastest].samples, timing.samples, len(timed))
    ]
    if incumbent in equals and incumbent is not None:
        return incumbent
    return min(equals, key=lambda config: (complexity(config), timed[config].time_us))


def steadiest(timed: Sequence[Mapping[Config, Timing]], incumbent: Config | None = None) -> tuple[Config, float]:
    """The config that loses least to the best one where it loses most, and how much that is, as a fraction.

    Of those that lose alike, within half a percent, it is the incumbent, else the fastest in the first measurement.

    Args:
        timed: one measurement for each problem; configs that are missing from one are out.
        incumbent: the one that serves so far.

    Raises:
        ValueError: no config was timed in all.
    """
    best = [min(timing.relative for timing in one.values()) for one in timed if one]
    losses = {
        config: max(one[config].relative / least for one, least in zip(timed, best, strict=True)) - 1.0
        for config in (timed[0] if all(timed) else ())
        if all(config in one for one in timed)
    }
    if not losses:
        raise ValueError("no config was timed on every problem")
    least = min(losses.values())
    alike = [config for config, loss in losses.items() if loss <= least + _ALIKE]
    chosen = incumbent if incumbent in alike else min(alike, key=lambda config: timed[0][config].time_us)
    assert chosen is not None
    return chosen, losses[chosen]


def complexity(config: Config) -> tuple[int, int]:
    """Simple first: no programmatic launch, fewer consumers, then fewer stages."""
    p = config.params
    return (int(p.get("pdl", "off") != "off") + int(p.get("consumers", 1)), int(p.get("num_stages", 0)))
