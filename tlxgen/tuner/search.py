"""Searches over a finite list of legal configs, best first by the time model: exhaustive, random, or by Optuna."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tlxgen.config import Config, Value
from tlxgen.errors import InvalidConfigError, ToolchainError

if TYPE_CHECKING:
    import optuna

#: Names that `make_search` takes, the default first.
SEARCHES = ("tpe", "random", "exhaustive", "qmc", "gp")

#: Spaces of at most this many configs are tried in full: a sampler has learnt too little by then to save trials.
SMALL_SPACE = 64


class Search(Protocol):
    """Proposes configs, none twice, and learns from their times."""

    def propose(self, n: int) -> list[Config]:
        """Up to `n` configs that were neither proposed nor observed before; fewer if the list is used up."""

    def observe(self, config: Config, time_us: float | None) -> None:
        """Takes the time of a config in microseconds, or None for a failure.

        The config need not have been proposed: times of an earlier run are observed first. Configs that are not in the
        list, and second times of one config, are ignored.

        Raises:
            ValueError: the time is not positive and finite.
        """


def make_search(name: str, candidates: Sequence[Config], seed: int) -> Search:
    """The search called `name`.

    Args:
        name: `tpe` (tree-structured Parzen estimators), `gp` (Gaussian process), `qmc` (Sobol points), `random`
            (uniform without repetition; ignores the order of candidates) or `exhaustive` (in order).
        candidates: the legal configs, best first by the time model.
        seed: equal seeds and equal measurements give equal proposals.

    Raises:
        InvalidConfigError: no search has that name.
        ToolchainError: it needs a package that is not installed.
    """
    if name == "exhaustive":
        return ExhaustiveSearch(candidates)
    if name == "random":
        # Not Optuna's random sampler: a uniform point moved to the nearest legal config is not a uniform config.
        return ExhaustiveSearch(random.Random(seed).sample(candidates, len(candidates)))  # noqa: S311 - no secret
    return OptunaSearch(candidates, name, seed)


def effective_sampler(name: str, n_candidates: int, trials: int | None = None, small: int = SMALL_SPACE) -> str:
    """The name of the search to use: `exhaustive` if the space is small, or if the budget covers it.

    >>> effective_sampler("tpe", 48), effective_sampler("gp", 200, trials=300), effective_sampler("gp", 900, trials=99)
    ('exhaustive', 'exhaustive', 'gp')
    """
    everything = n_candidates <= small or (trials is not None and n_candidates <= trials)
    return "exhaustive" if everything else name


def default_warm(n_candidates: int) -> int:
    """How many of the model's best candidates are proposed before the sampler takes over.

    A tenth of all, at least 8 for the sampler to learn from, and at most 32: in a space of thousands a tenth would be
    the whole budget.
    """
    return min(max(8, n_candidates // 10), 32)


class ExhaustiveSearch:
    """All candidates, in the order given."""

    def __init__(self, candidates: Sequence[Config]) -> None:
        self._left = dict.fromkeys(candidates)

    def propose(self, n: int) -> list[Config]:
        """See `Search.propose`."""
        batch = list(self._left)[: max(n, 0)]
        for config in batch:
            del self._left[config]
        return batch

    def observe(self, config: Config, time_us: float | None) -> None:
        """See `Search.observe`."""
        _check_time(config, time_us)
        self._left.pop(config, None)


class OptunaSearch:
    """Optuna's samplers over a finite list.

    Optuna fixes the choices of a parameter for the whole study, suggests points again, and suggests illegal points. So
    the study has the values of all templates; a suggested point is moved to the nearest untried candidate, and the
    study is told that candidate's point.

    Args:
        candidates: the legal configs, best first by the time model.
        sampler: `tpe`, `qmc` or `gp`.
        seed: of the sampler.
        warm: number of candidates that are proposed in order before the sampler takes over.

    Raises:
        InvalidConfigError: no sampler has that name.
        ToolchainError: the sampler needs a package that is not installed.
    """

    def __init__(self, candidates: Sequence[Config], sampler: str, seed: int, warm: int | None = None) -> None:
        self._candidates = list(dict.fromkeys(candidates))
        self._index = {config: i for i, config in enumerate(self._candidates)}
        self._warm = default_warm(len(self._candidates)) if warm is None else warm
        self._learns = sampler != "qmc"
        self._uses_torch = sampler == "gp"
        self._seed = seed
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._grid = _Grid.of(self._candidates)
        self._untried = np.ones(len(self._candidates), dtype=bool)
        self._study = _make_study(sampler, seed)
        self._distributions = _distributions(self._grid.axes)
        self._running: dict[int, optuna.Trial] = {}
        self._values: list[float] = []  # log(time / first time) of the configs that ran
        self._first_us = 1.0

    def propose(self, n: int) -> list[Config]:
        """See `Search.propose`."""
        batch: list[Config] = []
        while len(batch) < n and self._untried.any():
            index = self._next()
            self._running[index] = self._start(index)
            batch.append(self._candidates[index])
        return batch

    def observe(self, config: Config, time_us: float | None) -> None:
        """See `Search.observe`."""
        _check_time(config, time_us)
        index = self._index.get(config)
        if index is None or not (self._untried[index] or index in self._running):
            return
        trial = self._running.pop(index, None) or self._start(index)
        # A failure is a violated constraint, not Optuna's FAIL: samplers skip failed trials and would suggest their
        # neighbourhood again. TPE ranks violations last, GP models their region. Their objective is the worst time so
        # far, since they must have one.
        trial.set_constraint("failed", float(time_us is None))
        self._study.tell(trial, max(self._values, default=0.0) if time_us is None else self._value(time_us))

    def _value(self, time_us: float) -> float:
        """The objective: a logarithm, so that it depends on ratios of times only."""
        if not self._values:
            self._first_us = time_us
        self._values.append(math.log(time_us / self._first_us))
        return self._values[-1]

    def _next(self) -> int:
        """Index of the untried candidate to propose: one of the model's best, then the sampler's choice."""
        warm = np.flatnonzero(self._untried[: self._warm])
        if warm.size:
            return int(warm[0])
        if self._learns and not self._values:
            # No time yet: a sampler would take the first failures for the best points and stay near them.
            return self._random.choice(np.flatnonzero(self._untried).tolist())
        return self._grid.nearest(self._suggest(), self._untried)

    def _suggest(self) -> list[int]:
        """The sampler's next point, as a rank on each axis."""
        from optuna.trial import TrialState

        with _one_torch_thread() if self._uses_torch else nullcontext():
            trial = self._study.ask(self._distributions)
        self._study.tell(trial, state=TrialState.FAIL)  # not run as suggested; samplers skip failed trials
        return [trial.params[axis.name] for axis in self._grid.axes]

    def _start(self, index: int) -> optuna.Trial:
        """A running trial at a candidate; TPE and GP avoid it until it is told (constant liar)."""
        self._untried[index] = False
        # A parameter that the template lacks gets a random rank, so that the sampler learns nothing about it.
        draw = random.Random(f"{self._seed} {self._candidates[index].id}")  # noqa: S311 - no secret
        point = {}
        for axis, rank in zip(self._grid.axes, self._grid.ranks[index].tolist(), strict=True):
            point[axis.name] = draw.randrange(len(axis.values)) if rank == _ABSENT else rank
        self._study.enqueue_trial(point)
        return self._study.ask(self._distributions)


