"""The installed `triton`: which distribution it is, whether it has TLX, and its command-line tools.

Two distributions provide the module `triton`: Meta's `fbtriton`, which has TLX, and upstream's `triton`, which a CUDA
build of torch requires. Installing one over the other replaces some files and leaves the rest, so TLX's folder can be
present and not work. So this module compares the files on disk with each distribution's RECORD.

Nothing here imports triton: that takes seconds, and fails in the cases that are to be explained.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tlxgen.errors import ToolchainError

FBTRITON = "fbtriton"
#: Other distributions that write the module `triton`.
UPSTREAM = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm")

_VERSION_IN_SOURCE = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_PTXAS_VERSION = re.compile(r"\bV(\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Triton:
    """The state of the module `triton` on disk.

    Attributes:
        folder: the package's folder, or None where `import triton` would find nothing.
        version: the version of the files in `folder`, without fbtriton's `+fb`.
        owner: the distribution whose files are in `folder`, or None if unknown (a source build, a copy).
        distributions: every registered distribution that provides `triton`, with its version.
        damaged: whether files that fbtriton installed are missing, or compiled ones were replaced.
        has_tlx_files: whether TLX's folder exists; it may still not work.
    """

    folder: Path | None
    version: str
    owner: str | None
    distributions: dict[str, str]
    damaged: bool
    has_tlx_files: bool

    @property
    def has_tlx(self) -> bool:
        """Whether TLX can be imported: its folder is there, and the files around it belong to it."""
        if self.folder is None or not self.has_tlx_files:
            return False
        return not (self.damaged or (self.owner in UPSTREAM and FBTRITON in self.distributions))

    @property
    def upstream(self) -> list[str]:
        """The registered distributions that are not fbtriton's, in a fixed order."""
        return [name for name in UPSTREAM if name in self.distributions]


def inspect() -> Triton:
    """The state of the `triton` that this process would import."""
    found = {name: dist for name in (FBTRITON, *UPSTREAM) if (dist := _distribution(name)) is not None}
    versions = {name: dist.version for name, dist in found.items()}
    folder = _package_folder()
    if folder is None:
        return Triton(None, "", None, versions, damaged=FBTRITON in found, has_tlx_files=False)
    owner = next((name for name, dist in found.items() if _owns(dist, folder)), None)
    fbtriton = found.get(FBTRITON)
    others = [dist for name, dist in found.items() if name != FBTRITON]
    return Triton(
        folder=folder,
        version=versions[owner] if owner else _version_in(folder),
        owner=owner,
        distributions=versions,
        damaged=fbtriton is not None and _is_damaged(fbtriton, folder, others),
        has_tlx_files=(folder / "language" / "extra" / "tlx" / "__init__.py").is_file(),
    )


def has_tlx() -> bool:
    """Whether the installed `triton` has a working TLX."""
    return _inspected().has_tlx


def require_tlx() -> None:
    """Raises unless TLX can be imported.

    Raises:
        ToolchainError: TLX cannot be imported; the message says why and which command puts it right.
    """
    if problem := explain(_inspected()):
        raise ToolchainError(f"{problem}; run: {remedy(_inspected())}")


def explain(state: Triton) -> str:
    """Why TLX cannot be imported, in one clause; empty if it can."""
    if state.has_tlx:
        return ""
    others = ", ".join(f"{name} {state.distributions[name]}" for name in state.upstream)
    if state.folder is None:
        return "the package `triton` is missing" + (", though fbtriton is registered" if state.damaged else "")
    if FBTRITON in state.distributions:
        culprit = f"{others} was installed over fbtriton" if others else "some of fbtriton's files are gone"
        return f"the installed `triton` lacks a working TLX: {culprit}"
    return f"the installed `triton` ({others or state.version or 'of unknown version'}) is upstream's, which has no TLX"


