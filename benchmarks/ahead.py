"""Kernels compiled ahead of a run, as `get_kernel` will choose them there: fills Triton's cache, and needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable

from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.devices import Gpu
from tlxgen.errors import CompileError
from tlxgen.problem import Problem
from tlxgen.runtime import selection
from tlxgen.tuner.compile_pool import CompilePool


def compile_served(problems: Iterable[Problem], gpu: Gpu) -> None:
    """Compiles them at once, and prints what each is."""
    with CompilePool(gpu.capability) as pool:
        pending = []
        for problem in dict.fromkeys(problems):
            choice = selection.select(problem, gpu, note_miss=False)
            if choice.config is not None:
                source = emit(ops.get(problem.operator), problem, choice.config)
                pending.append((f"{problem.label:48} {choice.origin:8}", choice.config.short, pool.submit(source)))
        for what, config, future in pending:
            try:
                took = f"{future.result().seconds:.1f} s"
            except CompileError as error:  # at run time something else serves
                took = error.kind
            print(f"{what} {took}  {config}", flush=True)
