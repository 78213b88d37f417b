"""Writes the newest results of the GEMM suite into README.md, between `<!-- gemm-suite -->` and `<!-- /gemm-suite -->`.

    python -m benchmarks.report            # rewrite the table
    python -m benchmarks.report --check    # exit 1 if the README is out of date

Nothing is computed here but geometric means: every number stands in a file that `benchmarks.suite` wrote.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeFloat, PositiveFloat, ValidationError

_ROOT = Path(__file__).parent.parent
_OPEN, _CLOSE = "<!-- gemm-suite -->", "<!-- /gemm-suite -->"
_BLOCK = re.compile(f"{re.escape(_OPEN)}\n.*?{re.escape(_CLOSE)}", re.DOTALL)

#: `<date>-gemm-<gpu>.json`; exhaustive searches have another suite's name before `gemm`.
_RESULTS = re.compile(r"\d{4}-\d{2}-\d{2}-gemm-[a-z0-9-]+\.json")

_TIMES = "\N{MULTIPLICATION SIGN}"
_HEADER = (_TIMES.join("MNK"), "tlxgen µs", "cuBLAS µs", "ratio", "TFLOP/s", "default's ratio", "config")
_NOTHING = """\
Nothing has been measured yet by this suite. `python -m benchmarks.suite benchmarks/suites/gemm.yaml` measures on a
Hopper GPU, and `python -m benchmarks.report` writes the table here."""
_NAMES = {"cuda": "CUDA", "python": "Python", "toolchain": ""}


class ReportError(ValueError):
    """A README or a results file that cannot be reported from."""


class Row(BaseModel):
    """One kernel of one shape; times in microseconds."""

    kind: Literal["tuned", "default"]
    problem: dict[str, Any]
    config: dict[str, Any]
    time_us: PositiveFloat
    spread: NonNegativeFloat  #: interquartile range of the rounds
    peer_us: PositiveFloat
    ratio: PositiveFloat
    tflops: PositiveFloat

    @property
    def what(self) -> str:
        """All of the problem but its sizes, such as `bf16, nn`."""
        p = self.problem
        words = [p["dtype"], p["layout"]]
        words += [f"{p['out_dtype']} out"] if p["out_dtype"] != p["dtype"] else []
        words += [p["epilogue"]] if p["epilogue"] != "none" else []
        return ", ".join(words)


class Results(BaseModel):
    """What `benchmarks.results.write` wrote, as far as it is reported."""

    date: str
    gpu: str
    sm_count: int
    driver: str
    versions: dict[str, str]
    protocol: str
    rows: list[Row]


@dataclass(frozen=True)
class Shape:
    """The rows of one problem: tuned and default config are timed in one measurement."""

    tuned: Row | None
    default: Row | None


def newest(folder: Path) -> Path | None:
    """The latest results file of the GEMM suite; of one day's, the last by name."""
    return max((path for path in folder.glob("*.json") if _RESULTS.fullmatch(path.name)), default=None)


