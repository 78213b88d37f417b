"""`tlxgen export`: a package of kernels that runs without tlxgen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tlxgen import ops
from tlxgen.devices import Gpu
from tlxgen.ops import suites
from tlxgen.problem import Problem


def export(
    directory: Annotated[Path, typer.Argument(help="Directory to make; its name is the package's.")],
    suite: Annotated[
        list[str] | None, typer.Option(help="All shapes of a suite: a YAML file, or a name such as gemm.")
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(help="All problems of this operator that are tuned for the GPU.")
    ] = None,
    problem: Annotated[
        list[str] | None, typer.Option(help="One problem as `show` prints it: 'gemm 4096 4096 4096 bf16 nt'.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="GPU to choose for: h200, h100, ….")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest on stdout.")] = False,
) -> None:
    """Write kernels as a package that needs torch and triton, and no tlxgen.

    Each problem gets the kernel that `get_kernel` would choose; torch computes all other problems. Options may be
    combined and repeated.
    """
    from tlxgen import devices
    from tlxgen.export import why_not_exported, write_package

    gpu = devices.target(target) if target else devices.detect() or devices.target("h200")
    listed = [
        *(found for name in suite or () for found in suites.problems(name)),
        *(found for name in operator or () for found in _tuned(name, gpu)),
    ]
    problems = [found for found in listed if why_not_exported(found) is None] or listed  # if none can, say why
    for found in listed if len(problems) < len(listed) else ():
        if reason := why_not_exported(found):
            typer.echo(f"left out: {found.label}: {reason}", err=True)
    problems += map(_labelled, problem or ())
    manifest = write_package(directory, problems, gpu)
    if as_json:
        typer.echo(json.dumps(manifest.model_dump(mode="json"), sort_keys=True))
        return
    files = len({entry.module for entry in manifest.entries})
    origins = ", ".join(f"{count} {origin}" for origin, count in Counter(e.origin for e in manifest.entries).items())
    typer.echo(f"{directory}: {len(manifest.entries)} problems ({origins}) by {files} kernels for {gpu.slug}")


def _tuned(name: str, gpu: Gpu) -> Iterator[Problem]:
    from tlxgen.runtime import selection
    from tlxgen.toolchain import toolchain

    operator = ops.get(name)
    for record in selection.store().records(name, gpu.slug):
        if record.key.device == gpu.key and record.key.toolchain == toolchain():
            yield _problem(operator, record.key.problem, {})


def _labelled(label: str) -> Problem:
    operator = ops.get(label.partition(" ")[0])
    made: Problem = operator.problem_type.from_label(label)
    return made


def _problem(operator: Any, shape: Any, options: dict[str, Any]) -> Problem:
    made: Problem = operator.problem(shape, **options)
    return made
