"""`tune` and `rank` with recorded times in place of a GPU: results, failures, stored rows and trials, resumption."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.recorded import InstantPool, RecordedCard, table
from tlxgen import devices, ops
from tlxgen.cli import tune as tuning_cli
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import Trial, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import Gpu
from tlxgen.errors import CompileError, InvalidProblemError, TuningError
from tlxgen.problem import Problem
from tlxgen.space import candidates as of_today
from tlxgen.tuner import compile_pool, rank, tune
from tlxgen.tuner.measure import PROTOCOL, Verdict
from tlxgen.tuner.result import Budget, TuneResult

SQUARE = (4096, 4096, 4096)
FLAT = (512, 4096, 4096)
H200 = devices.target("h200")


def candidates(problem: Problem, gpu: Gpu, templates: tuple[str, ...] | None = None) -> list[Config]:
    """The recorded part of the search space, in which tiles were whole."""
    return [c for c in of_today.candidates(problem, gpu, templates) if c.params.get("tail") != "split"]


Run = Callable[..., TuneResult]


@pytest.fixture
def run(store: Store, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Tunes a recorded shape; other keyword arguments go to `tune`."""
    monkeypatch.setattr(tune, "candidates", candidates)

    def run(
        card: RecordedCard,
        sizes: tuple[int, int, int] = SQUARE,
        failures: dict[Config, BaseException] | None = None,
        trials: int = 60,
        seconds: float = 600,
        **options: Any,
    ) -> TuneResult:
        card.child.alive = True
        monkeypatch.setattr(tune, "Runner", lambda *_: card)
        monkeypatch.setattr(compile_pool, "CompilePool", lambda *_, **__: InstantPool(failures))
        return tune.tune(problem(sizes), store, budget=Budget(trials, seconds), **options)

    return run


def problem(sizes: tuple[int, int, int] = SQUARE) -> Any:
    return ops.get("gemm").problem(sizes)


LEGAL = candidates(problem(), H200)
KEY = tuning_key(problem(), H200.key)


def card(sizes: tuple[int, int, int] = SQUARE, **options: Any) -> RecordedCard:
    return RecordedCard(*table(sizes), **options)


def kept(store: Store) -> Any:
    return store.get(KEY)


def code_hash(config: Config) -> str:
    return emit(ops.get("gemm"), problem(), config).code_hash


def slowest_of_first(recorded: RecordedCard) -> Config:
    return max((config for config in LEGAL[:8] if config in recorded.times), key=recorded.times.__getitem__)


def before_measurement(recorded: RecordedCard, act: Callable[[int], None], after_gates: int = 0) -> None:
    """Calls `act` before each measurement with its number, counted from when so many candidates are gated."""
    numbers = iter(range(1000))

    def on_measure() -> None:
        if len(recorded.gated) >= after_gates:
            act(next(numbers))

    recorded.on_measure = on_measure


#: Of a run with 24 trials, counted from the first timing of the last batch: that, the semifinal, the final.
FINAL = 2


def in_final(recorded: RecordedCard, act: Callable[[bool], None]) -> None:
    """Calls `act` before each measurement of a run with 24 trials, with whether it is the first final."""
    before_measurement(recorded, lambda number: act(number == FINAL), after_gates=24)


def interrupt(at: int) -> Callable[[int], None]:
    def act(number: int) -> None:
        if number == at:
            raise KeyboardInterrupt

    return act


class Killed(BaseException):
    """Not handled anywhere, like SIGKILL."""


def killed_in_measurement(run: Run, recorded: RecordedCard, number: int) -> None:
    def act(now: int) -> None:
        if now == number:
            raise Killed

    before_measurement(recorded, act)
    with pytest.raises(Killed):
        run(recorded, trials=150)


