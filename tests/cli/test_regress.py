"""`tlxgen regress`: shipped rows are green, each fault is red, reports, `--update`, and rows on a GPU."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from tests.support.recorded import RecordedCard
from tests.support.tuned_rows import (
    FACTS,
    GEMM,
    SHIPPED,
    VECTOR,
    edit,
    lines_of,
    row,
    slower,
    with_code_of,
    write_lines,
)
from tlxgen import devices, paths
from tlxgen.cli import app, regress
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.facts import Facts
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord
from tlxgen.devices import target
from tlxgen.errors import CompileError, OutputError, TlxgenError, TuningError, UnsupportedDeviceError
from tlxgen.regress import ratchet, report, retime, rows
from tlxgen.regress.findings import Finding, Outcome
from tlxgen.tuner import gpu_lock
from tlxgen.tuner.runner import LIMIT_S

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped files, in use, without a GPU; compilers find the facts that are stored."""
    copy = tmp_path / "cache"
    shutil.copytree(paths.SHIPPED_CACHE, copy)
    monkeypatch.setattr(paths, "SHIPPED_CACHE", copy)
    monkeypatch.setattr(devices, "detect", lambda index=None: None)
    held = ratchet.load(ratchet.path_of(SHIPPED))
    assert held is not None
    stored = {kept.code: Facts.model_validate(kept.facts) for kept in held.rows.values()}

    def compile_all(jobs: Sequence[rows.Job], workers: int | None = None) -> list[Binary | CompileError]:
        return [Binary(source, stored.get(source.code_hash, FACTS), 0.25) for source, _ in jobs]

    monkeypatch.setattr(rows, "compile_all", compile_all)
    return copy


