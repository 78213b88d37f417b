"""What `tlxgen tune` shows: progress on stderr, the result on stdout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tlxgen import devices, ops
from tlxgen.db.record import TuningKey
from tlxgen.db.shipped import import_shipped
from tlxgen.db.store import Store
from tlxgen.db.validity import is_tuned
from tlxgen.devices import Gpu
from tlxgen.errors import (
    GpuLostError,
    InvalidConfigError,
    InvalidProblemError,
    TuningError,
    UnsupportedDeviceError,
)
from tlxgen.ops import suites
from tlxgen.ops.command_line import command
from tlxgen.problem import Problem
from tlxgen.toolchain import require_tlx, toolchain
from tlxgen.tuner import gpu_lock
from tlxgen.tuner.card import LIMIT_S
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.process import Child
from tlxgen.tuner.rank import rank
from tlxgen.tuner.search import SEARCHES
from tlxgen.tuner.state import Budget, State, TuneResult
from tlxgen.tuner.tune import tune

if TYPE_CHECKING:
    from rich.console import Console

#: Candidates of a run that cannot measure: the model's order settles the rest.
_TRIALS_WITHOUT_GPU = 24
_TRIALS = 200

#: GPUs without TLX kernels have nothing to tune yet.
_HOPPER = (9, 0)


#: Load of a GPU, in percent, that says nothing: a desktop, a driver's own work.
_IDLE_PERCENT = 5

#: What a config may lose on other data of a shape before rows for each are worth their while.
_LOSS = 0.05


@dataclass(frozen=True)
class Options:
    """What the command line says beside the problem."""

    trials: int | None
    seconds: float
    sampler: str
    seed: int
    workers: int | None
    templates: tuple[str, ...] | None
    compile_only: bool
    target: str | None
    as_json: bool
    within: float | None = None  #: seconds after which no other problem of a list is begun
    limit: float = LIMIT_S  #: seconds on the GPU after which a candidate counts as hung


def run_untuned(operator: str | None, options: Options, log: Console) -> None:
    """Tunes what programs asked for on this GPU under this toolchain, most wanted first; one failure stops no other.

    Raises:
        TuningError: for some problem no candidate survived; the others are tuned.
    """
    gpu = _target(devices.detect(), options.target, options.compile_only)
    with Store.open(read_only_ok=False) as store:
        wanted = [key for key, _ in store.untuned() if key.device == gpu.key and key.toolchain == toolchain()]
    problems = [problem for key in wanted if operator in (None, key.operator) and (problem := _known(key)) is not None]
    if not problems:
        log.print(f"nothing was asked for on {gpu.slug} that is not tuned", soft_wrap=True)
        return
    _run_all(problems, gpu, options, log)


def run_suite(name: str, options: Options, log: Console, *, only: Sequence[str] = (), again: bool = False) -> None:
    """Tunes each shape of a suite for which no measured row of today's code is there; one failure stops no other.

    Args:
        name: of the suite, or its file.
        options: of each run.
        log: for progress.
        only: tunes shapes with these words in their labels (`suites.part`).
        again: tunes shapes that have such a row too.

    Raises:
        InvalidProblemError: there is no such suite, or no such shape in it.
        TuningError: for some problem no candidate survived; the others are tuned.
    """
    gpu = _target(devices.detect(), options.target, options.compile_only)
    listed = suites.part(whole := suites.problems(name), only)
    if whole and not listed:
        asked = " and ".join(repr(words) for words in only)
        raise InvalidProblemError(f"--only: no label in suite {name} has {asked}; one is {whole[0].label!r}")
    problems = listed if again else _without_row(listed, gpu)
    if len(problems) < len(listed):
        log.print(f"{len(listed) - len(problems)} of {len(listed)} shapes are tuned on {gpu.slug}", soft_wrap=True)
    _run_all(problems, gpu, options, log)


def _without_row(listed: Sequence[Problem], gpu: Gpu) -> list[Problem]:
    with Store.open(read_only_ok=False) as store:
        import_shipped(store)
        return [problem for problem in listed if not is_tuned(problem, gpu, store)]


def _run_all(problems: Sequence[Problem], gpu: Gpu, options: Options, log: Console) -> None:
    failed = []
    started = time.monotonic()
    child = Child()  # one for all, and the compilers too: starting torch or triton takes seconds
    try:
        with CompilePool(gpu.capability, options.workers, simulate=True) as pool:
            for number, problem in enumerate(problems, start=1):
                if options.within is not None and time.monotonic() - started > options.within:
                    left = problems[number - 1 :]
                    told = f"{options.within:g} s are over: {len(left)} of {len(problems)} problems are left, first"
                    log.print(f"{told} {left[0].label}", soft_wrap=True, highlight=False)
                    break
                log.print(f"{number} of {len(problems)}: {problem.label}", soft_wrap=True, highlight=False)
                try:
                    result = run(problem, options, log, child, pool)
                except GpuLostError:
                    raise
                except TuningError as error:
                    failed.append(problem.label)
                    log.print(f"{problem.label}: {error}", soft_wrap=True, highlight=False, markup=False)
                    continue
                if result.interrupted:
                    return
    finally:
        child.kill()
    if failed:
        raise TuningError(f"{len(failed)} of {len(problems)} problems have no working candidate: {', '.join(failed)}")


def _known(key: TuningKey) -> Problem | None:
    """The problem of a key; None if another version of tlxgen asked for it."""
    try:
        problem = ops.get(key.operator).problem(key.problem)
    except InvalidProblemError:
        return None
    return problem if isinstance(problem, Problem) else None


def run(
    problem: Problem, options: Options, log: Console, child: Child | None = None, pool: CompilePool | None = None
) -> TuneResult:
    """Tunes or ranks, and reports; measures in `child` and compiles in `pool`, if they are lent."""
    if options.sampler not in SEARCHES:
        raise InvalidConfigError(f"sampler {options.sampler!r} is not known; use one of {', '.join(SEARCHES)}")
    unknown = set(options.templates or ()) - set(ops.get(problem.operator).templates)
    if unknown:
        known = ", ".join(ops.get(problem.operator).templates)
        raise InvalidConfigError(f"template {min(unknown)!r} is not one of {problem.operator}'s: {known}")
    require_tlx()
    present = devices.detect()
    gpu = _target(present, options.target, options.compile_only)
    measuring = not options.compile_only and present is not None and gpu.slug == present.slug
    with Store.open(read_only_ok=False) as store:
        import_shipped(store)  # so that what is reported as kept is what `get_kernel` will find
        if not measuring:
            why = "--compile-only" if options.compile_only else "no Hopper GPU here"
            log.print(
                f"{why}: compiling for {gpu.slug} and ranking by the analytic model; nothing is measured",
                soft_wrap=True,
            )
            budget = Budget(options.trials or _TRIALS_WITHOUT_GPU, options.seconds)
            with _bar(problem, log) as progress:
                result = rank(
                    problem,
                    gpu,
                    store,
                    budget=budget,
                    workers=options.workers,
                    templates=options.templates,
                    progress=progress,
                    pool=pool,
                )
        else:
            budget = Budget(options.trials or _TRIALS, options.seconds)
            uuid = devices.uuid()
            with gpu_lock.exclusive(uuid, log.print), _bar(problem, log) as progress:
                lent = child is not None and child.alive  # it computed the problem before, so it is on the GPU by now
                busy = gpu_lock.other_processes(uuid) - lent
                if busy > 0:
                    log.print(
                        f"warning: {busy} other process(es) compute on this GPU; times will be unreliable",
                        soft_wrap=True,
                    )
                crowded = busy > 0 and gpu_lock.load(uuid) > _IDLE_PERCENT  # else they are there, and do nothing
                result = tune(
                    problem,
                    store,
                    sampler=options.sampler,
                    budget=budget,
                    seed=options.seed,
                    workers=options.workers,
                    templates=options.templates,
                    progress=progress,
                    neighbours=lambda: gpu_lock.other_processes(uuid),
                    crowded=crowded,
                    child=child,
                    pool=pool,
                    limit=options.limit,
                )
    typer.echo(json.dumps(as_dict(result)) if options.as_json else describe(problem, result))
    if result.interrupted:
        log.print("interrupted: the best so far is kept; the same command goes on from here", soft_wrap=True)
    return result


def _target(present: Gpu | None, target: str | None, compile_only: bool) -> Gpu:
    """The GPU to tune for."""
    if target is not None:
        chosen = devices.target(target)
        if present is not None and not compile_only and chosen.slug != present.slug:
            raise UnsupportedDeviceError(
                f"--target {target}: this machine has {present.slug}; add --compile-only to rank for another GPU"
            )
        return chosen
    if present is None:
        return devices.target("h200")
    if present.capability != _HOPPER:
        major, minor = present.capability
        raise UnsupportedDeviceError(
            f"{present.slug} has compute capability {major}.{minor}; TLX kernels are tuned on Hopper (9.0). "
            "get_kernel works here through plain Triton; --compile-only --target h200 ranks for another GPU"
        )
    return present


@contextmanager
def _bar(problem: Problem, log: Console) -> Iterator[Callable[[State], None]]:
    """A progress bar: tried, failed, best so far, time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total} tried, {task.fields[failed]} failed  {task.fields[best]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=log, transient=True) as bar:
        task = bar.add_task(problem.label, total=None, failed=0, best="")

        def update(state: State) -> None:
            best = "" if state.best_us is None else f"best {state.best_us:.1f} us"
            if state.best_ratio is not None:
                best += f" ({state.best_ratio:.3f} of the library's speed)"
            total = min(state.legal, state.budget.trials)
            failed = sum(state.failures.values())
            bar.update(task, completed=state.tried, total=total, failed=failed, best=best)

        yield update


