"""Reports of the gate: JUnit for CI servers, Markdown for pull requests, JSON for programs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree as ET

from tlxgen.regress.findings import Finding, Outcome

#: Characters that XML cannot hold, even escaped (Extensible Markup Language 1.0, production 2).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Report:
    """All outcomes, changes by `--update`, and the GPU."""

    outcomes: tuple[Outcome, ...]
    changes: tuple[str, ...] = ()
    gpu: str = ""  #: its slug; empty if none was used

    @property
    def green(self) -> bool:
        """Whether no row fails the gate."""
        return not any(outcome.red for outcome in self.outcomes)

    @property
    def verdict(self) -> str:
        """The summary in one line."""
        rows = sum(outcome.row.line > 0 for outcome in self.outcomes)
        red = sum(outcome.red for outcome in self.outcomes)
        timed = sum(outcome.retimed is not None for outcome in self.outcomes)
        where = f", {timed} of them timed on {self.gpu}" if self.gpu else " without a GPU"
        return f"{rows} rows checked{where}: {f'{red} regressed' if red else 'green'}"

    def findings(self) -> Iterator[tuple[Outcome, Finding]]:
        """All findings with their outcomes, red ones first."""
        pairs = [(outcome, finding) for outcome in self.outcomes for finding in outcome.findings]
        return iter(sorted(pairs, key=lambda pair: not pair[1].red))


def times(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, str, str, str]]:
    """Of each timed row: name, µs, ratio, stored ratio, margin."""
    for outcome in outcomes:
        t = outcome.retimed
        if t is not None:
            yield outcome.row.name, f"{t.time_us:.2f}", f"{t.ratio:.3f}", f"{t.stored_ratio:.3f}", f"{t.margin:.3f}"


def to_json(report: Report) -> dict[str, Any]:
    """The content of `--json`."""
    return {
        "green": report.green,
        "rows": sum(outcome.row.line > 0 for outcome in report.outcomes),
        "findings": [
            {"file": str(outcome.row.file), "line": outcome.row.line, "row": outcome.row.name, **asdict(finding)}
            for outcome, finding in report.findings()
        ],
        "gpu": report.gpu or None,
        "timed": [
            {"row": outcome.row.name, **asdict(outcome.retimed)} for outcome in report.outcomes if outcome.retimed
        ],
        "updated": list(report.changes),
    }


def to_junit(report: Report) -> str:
    """JUnit XML with a suite per file, and a test case per row, missing rows included."""
    root = ET.Element("testsuites", name="tlxgen regress")
    for file in dict.fromkeys(outcome.row.file for outcome in report.outcomes):
        outcomes = [outcome for outcome in report.outcomes if outcome.row.file == file]
        red = sum(outcome.red for outcome in outcomes)
        suite = ET.SubElement(root, "testsuite", name=str(file), tests=str(len(outcomes)), failures=str(red))
        for outcome in outcomes:
            _add_case(suite, outcome)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ET.Element, outcome: Outcome) -> None:
    row = outcome.row
    name = f"{row.name} [{row.record.key.id[:8]}]" if row.record else row.name  # a problem may have several toolchains
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"regress.{row.file.stem}",
        name=_xml(name),
        file=str(row.file),
        line=str(row.line),
        time=f"{outcome.seconds:.3f}",
    )
    red = [finding for finding in outcome.findings if finding.red]
    if red:
        failure = ET.SubElement(case, "failure", type=red[0].check, message=_xml(red[0].what))
        failure.text = _xml("\n".join(f"{row.place} {f.check}: {f.what}\nremedy: {f.remedy}" for f in red))
    remarks = [f"{finding.check}: {finding.what}" for finding in outcome.findings if not finding.red]
    if remarks:
        ET.SubElement(case, "system-out").text = _xml("\n".join(remarks))


def _xml(text: str) -> str:
    return _NOT_XML.sub("�", text)


def to_markdown(report: Report) -> str:
    """A summary for a pull request or for `$GITHUB_STEP_SUMMARY`."""
    mark = "✅" if report.green else "❌"
    lines = [f"### {mark} Tuned configs: {report.verdict}", ""]
    found = [
        (f.check if f.red else f"{f.check} (remark)", o.row.place, o.row.name, f.what, f.remedy)
        for o, f in report.findings()
    ]
    if found:
        lines += [*_markdown_table(("check", "where", "row", "found", "what to do"), found), ""]
    timed = list(times(report.outcomes))
    if timed:
        lines += [*_markdown_table(("timed", "µs", "ratio", "stored", "margin"), timed), ""]
    if report.changes:
        lines += ["Updated:", "", *(f"- {change}" for change in report.changes), ""]
    return "\n".join(lines)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(_cell(text) for text in row)} |"


def _cell(text: str) -> str:
    """Text escaped for a table cell; commands in backticks stay as they are."""
    plain = " ".join(text.split()).replace("|", "\\|")
    return plain if "`" in plain else plain.replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