def load(path: Path) -> Results:
    """The results of a file.

    Raises:
        ReportError: the file cannot be read, or it is not what the suite writes.
    """
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ReportError(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None


def section(results: Results | None, source: str = "") -> str:
    """What stands between the markers.

    Args:
        results: the newest results, or None where nothing was measured.
        source: name of the file that they are from, relative to the project.
    """
    if results is None or not results.rows:
        return _NOTHING
    shapes = _shapes(results.rows)
    kinds = sorted({row.what for row in results.rows})
    lines = [
        f"One {results.gpu.upper()} ({results.sm_count} SMs), {results.date}, driver {results.driver}; "
        f"{_versions(results.versions)}; protocol {results.protocol}."
        + (f" All shapes {kinds[0]}." if len(kinds) == 1 else ""),
        "",
        _means(shapes),
        f"Ratio: cuBLAS's time over the kernel's, the median over the rounds of one run. {_spread(results.rows)}",
        f"Source: [{source}]({source}).",
        "",
        f"| {' | '.join(_HEADER)} |",
        "|---|--:|--:|--:|--:|--:|---|",
        *(_line(shape, name_kind=len(kinds) > 1) for shape in shapes),
    ]
    return "\n".join(lines)


def replaced(readme: str, text: str) -> str:
    """The README with `text` between the markers.

    Raises:
        ReportError: the markers are missing or stand there twice.
    """
    if len(_BLOCK.findall(readme)) != 1 or readme.count(_OPEN) != 1 or readme.count(_CLOSE) != 1:
        raise ReportError(f"the README needs one line {_OPEN} and, after it, one line {_CLOSE}")
    return _BLOCK.sub(lambda _: f"{_OPEN}\n{text}\n{_CLOSE}", readme)


def _shapes(rows: Sequence[Row]) -> list[Shape]:
    """The rows by problem, in the order of the suite."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(str(sorted(row.problem.items())), {})[row.kind] = row
    return [Shape(kinds.get("tuned"), kinds.get("default")) for kinds in found.values()]


def _means(shapes: Sequence[Shape]) -> str:
    parts = []
    for name, rows in (("tuned", [s.tuned for s in shapes]), ("default config", [s.default for s in shapes])):
        ratios = [row.ratio for row in rows if row is not None]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            parts.append(f"{name} {mean:.3f} over {_count(len(ratios))} (least {min(ratios):.3f})")
    return f"Geometric mean of the ratios: {', '.join(parts)}."


def _spread(rows: Sequence[Row]) -> str:
    spreads = [row.spread / row.time_us for row in rows]
    return f"Interquartile range of the rounds: {min(spreads):.1%} to {max(spreads):.1%} of the time."


def _count(shapes: int) -> str:
    return f"{shapes} shape{'s' if shapes > 1 else ''}"


def _line(shape: Shape, *, name_kind: bool) -> str:
    row = shape.tuned or shape.default
    assert row is not None
    p = row.problem
    cells = [_TIMES.join(str(p[size]) for size in "MNK") + (f" {row.what}" if name_kind else "")]
    if shape.tuned is None:
        cells += ["not tuned", f"{row.peer_us:.1f}", "-", "-"]
    else:
        cells += [f"{row.time_us:.1f}", f"{row.peer_us:.1f}", f"{row.ratio:.3f}", f"{row.tflops:.0f}"]
    cells.append("-" if shape.default is None else f"{shape.default.ratio:.3f}")
    cells.append("-" if shape.tuned is None else _config(shape.tuned.config))
    return f"| {' | '.join(cells)} |"


def _config(config: dict[str, Any]) -> str:
    """A config in few words, such as `tma_pingpong, 6 stages, group_m 8`, with the tile."""
    params = config["params"]
    tile = _TIMES.join(str(params[name]) for name in ("block_m", "block_n", "block_k"))
    words = [
        f"{config['template'].removeprefix('gemm_')} {tile}",
        f"{params['num_stages']} stages",
        f"group_m {params['group_m']}",
    ]
    if params.get("pdl", "off") != "off":
        words.append(f"pdl {params['pdl']}")
    return ", ".join(words)


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{_NAMES.get(name, name)} {version}".strip() for name, version in versions.items() if version)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks the README. Returns the exit status: 1 if `--check` finds it out of date, 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README is out of date")
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks" / "results", help="folder of results")
    parser.add_argument("--readme", type=Path, default=_ROOT / "README.md", help="file to write to")
    options = parser.parse_args(arguments)
    try:
        path = newest(options.results)
        text = section(load(path), f"benchmarks/results/{path.name}") if path else section(None)
        before = options.readme.read_text(encoding="utf-8")
        after = replaced(before, text)
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    if before == after:
        print(f"{options.readme} is up to date")
    elif options.check:
        print(f"{options.readme} is out of date; run python -m benchmarks.report", file=sys.stderr)
        return 1
    else:
        options.readme.write_text(after, encoding="utf-8")
        print(f"{options.readme} rewritten from {path.name if path else 'nothing: no results yet'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
