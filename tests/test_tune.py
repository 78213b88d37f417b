"""The tuner against recorded timings: what it finds, what it keeps, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import InstantPool, RecordedCard, table
from tlxgen import devices, ops, tune
from tlxgen.candidates import candidates
from tlxgen.config import Config
from tlxgen.errors import CompileError, InvalidProblemError, TuningError
from tlxgen.keys import tuning_key
from tlxgen.measure import PROTOCOL, Verdict
from tlxgen.record import Trial
from tlxgen.store import Store
from tlxgen.tune import Budget, TuneResult

SQUARE = (4096, 4096, 4096)
FLAT = (512, 4096, 4096)

#: Which measurement the final is, counted from the look at the last batch: that, the semifinal, the final.
FINAL = 2
H200 = devices.target("h200")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuned.db") as store:
        yield store


Run = Callable[..., TuneResult]


@pytest.fixture
def run(store: Store, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Tunes a recorded shape; keyword arguments go to the tuner, but for the card and the compiler's failures."""

    def run(
        card: RecordedCard,
        sizes: tuple[int, int, int] = SQUARE,
        failures: dict[Config, BaseException] | None = None,
        trials: int = 60,
        seconds: float = 600,
        **options: Any,
    ) -> TuneResult:
        card.child.alive = True
        monkeypatch.setattr(tune, "Card", lambda *_: card)
        monkeypatch.setattr(tune, "CompilePool", lambda *_, **__: InstantPool(failures))
        return tune.tune(problem(sizes), store, budget=Budget(trials, seconds), **options)

    return run


def problem(sizes: tuple[int, int, int]) -> Any:
    return ops.get("gemm").problem(sizes)


def card(sizes: tuple[int, int, int] = SQUARE, **options: Any) -> RecordedCard:
    return RecordedCard(*table(sizes), **options)


def kept(store: Store, sizes: tuple[int, int, int] = SQUARE) -> Any:
    return store.get(tuning_key(problem(sizes), H200.key))


