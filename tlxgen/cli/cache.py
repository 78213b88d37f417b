"""`tlxgen cache`: list, show, export, import, merge and prune tuned configs.

Results go to stdout, remarks to stderr. Commands that change the database refuse one that cannot be written; the others
use what can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from tlxgen import ops, paths
from tlxgen.cli import tables
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord, TuningKey
from tlxgen.db.store import Store
from tlxgen.errors import CacheError

app = typer.Typer(help="Tuned configs: list, show, export, import, merge, prune.", no_args_is_help=True)

#: Hex digits of a key in tables; any unique beginning names a row.
_SHORT_ID = 12
_SQLITE_MAGIC = b"SQLite format 3\0"


class PolicyName(str, Enum):
    """Which row stays if two have the same key."""

    faster = "faster"
    newer = "newer"
    keep = "keep"


class CacheInputError(CacheError, ValueError):
    """Invalid key or file on the command line."""

    exit_code = 2


OperatorOption = Annotated[str | None, typer.Option("--operator", help="Only this operator, such as gemm.")]
GpuOption = Annotated[str | None, typer.Option("--gpu", help="Only this GPU, such as h200.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One line of JSON instead of a table.")]
PolicyOption = Annotated[
    PolicyName,
    typer.Option(
        "--policy",
        help="Where a key is taken: the faster row stays, the newer one, or the one that is there (keep). "
        "Measured rows beat predicted ones in any case.",
    ),
]


@app.command("list")
def list_rows(operator: OperatorOption = None, gpu: GpuOption = None, as_json: JsonOption = False) -> None:
    """List the tuned configs."""
    with _open() as store:
        records = store.records(operator, gpu)
    if as_json:
        typer.echo(_json([_summary(record) for record in records]))
        return
    if not records:
        _remark(f"no tuned config matches in {store.location}; `tlxgen tune` makes one")
        return
    table = tables.empty("key", "operator", "problem", "gpu", "config", "origin", "µs", "vs peer")
    for record in records:
        key = record.key
        speed = f"{record.ratio:.3f} {record.peer or ''}".rstrip() if record.ratio is not None else "-"
        row = (key.id[:_SHORT_ID], key.operator, _problem(key), key.device.gpu, record.config.short, record.origin)
        table.add_row(*row, f"{record.time_us:.2f}", speed)
    tables.show(table)


@app.command("show")
def show(key: Annotated[str, typer.Argument(help="Key of the row, or a unique beginning of it.")]) -> None:
    """Show one row in full, as JSON."""
    with _open() as store:
        matches = [record for record in store.records() if record.key.id.startswith(key.lower())]
        defective = {key_id: why for key_id, why in store.defective().items() if key_id.startswith(key.lower())}
    if len(matches) + len(defective) > 1:
        ids = ", ".join(sorted([*(record.key.id for record in matches), *defective])[:5])
        raise CacheInputError(f"key {key!r} begins several rows ({ids}); give more digits")
    if defective:
        (key_id, why), *_ = defective.items()
        raise CacheError(f"row {key_id} is not used: {why}; tune the problem again, or run `tlxgen cache prune`")
    if not matches:
        raise CacheInputError(f"key {key!r} is in no row of {store.location}; `tlxgen cache list` shows the keys")
    typer.echo(json.dumps(_summary(matches[0]), indent=2, sort_keys=True))


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="JSON-lines file to write.")],
    gpu: GpuOption = None,
    operator: OperatorOption = None,
) -> None:
    """Write tuned configs to a file of sorted JSON lines."""
    with _open() as store:
        records = store.records(operator, gpu)
    if not records:
        raise CacheInputError(f"no tuned config of {store.location} matches; `tlxgen cache list` shows what there is")
    shipped.dump(records, file)
    typer.echo(f"{len(records)} rows written to {file}")


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="JSON-lines file that `tlxgen cache export` wrote.")],
    policy: PolicyOption = PolicyName.faster,
) -> None:
    """Take over tuned configs from a file. Bad lines are refused one by one; status 1 if there were any."""
    _merge([file], policy)


@app.command("merge")
def merge(
    files: Annotated[list[Path], typer.Argument(help="Databases or JSON-lines files.")],
    policy: PolicyOption = PolicyName.faster,
) -> None:
    """Take over tuned configs from other databases and files. Bad lines are refused one by one, with status 1."""
    _merge(files, policy)


@app.command("prune")
def prune(
    stale: Annotated[
        bool, typer.Option("--stale", help="Also rows of another toolchain or of code that has changed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove rows that are marked bad or cannot be read, with the trials behind them."""
    with _open(read_only_ok=False) as store:
        doomed = store.defective()
        if stale:
            doomed |= {record.key.id: why for record, why in _stale(store.records())}
        for key_id, why in doomed.items():
            _remark(f"{key_id[:_SHORT_ID]}  {why}")
        if doomed and not yes:
            typer.confirm(f"Remove {len(doomed)} rows from {store.location}?", abort=True, err=True)
        typer.echo(f"{store.delete(doomed) if doomed else 0} rows removed")


