"""The files under `benchmarks/results/`: what was measured, when, on what."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tlxgen import ops
from tlxgen._version import __version__
from tlxgen.config import Config
from tlxgen.problem import Problem
from tlxgen.toolchain import toolchain
from tlxgen.tuner.measure import PROTOCOL, DeviceReport
from tlxgen.tuner.timing import Timing


def row(problem: Problem, config: Config, timing: Timing, error: float | None, report: DeviceReport) -> dict[str, Any]:
    """One measured kernel; times in microseconds, `ratio` is the peer's time over the kernel's in the same rounds."""
    operator = ops.get(problem.operator)
    return {
        "op": problem.operator,
        "problem": problem.model_dump(),
        "config": config.model_dump(),
        "config_short": config.short,
        "time_us": round(timing.time_us, 3),
        "spread": round(timing.spread_us, 3),
        "peer": operator.peer,
        "peer_us": round(timing.peer_us, 3),
        "ratio": round(timing.peer_us / timing.time_us, 4),
        "tflops": round(operator.flops(problem) / timing.time_us * 1e-6, 1),
        "error": error,
        "error_peer": report.peer_error,
    }


def beside(found: Mapping[str, Timing], name: str, guests: Iterable[str]) -> dict[str, float]:
    """Other libraries' times over a kernel's in the same rounds."""
    return {guest: round(found[guest].relative / found[name].relative, 4) for guest in guests}


def write(folder: Path, name: str, report: DeviceReport, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Writes `<date>-<name>-<gpu>.json`."""
    date = datetime.now(timezone.utc).date().isoformat()
    path = folder / f"{date}-{name}-{report.gpu.slug}.json"
    content = {
        "date": date,
        "gpu": report.gpu.slug,
        "sm_count": report.gpu.sm_count,
        "driver": report.versions.get("driver", ""),
        "versions": {
            "tlxgen": __version__,
            "python": platform.python_version(),
            "toolchain": toolchain(),
            "torch": report.versions.get("torch", ""),
            "cuda": report.versions.get("cuda", ""),
        },
        "protocol": PROTOCOL,
        **more,
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
