"""Whether the card was ours alone while something was timed."""

from __future__ import annotations

from collections.abc import Iterable

from tlxgen.tuner.card import Timing

#: Interquartile range of the peer's rounds over their median beyond which a final says nothing. It is 0.002 to 0.11 on
#: a quiet H200, and 0.002 to 0.09 beside a process that loads it: who else is there is counted, not told by scatter.
_RESTLESS = 0.25


def disturbance(timed: Iterable[Timing], newcomers: int = 0, *, crowded: bool = False) -> str:
    """What says that something else ran on the card while these were timed, if anything does."""
    if crowded:
        return "other processes were loading this GPU before"
    if newcomers > 0:
        return f"{newcomers} process(es) began to compute on this GPU meanwhile"
    spread = max((timing.peer_spread for timing in timed), default=0.0)
    if spread > _RESTLESS:
        return f"the library's own times scatter by {spread:.0%}"
    return ""