@app.command("stale")
def stale_rows(as_json: JsonOption = False) -> None:
    """List rows that wait for re-tuning: of another toolchain, or of code that has changed."""
    with _open() as store:
        found = _stale(store.records())
    if as_json:
        typer.echo(_json([{**_summary(record), "stale": why} for record, why in found]))
        return
    if not found:
        _remark("no row is stale")
        return
    table = tables.empty("key", "operator", "problem", "gpu", "why")
    for record, why in found:
        key = record.key
        table.add_row(key.id[:_SHORT_ID], key.operator, _problem(key), key.device.gpu, why)
    tables.show(table)


@app.command("untuned")
def untuned(as_json: JsonOption = False) -> None:
    """List problems that programs asked for and that are not tuned, most wanted first."""
    with _open() as store:
        wanted = store.untuned()
    if as_json:
        typer.echo(_json([{**key.model_dump(mode="json"), "count": count} for key, count in wanted]))
        return
    if not wanted:
        _remark("nothing was asked for that is not tuned")
        return
    table = tables.empty("count", "operator", "problem", "gpu", "toolchain")
    for key, count in wanted:
        table.add_row(str(count), key.operator, _problem(key), key.device.gpu, key.toolchain)
    tables.show(table)


@app.command("path")
def path() -> None:
    """Print where the database is."""
    try:
        typer.echo(str(paths.database_path()))
    except RuntimeError as error:  # `~` without a home directory
        raise CacheInputError(f"TLXGEN_CACHE names no place: {error}; give it an absolute path") from error


def _open(read_only_ok: bool = True) -> Store:
    store = Store.open(read_only_ok=read_only_ok)
    shipped.import_shipped(store)
    return store


def _merge(files: Iterable[Path], policy: PolicyName) -> None:
    found = [_rows_of(file) for file in files]
    records = [record for rows, _ in found for record in rows]
    with _open(read_only_ok=False) as store:
        stored = store.merge(records, policy.value, source="user")
    refused = [reason for _, reasons in found for reason in reasons]
    for reason in refused:
        _remark(reason)
    done = f"{stored} of {len(records)} rows taken over into {store.location} (policy {policy.value})"
    typer.echo(f"{done}; {len(refused)} lines refused" if refused else done)
    if refused:
        raise typer.Exit(1)


def _rows_of(file: Path) -> tuple[list[TunedRecord], list[str]]:
    """The rows of a database or a JSON-lines file, told apart by content, and why the other lines are refused."""
    try:
        with file.open("rb") as stream:
            is_database = stream.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError as error:
        raise CacheInputError(f"{file} cannot be read: {error.strerror}; name a database or an export") from error
    if not is_database:
        lines = [(number, shipped.of_use(row)) for number, row in shipped.lines(file)]
        reasons = [f"{file}, line {number} is refused: {row}" for number, row in lines if isinstance(row, str)]
        return [row for _, row in lines if not isinstance(row, str)], reasons
    with Store.snapshot(file) as other:
        rows = [(record.key.id, shipped.of_use(record)) for record in other.records()]
    reasons = [f"{file}, key {key} is refused: {row}" for key, row in rows if isinstance(row, str)]
    return [row for _, row in rows if not isinstance(row, str)], reasons


def _stale(records: Iterable[TunedRecord]) -> list[tuple[TunedRecord, str]]:
    from tlxgen.db.validity import why_stale

    return [(record, why) for record in records if (why := why_stale(record)) is not None]


def _summary(record: TunedRecord) -> dict[str, Any]:
    return {
        **record.model_dump(mode="json"),
        "key_id": record.key.id,
        "config_id": record.config.id,
        "ratio": record.ratio,
    }


def _problem(key: TuningKey) -> str:
    """The problem as on the command line; field by field if this version does not know it."""
    try:
        problem = ops.get(key.operator).problem_type.model_validate(key.problem)
        return str(problem.label).removeprefix(f"{key.operator} ")
    except ValueError:  # unknown operator or fields
        pass
    return " ".join(f"{name}={value}" for name, value in key.problem.items())


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _remark(text: str) -> None:
    typer.echo(text, err=True)
