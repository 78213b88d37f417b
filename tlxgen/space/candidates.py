"""Legal configs of a problem, ranked by the time model; the default and plain-Triton configs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tlxgen import ops, paths
from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.errors import InvalidProblemError, TuningError
from tlxgen.problem import Problem
from tlxgen.space.size_classes import representative

#: Configs of a size class that are compared for each of its problems, since wave quantisation changes the best.
_FAVOURITES = 8


def candidates(problem: Problem, gpu: Gpu, templates: tuple[str, ...] | None = None) -> list[Config]:
    """Legal configs, best first by the time model.

    Raises:
        InvalidProblemError: a size is zero.
        TuningError: no config is legal.
    """
    if problem.empty:
        sizes = ", ".join(f"{name} = {getattr(problem, name)}" for name in problem.sizes)
        raise InvalidProblemError(f"{problem.operator}: {sizes}: tuning needs sizes of at least 1")
    legal = _ranked(problem, gpu, templates)
    if not legal:
        raise TuningError(f"no config is legal for {problem.label} on {gpu.slug}")
    return legal


def default_config(problem: Problem, gpu: Gpu) -> Config | None:
    """The time model's best config, which serves problems that were not tuned; None if none is legal."""
    return _favourite(problem, gpu, None)


def favourite(problem: Problem, gpu: Gpu, template: str) -> list[Config]:
    """The time model's best config of a template as a list of one; an empty list if none is legal."""
    config = _favourite(problem, gpu, (template,))
    return [] if config is None else [config]


def vanilla_config(problem: Problem, gpu: Gpu) -> Config | None:
    """The time model's best config of plain Triton, the operator's last template, which every GPU runs."""
    return _favourite(problem, gpu, (ops.get(problem.operator).templates[-1],))


def _favourite(problem: Problem, gpu: Gpu, templates: tuple[str, ...] | None) -> Config | None:
    """The best of the problem's size class for the problem; of all legal configs if none of those is legal."""
    from tlxgen.space import search_space  # imports YAML: not on the way to a known kernel

    operator = ops.get(problem.operator)
    for one in (representative(problem), problem):
        best = _of_class(one, gpu, templates, paths.SEARCH_SPACES)
        for config in sorted(best, key=lambda config: operator.predict_us(problem, config, gpu)):
            if one is problem or search_space.why_illegal(operator, problem, config, gpu) is None:
                return config
    return None


@lru_cache(maxsize=1024)
def _of_class(one: Problem, gpu: Gpu, templates: tuple[str, ...] | None, _spaces: object) -> tuple[Config, ...]:
    """The best configs of a size class, for each value of the parameters in `Operator.by_size`."""
    names = ops.get(one.operator).by_size
    best: dict[tuple[object, ...], list[Config]] = {}
    for config in _ranked(one, gpu, templates):
        alike = best.setdefault(tuple(config.params.get(name) for name in names), [])
        if len(alike) < _FAVOURITES:
            alike.append(config)
    return tuple(config for alike in best.values() for config in alike)


def forget() -> None:
    """Clears the ranking, after a change of time model or search space."""
    _of_class.cache_clear()


def _ranked(problem: Problem, gpu: Gpu, templates: Sequence[str] | None) -> list[Config]:
    from tlxgen.space import search_space

    operator = ops.get(problem.operator)
    legal = search_space.legal_configs(operator, problem, gpu, templates)
    return sorted(legal, key=lambda config: operator.predict_us(problem, config, gpu))