def run(*words: object, status: int = 0) -> str:
    """What `tlxgen regress` prints."""
    result = CliRunner().invoke(app.app, ["regress", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


def answer(*words: object, status: int = 0) -> Any:
    return json.loads(run("--json", *words, status=status))


def refused(*words: object) -> TlxgenError:
    with pytest.raises(TlxgenError) as caught:
        run(*words)
    assert "\n" not in str(caught.value)
    return caught.value


def as_line(change: Callable[..., TunedRecord], line: str, **how: Any) -> str:
    """The line of a changed row."""
    return shipped._line(change(TunedRecord.model_validate_json(line), **how))


class TestFiles:
    def test_shipped_are_green(self, folder: Path, tmp_path: Path) -> None:
        summary = tmp_path / "summary.md"
        assert run("--markdown", summary) == f"{len(lines_of(folder))} rows checked without a GPU: green\n"
        assert summary.read_text().startswith("### ✅ Tuned configs: ")
        assert answer()["green"]

    @pytest.mark.parametrize(
        ("fault", "check"),
        [
            (lambda first, rest: [first, *rest, "{"], "schema"),
            (lambda first, rest: [first, *rest, '{"surprise": 1}'], "schema"),
            (lambda first, rest: [first, *rest, first], "duplicate"),
            (lambda first, rest: rest, "coverage"),
            (lambda first, rest: [first.replace('"gemm"', '"conv"'), *rest], "dead"),
            (lambda first, rest: [first.replace('"sm_count":132', '"sm_count":78'), *rest], "key"),
            (lambda first, rest: [first.replace("fbtriton 3.7.4", "fbtriton 3.6.0"), *rest], "toolchain"),
            (lambda first, rest: [first.replace('"num_stages":8', '"num_stages":99'), *rest], "config"),
            (lambda first, rest: [first.replace('"num_stages":8', '"num_stages":7'), *rest], "code"),
            (lambda first, rest: [as_line(with_code_of, first, num_stages=7), *rest], "unrecorded"),
            (lambda first, rest: [as_line(slower, first, times=1.03), *rest], "ratio"),
            (lambda first, rest: [first.replace('"K":1024', '"K":2048'), *rest], "unrecorded"),
            (lambda first, rest: [re.sub('"source_hash":"..', '"source_hash":"zz', first), *rest], "code"),
        ],
    )
    def test_with_a_fault_are_red(self, folder: Path, fault: Callable[[str, list[str]], list[str]], check: str) -> None:
        first, *rest = lines_of(folder)
        after = fault(first, rest)
        assert after != [first, *rest]
        write_lines(folder, after)
        found = answer(status=1)["findings"]
        assert check in {finding["check"] for finding in found if finding["red"]}
        assert all(finding["remedy"] for finding in found)

    def test_of_ones_own(self, folder: Path, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        shipped.dump([GEMM], own)
        assert "1 rows checked" in run("--cache", own)
        both = answer("--cache", own, "--cache", folder / "h200.jsonl", status=1)
        assert [f["check"] for f in both["findings"] if f["red"]] == ["duplicate"]

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda folder: (folder / "h200.jsonl").unlink(),
            lambda folder: (folder / "h200.ratchet.json").write_text("{"),
            lambda folder: (folder / "h200.ratchet.json").write_text('{"version": 2}'),
            lambda folder: [path.unlink() for path in folder.iterdir()],
        ],
        ids=["no file", "bad ratchet", "other version", "empty folder"],
    )
    def test_that_cannot_be_read_are_bad_input(self, folder: Path, spoil: Callable[[Path], object]) -> None:
        spoil(folder)
        assert refused().exit_code == 2

    @pytest.mark.parametrize("text", ["{", "shapes: []", "operator: conv\nshapes: []", "operator: gemm\nshapes: [1]"])
    def test_of_suites_that_cannot_be_read_are_bad_input(self, folder: Path, tmp_path: Path, text: str) -> None:
        (tmp_path / "suites").mkdir()
        (tmp_path / "suites" / "own.yaml").write_text(text)
        error = refused("--update", "--suites", tmp_path / "suites")
        assert (error.exit_code, "own.yaml" in str(error)) == (2, True)

    def test_that_cannot_be_written_are_named(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for option in ("--junit", "--markdown"):
            error = refused(option, tmp_path / "missing" / "file")
            assert isinstance(error, OutputError)
            assert option in str(error)
        edit(folder / "h200.ratchet.json", '"registers": 168', '"registers": 144')
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
        assert isinstance(refused("--update"), OutputError)


class TestUpdate:
    def test_records_changed_facts_and_leaves_rows(self, folder: Path) -> None:
        path = folder / "h200.ratchet.json"
        before, content = path.read_bytes(), (folder / "h200.jsonl").read_bytes()
        edit(path, '"registers": 168', '"registers": 144')
        assert "registers 144 → 168" in run(status=1)
        assert re.search(r"updated: .* on h200: registers 144 → 168\n", run("--update"))
        assert (path.read_bytes(), (folder / "h200.jsonl").read_bytes()) == (before, content)
        assert "updated" not in run("--update")

    def test_makes_a_missing_ratchet(self, folder: Path) -> None:
        path = folder / "h200.ratchet.json"
        before = ratchet.load(path)
        path.unlink()
        assert "no facts stored" in run(status=1)  # red for shipped files only
        output = run("--update")
        after = ratchet.load(path)
        assert before is not None
        assert after is not None
        assert output.count(": facts stored") == len(lines_of(folder))
        assert output.count("must have a row from now on") == len(after.shapes)
        assert (after.rows, set(after.shapes) <= set(before.shapes)) == (before.rows, True)

    def test_does_not_give_up_a_shape_of_a_suite(self, folder: Path) -> None:
        write_lines(folder, lines_of(folder)[1:])
        assert "coverage" in run("--update", status=1)
        assert "coverage" in run(status=1)


class TestReports:
    def test_table_and_remedies(self, folder: Path) -> None:
        write_lines(folder, [*lines_of(folder), "{"])
        lines = run(status=1).splitlines()
        number = len(lines_of(folder))
        assert lines[0].split() == ["where", "row", "check", "found"]
        assert lines[1].startswith(f"h200.jsonl:{number}  line {number}")
        assert f"  h200.jsonl:{number} schema: correct or remove the line" in "\n".join(lines)
        assert lines[-1] == f"{number} rows checked without a GPU: 1 regressed"

    def test_junit_and_markdown(self, folder: Path, tmp_path: Path) -> None:
        write_lines(folder, [*lines_of(folder)[1:], "{ \x1b | <b>"])
        junit, markdown = tmp_path / "regress.xml", tmp_path / "summary.md"
        run("--junit", junit, "--markdown", markdown, status=1)
        suite = ET.parse(junit).getroot().find("testsuite")
        assert suite is not None
        cases = suite.findall("testcase")
        assert len(cases) == int(suite.attrib["tests"]) == len(lines_of(folder)) + 1  # and the shape without a row
        assert len({case.attrib["name"] for case in cases}) == len(cases)
        failures = [failure for case in cases for failure in case.findall("failure")]
        assert [failure.attrib["type"] for failure in failures] == ["schema", "coverage"]
        assert suite.attrib["failures"] == "2"
        assert all("remedy: " in (failure.text or "") for failure in failures)
        text = markdown.read_text()
        assert text.startswith("### ❌ Tuned configs: ")
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert [len(re.findall(r"(?<!\\)\|", line)) for line in table] == [6] * 4

    def test_remarks_come_last_and_are_green(self) -> None:
        remark, red = Finding("time", "a", "b", red=False), Finding("facts", "c", "d")
        found = report.Report((Outcome(row(GEMM), (remark,)), Outcome(row(VECTOR, 2), (red,))))
        assert [finding for _, finding in found.findings()] == [red, remark]
        assert "<system-out>time: a</system-out>" in report.to_junit(found)
        assert not found.green
        assert report.Report((Outcome(row(GEMM), (remark,)),)).green


class TestOnGpu:
    """An H200 whose times are those of the rows, except for what a test changes."""

    @pytest.fixture
    def limits(self) -> list[float]:
        """Time limits of the kernels."""
        return []

    @pytest.fixture(autouse=True)
    def slow(self, folder: Path, limits: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
        """Slowdown by config id."""
        factors: dict[str, float] = {}

        def make_runner(problem: Any, limit: float) -> RecordedCard:
            limits.append(limit)
            record = next(r for r in shipped.load(SHIPPED) if r.key.problem == problem.model_dump())
            time_us = record.time_us * factors.get(record.config.id, 1.0)
            return RecordedCard({record.config: time_us}, record.peer_us or 1.0, noise=0.002)

        monkeypatch.setattr(devices, "detect", lambda index=None: target("h200"))
        monkeypatch.setattr(devices, "uuid", lambda: "0")
        monkeypatch.setattr(gpu_lock, "exclusive", lambda *_: nullcontext())
        monkeypatch.setattr(gpu_lock, "other_processes", lambda gpu: 0)
        monkeypatch.setattr(retime, "make_runner", make_runner)
        return factors

    def test_all_rows_are_timed_within_the_limit(self, folder: Path, limits: list[float]) -> None:
        found = answer("--gpu")
        assert (found["green"], found["gpu"], len(found["timed"])) == (True, "h200", len(lines_of(folder)))
        assert set(limits) == {LIMIT_S}
        limits.clear()
        run("--gpu", "--limit", 90)
        assert set(limits) == {90.0}

    def test_slower_config_is_red(self, slow: dict[str, float], folder: Path, tmp_path: Path) -> None:
        slow[VECTOR.config.id] = 1.1
        before = (folder / "h200.jsonl").read_bytes()
        output = run("--markdown", tmp_path / "summary.md", "--update", status=1)
        assert output.splitlines()[0].split() == ["timed", "µs", "ratio", "stored", "margin"]
        assert output.rstrip().endswith(f"{len(lines_of(folder))} of them timed on h200: 1 regressed")
        assert "| timed | µs | ratio | stored | margin |" in (tmp_path / "summary.md").read_text()
        assert "updated" not in output
        assert (folder / "h200.jsonl").read_bytes() == before

    def test_red_rows_are_not_timed(self, folder: Path) -> None:
        first, *rest = lines_of(folder)
        write_lines(folder, [first.replace('"num_stages":8', '"num_stages":99'), *rest])
        assert len(answer(status=1)["timed"]) == len(rest)

    def test_no_gpu_times_nothing(self) -> None:
        assert answer("--no-gpu")["timed"] == []

    @pytest.mark.parametrize("present", [target("h100"), None])
    def test_gpu_of_the_rows_model_is_required_by_gpu_only(
        self, present: devices.Gpu | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(devices, "detect", lambda index=None: present)
        assert ("0 of them timed on h100" if present else "without a GPU") in run()
        error = refused("--gpu")
        assert isinstance(error, UnsupportedDeviceError)
        assert (error.exit_code, "h100" in str(error)) == (2, present is not None)

    def test_gpu_that_does_not_answer_is_given_up(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def dead(problem: Any, limit: float) -> RecordedCard:
            asked.append(problem.label)
            return RecordedCard({}, 1.0, broken=TuningError("no CUDA-capable device is detected"))

        monkeypatch.setattr(retime, "make_runner", dead)
        output = run("--gpu", status=1)
        assert len(asked) == output.count("no CUDA-capable device") == 3
        assert output.count("not tried: the GPU did not answer") == len(lines_of(folder)) - 3

    def test_other_processes_are_a_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_lock, "other_processes", lambda gpu: 2)
        monkeypatch.setattr(regress, "_report", lambda *_: None)
        messages: list[str] = []
        log: Any = SimpleNamespace(print=lambda text, **_: messages.append(text), status=lambda text: nullcontext())
        regress.run([], regress.Outputs(), log=log, update=False, suites=None, gpu=None, workers=None)
        assert any("2 other process(es)" in message for message in messages)


def test_workflow_of_the_example_uses_existing_options() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "regress.yml").read_text())
    scripts = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    words = [word for script in scripts for word in shlex.split(script.replace("\\\n", " ")) if word.startswith("--")]
    command: Any = get_command(app.app).commands["regress"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    assert {"--junit", "--markdown", "--gpu"} <= set(words) <= known
    assert sum("tlxgen regress" in script for script in scripts) == 2


#: The shipped rows are checked in parts, which pytest-xdist can run side by side.
PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_shipped_rows_pass_compilers_and_simulator(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect", lambda index=None: None)
    for file in sorted(paths.SHIPPED_CACHE.glob("*.jsonl")):
        records, held = shipped.load(file)[part::PARTS], ratchet.load(ratchet.path_of(file))
        assert held is not None
        own = tmp_path / file.name
        shipped.dump(records, own)
        kept = {record.key.id: held.rows[record.key.id] for record in records}
        ratchet.dump(ratchet.Ratchet(rows=kept), ratchet.path_of(own))
        found = answer("--cache", own, "--workers", 1)
        assert (found["findings"], found["rows"]) == ([], len(records))
