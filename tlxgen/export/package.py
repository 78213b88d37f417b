"""Writes a package of kernels: emitted files, `manifest.json` (which file serves which problem) and a dispatcher.

The dispatcher is the modules of `tlxgen.export.standalone`, copied: they look calls up in the table and pass all others
to torch. Problems whose kernels have the same code share a file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tlxgen import ops
from tlxgen._version import __version__
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.db.record import tuning_key
from tlxgen.devices import Gpu
from tlxgen.errors import InvalidProblemError, OutputError
from tlxgen.export.manifest import Entry, Manifest, Provenance
from tlxgen.problem import Problem
from tlxgen.runtime import kernel, selection
from tlxgen.toolchain import toolchain

_STANDALONE = Path(__file__).parent / "standalone"

#: Operators that can be exported: those with a standalone module, which turns a call's tensors into a problem.
OPERATORS = tuple(name for name in ops.NAMES if (_STANDALONE / f"{name}.py").is_file())


def write_package(directory: Path, problems: Iterable[Problem], gpu: Gpu) -> Manifest:
    """Writes the package atomically; its name is the directory's.

    Args:
        directory: created; an empty one or an earlier export is replaced.
        problems: each is served by the kernel that `get_kernel` would choose on `gpu`.
        gpu: the GPU that kernels are chosen for.

    Raises:
        InvalidProblemError: no problem, or one of an operator that cannot be exported or of size zero.
        OutputError: the directory's name is not a module name, it contains something else, or it cannot be written.
    """
    chosen = list(dict.fromkeys(problems))
    if not chosen:
        raise InvalidProblemError("nothing to export: no problem was named, and none is tuned")
    _check_place(directory)
    made = [entry for entry in (_entry(problem, gpu) for problem in chosen) if entry is not None]
    if not made:
        raise InvalidProblemError(f"nothing to export: torch computes all of {len(chosen)} problem(s) on {gpu.slug}")
    manifest = Manifest(
        made_by=f"tlxgen {__version__}",
        device=gpu.key,
        capability=gpu.capability,
        toolchain=toolchain(),
        entries=tuple(entry for entry, _ in made),
    )
    try:
        _write(directory, manifest, [source for _, source in made])
    except OSError as error:
        raise OutputError(f"{directory} cannot be written: {error}") from error
    return manifest


def why_not_exported(problem: Problem) -> str | None:
    """Why a problem cannot be exported, or None."""
    if problem.operator not in OPERATORS:
        return (
            f"{problem.operator} cannot be exported; {', '.join(OPERATORS)} can, "
            "and `tlxgen emit` writes any kernel as a file of its own"
        )
    if problem.empty:
        return "a size is zero, so there is no kernel to export"
    reason: str | None = ops.get(problem.operator).why_not_exported(problem)
    return reason


def _entry(problem: Problem, gpu: Gpu) -> tuple[Entry, KernelSource] | None:
    """The problem's entry and kernel; None if torch computes it."""
    reason = why_not_exported(problem)
    if reason:
        raise InvalidProblemError(f"{problem.label}: {reason}")
    choice = kernel.select(problem, gpu, note_miss=False)
    if choice.config is None:
        return None
    source = emit(ops.get(problem.operator), problem, choice.config)
    key = tuning_key(problem, gpu.key)
    record = selection.store().get(key) if choice.origin == "tuned" else None
    provenance = None
    if record is not None:
        fields = record.model_dump(include=set(Provenance.model_fields), mode="json")
        provenance = Provenance.model_validate(fields)
    entry = Entry(
        key=key.id,
        operator=problem.operator,
        problem=problem.model_dump(),
        label=problem.label,
        config=choice.config,
        origin=choice.origin,
        why=choice.explain(),
        module=f"{choice.config.template}_{source.code_hash}",
        code_hash=source.code_hash,
        needs_tlx="extra.tlx" in source.text,
        provenance=provenance,
    )
    return entry, source


def _check_place(directory: Path) -> None:
    if not directory.name.isidentifier():
        raise OutputError(f"{directory}: {directory.name!r} cannot be imported; name the directory as a module")
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory} is a file; name a directory to be made")
    if directory.is_dir() and any(directory.iterdir()) and not _is_export(directory):
        raise OutputError(f"{directory} holds something else than an export; name a directory to be made")


def _is_export(directory: Path) -> bool:
    try:
        return str(json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["made_by"]).startswith(
            "tlxgen "
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _init() -> str:
    """Text of the package's `__init__`: a function for each operator, named after it."""
    from tlxgen.export import standalone

    imports = [("dispatch", "entries, explain"), *((name, name) for name in OPERATORS)]
    exported = ", ".join(f'"{name}"' for name in sorted(["entries", "explain", *OPERATORS]))
    lines = [f"from .{module} import {names}" for module, names in sorted(imports)]
    return f'"""{standalone.__doc__}"""\n\n' + "\n".join(lines) + f"\n\n__all__ = [{exported}]\n"


def _write(directory: Path, manifest: Manifest, sources: Iterable[KernelSource]) -> None:
    """Writes into a temporary folder and renames it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        package = Path(temporary) / directory.name
        kernels = package / "kernels"
        kernels.mkdir(parents=True)
        for name in ("dispatch", *OPERATORS):
            text = (_STANDALONE / f"{name}.py").read_text(encoding="utf-8")
            (package / f"{name}.py").write_text(text, encoding="utf-8")
        (package / "__init__.py").write_text(_init(), encoding="utf-8")
        for entry, source in zip(manifest.entries, sources, strict=True):
            (kernels / f"{entry.module}.py").write_text(source.text, encoding="utf-8")
        (kernels / "__init__.py").write_text('"""Emitted kernels; each runs as a script, too."""\n', encoding="utf-8")
        text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True)
        (package / "manifest.json").write_text(text + "\n", encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        package.replace(directory)