def import_error() -> str:
    """The last line of output of a fresh process that imports TLX; empty if it succeeds.

    Complements `explain`: TLX's folder can be imported among upstream's files, and fails later.
    """
    command = [sys.executable, "-c", "import triton.language.extra.tlx"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return ""
    return (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]


def remedy(state: Triton) -> str:
    """The command line that leaves one `triton`, fbtriton's.

    >>> state = Triton(Path("triton"), "3.7.1", "triton", {"triton": "3.7.1"}, damaged=False, has_tlx_files=False)
    >>> remedy(state).split("==")[0]
    'pip uninstall -y triton && pip install --force-reinstall --no-deps fbtriton'
    """
    uninstall = f"pip uninstall -y {' '.join(state.upstream)} && " if state.upstream else ""
    return f"{uninstall}pip install --force-reinstall --no-deps {fbtriton_requirement()}"


def fbtriton_requirement() -> str:
    """The fbtriton that this tlxgen asks for, such as `fbtriton==3.7.4`: its own metadata alone pins it."""
    try:
        requirements = importlib.metadata.requires("tlxgen") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
        requirements = []
    return next((item.split(";")[0].strip() for item in requirements if item.startswith(FBTRITON)), FBTRITON)


@lru_cache(maxsize=1)
def toolchain() -> str:
    """The toolchain as it stands in cache keys: `fbtriton 3.7.4, ptxas 12.9.86`.

    A string in any case, so that look-ups work (and miss) on a machine without triton.
    """
    state = _inspected()
    if state.folder is None:
        return "no triton"
    return f"{FBTRITON if state.has_tlx else 'triton'} {state.version or 'unknown'}, ptxas {ptxas_version() or 'none'}"


@lru_cache(maxsize=1)
def ptxas_version() -> str:
    """The version of triton's ptxas, such as `12.9.86`; empty if it is missing or does not run."""
    try:
        command = [str(binary("ptxas")), "--version"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (ToolchainError, OSError, subprocess.SubprocessError):
        return ""
    match = _PTXAS_VERSION.search(output)
    return match.group(1) if match else ""


def binary(name: str) -> Path:
    """The tool `name` (`ptxas`, `cuobjdump`, `nvdisasm`) that triton itself would call.

    Like triton, it takes `TRITON_<NAME>_PATH` where that names a file, and the copy inside the package otherwise.

    Raises:
        ToolchainError: there is no such file.
    """
    override = os.environ.get(f"TRITON_{name.upper().replace('-', '_')}_PATH")
    if override and Path(override).is_file():
        return Path(override)
    folder = _inspected().folder
    path = folder / "backends" / "nvidia" / "bin" / name if folder else None
    if path is None or not path.is_file():
        where = path or "the missing package `triton`"
        raise ToolchainError(f"{name} not found (expected {where}); run: {remedy(_inspected())}")
    return path


def clear_caches() -> None:
    """Clears caches, after packages were installed or removed."""
    for cached in (toolchain, ptxas_version, _inspected):
        cached.cache_clear()


@lru_cache(maxsize=1)
def _inspected() -> Triton:
    return inspect()


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_folder() -> Path | None:
    """The folder that `import triton` would read; None for one without `__init__.py`."""
    try:
        spec = importlib.util.find_spec("triton")
    except ValueError:  # an imported stand-in without a spec
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _version_in(folder: Path) -> str:
    match = _VERSION_IN_SOURCE.search((folder / "__init__.py").read_text(encoding="utf-8", errors="replace"))
    return match.group(1).removesuffix("+fb") if match else ""


def _owns(dist: importlib.metadata.Distribution, folder: Path) -> bool:
    """Whether `dist` installed `folder/__init__.py`, in which distributions differ by their version line at least."""
    for item in _files(dist):
        if item.name == "triton/__init__.py":
            path = Path(str(dist.locate_file(item.name)))
            if path.parent.resolve() != folder.resolve() or not path.is_file():
                return False
            mode, _, value = item.hash.partition("=")
            digest = hashlib.new(mode, path.read_bytes()).digest()
            return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == value
    return False


def _is_damaged(
    dist: importlib.metadata.Distribution, folder: Path, others: list[importlib.metadata.Distribution]
) -> bool:
    """Whether a file of `dist` in `folder` is missing, or a compiled one has another distribution's size.

    Python files may differ, since people edit them to debug. Comparing sizes takes milliseconds, hashing the compiler
    seconds; sizes count only if one of `others` was installed into the same folder, since a stripped library is not
    damaged. A `triton` from elsewhere on the path, or without parts for other GPUs, is not damaged either.
    """
    if not _installs_into(dist, folder):
        return False
    contested = any(_installs_into(other, folder) for other in others)
    root = str(dist.locate_file(""))
    for item in _files(dist):
        parts = item.name.split("/")
        if parts[0] != "triton":
            continue
        needed = item.name.endswith(".py") or parts[-1].startswith("libtriton.")
        compared = contested and item.name.endswith(".so")
        size = _size(os.path.join(root, item.name)) if needed or compared else None  # noqa: PTH118 - see `_files`
        if needed and "amd" not in parts and size is None:
            return True
        if compared and size is not None and size != item.size:
            return True
    return False


class _File(NamedTuple):
    """A line of a distribution's RECORD."""

    name: str
    hash: str
    size: int | None


def _files(dist: importlib.metadata.Distribution) -> list[_File]:
    """The files of a distribution that are recorded with a hash, which excludes byte code.

    `Distribution.files` creates paths, which takes ten times as long and would delay the first kernel.
    """
    lines = csv.reader((dist.read_text("RECORD") or "").splitlines())
    return [_File(name, hashed, int(size) if size else None) for name, hashed, size in lines if hashed]


def _size(path: str) -> int | None:
    """Bytes of a file; None if there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - see `_files`
    except OSError:
        return None


def _installs_into(dist: importlib.metadata.Distribution, folder: Path) -> bool:
    return Path(str(dist.locate_file("triton"))).resolve() == folder.resolve()
