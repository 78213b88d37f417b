"""`tlxgen doctor`: findings on GPU, driver, triton, tools and cache, with a remedy for each problem.

Each probe covers one topic. None raises, since the installation may be broken in any way.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from tlxgen import toolchain
from tlxgen.errors import TlxgenError
from tlxgen.paths import database_path, user_cache_dir
from tlxgen.tuner import nvml

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["ok", "warning", "problem"]

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_TORCH_REMEDY = "pip install 'tlxgen[torch]' && python -m tlxgen.install"
_CACHE_REMEDY = "set TLXGEN_CACHE to a file in a directory that can be written"
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_OPTIONAL = {"plotly": "plots of a study", "matplotlib": "plots of a study"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is one command or sentence; empty if there is nothing to do."""

    topic: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which a user would fix them."""
    return [finding for topic, probe in _PROBES.items() for finding in _guarded(topic, probe)]


def report(findings: list[Finding], console: Console) -> None:
    """Prints the findings as a table, then the remedies."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for style in ("bold", None, None):
        table.add_column(style=style, overflow="fold")
    for finding in findings:
        table.add_row(finding.topic, Text(finding.status, style=_STYLES[finding.status]), Text(finding.detail))
    console.print(table)
    remedies = [finding for finding in findings if finding.remedy]
    if remedies:
        console.print("\n[bold]What to do[/bold]")
    for finding in remedies:
        # Not wrapped, so that a command can be copied.
        console.print(Text.assemble((f"{finding.topic}: ", "bold"), finding.remedy), soft_wrap=True)


def to_json(findings: list[Finding]) -> str:
    """The findings on one line, as `{"ok": ..., "findings": [...]}`; `ok` is false if any is a problem."""
    healthy = all(finding.status != "problem" for finding in findings)
    return json.dumps({"ok": healthy, "findings": [asdict(finding) for finding in findings]})


def _guarded(topic: str, probe: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - third-party code on a broken machine may raise anything
        return [Finding(topic, "problem", f"cannot be examined: {_one_line(error)}", "report this as a bug of tlxgen")]


def _python() -> list[Finding]:
    version = platform.python_version()
    detail = f"{version}, {sys.executable}"
    if not (3, 10) <= sys.version_info[:2] < (3, 14):
        return [Finding("python", "problem", detail, "use Python 3.10 to 3.13")]
    if platform.system() != "Linux":
        return [
            Finding("python", "problem", f"{detail}, {platform.system()}", "use Linux: fbtriton is built for it alone")
        ]
    return [Finding("python", "ok", detail)]


def _torch() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("torch", "problem", f"cannot be imported: {_one_line(error)}", _TORCH_REMEDY)]
    except OSError as error:  # a shared library of CUDA is missing
        remedy = "pip install --force-reinstall torch && python -m tlxgen.install"
        return [Finding("torch", "problem", f"cannot be loaded: {_one_line(error)}", remedy)]
    if torch.version.hip:
        return [Finding("torch", "warning", f"{torch.__version__}, built for ROCm", "install a CUDA build for Hopper")]
    if torch.version.cuda is None:
        detail = f"{torch.__version__}, built without CUDA: kernels compile and run on the CPU fallback only"
        return [Finding("torch", "warning", detail, "on a machine with a GPU, install a CUDA build of torch")]
    return [Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}")]


