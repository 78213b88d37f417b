"""Table of the newest GEMM suite in README.md, between `<!-- gemm-suite -->` and `<!-- /gemm-suite -->`.

    python -m benchmarks.report            # rewrite the table
    python -m benchmarks.report --check    # exit 1 if the README is out of date

Needs no GPU and takes a second. Every number but the geometric means stands in a file that `benchmarks.suite` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row

_ROOT = Path(__file__).parent.parent
_OPEN, _CLOSE = "<!-- gemm-suite -->", "<!-- /gemm-suite -->"
_BLOCK = re.compile(f"{re.escape(_OPEN)}\n.*?{re.escape(_CLOSE)}", re.DOTALL)
_RESULTS = re.compile(r"\d{4}-\d{2}-\d{2}-gemm-[a-z0-9-]+\.json")

_TIMES = "\N{MULTIPLICATION SIGN}"
_HEADER = (_TIMES.join("MNK"), "tlxgen µs", "cuBLAS µs", "ratio", "TFLOP/s", "default's ratio", "config")
_NOTHING = """\
Nothing has been measured yet by this suite. `python -m benchmarks.suite benchmarks/suites/gemm.yaml` measures on a
Hopper GPU, and `python -m benchmarks.report` writes the table here."""
_NAMES = {"cuda": "CUDA", "python": "Python", "toolchain": ""}


class ReportError(ValueError):
    """A results file that cannot be used."""


def newest(folder: Path) -> Path | None:
    """The latest results file of the GEMM suite; of one day's, the last by name."""
    return max((path for path in folder.glob("*.json") if _RESULTS.fullmatch(path.name)), default=None)


def section(path: Path | None) -> str:
    """The text between the markers.

    Raises:
        ReportError: the file is not a results file of the suite.
    """
    if path is None:
        return _NOTHING
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        return _section(results, f"benchmarks/results/{path.name}") if results["rows"] else _NOTHING
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ReportError(f"{path}: not a results file of the suite: {type(error).__name__}: {error}") from None


def _section(results: Row, source: str) -> str:
    rows = results["rows"]
    shapes: dict[str, dict[str, Row]] = {}  # rows of a problem by kind, in the order of the suite
    for row in rows:
        shapes.setdefault(str(sorted(row["problem"].items())), {})[row["kind"]] = row
    kinds = sorted({_options(row["problem"]) for row in rows})
    spreads = [row["spread"] / row["time_us"] for row in rows]
    versions = (
        f"{_NAMES.get(name, name)} {version}".strip() for name, version in results["versions"].items() if version
    )
    gpu = f"One {results['gpu'].upper()} ({results['sm_count']} SMs), {results['date']}, driver {results['driver']}"
    all_shapes = f" All shapes {kinds[0]}." if len(kinds) == 1 else ""
    spread = f"Interquartile range of the rounds: {min(spreads):.1%} to {max(spreads):.1%} of the time."
    lines = [
        f"{gpu}; {', '.join(versions)}; protocol {results['protocol']}.{all_shapes}",
        "",
        _means(rows),
        f"Ratio: cuBLAS's time over the kernel's, the median over the rounds of one run. {spread}",
        f"Source: [{source}]({source}).",
        "",
        f"| {' | '.join(_HEADER)} |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    lines += [_line(shape.get("tuned"), shape.get("default"), options=len(kinds) > 1) for shape in shapes.values()]
    return "\n".join(lines)


def _means(rows: Sequence[Row]) -> str:
    parts = []
    for kind, name in (("tuned", "tuned"), ("default", "default config")):
        ratios = [row["ratio"] for row in rows if row["kind"] == kind]
        if ratios:
            count = f"{len(ratios)} shape{'s' if len(ratios) > 1 else ''}"
            parts.append(f"{name} {statistics.geometric_mean(ratios):.3f} over {count} (least {min(ratios):.3f})")
    return f"Geometric mean of the ratios: {', '.join(parts)}."


def _line(tuned: Row | None, default: Row | None, *, options: bool) -> str:
    row = tuned or default
    assert row is not None
    cells = [_TIMES.join(str(row["problem"][size]) for size in "MNK")]
    if options:
        cells[0] += f" {_options(row['problem'])}"
    if tuned is None:
        cells += ["not tuned", f"{row['peer_us']:.1f}", "-", "-"]
    else:
        cells += [f"{row['time_us']:.1f}", f"{row['peer_us']:.1f}", f"{row['ratio']:.3f}", f"{row['tflops']:.0f}"]
    cells += ["-" if default is None else f"{default['ratio']:.3f}", "-" if tuned is None else _config(tuned["config"])]
    return f"| {' | '.join(cells)} |"


def _options(problem: Row) -> str:
    """All of a problem except its sizes, such as `bf16, nn`."""
    words = [problem["dtype"], problem["layout"]]
    words += [f"{problem['out_dtype']} out"] if problem["out_dtype"] != problem["dtype"] else []
    words += [problem["epilogue"]] if problem["epilogue"] != "none" else []
    return ", ".join(words)


def _config(config: Row) -> str:
    """A short form of a config, such as `tma_pingpong <tile>, 6 stages, group_m 8`."""
    params = config["params"]
    tile = _TIMES.join(str(params[name]) for name in ("block_m", "block_n", "block_k"))
    words = [f"{config['template'].removeprefix('gemm_')} {tile}", f"{params['num_stages']} stages"]
    words += [f"group_m {params['group_m']}"]
    words += [f"pdl {params['pdl']}"] if params.get("pdl", "off") != "off" else []
    return ", ".join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks the README. Returns the exit status: 1 if `--check` finds it out of date, 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README is out of date")
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks" / "results", help="folder of results")
    parser.add_argument("--readme", type=Path, default=_ROOT / "README.md", help="file to write to")
    options = parser.parse_args(arguments)
    try:
        text = section(newest(options.results))
        before = options.readme.read_text(encoding="utf-8")
    except (ReportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    if not (len(_BLOCK.findall(before)) == before.count(_OPEN) == before.count(_CLOSE) == 1):
        print(f"report: the README needs one line {_OPEN} and, after it, one line {_CLOSE}", file=sys.stderr)
        return 2
    after = _BLOCK.sub(lambda _: f"{_OPEN}\n{text}\n{_CLOSE}", before)
    if before == after:
        print(f"{options.readme} is up to date")
    elif options.check:
        print(f"{options.readme} is out of date; run python -m benchmarks.report", file=sys.stderr)
        return 1
    else:
        options.readme.write_text(after, encoding="utf-8")
        print(f"{options.readme} rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
