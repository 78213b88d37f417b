"""Who wins the final: a lead counts only where it exceeds the noise of paired rounds."""

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


def rounds(seed: int, drift: float = 0.1, rounds: int = ROUNDS) -> list[float]:
    """What all candidates of one round have in common: a card that slows down and jumps."""
    rng = random.Random(seed)
    return [1 + drift * i / rounds + rng.choice([0.0, 0.0, 0.2]) for i in range(rounds)]


def samples(time_us: float, noise: float, seed: int, common: Sequence[float] | None = None) -> tuple[float, ...]:
    rng = random.Random(seed)
    return tuple(time_us * shared * (1 + rng.gauss(0, noise)) for shared in (common or [1.0] * ROUNDS))


def timing(times: Sequence[float]) -> Timing:
    return Timing(statistics.median(times), 0.0, 100.0, tuple(times), (100.0,) * len(times))


class TestLead:
    def test_of_nothing_is_noise(self) -> None:
        assert lead_is_noise((1.0,) * ROUNDS, (1.0,) * ROUNDS)

    @pytest.mark.parametrize("seed", range(5))
    def test_within_the_scatter_is_noise(self, seed: int) -> None:
        assert lead_is_noise(samples(100, 0.02, seed), samples(100.05, 0.02, seed + 100))

    @pytest.mark.parametrize("seed", range(5))
    def test_far_outside_the_scatter_is_none(self, seed: int) -> None:
        assert not lead_is_noise(samples(100, 0.01, seed), samples(105, 0.01, seed + 100))

    def test_that_every_round_shows_is_none_however_the_card_drifts(self) -> None:
        """Paired: one percent in each round counts though the rounds differ by thirty."""
        common = rounds(1)
        assert not lead_is_noise(samples(100, 0.001, 2, common), samples(101, 0.001, 3, common))

    def test_the_wrong_way_round_is_noise(self) -> None:
        assert lead_is_noise(samples(105, 0.01, 1), samples(100, 0.01, 2))

    def test_is_judged_alike_each_time(self) -> None:
        pair = samples(100, 0.02, 1), samples(100.5, 0.02, 2)
        assert len({lead_is_noise(*pair) for _ in range(5)}) == 1

    def test_of_one_lucky_round_is_noise(self) -> None:
        faster = [100.0] * ROUNDS
        faster[3] = 50.0
        assert lead_is_noise(faster, [100.0] * ROUNDS)

    def test_needs_rounds_that_pair_up(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            lead_is_noise((1.0, 1.0), (1.0,))


class TestWinner:
    def test_is_the_only_one_there_is(self) -> None:
        assert winner({COMPLEX: timing(samples(100, 0.01, 1))}) == COMPLEX

    def test_outside_the_noise_is_the_fastest(self) -> None:
        timed = {SIMPLE: timing(samples(110, 0.01, 1)), COMPLEX: timing(samples(100, 0.01, 2))}
        assert winner(timed) == COMPLEX
        assert winner(timed, incumbent=SIMPLE) == COMPLEX

    def test_within_the_noise_is_the_incumbent(self) -> None:
        common = rounds(4)
        timed = {
            SIMPLE: timing(samples(100.0, 0.02, 1, common)),
            MORE_STAGES: timing(samples(100.1, 0.02, 2, common)),
            COMPLEX: timing(samples(100.05, 0.02, 3, common)),
        }
        assert winner(timed, incumbent=COMPLEX) == COMPLEX
        assert winner(timed, incumbent=MORE_STAGES) == MORE_STAGES

    def test_within_the_noise_and_without_incumbent_is_the_simplest(self) -> None:
        common = rounds(4)
        timed = {
            COMPLEX: timing(samples(100.0, 0.02, 1, common)),
            MORE_STAGES: timing(samples(100.1, 0.02, 2, common)),
            SIMPLE: timing(samples(100.05, 0.02, 3, common)),
        }
        assert winner(timed) == SIMPLE

    @pytest.mark.parametrize("turn", [0, ROUNDS // 2, ROUNDS - 1])
    def test_is_not_made_by_one_fast_sample(self, turn: int) -> None:
        common = rounds(4)
        lucky = list(samples(101, 0.003, 1, common))
        lucky[turn] *= 0.1
        assert winner({SIMPLE: timing(lucky), COMPLEX: timing(samples(100, 0.003, 2, common))}) == COMPLEX

    def test_does_not_depend_on_the_order_of_candidates(self) -> None:
        common = rounds(4)
        timed = [(c, timing(samples(100, 0.02, i, common))) for i, c in enumerate((COMPLEX, MORE_STAGES, SIMPLE))]
        assert winner(dict(timed)) == winner(dict(reversed(timed)))

    def test_is_no_incumbent_that_was_not_timed(self) -> None:
        timed = {SIMPLE: timing(samples(100, 0.01, 1))}
        assert winner(timed, incumbent=COMPLEX) == SIMPLE

    def test_is_no_simple_config_that_is_clearly_slower(self) -> None:
        timed = {
            SIMPLE: timing(samples(120, 0.01, 1)),
            MORE_STAGES: timing(samples(100.0, 0.01, 2)),
            COMPLEX: timing(samples(100.1, 0.01, 3)),
        }
        assert winner(timed) == MORE_STAGES


class TestComplexity:
    def test_grows_with_consumers_stages_and_programmatic_launch(self) -> None:
        ordered = [config(), config(stages=4), config(stages=6), config(consumers=2), config(consumers=3)]
        assert sorted(ordered, key=complexity) == ordered
        assert complexity(config(pdl="early")) > complexity(config())

    def test_is_known_for_templates_without_those_parameters(self) -> None:
        assert complexity(Config(template="vector_add_vanilla", params={"block": 1024})) == (1, 0)


class TestSteadiest:
    def test_is_the_one_that_loses_least_where_it_loses_most(self) -> None:
        here = {SIMPLE: timing([100.0] * 3), MORE_STAGES: timing([103.0] * 3), COMPLEX: timing([104.0] * 3)}
        there = {SIMPLE: timing([120.0] * 3), MORE_STAGES: timing([102.0] * 3), COMPLEX: timing([100.0] * 3)}
        config, loss = winner_on_all([here, there])
        assert config == MORE_STAGES
        assert loss == pytest.approx(0.03)

    def test_of_equals_is_the_incumbent_or_the_fastest_in_the_first(self) -> None:
        here = {SIMPLE: timing([100.0] * 3), MORE_STAGES: timing([100.3] * 3)}
        assert winner_on_all([here, here])[0] == SIMPLE
        assert winner_on_all([here, here], MORE_STAGES)[0] == MORE_STAGES
        there = {SIMPLE: timing([100.0] * 3), MORE_STAGES: timing([101.0] * 3)}
        assert winner_on_all([here, there], MORE_STAGES)[0] == SIMPLE

    def test_is_none_that_was_not_timed_everywhere(self) -> None:
        here = {SIMPLE: timing([100.0] * 3), MORE_STAGES: timing([110.0] * 3)}
        assert winner_on_all([here, {MORE_STAGES: timing([100.0] * 3)}])[0] == MORE_STAGES
        with pytest.raises(ValueError, match="no config"):
            winner_on_all([here, {}])