def _gpu() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError):
        return [Finding("gpu", "warning", "not examined, for want of torch")]
    if not torch.cuda.is_available():
        works = "emit, compile and `tune` (predicted) work; timing does not, and kernels fall back to torch"
        return [Finding("gpu", "warning", f"no CUDA GPU visible to torch: {works}", _gpu_remedy(torch.version.cuda))]
    return [_one_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu_remedy(torch_cuda: str | None) -> str:
    """The remedy if the driver sees a GPU that torch does not; empty if there is no GPU."""
    if not nvml.ask(lambda driver: driver.nvmlDeviceGetCount()):
        return ""
    if torch_cuda is None:
        return "the driver sees a GPU but this torch has no CUDA: install a CUDA build of torch"
    return "the driver sees a GPU but torch does not: check CUDA_VISIBLE_DEVICES, and the driver against torch's CUDA"


def _one_gpu(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    detail = f"{index}: {properties.name}, {properties.multi_processor_count} SMs, capability {capability}"
    if capability != "9.0":
        return Finding(
            "gpu", "warning", f"{detail}: not Hopper, so vanilla Triton or torch serve instead of TLX kernels"
        )
    return Finding("gpu", "ok", detail)


def _driver() -> list[Finding]:
    """The driver's version, and its CUDA version, which bounds the one that torch may be built for."""
    if not nvml.ask(lambda _: True):
        return [Finding("driver", "warning", "no NVIDIA driver, or it does not answer")]
    cuda = nvml.ask(lambda driver: int(driver.nvmlSystemGetCudaDriverVersion()))
    upto = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "unknown"
    return [Finding("driver", "ok", f"{nvml.driver_version() or 'unknown'}, CUDA up to {upto}")]


def _triton() -> list[Finding]:
    state = toolchain.inspect()
    registered = ", ".join(f"{name} {version}" for name, version in state.distributions.items()) or "not registered"
    detail = f"{state.version or 'unknown version'} in {state.folder} ({registered})"
    if why := toolchain.explain(state):
        return [Finding("triton", "problem", why, toolchain.remedy(state))]
    if state.upstream and state.owner == toolchain.FBTRITON:
        detail += ": fbtriton was installed over upstream's, whose files are still registered"
        return [Finding("triton", "warning", detail, toolchain.remedy(state))]
    return [Finding("triton", "ok", detail), _tlx()]


def _tlx() -> Finding:
    if error := toolchain.import_error():
        remedy = toolchain.remedy(toolchain.inspect())
        return Finding("tlx", "problem", f"cannot be imported: {error}", remedy)
    return Finding("tlx", "ok", "triton.language.extra.tlx can be imported")


def _graphs() -> list[Finding]:
    """Whether torch.compile works: Triton 3.7 and newer finds no GPU in the processes that torch forks to compile.

    Torch no longer asks it there after 2.13 (pytorch/pytorch#184643).
    """
    try:
        import torch
    except (ImportError, OSError):
        return []
    triton = toolchain.inspect().version
    if torch.version.hip or not torch.cuda.is_available():
        return []
    if _release(torch.__version__) > (2, 13) or _release(triton) < (3, 7):
        return []
    if os.environ.get(_THREADS) == "1":
        return [Finding("torch.compile", "ok", f"{_THREADS}=1: compiles in the program's own process")]
    detail = f"torch {torch.__version__} compiles in processes where triton {triton} finds no GPU, and fails"
    return [Finding("torch.compile", "warning", detail, f"export {_THREADS}=1")]


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number; empty if unknown."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _cuda_tools() -> list[Finding]:
    return [_cuda_tool(name, needed_for) for name, needed_for in _CUDA_TOOLS.items()]


_CUDA_TOOLS = {
    "ptxas": "every compilation",
    "cuobjdump": "facts about compiled kernels",
    "nvdisasm": "facts about compiled kernels",
}


def _cuda_tool(name: str, needed_for: str) -> Finding:
    try:
        path = toolchain.binary(name)
    except TlxgenError:
        state = toolchain.inspect()
        return Finding(name, "problem", f"missing; needed for {needed_for}", toolchain.remedy(state))
    if name != "ptxas":
        return Finding(name, "ok", str(path))
    version = toolchain.ptxas_version()
    if not version:
        return Finding(name, "problem", f"{path} does not run", f"chmod +x {path}")
    return Finding(name, "ok", f"{version}, {path}")


def _profiler() -> list[Finding]:
    path = shutil.which("ncu")
    if path is None:
        return [Finding("ncu", "warning", "not on PATH; needed only to profile kernels", "install Nsight Compute")]
    return [Finding("ncu", "ok", path)]


def _compiler() -> list[Finding]:
    """The C compiler that Triton builds its launchers with: `CC`, gcc or clang."""
    for name in (os.environ.get("CC"), "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return [Finding("c compiler", "ok", path)]
    detail = "neither CC nor gcc nor clang is on PATH; triton builds its launcher with it at the first launch"
    return [Finding("c compiler", "problem", detail, "install gcc (Debian and Ubuntu: apt-get install gcc)")]


def _cache() -> list[Finding]:
    path = database_path()
    return [_made_cache(path) if path.exists() else _unmade_cache(path)]


def _unmade_cache(path: Path) -> Finding:
    """Whether the first use can make the file; only the user's own cache directory is made with it."""
    folder = path.parent
    if user_cache_dir() in path.parents:
        folder = next(parent for parent in path.parents if parent.is_dir())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        detail = f"{path} cannot be made: {folder} {'is read only' if folder.is_dir() else 'does not exist'}"
        return Finding("cache", "warning", f"{detail}, so results last for one process", _CACHE_REMEDY)
    return Finding("cache", "ok", f"{path} (made on first use)")


def _made_cache(path: Path) -> Finding:
    from tlxgen.db.sqlite import why_unusable
    from tlxgen.db.store import MEMORY, Store

    if reason := why_unusable(path):
        return Finding("cache", "problem", f"{path}: {reason}", "tlxgen cache list: it moves the file aside, if unused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Store.open(path) as store:
                rows, location, writable = len(list(store.records())), store.location, store.writable
        except (TlxgenError, OSError) as error:
            return Finding("cache", "problem", f"{path} cannot be opened: {_one_line(error)}", _CACHE_REMEDY)
    complaint = "; ".join(str(warning.message) for warning in caught)
    if location == MEMORY:
        return Finding(
            "cache", "problem", f"{path} cannot be read: {complaint}", f"move {path} away, or {_CACHE_REMEDY}"
        )
    if not writable:
        return Finding("cache", "warning", f"{path}, {rows} tuned rows, cannot be written: {complaint}", _CACHE_REMEDY)
    if complaint:
        return Finding("cache", "warning", f"{path}, {rows} tuned rows; {complaint}", "tlxgen cache prune")
    return Finding("cache", "ok", f"{path}, {rows} tuned rows")


def _optional() -> list[Finding]:
    missing = [name for name in _OPTIONAL if not _installed(name)]
    if missing:
        uses = ", ".join(sorted({_OPTIONAL[name] for name in missing}))
        return [Finding("optional", "ok", f"no {', '.join(missing)}: no {uses}", "pip install 'tlxgen[plot]'")]
    return [Finding("optional", "ok", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _OPTIONAL))]


_PROBES: dict[str, Callable[[], list[Finding]]] = {
    "python": _python,
    "torch": _torch,
    "gpu": _gpu,
    "driver": _driver,
    "triton": _triton,
    "torch.compile": _graphs,
    "cuda tools": _cuda_tools,
    "ncu": _profiler,
    "c compiler": _compiler,
    "cache": _cache,
    "optional": _optional,
}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
