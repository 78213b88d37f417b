"""Whether a kernel may be launched: the simulator's word on it, remembered by the hash of its code.

A verdict counts as long as neither the code nor what it was simulated with has changed. Any defect of a remembered
verdict is a miss; where none can be written, kernels are simulated again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from pathlib import Path

from tlxgen import paths
from tlxgen.codegen.emit import KernelSource

_SCHEDULES = 3  # one for each policy: what is found hardly depends on the seed
_PACKAGE = Path(__file__).parents[1]


def why_unsafe(source: KernelSource) -> str | None:
    """The first thing that the simulator finds, or None if the kernel may be launched."""
    known, verdict = _recall(source)
    if not known:
        verdict = _simulate(source)
        _remember(source, verdict)
    return verdict


def is_known_safe(source: KernelSource) -> bool:
    """Whether the simulator has passed this kernel before; simulates nothing."""
    return _recall(source) == (True, None)


def _simulate(source: KernelSource) -> str | None:
    from tlxgen.simulator.check import check

    report = check(source, _SCHEDULES, stop_early=True)
    if report.clean:
        return None
    first = report.findings[0]
    return f"{first.kind} at {first.place}: {' '.join(first.message.split())}"


def _place(source: KernelSource) -> Path:
    return paths.user_cache_dir() / "simulated" / _version() / f"{source.code_hash}.json"


def _recall(source: KernelSource) -> tuple[bool, str | None]:
    """Whether there is a verdict, and which."""
    try:
        verdict = json.loads(_place(source).read_text(encoding="utf-8"))["unsafe"]
    except (OSError, ValueError, KeyError, TypeError):
        return False, None
    return verdict is None or isinstance(verdict, str), verdict


def _remember(source: KernelSource, verdict: str | None) -> None:
    with contextlib.suppress(OSError):
        paths.write_atomically(_place(source), json.dumps({"unsafe": verdict}))


@functools.cache
def _version() -> str:
    """Hash of what a verdict depends on beside the code: simulator, small problems, references, and when they agree."""
    digest = hashlib.sha256()
    for path in sorted([*_PACKAGE.glob("simulator/**/*.py"), *_PACKAGE.glob("ops/**/*.py")]):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
