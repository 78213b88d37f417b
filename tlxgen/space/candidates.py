"""The legal configs of a problem, best first by the analytic model, and those that serve where nothing was tuned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tlxgen import ops, paths
from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.errors import InvalidProblemError, TuningError
from tlxgen.problem import Problem
from tlxgen.space.size_classes import representative

#: Of a class of sizes, so many are compared for each problem: wave quantisation moves the best of them.
_FAVOURITES = 8


def candidates(problem: Problem, gpu: Gpu, templates: tuple[str, ...] | None = None) -> list[Config]:
    """Legal configs, best first by the analytic model.

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
    """What runs where nothing was tuned: the model's favourite."""
    return _favourite(problem, gpu, None)


def favourite(problem: Problem, gpu: Gpu, template: str) -> list[Config]:
    """The model's favourite config of one template, if it has a legal one."""
    config = _favourite(problem, gpu, (template,))
    return [] if config is None else [config]


def vanilla_config(problem: Problem, gpu: Gpu) -> Config | None:
    """The model's favourite of plain Triton, the operator's last template, which any GPU can run."""
    return _favourite(problem, gpu, (ops.get(problem.operator).templates[-1],))


def _favourite(problem: Problem, gpu: Gpu, templates: tuple[str, ...] | None) -> Config | None:
    """The best for the problem of what is best for its class; of all legal configs, where none of those is."""
    from tlxgen.space import search_space  # brings YAML and more, of which a kernel that was served before has no need

    operator = ops.get(problem.operator)
    for one in (representative(problem), problem):
        best = _of_class(one, gpu, templates, paths.SEARCH_SPACES)
        for config in sorted(best, key=lambda config: operator.predict_us(problem, config, gpu)):
            if one is problem or search_space.why_illegal(operator, problem, config, gpu) is None:
                return config
    return None


@lru_cache(maxsize=1024)
def _of_class(one: Problem, gpu: Gpu, templates: tuple[str, ...] | None, _spaces: object) -> tuple[Config, ...]:
    """The best of a class, for each value of what sizes of one class do not agree on."""
    names = ops.get(one.operator).by_size
    best: dict[tuple[object, ...], list[Config]] = {}
    for config in _ranked(one, gpu, templates):
        alike = best.setdefault(tuple(config.params.get(name) for name in names), [])
        if len(alike) < _FAVOURITES:
            alike.append(config)
    return tuple(config for alike in best.values() for config in alike)


def forget() -> None:
    """Ranks anew, for whoever changed the model or a search space."""
    _of_class.cache_clear()


def _ranked(problem: Problem, gpu: Gpu, templates: Sequence[str] | None) -> list[Config]:
    from tlxgen.space import search_space

    operator = ops.get(problem.operator)
    legal = search_space.legal_configs(operator, problem, gpu, templates)
    return sorted(legal, key=lambda config: operator.predict_us(problem, config, gpu))
