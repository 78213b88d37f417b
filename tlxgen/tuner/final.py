"""The choice of the winner: a paired comparison of the finalists, in which a lead must exceed the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlxgen.config import Config
from tlxgen.tuner.timing import Timing, ratios

_RESAMPLES = 2000
_EQUAL_LOSS = 0.005
_ERROR_RATE = 0.05  #: of taking noise for a lead, over all comparisons of one final


def lead_is_noise(faster: Sequence[float], slower: Sequence[float], comparisons: int = 1, seed: int = 0) -> bool:
    """Whether the bootstrap interval of the median of `slower / faster` reaches down to 1.

    Both hold one time per round, in the order of the rounds (Efron and Tibshirani, An Introduction to the Bootstrap,
    percentile interval). The fastest of many is fast by luck too: the interval is widened for the number of comparisons
    (Bonferroni).
    """
    import numpy as np
    from scipy.stats import bootstrap

    interval = bootstrap(
        (ratios(faster, slower),),
        np.median,
        n_resamples=_RESAMPLES,
        confidence_level=1 - _ERROR_RATE / comparisons,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return bool(interval.low <= 1.0)


def winner(timed: Mapping[Config, Timing], incumbent: Config | None = None) -> Config:
    """The fastest config; of those that noise cannot tell from it, the incumbent, else the simplest.

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


def winner_on_all(timed: Sequence[Mapping[Config, Timing]], incumbent: Config | None = None) -> tuple[Config, float]:
    """The config with the smallest greatest loss over several problems, and that loss.

    A loss is the time over that of the problem's best config, minus 1. Of configs within half a percent of the smallest
    loss, it is the incumbent, else the fastest in the first measurement.

    Args:
        timed: one measurement per problem; configs that are missing from one are out.
        incumbent: the config that was stored before.

    Raises:
        ValueError: no config was timed on every problem.
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
    equals = [config for config, loss in losses.items() if loss <= least + _EQUAL_LOSS]
    chosen = incumbent if incumbent in equals else min(equals, key=lambda config: timed[0][config].time_us)
    assert chosen is not None
    return chosen, losses[chosen]


def complexity(config: Config) -> tuple[int, int]:
    """Orders configs, simple first: no programmatic launch, fewer consumers, then fewer stages."""
    p = config.params
    return (int(p.get("pdl", "off") != "off") + int(p.get("consumers", 1)), int(p.get("num_stages", 0)))
