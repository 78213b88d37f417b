"""Chooses the config that serves a problem, and explains why better choices do not apply.

In order: the pinned config, the tuned row, the nearest measured row, the time model's default, plain Triton, torch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from tlxgen import ops, toolchain
from tlxgen.config import Config
from tlxgen.db import misses
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.devices import Gpu
from tlxgen.errors import CacheError, InvalidConfigError
from tlxgen.problem import Problem
from tlxgen.runtime import kernel_notes
from tlxgen.runtime.pinning import Pin
from tlxgen.space.candidates import default_config, vanilla_config

if TYPE_CHECKING:
    from tlxgen.db.nearest import Neighbour, Neighbourhood

#: `pinned`: chosen by the user; `tuned`, `predicted`: a row of the database; `nearest`: the row of a similar problem;
#: `default`: the time model's best; `vanilla`: plain Triton.
Origin = Literal["pinned", "tuned", "predicted", "nearest", "default", "vanilla", "torch"]

HOPPER = (9, 0)

#: Relative speed to the library below which drop-in functions call torch.
_WORTH = 0.95
#: Distance in octaves up to which a neighbour's comparison with the library applies.
_ALIKE = 1.0


class FallbackWarning(UserWarning):
    """A kernel is served by something worse than a tuned row; issued once for each size class."""


@dataclass(frozen=True)
class Choice:
    """The chosen config, and why better ones were passed over.

    Attributes:
        origin: where the config comes from.
        config: None if torch computes.
        passed_over: why better choices do not apply, best first.
        note: about the choice itself, such as a neighbour's problem.
        lead: measured speed of the library over the kernel's, if it is clearly above 1.
    """

    origin: Origin
    config: Config | None
    passed_over: tuple[str, ...] = ()
    note: str = ""
    lead: float | None = None

    @property
    def slower(self) -> bool:
        """Whether the library was measured to be clearly faster."""
        return self.lead is not None

    def explain(self) -> str:
        """The choice and the reasons, in one line."""
        notes = [self.note] if self.note else []
        if self.lead is not None:
            there = " there" if self.origin == "nearest" else ""
            notes.append(f"the library was measured to be {self.lead:.2f} times as fast{there}")
        note = f" ({'; '.join(notes)})" if notes else ""
        chosen = [f"{self.origin}: {self.config.short}{note}"] if self.config else []
        return "; ".join([*self.passed_over, *chosen])


def select(problem: Problem, gpu: Gpu | None, *, note_miss: bool = True, pin: Pin | None = None) -> Choice:
    """The first choice of the list that applies; with `note_miss` a missing row is noted for `tlxgen tune --untuned`.

    Raises:
        InvalidConfigError: a pin for this very problem is not legal on this GPU.
    """
    if problem.empty:
        return Choice("torch", None, ("a size is zero: nothing to launch",))
    if gpu is None:
        return Choice("torch", None, ("no CUDA GPU here: torch computes",))
    passed_over: list[str] = []
    if pin is not None:
        reason = _why_not_pinned(problem, gpu, pin)
        if reason is None:
            return Choice("pinned", pin.config, note=f"by {pin.by}")
        passed_over.append(f"the config pinned by {pin.by} is not used: {reason}")
    choice = _on_hopper(problem, gpu, passed_over, note_miss=note_miss)
    return choice or _anywhere(problem, gpu, passed_over)


def _anywhere(problem: Problem, gpu: Gpu, passed_over: list[str]) -> Choice:
    """Plain Triton, or torch."""
    config = vanilla_config(problem, gpu)
    if config is not None and has_triton():
        unseen = f"compiled for {gpu.architecture}, and never launched on such a GPU" if gpu.architecture else ""
        return Choice("vanilla", config, tuple(passed_over), unseen)
    return Choice("torch", None, (*passed_over, "no plain Triton kernel either: torch computes"))


def _why_not_pinned(problem: Problem, gpu: Gpu, pin: Pin) -> str | None:
    from tlxgen.space import search_space

    operator = ops.get(problem.operator)
    if pin.config.template != operator.templates[-1] and (reason := _why_no_tlx(gpu)):
        reason = f"{pin.config.template} needs TLX on Hopper: {reason}"
    else:
        reason = search_space.why_illegal(operator, problem, pin.config, gpu)
    if reason is not None and pin.binding:
        raise InvalidConfigError(f"{problem.label}: {reason}")
    return reason


def _why_no_tlx(gpu: Gpu) -> str | None:
    """Why TLX kernels cannot run on the GPU, or None."""
    if gpu.architecture:
        return f"{gpu.architecture} is AMD's, and TLX kernels are Hopper's"
    if gpu.capability != HOPPER:
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]} is not Hopper's 9.0"
    return None if toolchain.has_tlx() else "the installed triton has no TLX (see `tlxgen doctor`)"


def _on_hopper(problem: Problem, gpu: Gpu, passed_over: list[str], *, note_miss: bool) -> Choice | None:
    """A stored row, a neighbour's row or the default; None, with reasons added to `passed_over`."""
    reason = _why_no_tlx(gpu)
    if reason is not None:
        passed_over.append(reason)
        return None
    record, reason = _stored(problem, gpu, note_miss=note_miss)
    if record is not None:
        origin: Origin = "tuned" if record.origin == "measured" else "predicted"
        return Choice(origin, record.config, tuple(passed_over), lead=_lead(record))
    passed_over.append(reason)
    default = default_config(problem, gpu)
    rows, compiler = neighbourhood(problem.operator), toolchain.toolchain()
    elsewhere = rows.elsewhere(problem, gpu, compiler)
    passed_over += [elsewhere] if elsewhere else []
    neighbour, reason = rows.nearest(problem, gpu, compiler, default)
    if neighbour is not None:
        note = f"tuned for {neighbour.problem.label}, {neighbour.distance:.2f} octaves away"
        lead = _lead(neighbour.record) if _same_weights(problem, neighbour) else None
        return Choice("nearest", neighbour.record.config, tuple(passed_over), note, lead)
    passed_over += [reason] if reason else []
    return Choice("default", default, tuple(passed_over)) if default is not None else None


