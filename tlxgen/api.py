"""The public functions of tlxgen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from tlxgen import ops
from tlxgen.config import Config
from tlxgen.errors import InvalidConfigError
from tlxgen.problem import Problem
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime.kernel import Kernel

#: What to do where nothing was tuned for the problem: note it for `tlxgen tune --untuned`, nothing, or tune now.
OnMiss = Literal["record", "ignore", "tune"]


def get_kernel(
    operator: str,
    shape: Problem | Sequence[int] | Mapping[str, Any],
    *,
    config: Config | str | Mapping[str, Any] | None = None,
    strict: bool = False,
    on_miss: OnMiss = "record",
    **options: Any,
) -> Kernel:
    """The best kernel for a problem on the current device.

    Args:
        operator: one of `tlxgen.ops.NAMES`, such as `gemm`.
        shape: sizes in order, fields by name, or a Problem; (M, N, K) for gemm, (B, H, S, D) for attention, (n,) for
            vector_add.
        config: the config to take, as a `Config`, as `tlxgen show` prints it, or as `{"template": ..., "params": ...}`.
            By default that of `tlxgen.pin` or of the environment (`tlxgen.runtime.pinning`), else the best known one.
        strict: raise instead of falling back from a tuned row or a pinned config.
        on_miss: where no row is there for the problem: `record` notes it for `tlxgen tune --untuned`, `ignore` does
            not, `tune` tunes now, for up to two minutes, on a Hopper GPU outside graph captures.
        **options: further fields of the Problem, such as `dtype`, `layout` and `epilogue`.

    Returns:
        A callable that takes the operator's tensors and returns the result; see `Kernel`.

    Raises:
        InvalidProblemError: no such operator or problem.
        InvalidConfigError: `config`, or the environment's, does not exist, or `config` is not legal for the problem;
            `on_miss` is none of the three.
        NoKernelError: `strict`, and there is no tuned row for this GPU and toolchain.
        LaunchError: `on_miss="tune"` while a CUDA graph is captured.
        TuningError: `on_miss="tune"`, and no candidate survives.
    """
    if on_miss not in get_args(OnMiss):
        raise InvalidConfigError(f"on_miss is {on_miss!r}; use one of {', '.join(get_args(OnMiss))}")
    problem = ops.get(operator).problem(shape, **options)
    if on_miss == "tune" and not runtime.is_served(problem, config):
        from tlxgen.tuner.on_miss import tune_here

        tune_here(problem)
    return runtime.kernel_for(problem, config=config, strict=strict, note_miss=on_miss == "record")