class TestWhatItFinds:
    @pytest.mark.parametrize("sizes", [SQUARE, FLAT, (3008, 1008, 4992), (8192, 8192, 8192), (1024, 1024, 1024)])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_comes_within_five_percent_of_the_best_recorded_look_with_a_third_of_the_trials(
        self, sizes: tuple[int, int, int], seed: int, run: Run
    ) -> None:
        recorded = card(sizes)
        legal = candidates(problem(sizes), H200)
        best = min(recorded.times[config] for config in legal if config in recorded.times)
        result = run(recorded, sizes, trials=max(64, len(legal) // 3), seed=seed)
        # One look of five rounds is itself a few percent off, so the table cannot tell closer configs apart.
        assert recorded.times[result.record.config] <= 1.05 * best

    def test_everything_is_tried_where_the_budget_allows(self, run: Run) -> None:
        recorded = card()
        result = run(recorded, trials=10_000)
        assert result.state.tried == result.state.legal == len(candidates(problem(SQUARE), H200))

    def test_no_config_is_tried_twice(self, run: Run) -> None:
        recorded = card()
        result = run(recorded, trials=80)
        first_gates = recorded.gated[: result.state.tried]
        assert len(first_gates) == len(set(first_gates)) == 80

    @pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
    def test_a_seed_fixes_the_search(self, sampler: str, run: Run, tmp_path: Path, store: Store) -> None:
        first = card(noise=0.0)
        run(first, trials=70, sampler=sampler, seed=7)
        store.delete([tuning_key(problem(SQUARE), H200.key)])
        second = card(noise=0.0)
        run(second, trials=70, sampler=sampler, seed=7)
        assert first.gated == second.gated

    def test_the_record_holds_the_evidence(self, run: Run) -> None:
        record = run(card()).record
        assert record.origin == "measured"
        assert record.peer == "cublas"
        assert record.ratio is not None
        assert record.spread_us > 0
        assert record.protocol == PROTOCOL
        assert record.trials == 60
        assert record.error == record.error_peer == 1.6e-3


class TestFailures:
    def test_are_counted_by_class_and_the_search_goes_on(self, run: Run, store: Store) -> None:
        legal = candidates(problem(SQUARE), H200)
        recorded = card()
        recorded.verdicts = {legal[0]: Verdict("hang", "no result"), legal[1]: Verdict("wrong_result", "off")}
        failures: dict[Config, BaseException] = {
            legal[2]: CompileError("ptxas", "fatal"),
            legal[3]: CompileError("compiler_crash", "exit status -6"),
            legal[4]: CompileError("timeout", "60 s"),
        }
        result = run(recorded, failures=failures)
        assert result.state.failures == {"hang": 1, "wrong_result": 1, "ptxas": 1, "compiler_crash": 1, "timeout": 1}
        assert result.record.config not in legal[:5]
        assert {t.status for t in store.trials(result.record.key)} > set(result.state.failures)

    def test_are_remembered_and_not_repeated(self, run: Run) -> None:
        legal = candidates(problem(SQUARE), H200)
        first = card(verdicts={legal[0]: Verdict("hang", "no result")})
        run(first)
        second = card(verdicts=first.verdicts)
        result = run(second, trials=80)
        assert legal[0] not in second.gated
        assert result.state.failures["hang"] == 1

    def test_of_every_candidate_leave_nothing_behind(self, run: Run, store: Store) -> None:
        recorded = RecordedCard({}, 200.0)
        with pytest.raises(TuningError, match=r"64 wrong_result.*no record"):
            run(recorded, trials=64)
        assert kept(store) is None

    def test_a_bug_of_a_template_stops_the_run(self, run: Run) -> None:
        legal = candidates(problem(SQUARE), H200)
        with pytest.raises(KeyError):
            run(card(), failures={legal[0]: KeyError("a template's own mistake")})


class TestMeasuringHonestly:
    def test_a_lucky_look_is_taken_again_and_wins_nothing(self, run: Run, store: Store) -> None:
        recorded = card()
        tried = [config for config in candidates(problem(SQUARE), H200)[:8] if config in recorded.times]
        slow = max(tried, key=recorded.times.__getitem__)
        recorded.luck = {slow: 0.3}

        def luck_ends() -> None:
            if PROTOCOL in {trial.protocol for trial in store.trials(tuning_key(problem(SQUARE), H200.key))}:
                recorded.luck = {}

        recorded.on_measure = luck_ends
        result = run(recorded, trials=24)
        lucky = next(trial for trial in store.trials(result.record.key) if trial.config == slow)
        assert lucky.time_us is not None
        assert lucky.time_us < 0.6 * result.record.time_us, "it led when the search ended"
        assert result.record.config != slow
        assert result.record.time_us == pytest.approx(recorded.times[result.record.config], rel=0.05)

    def test_a_restless_card_decides_nothing(self, run: Run, store: Store) -> None:
        result = run(card(noise=0.4), trials=24)
        assert "scatter by" in result.disturbed
        assert result.stored, "better than nothing"
        assert kept(store).protocol == f"{PROTOCOL}/look"
        quiet = run(card(), trials=24)
        assert quiet.disturbed == ""
        assert kept(store) == quiet.record
        assert run(card(noise=0.4), trials=32).stored is False
        assert kept(store) == quiet.record

    def test_a_disturbance_may_pass(self, run: Run, store: Store) -> None:
        recorded = card()

        def disturb() -> None:
            recorded.noise = 0.4 if len(recorded.gated) >= 24 and next(calls) == FINAL else 0.005

        calls = iter(range(100))
        recorded.on_measure = disturb
        result = run(recorded, trials=24)
        assert next(calls) == FINAL + 2, "the final was held once more"
        assert result.disturbed == ""
        assert kept(store).protocol == PROTOCOL

    def test_a_process_that_comes_to_the_gpu_is_noticed(self, run: Run, store: Store) -> None:
        counts = iter([1, 2, 2, 2])
        result = run(card(), trials=24, neighbours=lambda: next(counts))
        assert result.disturbed == "1 process(es) began to compute on this GPU meanwhile"
        assert kept(store).protocol == f"{PROTOCOL}/look"
        assert run(card(), trials=24, neighbours=lambda: 3).disturbed == "", (
            "those that sat there before are told before"
        )


class TestEndings:
    def test_an_interrupted_run_keeps_its_best_and_says_so(self, run: Run, store: Store) -> None:
        rounds = iter(range(100))

        def interrupt() -> None:
            if next(rounds) == 2:
                raise KeyboardInterrupt

        result = run(card(on_measure=interrupt), trials=150)
        assert result.interrupted
        assert 0 < result.state.tried < 150
        assert kept(store).config == result.record.config

    def test_a_killed_run_has_left_its_best_so_far(self, run: Run, store: Store) -> None:
        class Killed(BaseException):
            pass

        rounds = iter(range(100))

        def die() -> None:
            if next(rounds) == 2:
                raise Killed

        with pytest.raises(Killed):
            run(card(on_measure=die), trials=150)
        assert kept(store).origin == "measured"
        assert len(store.trials(tuning_key(problem(SQUARE), H200.key))) > 0

    def test_the_same_command_goes_on_where_it_stopped(self, run: Run) -> None:
        first, second = card(), card()
        run(first, trials=64)
        result = run(second, trials=96)
        assert result.state.resumed == 64
        assert result.state.tried == 96
        assert not set(first.gated[:64]) & set(second.gated[:32])

    def test_a_search_space_that_has_grown_keeps_what_was_found(
        self, run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        legal = candidates(problem(SQUARE), H200)
        monkeypatch.setattr(tune, "candidates", lambda *_: legal[:70])
        run(card(), trials=70)
        monkeypatch.setattr(tune, "candidates", lambda *_: legal[40:])
        second = card()
        result = run(second, trials=90)
        assert (result.state.resumed, result.state.tried) == (30, 90), "those that are candidates still"
        assert not set(second.gated[:60]) & set(legal[:70])
        assert len(store.trials(tuning_key(problem(SQUARE), H200.key))) == 130

    def test_an_interrupted_final_is_cut_short_and_counts(self, run: Run, store: Store) -> None:
        recorded = card()

        def interrupt() -> None:
            if len(recorded.gated) >= 24 and next(calls) == FINAL:
                raise KeyboardInterrupt

        calls = iter(range(100))
        recorded.on_measure = interrupt
        result = run(recorded, trials=24)
        assert result.interrupted
        assert kept(store) == result.record
        assert result.record.protocol == PROTOCOL

    def test_an_interruption_before_the_first_look_is_passed_on(self, run: Run, store: Store) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(card(on_measure=interrupt), trials=24)
        assert store.records() == []

    def test_a_row_whose_kernels_all_fall_in_the_final_is_served_no_more(self, run: Run, store: Store) -> None:
        recorded = card()

        def fall() -> None:
            recorded.falls = len(recorded.gated) >= 24 and next(calls) >= FINAL

        calls = iter(range(100))
        recorded.on_measure = fall
        with pytest.raises(TuningError, match="works"):
            run(recorded, trials=24)
        assert kept(store) is None
        assert list(store.defective().values()) == ["it did not survive the final comparison"]

    def test_an_interrupted_ranking_keeps_its_best(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        legal = candidates(problem(SQUARE), H200)
        failures = {legal[0]: CompileError("ptxas", "fatal"), legal[5]: KeyboardInterrupt()}
        monkeypatch.setattr(tune, "CompilePool", lambda *_, **__: InstantPool(failures))
        result = tune.rank(problem(SQUARE), H200, store, budget=Budget(24, 600))
        assert (result.interrupted, result.record.config, result.state.tried) == (True, legal[1], 5)
        assert kept(store) == result.record
        failures[legal[0]] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            tune.rank(problem(SQUARE), H200, store, budget=Budget(24, 600))

    def test_a_finished_search_only_runs_its_final_again(self, run: Run) -> None:
        run(card(), trials=64)
        second = card()
        result = run(second, trials=64)
        assert result.state.resumed == result.state.tried == 64
        assert len(second.gated) <= 34

    def test_trials_of_other_code_do_not_count(self, run: Run, store: Store) -> None:
        key = tuning_key(problem(SQUARE), H200.key)
        config = candidates(problem(SQUARE), H200)[0]
        store.add_trial(key, Trial(config=config, source_hash="0" * 32, status="ok", time_us=1.0, protocol=PROTOCOL))
        assert run(card()).state.resumed == 0

    def test_time_is_a_budget_too(self, run: Run) -> None:
        assert run(card(), trials=190, seconds=0.0001, sampler="random").state.tried < 100

    def test_the_incumbent_stays_where_the_lead_is_noise(self, run: Run, store: Store) -> None:
        first = run(card(), trials=64).record
        flat = card(noise=0.02)
        flat.times = dict.fromkeys(flat.times, 200.0)
        assert run(flat, trials=96).record.config == first.config
        assert kept(store).config == first.config

    def test_a_run_over_one_template_does_not_lose_the_row_of_another(self, run: Run, store: Store) -> None:
        first = run(card(), trials=64).record
        assert first.config.template != "gemm_vanilla"
        assert run(card(), templates=("gemm_vanilla",)).record.config == first.config
        assert kept(store).config == first.config

    def test_the_row_of_a_killed_run_is_no_incumbent(self, run: Run, store: Store) -> None:
        rounds = iter(range(100))

        def die() -> None:
            if next(rounds) == 1:
                raise SystemExit

        with pytest.raises(SystemExit):
            run(card(on_measure=die), trials=150)
        assert kept(store).protocol == f"{PROTOCOL}/look"
        assert run(card(), trials=64).record.protocol == PROTOCOL

    def test_a_size_of_zero_is_refused(self, store: Store) -> None:
        with pytest.raises(InvalidProblemError, match="K = 0"):
            candidates(problem((8, 8, 0)), H200)
