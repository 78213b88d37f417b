"""The legal configs of a problem, best first by the analytic model, and the two that serve where nothing was tuned."""

from __future__ import annotations

from tlxgen import ops, space
from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.errors import InvalidProblemError, TuningError
from tlxgen.problem import Problem


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
    return next(iter(_ranked(problem, gpu, None)), None)


def favourite(problem: Problem, gpu: Gpu, template: str) -> list[Config]:
    """The model's favourite config of one template, if it has a legal one."""
    return _ranked(problem, gpu, (template,))[:1]


def vanilla_config(problem: Problem, gpu: Gpu) -> Config | None:
    """The model's favourite of plain Triton, the operator's last template, which any GPU can run."""
    return next(iter(favourite(problem, gpu, ops.get(problem.operator).templates[-1])), None)


def _ranked(problem: Problem, gpu: Gpu, templates: tuple[str, ...] | None) -> list[Config]:
    operator = ops.get(problem.operator)
    legal = space.legal_configs(operator, problem, gpu, templates)
    return sorted(legal, key=lambda config: operator.predict_us(problem, config, gpu))