@dataclass(frozen=True)
class _Axis:
    """One parameter, shared by name between templates, with its values in all candidates."""

    name: str
    values: tuple[Value, ...]
    ordered: bool  #: integers in ascending order, so that ranks have distances


#: Name of the axis of templates; no identifier, so that no parameter has it.
_TEMPLATE = "<template>"
_ABSENT = -1


@dataclass(frozen=True)
class _Grid:
    """Ranks of the candidates' values: a row per candidate, a column per axis, `_ABSENT` if the template lacks it."""

    axes: list[_Axis]
    ranks: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def of(cls, candidates: Sequence[Config]) -> _Grid:
        """The grid whose axes are all parameters that take more than one value."""
        rows = [{_TEMPLATE: config.template, **config.params} for config in candidates]
        names = list(dict.fromkeys(name for row in rows for name in row))
        axes = [_axis(name, [row[name] for row in rows if name in row]) for name in names]
        axes = [axis for axis in axes if len(axis.values) > 1]
        ranks = np.full((len(rows), len(axes)), _ABSENT, dtype=np.int64)
        for column, axis in enumerate(axes):
            rank_of = {(type(value), value): rank for rank, value in enumerate(axis.values)}
            for i, row in enumerate(rows):
                if axis.name in row:
                    value = row[axis.name]
                    ranks[i, column] = rank_of[type(value), value]
        return cls(axes, ranks)

    def nearest(self, point: Sequence[int], allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
        """Index of the allowed candidate nearest to a point; of equals, the first, which the time model prefers.

        Along an ordered axis the distance is that of the ranks over the axis' length, along others 0 or 1. Configs of
        another template are farther away than all of the same template.
        """
        distance = np.zeros(len(self.ranks))
        for column, (axis, rank) in enumerate(zip(self.axes, point, strict=True)):
            ranks = self.ranks[:, column]
            if axis.name == _TEMPLATE:
                distance += len(self.axes) * (ranks != rank)
            elif axis.ordered:
                distance += np.where(ranks == _ABSENT, 0.0, np.abs(ranks - rank) / (len(axis.values) - 1))
            else:
                distance += (ranks != _ABSENT) & (ranks != rank)
        return int(np.argmin(np.where(allowed, distance, np.inf)))


def _axis(name: str, values: Sequence[Value]) -> _Axis:
    distinct = {(type(value), value): value for value in values}.values()  # True is not 1
    numbers = [value for value in distinct if type(value) is int]
    if len(numbers) == len(distinct):
        return _Axis(name, tuple(sorted(numbers)), ordered=True)
    return _Axis(name, tuple(distinct), ordered=False)


def _distributions(axes: Sequence[_Axis]) -> dict[str, optuna.distributions.BaseDistribution]:
    """Distributions of ranks: evenly spaced, and without Optuna's restrictions on types of choices."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    return {
        axis.name: IntDistribution(0, len(axis.values) - 1)
        if axis.ordered
        else CategoricalDistribution(tuple(range(len(axis.values))))
        for axis in axes
    }


#: Packages that a sampler imports only when it first samples.
_NEEDS = {"tpe": ("optuna",), "qmc": ("optuna", "scipy"), "gp": ("optuna", "scipy", "torch")}


def _make_study(sampler: str, seed: int) -> optuna.Study:
    """A study in memory: the caller's database keeps the times."""
    if sampler not in _NEEDS:
        raise InvalidConfigError(f"search {sampler!r} is not known; use one of {', '.join(SEARCHES)}")
    try:
        for package in _NEEDS[sampler]:
            import_module(package)
    except ImportError as error:
        raise ToolchainError(
            f"search {sampler!r} needs the package {package}, which does not import ({error}); "
            f"run `pip install {package}` or use another search"
        ) from error
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    make: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed),
        "qmc": lambda: optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # QMC; Optuna's version is pinned
        return optuna.create_study(direction="minimize", sampler=make[sampler]())


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Limits torch to one thread: GP's matrices are small, and the compilers keep the cores busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_time(config: Config, time_us: float | None) -> None:
    if time_us is not None and not (math.isfinite(time_us) and time_us > 0):
        raise ValueError(f"time_us = {time_us} of {config.short} is not a positive time; pass None for a failure")
