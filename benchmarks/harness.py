"""Steps that the scripts share: options, the GPU's report, gate, results files, tables."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tlxgen import devices, ops
from tlxgen._version import __version__
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.problem import Problem
from tlxgen.toolchain import toolchain
from tlxgen.tuner.measure import PROTOCOL, DeviceReport, Setup
from tlxgen.tuner.runner import Runner
from tlxgen.tuner.timing import Timing

Row = dict[str, Any]


def options(text: str | None) -> argparse.ArgumentParser:
    """A parser with `--output`, and a module's docstring as its help."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"), help="folder of results")
    return parser


def require_gpu() -> None:
    """Ends the script with one line if this process has no GPU."""
    if devices.detect() is None:
        raise SystemExit("this benchmark needs an NVIDIA GPU, and torch sees none here")


def device_report() -> DeviceReport:
    """GPU and versions."""
    require_gpu()
    return Setup("gemm", ops.get("gemm").problem((128, 128, 128)), seed=1)()


def pass_gate(runner: Runner, configs: Mapping[str, Config]) -> dict[str, float | None]:
    """Errors of the configs that are right, by name; from then on they can be timed. Prints the others."""
    errors = {}
    for name, config in configs.items():
        verdict = runner.gate(name, emit(ops.get(runner.operator), runner.problem, config))
        if verdict.status == "ok":
            errors[name] = verdict.error
        else:
            print(f"{runner.problem.label} {config.short}: {verdict.status}, {verdict.message}")
    return errors


@dataclass
class Results:
    """The results file `<date>-<name>-<gpu>.json`, written after every row so that a run that breaks off loses little.

    It holds date, GPU, driver, versions, protocol, `more` and the rows. Without `report` it is `<date>-<name>.json` and
    names the processor in place of the GPU.
    """

    folder: Path
    name: str
    report: DeviceReport | None = None
    more: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Path of the file."""
        gpu = [self.report.gpu.slug] if self.report else []
        return self.folder / f"{'-'.join([_today(), self.name, *gpu])}.json"

    def add(self, row: Row, line: str) -> None:
        """Appends a row, prints its line and writes the file."""
        self.rows.append(row)
        print(line, flush=True)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        versions = {"tlxgen": __version__, "python": platform.python_version(), "toolchain": toolchain()}
        machine: Row = {"processor": _processor(), "versions": versions}
        if self.report:
            gpu, found = self.report.gpu, self.report.versions
            versions |= {name: found.get(name, "") for name in ("torch", "cuda")}
            machine = {"gpu": gpu.slug, "sm_count": gpu.sm_count, "driver": found.get("driver", "")}
            machine |= {"versions": versions, "protocol": PROTOCOL}
        content = {"date": _today(), **machine, **self.more, "rows": self.rows}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def kernel_row(problem: Problem, config: Config, timing: Timing, error: float | None, report: DeviceReport) -> Row:
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


def mean_and_least(ratios: Iterable[float]) -> str:
    """Geometric mean and minimum, as text."""
    values = list(ratios)
    if not values:
        return "no ratios"
    return f"geometric mean {statistics.geometric_mean(values):.3f}, least {min(values):.3f} of {len(values)}"


def spaced(values: Mapping[str, float], form: str) -> str:
    """`name value` pairs of a table's line."""
    return "  ".join(f"{name} {format(value, form)}" for name, value in values.items())


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
