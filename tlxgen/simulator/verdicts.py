"""Cache of the simulator's verdicts, by hash of the kernel's code and of the simulator: may a kernel be launched?

An unreadable entry is a miss; without a writable cache directory, kernels are simulated again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from pathlib import Path

from tlxgen import paths
from tlxgen.codegen.emit import KernelSource

_SCHEDULES = 3  # one for each policy: findings hardly depend on the seed
_PACKAGE = Path(__file__).parents[1]


def why_unsafe(source: KernelSource) -> str | None:
    """The simulator's first finding, or None if the kernel may be launched."""
    known, verdict = _load(source)
    if not known:
        verdict = _simulate(source)
        with contextlib.suppress(OSError):
            paths.write_atomically(_path(source), json.dumps({"unsafe": verdict}))
    return verdict


def is_known_safe(source: KernelSource) -> bool:
    """Whether the cache says that the kernel passes; simulates nothing."""
    return _load(source) == (True, None)


def _simulate(source: KernelSource) -> str | None:
    from tlxgen.simulator.check import check

    report = check(source, _SCHEDULES, stop_early=True)
    if report.clean:
        return None
    first = report.findings[0]
    return f"{first.kind} at {first.place}: {' '.join(first.message.split())}"


def _path(source: KernelSource) -> Path:
    return paths.user_cache_dir() / "simulated" / _version() / f"{source.code_hash}.json"


def _load(source: KernelSource) -> tuple[bool, str | None]:
    """Whether there is a verdict, and the verdict."""
    try:
        verdict = json.loads(_path(source).read_text(encoding="utf-8"))["unsafe"]
    except (OSError, ValueError, KeyError, TypeError):
        return False, None
    return verdict is None or isinstance(verdict, str), verdict


@functools.cache
def _version() -> str:
    """Hash of the sources that a verdict depends on beside the code: the simulator and the operators."""
    digest = hashlib.sha256()
    for path in sorted([*_PACKAGE.glob("simulator/**/*.py"), *_PACKAGE.glob("ops/**/*.py")]):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