class TestWinner:
    @pytest.mark.parametrize("sizes", [SQUARE, FLAT, (3008, 1008, 4992), (8192, 8192, 8192), (1024, 1024, 1024)])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_is_within_five_percent_of_the_best_after_a_third_of_the_trials(
        self, sizes: tuple[int, int, int], seed: int, run: Run
    ) -> None:
        recorded = card(sizes)
        legal = candidates(problem(sizes), H200)
        best = min(recorded.times[config] for config in legal if config in recorded.times)
        result = run(recorded, sizes, trials=max(64, len(legal) // 3), seed=seed)
        # The table holds times of five rounds, which are a few percent off, so it cannot order closer configs.
        assert recorded.times[result.record.config] <= 1.05 * best

    @pytest.mark.slow
    @pytest.mark.parametrize("sizes", [SQUARE, FLAT, (2048, 2048, 2048)])
    def test_of_ten_runs_from_scratch_differs_by_three_percent(
        self, sizes: tuple[int, int, int], run: Run, store: Store
    ) -> None:
        found = []
        for seed in range(10):
            recorded = card(sizes, rng=random.Random(seed))
            found.append(recorded.times[run(recorded, sizes, trials=128, seed=seed).record.config])
            store.delete([tuning_key(problem(sizes), H200.key)])
        assert max(found) <= 1.03 * min(found)

    @pytest.mark.parametrize("sizes", [SQUARE, FLAT])
    def test_and_top_three_do_not_depend_on_the_order_of_candidates(
        self, sizes: tuple[int, int, int], run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        legal = candidates(problem(sizes), H200)
        times = {config: time_us for config, time_us in card(sizes).times.items() if config in legal}
        best = sorted(times.values())
        for seed, order in enumerate([legal, legal[::-1], random.Random(0).sample(legal, len(legal))]):
            monkeypatch.setattr(tune, "candidates", lambda *_, order=order: order)
            finalists = run(card(sizes, rng=random.Random(seed)), sizes, trials=10_000).finalists
            top = sorted(finalists, key=lambda config: finalists[config].time_us)[:3]
            # Neighbours in the table are closer than noise of half a percent can tell after 31 rounds.
            assert all(times[config] <= 1.005 * time_us for config, time_us in zip(top, best, strict=False))
            store.delete([tuning_key(problem(sizes), H200.key)])

    def test_record_holds_the_evidence(self, run: Run) -> None:
        record = run(card()).record
        assert (record.origin, record.peer, record.protocol, record.trials) == ("measured", "cublas", PROTOCOL, 60)
        assert record.ratio is not None
        assert record.spread_us > 0
        assert record.error == record.error_peer == 1.6e-3


class TestSearch:
    def test_tries_everything_if_the_budget_allows(self, run: Run) -> None:
        result = run(card(), trials=10_000)
        assert result.state.tried == result.state.legal == len(LEGAL)

    def test_tries_no_config_twice(self, run: Run) -> None:
        recorded = card()
        result = run(recorded, trials=80)
        first_gates = recorded.gated[: result.state.tried]
        assert len(first_gates) == len(set(first_gates)) == 80

    @pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
    def test_depends_on_the_seed_only(self, sampler: str, run: Run, store: Store) -> None:
        gated = []
        for _ in range(2):
            recorded = card(noise=0.0)
            run(recorded, trials=70, sampler=sampler, seed=7)
            gated.append(recorded.gated)
            store.delete([KEY])
        assert gated[0] == gated[1]

    def test_ends_when_time_is_over(self, run: Run) -> None:
        assert run(card(), trials=190, seconds=0.0001, sampler="random").state.tried < 100

    def test_refuses_a_size_of_zero(self) -> None:
        with pytest.raises(InvalidProblemError, match="K = 0"):
            candidates(problem((8, 8, 0)), H200)


class TestFailures:
    def test_are_counted_by_class_and_the_search_goes_on(self, run: Run, store: Store) -> None:
        recorded = card(verdicts={LEGAL[0]: Verdict("hang", "no result"), LEGAL[1]: Verdict("wrong_result", "off")})
        failures: dict[Config, BaseException] = {
            LEGAL[2]: CompileError("ptxas", "fatal"),
            LEGAL[3]: CompileError("compiler_crash", "exit status -6"),
            LEGAL[4]: CompileError("timeout", "60 s"),
        }
        result = run(recorded, failures=failures)
        assert result.state.failures == {"hang": 1, "wrong_result": 1, "ptxas": 1, "compiler_crash": 1, "timeout": 1}
        assert result.record.config not in LEGAL[:5]
        assert {t.status for t in store.trials(result.record.key)} > set(result.state.failures)

    def test_are_not_tried_again(self, run: Run) -> None:
        verdicts = {LEGAL[0]: Verdict("hang", "no result")}
        run(card(verdicts=verdicts))
        second = card(verdicts=verdicts)
        result = run(second, trials=80)
        assert LEGAL[0] not in second.gated
        assert result.state.failures["hang"] == 1

    def test_of_all_candidates_store_nothing(self, run: Run, store: Store) -> None:
        with pytest.raises(TuningError, match=r"64 wrong_result.*no record"):
            run(RecordedCard({}, 200.0), trials=64)
        assert kept(store) is None

    def test_of_a_template_stop_the_run(self, run: Run) -> None:
        with pytest.raises(KeyError):
            run(card(), failures={LEGAL[0]: KeyError("a template's own mistake")})


class TestNoise:
    def test_lucky_first_timing_does_not_win(self, run: Run, store: Store) -> None:
        recorded = card()
        slow = slowest_of_first(recorded)
        recorded.luck = {slow: 0.3}

        def end_luck(_: int) -> None:
            if PROTOCOL in {trial.protocol for trial in store.trials(KEY)}:
                recorded.luck = {}

        before_measurement(recorded, end_luck)
        result = run(recorded, trials=24)
        lucky = next(trial for trial in store.trials(KEY) if trial.config == slow)
        assert lucky.time_us is not None
        assert lucky.time_us < 0.6 * result.record.time_us, "it led when the search ended"
        assert result.record.config != slow
        assert result.record.time_us == pytest.approx(recorded.times[result.record.config], rel=0.05)

    def test_luck_up_to_the_final_does_not_win(self, run: Run) -> None:
        recorded = card()
        slow = slowest_of_first(recorded)
        recorded.luck = {slow: 0.3}
        in_final(recorded, lambda final: recorded.luck.update({slow: 1.0 if final else 0.3}))
        result = run(recorded, trials=24)
        assert slow in result.finalists
        assert result.record.config != slow

    def test_single_fast_sample_changes_nothing(self, run: Run) -> None:
        recorded = card(glitch=0.1)
        found = run(recorded, trials=24).record
        tried = [recorded.times[config] for config in recorded.gated if config in recorded.times]
        assert recorded.times[found.config] <= 1.005 * min(tried)
        assert found.time_us == pytest.approx(recorded.times[found.config], rel=0.01)

    def test_scattering_final_is_provisional_and_displaces_no_row(self, run: Run, store: Store) -> None:
        result = run(card(noise=0.4), trials=24)
        assert "scatter by" in result.disturbed
        assert result.stored, "better than nothing"
        assert kept(store).protocol == f"{PROTOCOL}/look"
        quiet = run(card(), trials=24)
        assert quiet.disturbed == ""
        assert kept(store) == quiet.record
        assert run(card(noise=0.4), trials=32).stored is False
        assert kept(store) == quiet.record

    def test_disturbed_final_is_repeated_once(self, run: Run, store: Store) -> None:
        recorded = card()
        finals: list[bool] = []

        def disturb(final: bool) -> None:
            finals.append(final)
            recorded.noise = 0.4 if final else 0.005

        in_final(recorded, disturb)
        result = run(recorded, trials=24)
        assert finals == [False, False, True, False], "the final was repeated"
        assert result.disturbed == ""
        assert kept(store).protocol == PROTOCOL

    def test_new_process_on_the_gpu_makes_the_final_provisional(self, run: Run, store: Store) -> None:
        counts = iter([1, 2, 2, 2])
        result = run(card(), trials=24, gpu_processes=lambda: next(counts))
        assert result.disturbed == "1 process(es) began to compute on this GPU meanwhile"
        assert kept(store).protocol == f"{PROTOCOL}/look"
        busy = run(card(), trials=24, gpu_processes=lambda: 3, gpu_busy=True)
        assert busy.disturbed == "other processes were loading this GPU before"
        assert kept(store).protocol == f"{PROTOCOL}/look"
        assert run(card(), trials=24, gpu_processes=lambda: 3).disturbed == "", "idle since before the run"


class TestSimulatedBeforeLaunch:
    """Every config passes compiler and simulator before the gate, and each code once."""

    UNSAFE = CompileError("unsafe", "simulator: deadlock")

    @pytest.fixture(autouse=True)
    def _no_verdicts_of_other_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tune, "is_known_safe", lambda _: False)

    def pool(self, *unsafe: Config) -> InstantPool:
        return InstantPool(dict.fromkeys(unsafe, self.UNSAFE))

    def finished(self, run: Run, store: Store) -> list[Config]:
        """Candidates of a finished run, best first."""
        trials = store.trials(run(card(), trials=64).record.key)
        times = {trial.config: trial.time_us for trial in trials if trial.time_us}
        return sorted(times, key=times.__getitem__)

    def test_all_gated_candidates_once(self, run: Run) -> None:
        pool, recorded = self.pool(), card()
        run(recorded, trials=64, pool=pool)
        submitted = [source.code_hash for source in pool.submitted]
        assert len(submitted) == len(set(submitted)) == 64
        assert set(map(code_hash, recorded.gated)) <= set(submitted)

    def test_trials_of_earlier_runs(self, run: Run, store: Store) -> None:
        best = self.finished(run, store)[0]
        pool, recorded = self.pool(best), card()
        result = run(recorded, trials=64, pool=pool)
        assert {source.config for source in pool.submitted} == {*recorded.gated, best}
        assert best not in recorded.gated
        assert best not in result.finalists
        assert result.record.config != best

    def test_trials_of_earlier_runs_in_an_interrupted_final(self, run: Run, store: Store) -> None:
        best = self.finished(run, store)[0]
        recorded = card()
        before_measurement(recorded, interrupt(at=0))
        result = run(recorded, trials=96, pool=self.pool(best))
        assert result.interrupted
        assert best not in recorded.gated

    def test_stored_row_without_a_trial(self, run: Run, store: Store) -> None:
        row = run(card(), trials=64).record
        late = LEGAL[-1]
        stored = row.model_copy(update={"config": late, "source_hash": code_hash(late)})
        store.delete([row.key])
        recorded = card()
        recorded.times[late] = 1.0
        store.put(stored)
        assert run(recorded, trials=64, pool=self.pool(late), sampler="exhaustive").record.config != late
        assert late not in recorded.gated
        store.put(stored)
        assert run(recorded, trials=64, pool=self.pool(), sampler="exhaustive").record.config == late

    def test_code_with_a_known_verdict_starts_no_compiler(
        self, run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        best, *others = self.finished(run, store)
        known = set(map(code_hash, others))
        monkeypatch.setattr(tune, "is_known_safe", lambda source: source.code_hash in known)
        pool = self.pool()
        run(card(), trials=64, pool=pool)
        assert [source.config for source in pool.submitted] == [best]


class TestInterruption:
    def test_of_the_search_stores_the_best_so_far(self, run: Run, store: Store) -> None:
        recorded = card()
        before_measurement(recorded, interrupt(at=2))
        result = run(recorded, trials=150)
        assert result.interrupted
        assert 0 < result.state.tried < 150
        assert kept(store).config == result.record.config

    def test_of_the_final_stores_the_winner_of_a_shorter_one(self, run: Run, store: Store) -> None:
        recorded = card()
        before_measurement(recorded, interrupt(at=FINAL), after_gates=24)
        result = run(recorded, trials=24)
        assert result.interrupted
        assert kept(store) == result.record
        assert result.record.protocol == PROTOCOL

    def test_before_the_first_timing_is_raised(self, run: Run, store: Store) -> None:
        recorded = card()
        before_measurement(recorded, interrupt(at=0))
        with pytest.raises(KeyboardInterrupt):
            run(recorded, trials=24)
        assert store.records() == []

    def test_of_rank_stores_the_best_so_far(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        failures = {LEGAL[0]: CompileError("ptxas", "fatal"), LEGAL[5]: KeyboardInterrupt()}
        monkeypatch.setattr(compile_pool, "CompilePool", lambda *_, **__: InstantPool(failures))
        result = rank.rank(problem(), H200, store, budget=Budget(24, 600))
        assert (result.interrupted, result.record.config, result.state.tried) == (True, LEGAL[1], 5)
        assert kept(store) == result.record
        failures[LEGAL[0]] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            rank.rank(problem(), H200, store, budget=Budget(24, 600))

    def test_by_kill_leaves_the_best_so_far_as_a_provisional_row(self, run: Run, store: Store) -> None:
        killed_in_measurement(run, card(), 2)
        assert (kept(store).origin, kept(store).protocol) == ("measured", f"{PROTOCOL}/look")
        assert len(store.trials(KEY)) > 0
        assert run(card(), trials=64).record.protocol == PROTOCOL

    def test_by_kill_loses_no_gated_candidate(self, run: Run, store: Store) -> None:
        """Each is counted once and timed first by the next run."""
        first, second = card(), card()
        killed_in_measurement(run, first, 1)
        timed, gated = (store.trials(KEY, protocol) for protocol in (PROTOCOL, f"{PROTOCOL}/gate"))
        assert [trial.config for trial in gated] == first.gated[len(timed) :]
        assert {(trial.time_us, trial.peer_us) for trial in gated} == {(1.0, second.peer_us)}
        result = run(second, trials=64)
        assert (result.state.resumed, result.state.tried) == (len(first.gated), 64)
        assert second.gated[: len(gated)] == [trial.config for trial in gated]
        trials = store.trials(KEY)
        assert {trial.protocol for trial in trials} == {PROTOCOL}
        assert len({trial.config for trial in trials}) == len(trials) == 64
        assert len(set(first.gated) | set(second.gated[: 64 - len(timed)])) == 64, "no search proposes them again"

    def test_rough_time_of_the_gate_decides_nothing(self, run: Run, store: Store) -> None:
        killed_in_measurement(run, card(launch_us=0.01), 0)
        assert store.records() == []
        result = run(card(), trials=0)
        assert result.state.tried == len(store.trials(KEY, PROTOCOL))
        assert store.trials(KEY, f"{PROTOCOL}/gate") == []
        assert result.record.time_us == pytest.approx(card().times[result.record.config], rel=0.05)

    def test_candidate_gated_before_a_kill_may_fail_after_it(self, run: Run, store: Store) -> None:
        first = card()
        killed_in_measurement(run, first, 0)
        bad = first.gated[1]
        result = run(card(verdicts={bad: Verdict("hang", "no result")}), trials=len(first.gated))
        assert (result.state.failures, result.state.tried) == ({"hang": 1}, len(first.gated))
        assert [t.status for t in store.trials(KEY) if t.config == bad] == ["hang"]

    def test_candidate_tried_again_after_a_transient_failure_counts_after_a_kill(self, run: Run, store: Store) -> None:
        run(card(verdicts={LEGAL[0]: Verdict("out_of_memory", "another's")}), trials=24)
        killed_in_measurement(run, card(), 0)
        assert run(card(), trials=64).state.tried == 64
        assert [t.status for t in store.trials(KEY) if t.config == LEGAL[0]] == ["ok"]


class TestResumption:
    def test_goes_on_where_the_run_stopped(self, run: Run) -> None:
        first, second = card(), card()
        run(first, trials=64)
        result = run(second, trials=96)
        assert (result.state.resumed, result.state.tried) == (64, 96)
        assert not set(first.gated[:64]) & set(second.gated[:32])

    def test_of_a_finished_search_repeats_the_final_only(self, run: Run) -> None:
        run(card(), trials=64)
        second = card()
        result = run(second, trials=64)
        assert result.state.resumed == result.state.tried == 64
        assert len(second.gated) <= 34

    def test_in_a_changed_search_space_keeps_trials_of_legal_candidates(
        self, run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tune, "candidates", lambda *_: LEGAL[:70])
        run(card(), trials=70)
        monkeypatch.setattr(tune, "candidates", lambda *_: LEGAL[40:])
        second = card()
        result = run(second, trials=90)
        assert (result.state.resumed, result.state.tried) == (30, 90)
        assert not set(second.gated[:60]) & set(LEGAL[:70])
        assert len(store.trials(KEY)) == 130

    @pytest.mark.parametrize("protocol", [PROTOCOL, f"{PROTOCOL}/gate"])
    def test_ignores_trials_of_other_code(self, protocol: str, run: Run, store: Store) -> None:
        trial = Trial(config=LEGAL[0], source_hash="0" * 32, status="ok", time_us=1.0, protocol=protocol)
        store.add_trial(KEY, trial)
        assert run(card()).state.resumed == 0


class TestIncumbent:
    def test_stays_if_the_lead_is_noise(self, run: Run, store: Store) -> None:
        first = run(card(), trials=64).record
        flat = card(noise=0.02)
        flat.times = dict.fromkeys(flat.times, 200.0)
        assert run(flat, trials=96).record.config == first.config
        assert kept(store).config == first.config

    def test_of_another_template_stays(self, run: Run, store: Store) -> None:
        first = run(card(), trials=64).record
        assert first.config.template != "gemm_vanilla"
        assert run(card(), templates=("gemm_vanilla",)).record.config == first.config
        assert kept(store).config == first.config

    def test_is_marked_bad_if_no_finalist_survives(self, run: Run, store: Store) -> None:
        recorded = card()

        def fail(number: int) -> None:
            recorded.falls = number >= FINAL

        before_measurement(recorded, fail, after_gates=24)
        with pytest.raises(TuningError, match="works"):
            run(recorded, trials=24)
        assert kept(store) is None
        assert list(store.defective().values()) == ["it did not survive the final comparison"]


class TestTwins:
    """A grouped GEMM whose calls may have their tokens spread in any way."""

    SIZES = (64, 8192, 2048, 7168)
    TWINS = ("dirichlet", "even", "zipf")

    Tuned = Callable[..., TuneResult]

    def problem(self, spread: str | None = None) -> Any:
        return ops.get("grouped_gemm").problem(self.SIZES, layout="nt", group_sizes=spread)

    def on_each(self, times: dict[Config, float]) -> dict[str, dict[Config, float]]:
        return dict.fromkeys(self.TWINS, times)

    @pytest.fixture
    def legal(self) -> list[Config]:
        return candidates(self.problem(), H200)

    @pytest.fixture
    def tuned(self, store: Store, legal: list[Config], monkeypatch: pytest.MonkeyPatch) -> Tuned:
        """Tunes with times by spread; every other config takes 400 us."""

        def tuned(
            times: dict[str, dict[Config, float]],
            spread: str | None = None,
            broken: Mapping[str, BaseException] | None = None,
            pool: InstantPool | None = None,
            lacking: Config | None = None,
        ) -> TuneResult:
            child = SimpleNamespace(alive=True)
            slow = dict.fromkeys(legal, 400.0)
            cards = {one: RecordedCard(slow | fast, 200.0, noise=0.0, child=child) for one, fast in times.items()}
            for one, error in (broken or {}).items():
                cards[one].broken = error
            if lacking is not None:
                del cards["zipf"].times[lacking]
            monkeypatch.setattr(tune, "Runner", lambda _operator, problem, *_: cards[problem.group_sizes])
            monkeypatch.setattr(compile_pool, "CompilePool", lambda *_, **__: pool or InstantPool())
            return tune.tune(self.problem(spread), store, budget=Budget(8, 600))

        return tuned

    @pytest.fixture
    def stored_on_even(self, store: Store, legal: list[Config], tuned: Tuned) -> Config:
        """A config that is stored for one of the twins, and that the search does not reach."""
        even = tuned({"even": {}}, "even").record
        store.put(even.model_copy(update={"config": legal[30]}))
        return legal[30]

    def test_winner_loses_least_on_all(self, legal: list[Config], tuned: Tuned) -> None:
        first, second, third = legal[:3]
        result = tuned(
            {
                "dirichlet": {first: 100.0, second: 102.0, third: 104.0},
                "even": {first: 130.0, second: 103.0, third: 100.0},
                "zipf": {first: 100.0, second: 101.0, third: 120.0},
            }
        )
        assert result.record.config == second
        assert result.loss == pytest.approx(0.03)
        assert result.record.time_us == pytest.approx(102.0)  # on the problem itself
        assert result.record.key.problem["group_sizes"] == "dirichlet"

    def test_large_loss_is_reported_with_the_commands_for_separate_rows(
        self, legal: list[Config], tuned: Tuned
    ) -> None:
        first, second = legal[:2]
        times = {
            "dirichlet": {first: 100.0, second: 108.0},
            "even": {first: 108.0, second: 100.0},
            "zipf": {first: 100.0, second: 100.0},
        }
        *_, loss, hint = tuning_cli.describe(self.problem(), tuned(times)).splitlines()
        assert "at most 8.0% slower" in loss
        assert "`tlxgen tune grouped_gemm 64 8192 2048 7168 --layout nt --group-sizes even` and" in hint
        *_, loss = tuning_cli.describe(self.problem(), tuned(self.on_each({first: 100.0}))).splitlines()
        assert "at most 0.0% slower" in loss

    def test_problem_with_a_given_spread_has_none(self, tuned: Tuned) -> None:
        fastest = candidates(self.problem("even"), H200)[5]
        result = tuned({"even": {fastest: 100.0}}, "even")
        assert (result.record.config, result.loss) == (fastest, None)

    def test_their_stored_winners_are_finalists(
        self, legal: list[Config], tuned: Tuned, stored_on_even: Config
    ) -> None:
        times = {stored_on_even: 101.0, legal[0]: 100.0}
        result = tuned({"dirichlet": times, "even": {**times, legal[0]: 110.0}, "zipf": times})
        assert result.record.config == stored_on_even

    def test_their_stored_winners_pass_the_simulator_first(
        self, legal: list[Config], tuned: Tuned, stored_on_even: Config
    ) -> None:
        times = self.on_each({stored_on_even: 1.0, legal[0]: 100.0})
        refused = InstantPool({stored_on_even: CompileError("unsafe", "simulator: deadlock")})
        assert tuned(times, pool=refused).record.config == legal[0]
        assert tuned(times).record.config == stored_on_even

    def test_their_code_is_compiled_and_simulated_once(self, tuned: Tuned) -> None:
        pool = InstantPool()
        tuned(self.on_each({}), pool=pool)
        assert len(pool.submitted) == 8

    def test_config_that_fails_on_one_is_out(self, legal: list[Config], tuned: Tuned) -> None:
        first, second = legal[:2]
        result = tuned(self.on_each({first: 100.0, second: 101.0}), lacking=first)
        assert result.record.config == second

    def test_one_that_cannot_be_measured_is_ignored(self, legal: list[Config], tuned: Tuned) -> None:
        broken = {"even": TuningError("the GPU has too little free memory")}
        result = tuned(self.on_each({legal[0]: 100.0}), broken=broken)
        assert (result.record.config, result.loss, result.record.protocol) == (legal[0], None, PROTOCOL)

    def test_interruption_on_one_leaves_the_problems_own_times(self, legal: list[Config], tuned: Tuned) -> None:
        slower = dict.fromkeys(legal, 4000.0) | {legal[0]: 1000.0}
        times = {"dirichlet": {legal[0]: 100.0}, "even": slower, "zipf": slower}
        result = tuned(times, broken={"even": KeyboardInterrupt()})
        assert result.interrupted
        assert result.record.time_us == pytest.approx(100.0)


class TestGivenProcesses:
    """A suite shares the measuring process and the compilers, which take long to start."""

    class Pool(InstantPool):
        """Finishes only the first compilations; notes what was cancelled, and whether it was closed."""

        def __init__(self, first: int) -> None:
            super().__init__()
            self.first, self.closed = first, False
            self.futures: list[Any] = []

        def submit(self, source: Any) -> Any:
            future = super().submit(source) if len(self.futures) < self.first else Future()
            self.futures.append(future)
            return future

        def __exit__(self, *_: object) -> None:
            self.closed = True

    def test_child_is_left_running(self, run: Run) -> None:
        own, given = card(), SimpleNamespace(alive=True)
        run(own, trials=8)
        assert not own.child.alive
        user = card()
        run(user, trials=8, child=given)
        assert user.child is given
        assert given.alive

    def test_pool_stays_open_and_what_has_not_begun_is_cancelled(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool: Any = self.Pool(first=32)
        monkeypatch.setattr("os.cpu_count", lambda: 16)
        assert run(card(), trials=100, seconds=0.0, pool=pool).state.tried <= 32
        assert not pool.closed
        assert all(future.cancelled() for future in pool.futures[32:])

    def test_rank_leaves_the_pool_open_too(self, store: Store) -> None:
        pool: Any = self.Pool(first=3)
        result = rank.rank(problem(), H200, store, budget=Budget(20, 0.0), pool=pool)
        assert result.record.origin == "predicted"
        assert not pool.closed
        assert all(future.cancelled() for future in pool.futures[3:])
