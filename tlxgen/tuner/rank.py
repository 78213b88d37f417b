"""Tuning without a GPU: the time model's best candidate that compiles and passes the simulator."""

from __future__ import annotations

from tlxgen import ops
from tlxgen._version import __version__
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import Gpu
from tlxgen.errors import CompileError, TuningError
from tlxgen.ops import rates
from tlxgen.problem import Problem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool, given_or_new
from tlxgen.tuner.result import Budget, Progress, State, TuneResult, nothing_works


def rank(
    problem: Problem,
    gpu: Gpu,
    store: Store,
    *,
    budget: Budget,
    workers: int | None = None,
    templates: tuple[str, ...] | None = None,
    progress: Progress | None = None,
    pool: CompilePool | None = None,
) -> TuneResult:
    """Compiles the model's best candidates and stores the first that works as `predicted`.

    `pool` stays open, as in `tune`.

    Raises:
        TuningError: none compiles.
        KeyboardInterrupt: before a candidate had compiled.
    """
    operator = ops.get(problem.operator)
    legal = candidates(problem, gpu, templates)
    state = State(len(legal), budget)
    compiled: dict[Config, Binary] = {}
    interrupted = False
    try:
        with given_or_new(pool, gpu, workers) as compilers:
            futures = {config: compilers.submit(emit(operator, problem, config)) for config in legal[: budget.trials]}
            try:
                for config, future in futures.items():
                    if state.elapsed > budget.seconds and compiled:
                        break
                    try:
                        compiled[config] = future.result()
                    except CompileError as error:
                        state.fail(error.kind, str(error))
                    state.tried += 1
                    if state.best is None and config in compiled:  # in the model's order
                        state.best, state.best_us = config, operator.predict_us(problem, config, gpu)
                    if progress:
                        progress(state)
            finally:
                for future in futures.values():
                    future.cancel()
    except KeyboardInterrupt:
        if state.best is None:
            raise
        interrupted = True
    if state.best is None:
        raise TuningError(nothing_works(problem, state))
    record = TunedRecord(
        key=tuning_key(problem, gpu.key),
        config=state.best,
        origin="predicted",
        source_hash=compiled[state.best].source.code_hash,
        time_us=operator.predict_us(problem, state.best, gpu),
        protocol=rates.VERSION,
        versions={"tlxgen": __version__},
        trials=state.tried,
    )
    return TuneResult(record, store.put(record), state, interrupted, finalists={})
