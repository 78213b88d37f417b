"""The choice of the winner: a lead counts only if it exceeds the noise of paired rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from tlxgen.config import Config
from tlxgen.tuner.final import complexity, lead_is_noise, winner, winner_on_all
from tlxgen.tuner.timing import Timing

ROUNDS = 25


def config(consumers: int = 1, stages: int = 3, pdl: str = "off") -> Config:
    return Config(template="gemm_tma_cooperative", params={"consumers": consumers, "num_stages": stages, "pdl": pdl})


SIMPLE, MORE_STAGES, COMPLEX = config(), config(stages=6), config(consumers=2, stages=4, pdl="early")


def drift(seed: int) -> list[float]:
    """Slowdown of each round, common to all candidates: a drift with jumps."""
    rng = random.Random(seed)
    return [1 + 0.1 * i / ROUNDS + rng.choice([0.0, 0.0, 0.2]) for i in range(ROUNDS)]


COMMON = drift(4)


def samples(time_us: float, noise: float, seed: int, common: Sequence[float] = (1.0,) * ROUNDS) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(time_us * shared * (1 + rng.gauss(0, noise)) for shared in common)


def timing(times: Sequence[float]) -> Timing:
    return Timing(statistics.median(times), 0.0, 100.0, tuple(times), (100.0,) * len(times))


def timed(**times: float) -> dict[Config, Timing]:
    configs = {"simple": SIMPLE, "more_stages": MORE_STAGES, "complex": COMPLEX}
    return {configs[name]: timing([time_us] * 3) for name, time_us in times.items()}


class TestLeadIsNoise:
    @pytest.mark.parametrize(
        ("faster", "slower", "noise"),
        [
            ((1.0,) * ROUNDS, (1.0,) * ROUNDS, True),
            (samples(105, 0.01, 1), samples(100, 0.01, 2), True),
            ((*[100.0] * 3, 50.0, *[100.0] * 21), (100.0,) * ROUNDS, True),
            (samples(100, 0.001, 2, drift(1)), samples(101, 0.001, 3, drift(1)), False),
        ],
        ids=["no lead", "negative lead", "one lucky round", "one percent in each round despite drift"],
    )
    def test_of(self, faster: Sequence[float], slower: Sequence[float], noise: bool) -> None:
        assert lead_is_noise(faster, slower) is noise

    @pytest.mark.parametrize("seed", range(5))
    def test_depends_on_the_scatter(self, seed: int) -> None:
        assert lead_is_noise(samples(100, 0.02, seed), samples(100.05, 0.02, seed + 100))
        assert not lead_is_noise(samples(100, 0.01, seed), samples(105, 0.01, seed + 100))

    def test_is_reproducible(self) -> None:
        pair = samples(100, 0.02, 1), samples(100.5, 0.02, 2)
        assert len({lead_is_noise(*pair) for _ in range(5)}) == 1

    def test_needs_rounds_that_pair_up(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            lead_is_noise((1.0, 1.0), (1.0,))


class TestWinner:
    def test_of_one(self) -> None:
        assert winner({COMPLEX: timing(samples(100, 0.01, 1))}) == COMPLEX

    def test_is_the_fastest_outside_the_noise(self) -> None:
        measured = {SIMPLE: timing(samples(110, 0.01, 1)), COMPLEX: timing(samples(100, 0.01, 2))}
        assert winner(measured) == winner(measured, incumbent=SIMPLE) == COMPLEX

    def test_within_the_noise_is_the_incumbent_else_the_simplest(self) -> None:
        measured = {
            COMPLEX: timing(samples(100.0, 0.02, 1, COMMON)),
            MORE_STAGES: timing(samples(100.1, 0.02, 2, COMMON)),
            SIMPLE: timing(samples(100.05, 0.02, 3, COMMON)),
        }
        assert winner(measured) == winner(dict(reversed(measured.items()))) == SIMPLE
        assert winner(measured, incumbent=COMPLEX) == COMPLEX
        assert winner(measured, incumbent=MORE_STAGES) == MORE_STAGES

    @pytest.mark.parametrize("turn", [0, ROUNDS // 2, ROUNDS - 1])
    def test_is_not_changed_by_one_fast_sample(self, turn: int) -> None:
        lucky = list(samples(101, 0.003, 1, COMMON))
        lucky[turn] *= 0.1
        assert winner({SIMPLE: timing(lucky), COMPLEX: timing(samples(100, 0.003, 2, COMMON))}) == COMPLEX

    def test_is_no_incumbent_that_was_not_timed(self) -> None:
        assert winner({SIMPLE: timing(samples(100, 0.01, 1))}, incumbent=COMPLEX) == SIMPLE

    def test_is_no_simple_config_that_is_clearly_slower(self) -> None:
        measured = {
            SIMPLE: timing(samples(120, 0.01, 1)),
            MORE_STAGES: timing(samples(100.0, 0.01, 2)),
            COMPLEX: timing(samples(100.1, 0.01, 3)),
        }
        assert winner(measured) == MORE_STAGES


class TestComplexity:
    def test_grows_with_consumers_stages_and_programmatic_launch(self) -> None:
        ordered = [config(), config(stages=4), config(stages=6), config(consumers=2), config(consumers=3)]
        assert sorted(ordered, key=complexity) == ordered
        assert complexity(config(pdl="early")) > complexity(config())

    def test_has_defaults_for_missing_parameters(self) -> None:
        assert complexity(Config(template="vector_add_vanilla", params={"block": 1024})) == (1, 0)


class TestWinnerOnAll:
    def test_has_the_smallest_greatest_loss(self) -> None:
        here, there = timed(simple=100, more_stages=103, complex=104), timed(simple=120, more_stages=102, complex=100)
        chosen, loss = winner_on_all([here, there])
        assert chosen == MORE_STAGES
        assert loss == pytest.approx(0.03)

    def test_of_equals_is_the_incumbent_or_the_fastest_in_the_first(self) -> None:
        here = timed(simple=100, more_stages=100.3)
        assert winner_on_all([here, here])[0] == SIMPLE
        assert winner_on_all([here, here], MORE_STAGES)[0] == MORE_STAGES
        assert winner_on_all([here, timed(simple=100, more_stages=101)], MORE_STAGES)[0] == SIMPLE

    def test_was_timed_everywhere(self) -> None:
        here = timed(simple=100, more_stages=110)
        assert winner_on_all([here, timed(more_stages=100)])[0] == MORE_STAGES
        with pytest.raises(ValueError, match="no config"):
            winner_on_all([here, {}])
