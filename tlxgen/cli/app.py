"""The command line: `tlxgen tune | show | emit | export | check | regress | doctor | cache`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tlxgen import ops
from tlxgen._version import __version__
from tlxgen.cli import cache as cli_cache
from tlxgen.cli import export
from tlxgen.cli.problem_options import OPERATORS_HELP, Options, parse, sizes_help, takes_problem
from tlxgen.errors import InvalidConfigError, InvalidProblemError, OutputError, TlxgenError
from tlxgen.problem import Problem

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(cli_cache.app, name="cache", help="List, export, import and prune tuned configs.")
app.command()(export.export)

#: Progress and errors; results go to stdout.
_log = Console(stderr=True)

_Operator = Annotated[str, typer.Argument(help=OPERATORS_HELP, show_default=False)]
_Sizes = Annotated[list[str], typer.Argument(help=sizes_help(), show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
_Limit = Annotated[
    float,
    typer.Option(min=1, max=3600, help="Seconds on the GPU after which a kernel counts as hung, and its process ends."),
]
_Target = Annotated[str | None, typer.Option(help="GPU to compile for: h200, h100, h100-pcie, h20, ….")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 - read by main
) -> None:
    """Tuned TLX kernels for Hopper GPUs."""
    if version:
        typer.echo(f"tlxgen {__version__}")
        raise typer.Exit


@app.command()
@takes_problem
def tune(
    operator: Annotated[str | None, typer.Argument(help=OPERATORS_HELP, show_default=False)] = None,
    sizes: Annotated[list[str] | None, typer.Argument(help=sizes_help(), show_default=False)] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Distinct candidates; 200, or 24 without a GPU.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time for the search.")] = 120.0,
    sampler: Annotated[str, typer.Option(help="tpe, random, exhaustive, qmc or gp.")] = "tpe",
    seed: Annotated[int, typer.Option(help="Of the search and of the inputs.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Compilers at once; one a core by default.")] = None,
    limit: _Limit = 20.0,
    template: Annotated[list[str] | None, typer.Option(help="Only these templates; may be given again.")] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Compile and rank; measure nothing.")] = False,
    target: _Target = None,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="All problems that programs asked for here and found no row for.")
    ] = False,
    suite: Annotated[
        str | None,
        typer.Option(help="All shapes of a suite that are not tuned: a YAML file, or a name such as attention."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Of a suite, the shapes with these words in their labels; given again, with those words as well."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Of a suite, what is tuned too.")] = False,
    within: Annotated[
        float | None, typer.Option(min=0, help="Of --untuned and --suite: begin no problem after so many seconds.")
    ] = None,
    as_json: _Json = False,
    *,
    options: Options,
) -> None:
    """Find the best kernel for a problem and store it.

    With a Hopper GPU candidates are measured. Without one, or with --compile-only, they are compiled for --target and
    ranked by the time model; the result is marked `predicted` and never replaces a measurement.
    """
    from tlxgen.cli import tune as tuning_cli

    if suite is None and (only or again):
        raise InvalidProblemError(f"{'--only' if only else '--again'} chooses from a suite; add --suite")
    if within is not None and suite is None and not untuned:
        raise InvalidProblemError("--within is for lists, --untuned or --suite; --seconds is the time of one search")
    settings = tuning_cli.Options(
        trials=trials,
        seconds=seconds,
        sampler=sampler,
        seed=seed,
        workers=workers,
        templates=tuple(template) if template else None,
        compile_only=compile_only,
        target=target,
        as_json=as_json,
        within=within,
        limit=limit,
    )
    if untuned:
        if sizes or suite is not None:
            raise InvalidProblemError("--untuned takes its problems from the list, so none may be named beside it")
        tuning_cli.run_untuned(operator, settings, _log)
        return
    if suite is not None:
        if operator is not None:
            raise InvalidProblemError("--suite takes its problems from the file, so none may be named beside it")
        tuning_cli.run_suite(suite, settings, _log, only=only or (), again=again)
        return
    if operator is None:
        raise InvalidProblemError(
            "name a problem, such as `tlxgen tune gemm 4096 4096 4096`; "
            "or `tlxgen tune --untuned` for all that programs asked for"
        )
    tuning_cli.run(parse(operator, sizes or [], options), settings, _log)


@app.command()
@takes_problem
def show(
    operator: _Operator,
    sizes: _Sizes,
    target: _Target = None,
    as_json: _Json = False,
    *,
    options: Options,
) -> None:
    """Show which kernel `get_kernel` would return for a problem, and why."""
    from tlxgen import devices
    from tlxgen.runtime import kernel as runtime

    problem = parse(operator, sizes, options)
    gpu = devices.target(target) if target else devices.present()
    kernel = runtime.Kernel(problem, runtime.select(problem, gpu, note_miss=False), gpu)
    if as_json:
        config = kernel.config.model_dump() if kernel.config else None
        answer = {"problem": problem.model_dump(), "origin": kernel.origin, "config": config, "why": kernel.explain()}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"{problem.label} on {gpu.slug if gpu else 'a machine without a CUDA GPU'}")
        typer.echo(f"  {kernel.explain()}".replace("; ", "\n  "))


@app.command()
@takes_problem
def emit(
    operator: _Operator,
    sizes: _Sizes,
    target: _Target = None,
    template: Annotated[str | None, typer.Option(help="A template; the model's favourite config of it.")] = None,
    param: Annotated[list[str] | None, typer.Option("--param", "-p", help="name=value; may be given again.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout by default.")] = None,
    *,
    options: Options,
) -> None:
    """Write a problem's kernel as one Python file that runs without tlxgen.

    By default with the tuned config, or else the time model's best; --template and --param choose another.
    """
    from tlxgen import devices
    from tlxgen.codegen.emit import emit as emit_source

    problem = parse(operator, sizes, options)
    gpu = devices.target(target) if target else devices.detect() or devices.target("h200")
    config = _chosen_config(problem, gpu, template, param or [])
    text = emit_source(ops.get(operator), problem, config).text
    if output is None:
        typer.echo(text, nl=False)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"--output {output}: {error.strerror}") from None
        _log.print(f"{output}: {config.short}")


@app.command()
@takes_problem
def check(
    what: Annotated[str, typer.Argument(help="A file with a kernel, or an operator.", show_default=False)],
    sizes: Annotated[list[str] | None, typer.Argument(help="The operator's sizes.", show_default=False)] = None,
    target: _Target = None,
    config: Annotated[str | None, typer.Option(help="'TEMPLATE name=value ...', as `show` prints it.")] = None,
    template: Annotated[str | None, typer.Option(help="A template; the model's favourite config of it.")] = None,
    param: Annotated[list[str] | None, typer.Option("--param", "-p", help="name=value; may be given again.")] = None,
    entry: Annotated[str | None, typer.Option(help="Function of the file that launches its kernels.")] = None,
    schedules: Annotated[int, typer.Option(min=1, help="Schedules for each small problem.")] = 6,
    seed: Annotated[int, typer.Option(help="Of schedules and inputs.")] = 0,
    timeline: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the first run here.")] = None,
    as_json: _Json = False,
    *,
    options: Options,
) -> None:
    """Simulate a kernel on the CPU: deadlocks, races, wrong results. Exit status 1 if there are any.

    An emitted file, edited or not, is checked on small problems of its operator. Any other file with TLX kernels needs
    --entry: a function without arguments that creates CPU tensors and launches `kernel[grid](...)`.
    """
    from tlxgen import devices
    from tlxgen.cli import check as cli_check
    from tlxgen.codegen.emit import emit as emit_source
    from tlxgen.runtime import pinning

    if what.endswith(".py") or Path(what).is_file():
        if sizes:
            raise InvalidProblemError(f"check {what}: a file takes no sizes")
        cli_check.run_file(Path(what), entry, schedules=schedules, seed=seed, timeline=timeline, as_json=as_json)
        return
    problem = parse(what, sizes or [], options)
    gpu = devices.target(target) if target else devices.detect() or devices.target("h200")
    if config:
        chosen = pinning.as_config(what, config)
        _refuse_illegal(problem, chosen, gpu)
    else:
        chosen = _chosen_config(problem, gpu, template, param or [])
    source = emit_source(ops.get(what), problem, chosen)
    cli_check.run_source(source, schedules=schedules, seed=seed, timeline=timeline, as_json=as_json)


@app.command()
def regress(
    cache: Annotated[
        list[Path] | None, typer.Option(help="File of tuned configs; may be given again. Those of tlxgen by default.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here: a test case for each row.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary here, such as $GITHUB_STEP_SUMMARY.")] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Store facts and shapes of today beside each file; never times.")
    ] = False,
    suites: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of suites whose shapes must keep their rows."),
    ] = None,
    gpu: Annotated[
        bool | None, typer.Option("--gpu/--no-gpu", help="Insist on timing rows, or time none. As it comes by default.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Compilers at once; one a core by default.")] = None,
    limit: _Limit = 20.0,
    as_json: _Json = False,
) -> None:
    """Check that tuned configs are still valid. Exit status 1 if one is not.

    Without a GPU: key, legality, emitted code, compilation, facts of the binary, simulator, shapes that must have a
    row. On a GPU of the rows' model also results and the speed relative to the library.
    """
    from tlxgen.cli import regress as cli_regress

    outputs = cli_regress.Outputs(junit, markdown, as_json)
    cli_regress.run(cache or [], outputs, update=update, suites=suites, gpu=gpu, workers=workers, limit=limit, log=_log)


@app.command()
def doctor(as_json: _Json = False) -> None:
    """Report GPU, driver, CUDA, triton, tools and cache, with a remedy for each problem."""
    from tlxgen.cli import doctor as examination

    findings = examination.examine()
    if as_json:
        typer.echo(examination.to_json(findings))
    else:
        examination.report(findings, Console())
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


def _chosen_config(problem: Problem, gpu: Any, template: str | None, params: list[str]) -> Any:
    from tlxgen.config import Config, parse_params
    from tlxgen.runtime import kernel as runtime
    from tlxgen.space.candidates import candidates

    if template is None and not params:
        choice = runtime.select(problem, gpu, note_miss=False)
        if choice.config is not None:
            return choice.config
    templates = (template,) if template else None
    favourite = candidates(problem, gpu, templates)[0]
    try:
        config = Config(template=favourite.template, params={**favourite.params, **parse_params(params)})
    except InvalidConfigError as error:
        raise InvalidConfigError(f"--param {error}") from None
    _refuse_illegal(problem, config, gpu)
    return config


def _refuse_illegal(problem: Problem, config: Any, gpu: Any) -> None:
    from tlxgen.space import search_space

    reason = search_space.why_illegal(ops.get(problem.operator), problem, config, gpu)
    if reason:
        raise InvalidConfigError(reason)


def main() -> None:
    """Entry point: prints a TlxgenError as one line and exits with its status."""
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    debug = "--debug" in sys.argv
    try:
        app()
    except TlxgenError as error:
        if debug:
            raise
        _log.print(f"tlxgen: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _log.print("tlxgen: interrupted", style="red")
        sys.exit(130)


def _interrupt() -> None:
    raise KeyboardInterrupt
