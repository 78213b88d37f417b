"""The tuner: proposes, compiles, gates, times, keeps.

Compilation runs ahead of the GPU: while one batch is measured, the next one compiles. A candidate is in the database as
soon as it has failed or passed its gate, so that a run that ends early, by whatever hand, goes on by the same command.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tlxgen import ops
from tlxgen._version import __version__
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config
from tlxgen.db.record import Trial, TrialStatus, TunedRecord, TuningKey, tuning_key
from tlxgen.db.store import Store
from tlxgen.errors import CompileError, GpuLostError, TuningError
from tlxgen.problem import Problem
from tlxgen.simulator.verdicts import is_known_safe
from tlxgen.space import search_space
from tlxgen.space.candidates import candidates
from tlxgen.tuner import final
from tlxgen.tuner.card import LIMIT_S, Card, Timing, timings
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.contention import disturbance
from tlxgen.tuner.measure import PROTOCOL, DeviceReport, Verdict
from tlxgen.tuner.process import Child
from tlxgen.tuner.search import Search, effective_sampler, make_search
from tlxgen.tuner.state import Budget, Progress, State, TuneResult, compilers, nothing_works

_LOOK_ROUNDS = 5
_SEMIFINAL_ROUNDS = 11
_SEMIFINALISTS = 24
_FINAL_ROUNDS = 31
_FINALISTS = 8
_RIVALS = 6  # of the finalists, those that are compared on the problem's twins too
_RIVAL = 0.15  # which are no slower than the fastest by more than this

#: Failures that say more of the machine than of the candidate; they are tried again.
_TRANSIENT = {"timeout", "killed", "out_of_memory", "gpu_lost"}

#: Protocol of a row that is kept while the search goes on: one look, not yet a final.
_LOOK_PROTOCOL = f"{PROTOCOL}/look"

#: Protocol of the trial of a candidate that has passed the gate, until the look at its batch takes its place. Its time
#: may be the host's, and decides nothing: it says that the candidate works.
_GATE_PROTOCOL = f"{PROTOCOL}/gate"


def tune(
    problem: Problem,
    store: Store,
    *,
    sampler: str = "tpe",
    budget: Budget | None = None,
    seed: int = 0,
    workers: int | None = None,
    templates: tuple[str, ...] | None = None,
    progress: Progress | None = None,
    neighbours: Callable[[], int] = lambda: 0,
    crowded: bool = False,
    child: Child | None = None,
    pool: CompilePool | None = None,
    limit: float = LIMIT_S,
) -> TuneResult:
    """Measures candidates on this machine's GPU and keeps the best.

    Ctrl-C ends the search, or its final, and what is known by then is compared in short and kept.

    Args:
        problem: what to tune.
        store: where to keep it; also holds what earlier runs found.
        sampler: see `make_search`.
        budget: when to stop.
        seed: of the search and of the inputs.
        workers: compilers at once, by default one a core.
        templates: only these.
        progress: called after every candidate.
        neighbours: how many processes compute on the GPU now, ours among them (`tlxgen.tuner.gpu_lock.other_processes`).
        crowded: whether others already load the GPU, so that times can be kept provisionally at most.
        child: the process to measure in, which is left running; by default one of the run's own.
        pool: the compilers, which are left running, and simulate too; by default `workers` of the run's own.
        limit: seconds on the card after which a candidate counts as hung.

    Raises:
        TuningError: every candidate failed; nothing is stored.
        GpuLostError: the GPU went away; what was finished is kept, and the same call goes on from there.
        KeyboardInterrupt: and nothing had been measured by then.
    """
    card = Card(problem.operator, problem, seed, limit)
    if child is not None:
        card.child = child
    try:
        report = card.setup()
        with compilers(pool, report.gpu, workers) as lent:
            run = _Run(problem, card, report, store, budget or Budget(), templates, neighbours, crowded, lent)
            run.resume()
            run.choose_search(sampler, seed)
            try:
                run.explore(progress)
                return run.finish(interrupted=False)
            except KeyboardInterrupt:
                if not run.relative:
                    raise
                return run.finish(interrupted=True)
            except GpuLostError as error:
                raise GpuLostError(f"{error}; {run.account()}; the same command goes on from there") from error
    finally:
        if child is None:
            card.close()


@dataclass
class _Batch:
    """Candidates in compilation."""

    entries: list[tuple[Config, KernelSource, Future[Binary]]]

    def cancel(self) -> None:
        """Drops those that have not begun."""
        for _, _, future in self.entries:
            future.cancel()


class _Run:
    """One tuning run on one card."""

    def __init__(
        self,
        problem: Problem,
        card: Card,
        report: DeviceReport,
        store: Store,
        budget: Budget,
        templates: tuple[str, ...] | None,
        neighbours: Callable[[], int],
        crowded: bool,
        pool: CompilePool,
    ) -> None:
        self.operator = ops.get(problem.operator)
        self.problem = problem
        self.card = card
        self.report = report
        self.store = store
        self.key: TuningKey = tuning_key(problem, report.gpu.key)
        self.legal = candidates(problem, report.gpu, templates)
        self.state = State(len(self.legal), budget)
        self.relative: dict[Config, float] = {}  # time over the peer's, of every config that works
        self.errors: dict[Config, float] = {}
        self.finished: set[Config] = set()  # failed, or through the gate: what is in the database
        self.known: dict[Config, float | None] = {}  # what earlier runs found, None for failures
        self.untimed: list[Config] = []  # what a run had gated that was killed before it looked at them
        self.search: Search | None = None
        self.incumbent = self._incumbent()
        self.neighbours = neighbours
        self.crowded = crowded
        self.pool = pool
        self.sound: set[str] = set()  # hashes of code that compilers and simulator have passed in this run
        self.processes = neighbours()  # ours among them, and whatever sat there before

    def _incumbent(self) -> TunedRecord | None:
        """The stored row, if it speaks of the kernel that its config emits now."""
        record = self.store.get(self.key)
        if record is None or record.origin != "measured" or record.protocol != PROTOCOL:
            return None
        # Legal among all templates: a run that is told to look at some must not lose the row of another.
        if search_space.why_illegal(self.operator, self.problem, record.config, self.report.gpu):
            return None
        same = emit(self.operator, self.problem, record.config).code_hash == record.source_hash
        return record if same else None

    def resume(self) -> None:
        """Takes over the trials of earlier runs whose kernels have not changed."""
        # Of two trials of one config the last: an older tlxgen files it without the parameters that it does not know.
        for trial in {trial.config: trial for trial in self._earlier(PROTOCOL)}.values():
            self.finished.add(trial.config)
            if trial.time_us is None:
                self.known[trial.config] = None
                self.state.fail(trial.status, trial.message)
            else:  # in the measure of today's card: relative to the peer of its own run, times today's
                relative = trial.time_us / (trial.peer_us or self.report.peer_us)
                self.known[trial.config] = relative * self.report.peer_us
                self._note(trial.config, relative)
        gated = dict.fromkeys(trial.config for trial in self._earlier(_GATE_PROTOCOL))
        self.untimed = [config for config in gated if config not in self.finished]
        self.finished.update(self.untimed)
        self.state.tried = self.state.resumed = len(self.finished)

    def _earlier(self, protocol: str) -> Iterator[Trial]:
        """Trials of candidates that are such still, of today's code, and not to be tried again."""
        legal = set(self.legal)
        for trial in self.store.trials(self.key, protocol):
            if trial.config not in legal or trial.status in _TRANSIENT:
                continue
            if emit(self.operator, self.problem, trial.config).code_hash == trial.source_hash:
                yield trial

    def choose_search(self, sampler: str, seed: int) -> None:
        """Small spaces are searched in full, whatever was asked for."""
        name = effective_sampler(sampler, len(self.legal), self.state.budget.trials)
        self.search = make_search(name, self.legal, seed)
        for config, time_us in self.known.items():
            self.search.observe(config, time_us)

    def explore(self, progress: Progress | None) -> None:
        """Looks at what has none, then proposes and measures until the budget or the space is used up."""
        size = max(8, min(32, 2 * (os.cpu_count() or 8)))
        for start in range(0, len(self.untimed), size):  # before the search proposes: it is to hear of them first
            self._measure(self._compile(self.untimed[start : start + size]), progress)
        ahead: deque[_Batch] = deque()
        try:
            while True:
                while len(ahead) < 2 and (batch := self._propose(size, ahead)):
                    ahead.append(batch)
                if not ahead:
                    return
                self._measure(ahead.popleft(), progress)
                if progress:
                    progress(self.state)
        finally:  # the compilers may be lent, and go on with another problem
            for batch in ahead:
                batch.cancel()

    def _propose(self, size: int, ahead: deque[_Batch]) -> _Batch | None:
        pending = sum(len(batch.entries) for batch in ahead)
        room = self.state.budget.trials - self.state.tried - pending
        late = self.state.elapsed > self.state.budget.seconds
        if room <= 0 or (late and (self.state.tried or pending)):  # the first batch always: it holds the default
            return None
        assert self.search is not None
        configs = self.search.propose(min(size, room))
        return self._compile(configs) if configs else None

    def _compile(self, configs: list[Config]) -> _Batch:
        sources = [(config, emit(self.operator, self.problem, config)) for config in configs]
        return _Batch([(config, source, self.pool.submit(source)) for config, source in sources])

    def _measure(self, batch: _Batch, progress: Progress | None) -> None:
        """Gates what compiled and times what passed, in one interleaved measurement."""
        passed: dict[str, tuple[Config, KernelSource]] = {}
        for config, source, future in batch.entries:
            if self.state.elapsed > self.state.budget.seconds and not future.done() and (passed or self.relative):
                future.cancel()  # out of time, and there is something to keep
                continue
            verdict = self._compiled_and_gated(self.card, source, future)
            if verdict.status == "ok":
                passed[config.id] = (config, source)
                self._passed(config, source, verdict)
            else:
                self._failed(config, source, verdict)
            if progress:
                progress(self.state)
        found = timings(self.card.measure(list(passed), _LOOK_ROUNDS)) if passed else {}
        for name, (config, source) in passed.items():
            if name in found:
                self._timed(config, source, found[name])
            else:
                self._failed(config, source, self.card.faults[name])
        self._keep_provisionally()
        self.card.forget(list(passed))

    def _compiled_and_gated(self, card: Card, source: KernelSource, future: Future[Binary] | None) -> Verdict:
        """What stands before a timing: the compilers' and the simulator's answer, unless it is known, and the gate."""
        try:
            if future is not None:
                future.result()
        except CompileError as error:
            return Verdict(error.kind, str(error))
        self.sound.add(source.code_hash)
        return card.gate(source.config.id, source)

    def _admitted(self, card: Card, problem: Problem, configs: Sequence[Config]) -> dict[str, Config]:
        """Those that may be timed on a card, by name; that some were tried before says nothing of their code today.

        What this run has not compiled and simulated, and the simulator has not passed in another, is submitted first,
        all of it, so that it is looked at side by side.
        """
        sources = [emit(self.operator, problem, config) for config in configs]
        unknown = [source for source in sources if not (source.code_hash in self.sound or is_known_safe(source))]
        futures = {source.config: self.pool.submit(source) for source in unknown}
        admitted = {}
        for source in sources:
            config = source.config
            if not (config.id in card.sources and card.ready):
                verdict = self._compiled_and_gated(card, source, futures.get(config))
                if verdict.status != "ok":
                    continue
                if card is self.card:
                    self.errors[config] = verdict.error or 0.0
            admitted[config.id] = config
        return admitted

    def _passed(self, config: Config, source: KernelSource, verdict: Verdict) -> None:
        self.errors[config] = verdict.error or 0.0
        trial = Trial(
            config=config,
            source_hash=source.code_hash,
            status="ok",
            time_us=verdict.launch_us,
            peer_us=self.report.peer_launch_us or self.report.peer_us,
            protocol=_GATE_PROTOCOL,
        )
        self._keep(trial)

    def _timed(self, config: Config, source: KernelSource, timing: Timing) -> None:
        # Relative times are comparable between batches; scaled by one peer time they are microseconds again.
        time_us = timing.relative * self.report.peer_us
        self._note(config, timing.relative)
        self._tell(config, source, "ok", time_us, "")

    def _failed(self, config: Config, source: KernelSource, verdict: Verdict) -> None:
        self.state.fail(verdict.status, verdict.message)
        status: Any = verdict.status
        self._tell(config, source, status, None, verdict.message)

    def _tell(
        self, config: Config, source: KernelSource, status: TrialStatus, time_us: float | None, message: str
    ) -> None:
        assert self.search is not None
        self.search.observe(config, time_us)
        trial = Trial(
            config=config,
            source_hash=source.code_hash,
            status=status,
            time_us=time_us,
            peer_us=time_us and self.report.peer_us,
            protocol=PROTOCOL,
            message=message[:500],
        )
        self._keep(trial)

    def _keep(self, trial: Trial) -> None:
        self.store.add_trial(self.key, trial, instead_of=_GATE_PROTOCOL)
        self.finished.add(trial.config)
        self.state.tried = len(self.finished)  # what is counted is kept, wherever an interruption falls

    def _note(self, config: Config, relative: float) -> None:
        self.relative[config] = relative
        state = self.state
        if state.best is None or relative < self.relative[state.best]:
            state.best, state.best_us, state.best_ratio = config, relative * self.report.peer_us, 1.0 / relative

    def _keep_provisionally(self) -> None:
        """The best so far, so that a killed run leaves something; the final replaces it."""
        best = self.state.best
        if best is not None and self.incumbent is None:
            timing = Timing(self.relative[best] * self.report.peer_us, 0.0, self.report.peer_us, (), ())
            self.store.put(self._record(best, timing, _LOOK_PROTOCOL))

    def finish(self, interrupted: bool) -> TuneResult:
        """Longer looks at fewer: a semifinal, then the final with the incumbent and the default; stores the winner."""
        leaders = sorted(self.relative, key=self.relative.__getitem__)
        if not interrupted:
            semifinal = self._timings(leaders[:_SEMIFINALISTS], _SEMIFINAL_ROUNDS)
            leaders = sorted(semifinal, key=lambda config: semifinal[config].time_us)
        default = [config for config in self.legal[:1] if config in self.relative]
        incumbent = [self.incumbent.config] if self.incumbent else []
        twins = () if interrupted else self.operator.twins(self.problem)
        favourites = [config for twin in twins for config in self._stored(twin)]
        finalists = list(dict.fromkeys([*leaders[:_FINALISTS], *default, *incumbent, *favourites]))
        rounds = _SEMIFINAL_ROUNDS if interrupted else _FINAL_ROUNDS
        timed = self._timings(finalists, rounds)
        if self._disturbance(timed):  # may have passed
            timed = self._timings(finalists, rounds)
        if not timed:
            if self.relative or self.incumbent:  # then the row is of one of those that were to be compared
                self.store.mark_bad(self.key, "it did not survive the final comparison")
            raise TuningError(nothing_works(self.problem, self.state))
        disturbed = self._disturbance(timed)
        best, loss = self._winner(timed, () if disturbed else twins, favourites)
        record = self._record(best, timed[best], _LOOK_PROTOCOL if disturbed else PROTOCOL)
        self.state.best, self.state.best_us, self.state.best_ratio = best, record.time_us, record.ratio
        # A disturbed final decides nothing: its winner serves until the next run, but displaces no other's.
        stored = (not disturbed or self.incumbent is None) and self.store.put(record)
        return TuneResult(record, stored, self.state, interrupted, timed, disturbed, loss)

    def _winner(
        self, timed: dict[Config, Timing], twins: Sequence[Problem], favourites: Sequence[Config]
    ) -> tuple[Config, float | None]:
        """The fastest, or of a problem with twins the one that loses least on any of them; and what it loses."""
        incumbent = self.incumbent.config if self.incumbent else None
        if not twins:
            return final.winner(timed, incumbent), None
        order = sorted(timed, key=lambda config: timed[config].time_us)
        near = [config for config in order if timed[config].time_us <= (1 + _RIVAL) * timed[order[0]].time_us]
        rivals = list(dict.fromkeys([*(config for config in favourites if config in near), *near]))[:_RIVALS]
        everywhere = [{config: timed[config] for config in rivals}, *(self._timed_on(twin, rivals) for twin in twins)]
        try:
            return final.steadiest(everywhere, incumbent)
        except ValueError:  # none went through all of it
            return final.winner(timed, incumbent), None

    def _stored(self, twin: Problem) -> list[Config]:
        """The config that is stored for a twin, if it is one of ours."""
        record = self.store.get(tuning_key(twin, self.report.gpu.key))
        return [record.config] if record is not None and record.config in self.legal else []

    def _timed_on(self, twin: Problem, configs: Sequence[Config]) -> dict[Config, Timing]:
        """One measurement of another problem, in the same process; nothing where that cannot be measured."""
        card = Card(twin.operator, twin, self.card.seed, self.card.limit)
        card.child = self.card.child
        self.card.leave()
        try:
            card.setup()
        except GpuLostError:
            raise
        except TuningError:
            return {}
        return self._timed_together(card, twin, configs, _SEMIFINAL_ROUNDS)

    def _disturbance(self, timed: dict[Config, Timing]) -> str:
        return disturbance(timed.values(), self.neighbours() - self.processes, crowded=self.crowded)

    def account(self) -> str:
        """What is kept, in one clause."""
        best = f", the best so far with {self.state.best_us:.1f} us" if self.state.best_us is not None else ""
        return f"{self.state.tried} trials ({self.state.failures_in_words or 'none failed'}) are kept{best}"

    def _timings(self, configs: Sequence[Config], rounds: int) -> dict[Config, Timing]:
        return self._timed_together(self.card, self.problem, configs, rounds)

    def _timed_together(
        self, card: Card, problem: Problem, configs: Sequence[Config], rounds: int
    ) -> dict[Config, Timing]:
        """One interleaved measurement of those that (still) may be timed."""
        names = self._admitted(card, problem, configs)
        found = timings(card.measure(list(names), rounds)) if names else {}
        return {names[name]: timing for name, timing in found.items()}

    def _record(self, config: Config, timing: Timing, protocol: str = PROTOCOL) -> TunedRecord:
        return TunedRecord(
            key=self.key,
            config=config,
            origin="measured",
            source_hash=emit(self.operator, self.problem, config).code_hash,
            time_us=timing.time_us,
            spread_us=timing.spread_us,
            peer=self.operator.peer,
            peer_us=timing.peer_us,
            error=self.errors.get(config),
            error_peer=self.report.peer_error,
            protocol=protocol,
            versions={"tlxgen": __version__, **self.report.versions},
            trials=self.state.tried,
        )