def as_dict(result: TuneResult) -> dict[str, Any]:
    """The result for machines."""
    record, state = result.record, result.state
    return {
        "operator": record.key.operator,
        "problem": record.key.problem,
        "device": record.key.device.model_dump(),
        "toolchain": record.key.toolchain,
        "origin": record.origin,
        "config": record.config.model_dump(),
        "time_us": record.time_us,
        "spread_us": record.spread_us,
        "peer": record.peer,
        "peer_us": record.peer_us,
        "ratio": record.ratio,
        "error": record.error,
        "error_peer": record.error_peer,
        "stored": result.stored,
        "legal": state.legal,
        "tried": state.tried,
        "resumed": state.resumed,
        "failures": dict(state.failures),
        "seconds": round(state.elapsed, 1),
        "interrupted": result.interrupted,
        "disturbed": result.disturbed,
        "loss": result.loss,
    }


def describe(problem: Problem, result: TuneResult) -> str:
    """The result for people."""
    record, state = result.record, result.state
    operator = ops.get(problem.operator)
    lines = [f"{problem.label} on {record.key.device.gpu}: {record.config.short}"]
    if record.origin == "measured" and record.peer_us:
        rate = f"{operator.flops(problem) / record.time_us * 1e-6:.0f} TFLOP/s"
        if operator.flops(problem) < operator.bytes_moved(problem):
            rate = f"{operator.bytes_moved(problem) / record.time_us * 1e-6:.2f} TB/s"
        lines.append(
            f"  measured {record.time_us:.1f} us ± {record.spread_us:.1f}, {rate}; "
            f"{record.peer} {record.peer_us:.1f} us: {record.ratio:.3f} of its speed"
        )
    else:
        lines.append(f"  predicted {record.time_us:.1f} us by {record.protocol}; not measured")
    failures = state.failures_in_words or "none failed"
    earlier = f" ({state.resumed} in earlier runs)" if state.resumed else ""
    lines.append(f"  {state.tried} of {state.legal} legal candidates tried{earlier}, {failures}; {state.elapsed:.0f} s")
    if result.loss is not None:
        lines.append(f"  at most {result.loss:.1%} slower than the best config, for other data of the same shape too")
        if result.loss > _LOSS:
            rows = " and ".join(f"`{command('tune', twin)}`" for twin in operator.twins(problem))
            lines.append(f"  for programs that know their data: {rows}")
    if result.disturbed:
        lines.append(
            f"  not a quiet GPU: {result.disturbed}; what was measured is provisional: run the same command again"
        )
    elif not result.stored:
        lines.append("  a better row is stored already; it stays")
    return "\n".join(lines)
