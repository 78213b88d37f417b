"""`tune`: one tuning run on a GPU, which searches, compiles, gates, times, chooses the winner and stores it.

Compilation runs ahead of the GPU: while one batch is timed, the next one compiles. A candidate is in the database as
soon as it has failed or passed its gate, so a run that ends early, even by SIGKILL, is resumed by the same call.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tlxgen import ops
from tlxgen._version import __version__
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config
from tlxgen.db.record import Trial, TrialStatus, TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.errors import CompileError, GpuLostError, TuningError
from tlxgen.problem import Problem
from tlxgen.simulator.verdicts import is_known_safe
from tlxgen.space import search_space
from tlxgen.space.candidates import candidates
from tlxgen.tuner import final
from tlxgen.tuner.compile_pool import CompilePool, given_or_new
from tlxgen.tuner.measure import PROTOCOL, DeviceReport, Verdict
from tlxgen.tuner.process import Child
from tlxgen.tuner.result import Budget, Progress, State, TuneResult, nothing_works
from tlxgen.tuner.runner import LIMIT_S, Runner
from tlxgen.tuner.search import Search, effective_sampler, make_search
from tlxgen.tuner.timing import Timing, disturbance, timings

_LOOK_ROUNDS = 5  #: of the first timing of a batch
_SEMIFINAL_ROUNDS = 11
_SEMIFINALISTS = 24
_FINAL_ROUNDS = 31
_FINALISTS = 8
_RIVALS = 6  #: finalists that are also timed on the problem's twins
_RIVAL_MARGIN = 0.15  #: how much slower than the fastest they may be

#: Failures that are due to the machine rather than the candidate, which is tried again by the next run.
_TRANSIENT = {"timeout", "killed", "out_of_memory", "gpu_lost"}

#: Protocol of a row that no undisturbed final has confirmed: it serves, and any final replaces it.
_LOOK_PROTOCOL = f"{PROTOCOL}/look"

#: Protocol of a trial that has passed the gate and is not timed yet. Its rough time is not compared with others.
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
    gpu_processes: Callable[[], int] = lambda: 0,
    gpu_busy: bool = False,
    child: Child | None = None,
    pool: CompilePool | None = None,
    limit: float = LIMIT_S,
) -> TuneResult:
    """Tunes a problem on this machine's GPU and stores the fastest config.

    Ctrl-C ends the search or the final; the candidates timed by then are compared in a short final.

    Args:
        problem: what to tune.
        store: database of earlier trials and of the result.
        sampler: see `make_search`.
        budget: when to stop.
        seed: of the search and of the inputs.
        workers: parallel compilers, by default one per core.
        templates: the only templates to try.
        progress: called after every candidate.
        gpu_processes: counts the processes on the GPU, this run's included (`tlxgen.tuner.gpu_lock.other_processes`).
        gpu_busy: whether other processes load the GPU, so that the result is provisional.
        child: the process to measure in, which is left running; by default one of this run.
        pool: compilers that also simulate, which are left running; by default `workers` of this run.
        limit: seconds on the GPU after which a candidate counts as hung.

    Raises:
        TuningError: every candidate failed; nothing is stored.
        GpuLostError: the GPU went away; finished trials are kept, and the same call goes on from there.
        KeyboardInterrupt: before a candidate had been timed.
    """
    runner = Runner(problem.operator, problem, seed, limit)
    if child is not None:
        runner.child = child
    try:
        report = runner.setup()
        with given_or_new(pool, report.gpu, workers) as compilers:
            run = _Run(
                problem, runner, report, store, budget or Budget(), templates, gpu_processes, gpu_busy, compilers
            )
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
                raise GpuLostError(f"{error}; {run.summary()}; the same command goes on from there") from error
    finally:
        if child is None:
            runner.close()


@dataclass
class _Batch:
    """Candidates in compilation."""

    entries: list[tuple[Config, KernelSource, Future[Binary]]]

    def cancel(self) -> None:
        """Cancels the compilations that have not begun."""
        for _, _, future in self.entries:
            future.cancel()


@dataclass
class _Run:
    """State and steps of one run: `resume`, `choose_search`, `explore`, `finish`."""

    problem: Problem
    runner: Runner
    report: DeviceReport
    store: Store
    budget: Budget
    templates: tuple[str, ...] | None
    gpu_processes: Callable[[], int]
    gpu_busy: bool
    pool: CompilePool
    search: Search | None = None
    relative: dict[Config, float] = field(default_factory=dict)  #: time over the peer's, of every timed config
    errors: dict[Config, float] = field(default_factory=dict)
    finished: set[Config] = field(default_factory=set)  #: configs with a trial in the database: failed, or gated
    known: dict[Config, float | None] = field(default_factory=dict)  #: times of earlier runs, None for failures
    untimed: list[Config] = field(default_factory=list)  #: gated by an earlier run that ended before it timed them
    sound: set[str] = field(default_factory=set)  #: hashes of code that this run has compiled and simulated

    def __post_init__(self) -> None:
        self.operator = ops.get(self.problem.operator)
        self.key = tuning_key(self.problem, self.report.gpu.key)
        self.legal = candidates(self.problem, self.report.gpu, self.templates)
        self.state = State(len(self.legal), self.budget)
        self.incumbent = self._incumbent()
        self.processes_before = self.gpu_processes()

    def _incumbent(self) -> TunedRecord | None:
        """The stored row, if it comes from a final and its config emits the same code now."""
        record = self.store.get(self.key)
        if record is None or record.origin != "measured" or record.protocol != PROTOCOL:
            return None
        # Legal in all templates, not only in `templates`: a run over some must not lose the row of another.
        if search_space.why_illegal(self.operator, self.problem, record.config, self.report.gpu):
            return None
        same = emit(self.operator, self.problem, record.config).code_hash == record.source_hash
        return record if same else None

    def resume(self) -> None:
        """Takes over the trials of earlier runs whose code has not changed."""
        # Of two trials of one config the last: an older tlxgen stores it without the parameters that it does not know.
        for trial in {trial.config: trial for trial in self._earlier(PROTOCOL)}.values():
            self.finished.add(trial.config)
            if trial.time_us is None:
                self.known[trial.config] = None
                self.state.fail(trial.status, trial.message)
            else:  # scaled from its own run's peer time to today's
                relative = trial.time_us / (trial.peer_us or self.report.peer_us)
                self.known[trial.config] = relative * self.report.peer_us
                self._note(trial.config, relative)
        gated = dict.fromkeys(trial.config for trial in self._earlier(_GATE_PROTOCOL))
        self.untimed = [config for config in gated if config not in self.finished]
        self.finished.update(self.untimed)
        self.state.tried = self.state.resumed = len(self.finished)

    def _earlier(self, protocol: str) -> Iterator[Trial]:
        """Stored trials of legal candidates with today's code, without transient failures."""
        legal = set(self.legal)
        for trial in self.store.trials(self.key, protocol):
            if trial.config not in legal or trial.status in _TRANSIENT:
                continue
            if emit(self.operator, self.problem, trial.config).code_hash == trial.source_hash:
                yield trial

    def choose_search(self, sampler: str, seed: int) -> None:
        """Makes the search, exhaustive for small spaces, and tells it the times of earlier runs."""
        name = effective_sampler(sampler, len(self.legal), self.state.budget.trials)
        self.search = make_search(name, self.legal, seed)
        for config, time_us in self.known.items():
            self.search.observe(config, time_us)

    def explore(self, progress: Progress | None) -> None:
        """Times untimed candidates, then proposes and times others until the budget or the space is used up."""
        size = max(8, min(32, 2 * (os.cpu_count() or 8)))
        for start in range(0, len(self.untimed), size):  # first, so that the search learns from them
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
        finally:  # the pool may be the caller's, and go on with another problem
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
        """Gates the candidates that compiled, and times those that passed in one interleaved measurement."""
        passed: dict[str, tuple[Config, KernelSource]] = {}
        for config, source, future in batch.entries:
            if self.state.elapsed > self.state.budget.seconds and not future.done() and (passed or self.relative):
                future.cancel()  # out of time, and there is a result to keep
                continue
            verdict = self._compiled_and_gated(self.runner, source, future)
            if verdict.status == "ok":
                passed[config.id] = (config, source)
                self._passed(config, source, verdict)
            else:
                self._failed(config, source, verdict)
            if progress:
                progress(self.state)
        found = timings(self.runner.measure(list(passed), _LOOK_ROUNDS)) if passed else {}
        for name, (config, source) in passed.items():
            if name in found:
                # Relative times are comparable between batches; scaled by one peer time they are microseconds.
                self._note(config, found[name].relative)
                self._observed(config, source, "ok", found[name].relative * self.report.peer_us, "")
            else:
                self._failed(config, source, self.runner.faults[name])
        self._store_provisionally()
        self.runner.forget(list(passed))

    def _compiled_and_gated(self, runner: Runner, source: KernelSource, future: Future[Binary] | None) -> Verdict:
        """The verdict of compiler and simulator, unless already known, and then of the gate."""
        try:
            if future is not None:
                future.result()
        except CompileError as error:
            return Verdict(error.kind, str(error))
        self.sound.add(source.code_hash)
        return runner.gate(source.config.id, source)

    def _admitted(self, runner: Runner, problem: Problem, configs: Sequence[Config]) -> dict[str, Config]:
        """The configs that may be timed by `runner`, by name, whether or not an earlier run has tried them.

        Code that the simulator has not passed in this run or another is compiled and simulated first, in parallel.
        """
        sources = [emit(self.operator, problem, config) for config in configs]
        unknown = [source for source in sources if not (source.code_hash in self.sound or is_known_safe(source))]
        futures = {source.config: self.pool.submit(source) for source in unknown}
        admitted = {}
        for source in sources:
            config = source.config
            if not (config.id in runner.sources and runner.ready):
                verdict = self._compiled_and_gated(runner, source, futures.get(config))
                if verdict.status != "ok":
                    continue
                if runner is self.runner:
                    self.errors[config] = verdict.error or 0.0
            admitted[config.id] = config
        return admitted

    def _passed(self, config: Config, source: KernelSource, verdict: Verdict) -> None:
        """Stores that a candidate passed the gate."""
        self.errors[config] = verdict.error or 0.0
        peer_us = self.report.peer_launch_us or self.report.peer_us
        self._store_trial(config, source, "ok", verdict.launch_us, peer_us, _GATE_PROTOCOL)

    def _failed(self, config: Config, source: KernelSource, verdict: Verdict) -> None:
        """Counts and stores a refused candidate."""
        self.state.fail(verdict.status, verdict.message)
        status: Any = verdict.status
        self._observed(config, source, status, None, verdict.message)

    def _observed(
        self, config: Config, source: KernelSource, status: TrialStatus, time_us: float | None, message: str
    ) -> None:
        """Tells the search about a candidate, and stores its trial."""
        assert self.search is not None
        self.search.observe(config, time_us)
        self._store_trial(config, source, status, time_us, time_us and self.report.peer_us, PROTOCOL, message[:500])

    def _store_trial(
        self,
        config: Config,
        source: KernelSource,
        status: TrialStatus,
        time_us: float | None,
        peer_us: float | None,
        protocol: str,
        message: str = "",
    ) -> None:
        trial = Trial(
            config=config,
            source_hash=source.code_hash,
            status=status,
            time_us=time_us,
            peer_us=peer_us,
            protocol=protocol,
            message=message,
        )
        self.store.add_trial(self.key, trial, instead_of=_GATE_PROTOCOL)
        self.finished.add(config)
        self.state.tried = len(self.finished)  # after the write: an interruption never counts what is not stored

    def _note(self, config: Config, relative: float) -> None:
        self.relative[config] = relative
        state = self.state
        if state.best is None or relative < self.relative[state.best]:
            state.best, state.best_us, state.best_ratio = config, relative * self.report.peer_us, 1.0 / relative

    def _store_provisionally(self) -> None:
        """Stores the best so far, so that a killed run leaves a row; the final replaces it."""
        best = self.state.best
        if best is not None and self.incumbent is None:
            timing = Timing(self.relative[best] * self.report.peer_us, 0.0, self.report.peer_us, (), ())
            self.store.put(self._record(best, timing, _LOOK_PROTOCOL))

    def finish(self, interrupted: bool) -> TuneResult:
        """Semifinal, and final with incumbent and default: fewer candidates, more rounds; stores the winner."""
        leaders = sorted(self.relative, key=self.relative.__getitem__)
        if not interrupted:
            semifinal = self._timings(leaders[:_SEMIFINALISTS], _SEMIFINAL_ROUNDS)
            leaders = sorted(semifinal, key=lambda config: semifinal[config].time_us)
        default = [config for config in self.legal[:1] if config in self.relative]
        incumbent = [self.incumbent.config] if self.incumbent else []
        twins = () if interrupted else self.operator.twins(self.problem)
        twin_winners = [config for twin in twins for config in self._stored(twin)]
        finalists = list(dict.fromkeys([*leaders[:_FINALISTS], *default, *incumbent, *twin_winners]))
        rounds = _SEMIFINAL_ROUNDS if interrupted else _FINAL_ROUNDS
        timed = self._timings(finalists, rounds)
        if self._disturbance(timed):  # once more: it may have passed
            timed = self._timings(finalists, rounds)
        if not timed:
            if self.relative or self.incumbent:  # then the stored row is one of the finalists
                self.store.mark_bad(self.key, "it did not survive the final comparison")
            raise TuningError(nothing_works(self.problem, self.state))
        disturbed = self._disturbance(timed)
        best, loss = self._winner(timed, () if disturbed else twins, twin_winners)
        record = self._record(best, timed[best], _LOOK_PROTOCOL if disturbed else PROTOCOL)
        self.state.best, self.state.best_us, self.state.best_ratio = best, record.time_us, record.ratio
        # The winner of a disturbed final serves until the next run, but does not displace an incumbent.
        stored = (not disturbed or self.incumbent is None) and self.store.put(record)
        return TuneResult(record, stored, self.state, interrupted, timed, disturbed, loss)

    def _winner(
        self, timed: dict[Config, Timing], twins: Sequence[Problem], twin_winners: Sequence[Config]
    ) -> tuple[Config, float | None]:
        """The fastest config; with twins, the one that loses least on any of the problems, and its loss."""
        incumbent = self.incumbent.config if self.incumbent else None
        if not twins:
            return final.winner(timed, incumbent), None
        order = sorted(timed, key=lambda config: timed[config].time_us)
        near = [config for config in order if timed[config].time_us <= (1 + _RIVAL_MARGIN) * timed[order[0]].time_us]
        rivals = list(dict.fromkeys([*(config for config in twin_winners if config in near), *near]))[:_RIVALS]
        everywhere = [{config: timed[config] for config in rivals}, *(self._timed_on(twin, rivals) for twin in twins)]
        try:
            return final.winner_on_all(everywhere, incumbent)
        except ValueError:  # no config was timed on every twin
            return final.winner(timed, incumbent), None

    def _stored(self, twin: Problem) -> list[Config]:
        """The config that is stored for a twin, if it is legal here."""
        record = self.store.get(tuning_key(twin, self.report.gpu.key))
        return [record.config] if record is not None and record.config in self.legal else []

    def _timed_on(self, twin: Problem, configs: Sequence[Config]) -> dict[Config, Timing]:
        """Times of another problem, measured in the same process; empty if it cannot be measured."""
        runner = Runner(twin.operator, twin, self.runner.seed, self.runner.limit)
        runner.child = self.runner.child
        self.runner.leave()
        try:
            runner.setup()
        except GpuLostError:
            raise
        except TuningError:
            return {}
        return self._timed_together(runner, twin, configs, _SEMIFINAL_ROUNDS)

    def _disturbance(self, timed: dict[Config, Timing]) -> str:
        return disturbance(timed.values(), self.gpu_processes() - self.processes_before, gpu_busy=self.gpu_busy)

    def summary(self) -> str:
        """The stored trials and the best so far, in one clause."""
        best = f", the best so far with {self.state.best_us:.1f} us" if self.state.best_us is not None else ""
        return f"{self.state.tried} trials ({self.state.failures_in_words or 'none failed'}) are kept{best}"

    def _timings(self, configs: Sequence[Config], rounds: int) -> dict[Config, Timing]:
        return self._timed_together(self.runner, self.problem, configs, rounds)

    def _timed_together(
        self, runner: Runner, problem: Problem, configs: Sequence[Config], rounds: int
    ) -> dict[Config, Timing]:
        """One interleaved measurement of the configs that may still be timed."""
        names = self._admitted(runner, problem, configs)
        found = timings(runner.measure(list(names), rounds)) if names else {}
        return {names[name]: timing for name, timing in found.items()}

    def _record(self, config: Config, timing: Timing, protocol: str) -> TunedRecord:
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