def _lead(record: TunedRecord) -> float | None:
    """The library's measured speed over the kernel's, if its lead exceeds the spread of the measurement."""
    if record.peer_us is None or record.peer_us >= _WORTH * (record.time_us - (record.spread_us or 0.0)):
        return None
    return record.time_us / record.peer_us


def _same_weights(problem: Problem, neighbour: Neighbour) -> bool:
    """Whether a neighbour is near and differs in running lengths only, so that the library's lead applies here too."""
    fixed = [name for name in problem.lengths if name not in problem.running]
    same = all(getattr(problem, name) == getattr(neighbour.problem, name) for name in fixed)
    return same and neighbour.distance <= _ALIKE


def _stored(problem: Problem, gpu: Gpu, *, note_miss: bool) -> tuple[TunedRecord | None, str]:
    """The stored row if it can be served, or the reason why not."""
    rows = store()
    key = tuning_key(problem, gpu.key)
    record = rows.get(key)
    if record is None:
        noted = misses.to_note(problem) if note_miss else None
        if noted is not None:
            rows.note_untuned(tuning_key(noted, gpu.key))
        return None, f"no tuned row for {problem.label} on {gpu.slug} ({gpu.sm_count} SMs), {key.toolchain}"
    known = kernel_notes.recall(problem, record.config, gpu)
    if known is not None and known.code_hash == record.source_hash:
        return record, ""
    from tlxgen.db.validity import why_other_code
    from tlxgen.space import search_space

    reason = search_space.why_illegal(ops.get(problem.operator), problem, record.config, gpu)
    if reason is not None:
        rows.mark_bad(key, reason)
    else:
        reason = why_other_code(record)  # a miss, not a defect: other versions of tlxgen may share the database
        if reason is None:
            return record, ""
    return None, f"the tuned row cannot be served: {reason}"


@cache
def store() -> Any:
    """The database with the shipped rows; cached."""
    from tlxgen.db.shipped import import_shipped
    from tlxgen.db.store import Store

    opened = Store.open()
    try:
        import_shipped(opened)
    except CacheError as error:
        warnings.warn(f"shipped configs could not be imported: {error}", FallbackWarning, stacklevel=2)
    return opened


@cache
def neighbourhood(operator: str) -> Neighbourhood:
    """The rows of an operator; cached."""
    from tlxgen.db.nearest import Neighbourhood

    try:
        return Neighbourhood(operator, store().records(operator))
    except CacheError as error:  # must not fail a kernel call
        warnings.warn(f"tuned rows of {operator} cannot be read: {error}", FallbackWarning, stacklevel=2)
        return Neighbourhood(operator, ())


def forget() -> None:
    """Drops the cached database and rows."""
    store.cache_clear()
    neighbourhood.cache_clear()
    misses.forget()
    kernel_notes.forget()


def has_triton() -> bool:
    """Whether a triton is installed."""
    from importlib.util import find_spec

    return find_spec("triton") is not None
