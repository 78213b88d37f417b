"""`tlxgen tune`: one problem, or a list of them; progress on stderr, the result on stdout."""

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
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.process import Child
from tlxgen.tuner.rank import rank
from tlxgen.tuner.result import Budget, State, TuneResult
from tlxgen.tuner.runner import LIMIT_S
from tlxgen.tuner.search import SEARCHES
from tlxgen.tuner.tune import tune

if TYPE_CHECKING:
    from rich.console import Console

_TRIALS = 200
_TRIALS_WITHOUT_GPU = 24  #: the time model's order decides beyond them

#: Compute capability with TLX kernels.
_HOPPER = (9, 0)

#: Load of a GPU, in percent, up to which it counts as idle: a desktop, the driver's own work.
_IDLE_PERCENT = 5

#: Loss of a config on other data of the same shape beyond which a row for each is recommended.
_LOSS = 0.05


@dataclass(frozen=True)
class Options:
    """Options of the command line beside the problem."""

    trials: int | None
    seconds: float
    sampler: str
    seed: int
    workers: int | None
    templates: tuple[str, ...] | None
    compile_only: bool
    target: str | None
    as_json: bool
    within: float | None = None  #: seconds after which no further problem of a list is begun
    limit: float = LIMIT_S  #: seconds on the GPU after which a candidate counts as hung


def run_untuned(operator: str | None, options: Options, log: Console) -> None:
    """Tunes the untuned problems that programs asked for on this GPU, most frequent first, despite failures.

    Raises:
        TuningError: a problem has no working candidate; the others are tuned.
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
    """Tunes each shape of a suite that has no measured row of today's code, despite failures.

    Args:
        name: of the suite, or its file.
        options: of each run.
        log: for progress.
        only: words that a shape's label must contain (`suites.part`).
        again: whether to tune shapes that have such a row too.

    Raises:
        InvalidProblemError: there is no such suite, or no such shape in it.
        TuningError: a problem has no working candidate; the others are tuned.
    """
    gpu = _target(devices.detect(), options.target, options.compile_only)
    listed = suites.part(whole := suites.problems(name), only)
    if whole and not listed:
        asked = " and ".join(repr(words) for words in only)
        raise InvalidProblemError(f"--only: no label in suite {name} has {asked}; one is {whole[0].label!r}")
    problems = listed
    if not again:
        with Store.open(read_only_ok=False) as store:
            import_shipped(store)
            problems = [problem for problem in listed if not is_tuned(problem, gpu, store)]
    if len(problems) < len(listed):
        log.print(f"{len(listed) - len(problems)} of {len(listed)} shapes are tuned on {gpu.slug}", soft_wrap=True)
    _run_all(problems, gpu, options, log)


def _run_all(problems: Sequence[Problem], gpu: Gpu, options: Options, log: Console) -> None:
    failed = []
    started = time.monotonic()
    child = Child()  # shared by all, as the compilers are: starting torch or triton takes seconds
    try:
        with CompilePool(gpu.capability, options.workers, simulate=True) as pool:
            for number, problem in enumerate(problems, start=1):
                if options.within is not None and time.monotonic() - started > options.within:
                    left = problems[number - 1 :]
                    rest = f"{len(left)} of {len(problems)} problems are left, first {left[0].label}"
                    log.print(f"{options.within:g} s are over: {rest}", soft_wrap=True, highlight=False)
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
    """The problem of a key; None if it is of another version of tlxgen."""
    try:
        problem = ops.get(key.operator).problem(key.problem)
    except InvalidProblemError:
        return None
    return problem if isinstance(problem, Problem) else None


def run(
    problem: Problem, options: Options, log: Console, child: Child | None = None, pool: CompilePool | None = None
) -> TuneResult:
    """Tunes or ranks, and reports; measures in `child` and compiles in `pool` if given, and leaves them running."""
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
    budget = Budget(options.trials or (_TRIALS if measuring else _TRIALS_WITHOUT_GPU), options.seconds)
    shared: dict[str, Any] = {
        "budget": budget,
        "workers": options.workers,
        "templates": options.templates,
        "pool": pool,
    }
    with Store.open(read_only_ok=False) as store:
        import_shipped(store)  # so that the row reported as kept is the one that `get_kernel` finds
        if measuring:
            result = _measured(problem, store, options, log, child, shared)
        else:
            why = "--compile-only" if options.compile_only else "no Hopper GPU here"
            what = f"compiling for {gpu.slug} and ranking by the time model; nothing is measured"
            log.print(f"{why}: {what}", soft_wrap=True)
            with _bar(problem, log) as progress:
                result = rank(problem, gpu, store, progress=progress, **shared)
    typer.echo(json.dumps(as_dict(result)) if options.as_json else describe(problem, result))
    if result.interrupted:
        log.print("interrupted: the best so far is kept; the same command goes on from here", soft_wrap=True)
    return result


def _measured(
    problem: Problem, store: Store, options: Options, log: Console, child: Child | None, shared: dict[str, Any]
) -> TuneResult:
    """Tunes on the present GPU, alone among tuners, with a warning about other processes on it."""
    uuid = devices.uuid()
    with gpu_lock.exclusive(uuid, log.print), _bar(problem, log) as progress:
        ours = child is not None and child.alive  # on the GPU since the problem before
        others = gpu_lock.other_processes(uuid) - ours
        if others > 0:
            what = f"{others} other process(es) compute on this GPU; times will be unreliable"
            log.print(f"warning: {what}", soft_wrap=True)
        return tune(
            problem,
            store,
            sampler=options.sampler,
            seed=options.seed,
            progress=progress,
            gpu_processes=lambda: gpu_lock.other_processes(uuid),
            gpu_busy=others > 0 and gpu_lock.load(uuid) > _IDLE_PERCENT,
            child=child,
            limit=options.limit,
            **shared,
        )


def _target(present: Gpu | None, target: str | None, compile_only: bool) -> Gpu:
    """The GPU to tune for: that of `--target`, else the present one, else an H200."""
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
    """A progress bar with candidates tried and failed, the best so far, and the time."""
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


_SHOWN = {"origin", "config", "time_us", "spread_us", "peer", "peer_us", "error", "error_peer"}


def as_dict(result: TuneResult) -> dict[str, Any]:
    """The result for `--json`."""
    record, state = result.record, result.state
    return {
        "operator": record.key.operator,
        "problem": record.key.problem,
        "device": record.key.device.model_dump(),
        "toolchain": record.key.toolchain,
        "ratio": record.ratio,
        **record.model_dump(include=_SHOWN),
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
    """The result as text."""
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
