"""`tlxgen tune` of lists of problems: `--untuned`, `--suite`, `--only`, `--within`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tlxgen import devices, ops
from tlxgen.cli import app
from tlxgen.cli import tune as tuning_cli
from tlxgen.codegen.emit import emit
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import target
from tlxgen.errors import TuningError
from tlxgen.ops import suites
from tlxgen.runtime import kernel
from tlxgen.runtime.selection import select
from tlxgen.space.candidates import default_config
from tlxgen.tuner import gpu_lock
from tlxgen.tuner.compile_pool import CompilePool
from tlxgen.tuner.process import Child

H200 = target("h200")


@pytest.fixture(autouse=True)
def on_h200(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
    monkeypatch.setattr(devices, "detect", lambda _=None: H200)
    kernel.forget()
    yield
    kernel.forget()


@pytest.fixture
def processes() -> list[tuple[object, ...]]:
    """Child and pool of each run."""
    return []


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, processes: list[tuple[object, ...]]) -> list[str]:
    """Labels of the problems that `run` was called with; it tunes nothing."""
    labels: list[str] = []

    def run(problem: Any, options: tuning_cli.Options, _log: object, *lent: object) -> SimpleNamespace:
        labels.append(problem.label)
        processes.append(lent)
        if problem.M == 512:
            raise TuningError("no candidate survived")
        return SimpleNamespace(interrupted=problem.M == 1536)

    monkeypatch.setattr(tuning_cli, "run", run)
    return labels


@pytest.fixture
def tlxgen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    before = signal.getsignal(signal.SIGTERM)

    def command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tlxgen", "tune", *words])
        try:
            app.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
        return 0

    yield command
    signal.signal(signal.SIGTERM, before)


def keep(problem: Any, **changes: Any) -> TunedRecord:
    """Stores a measured row of today's code, with changes."""
    config = default_config(problem, H200)
    assert config is not None
    record = TunedRecord(
        key=tuning_key(problem, H200.key),
        config=config,
        origin="measured",
        source_hash=emit(ops.get("gemm"), problem, config).code_hash,
        time_us=10.0,
        protocol="graph-2",
    ).model_copy(update=changes)
    with Store.open(read_only_ok=False) as store:
        store.delete([record.key])
        store.put(record)
    return record


def ask(m: int, times: int = 1, gpu: devices.Gpu = H200) -> None:
    for _ in range(times):
        kernel.forget()
        select(ops.get("gemm").problem((m, 1024, 1024)), gpu)


def test_untuned_problems_are_tuned_most_wanted_first(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    ask(1024)
    ask(2048, times=3)
    ask(4096, gpu=target("h100"))  # of another machine with the same database
    assert tlxgen("--untuned") == 0
    assert tuned == ["gemm 2048 1024 1024 bf16 nn", "gemm 1024 1024 1024 bf16 nn"]


def test_operator_limits_the_list(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    ask(1024)
    assert tlxgen("attention", "--untuned") == 0
    assert tuned == []
    assert tlxgen("gemm", "--untuned") == 0
    assert len(tuned) == 1


def test_failure_stops_no_other_and_is_reported_at_the_end(
    tlxgen: Callable[..., int], tuned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ask(512, times=2)
    ask(1024)
    assert tlxgen("--untuned") == 1
    assert len(tuned) == 2
    assert "1 of 2 problems have no working candidate: gemm 512 1024 1024 bf16 nn" in " ".join(
        capsys.readouterr().err.split()
    )


def test_all_problems_share_a_child_and_a_pool(
    tlxgen: Callable[..., int], tuned: list[str], processes: list[tuple[object, ...]]
) -> None:
    ask(1024)
    ask(2048)
    assert tlxgen("--untuned") == 0
    first, second = processes
    assert [type(one) for one in first] == [Child, CompilePool]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_interruption_ends_the_list(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    ask(1536, times=2)
    ask(1024)
    assert tlxgen("--untuned") == 0
    assert len(tuned) == 1


def test_keys_of_other_versions_are_ignored(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    strange = tuning_key(ops.get("gemm").problem((8, 8, 8)), H200.key)
    strange = strange.model_copy(update={"problem": {**strange.problem, "colour": "blue"}})
    with Store.open(read_only_ok=False) as store:
        store.note_untuned(strange)
    assert tlxgen("--untuned") == 0
    assert tuned == []


@pytest.mark.parametrize("words", [("gemm", "8", "8", "8", "--untuned"), ()], ids=["and a problem", "nothing"])
def test_problem_and_list_exclude_each_other(
    words: tuple[str, ...], tlxgen: Callable[..., int], tuned: list[str]
) -> None:
    assert tlxgen(*words) == 2
    assert tuned == []


@pytest.mark.parametrize(
    ("ours", "on_the_gpu", "load", "warned", "busy"),
    [
        (True, 1, 90, False, False),
        (True, 2, 90, True, True),
        (False, 0, 90, False, False),
        (False, 1, 90, True, True),
        (False, 1, 0, True, False),
    ],
    ids=["ours", "ours and another", "none", "another", "another that is idle"],
)
def test_other_processes_are_a_warning_and_make_the_result_provisional_if_they_load_the_gpu(
    ours: bool, on_the_gpu: int, load: int, warned: bool, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def tune(*_: object, **named: object) -> SimpleNamespace:
        asked.update(named)
        return SimpleNamespace(interrupted=False)

    monkeypatch.setattr(tuning_cli, "tune", tune)
    monkeypatch.setattr(tuning_cli, "describe", lambda *_: "")
    monkeypatch.setattr(tuning_cli, "require_tlx", lambda: None)
    monkeypatch.setattr(devices, "uuid", lambda: "here")
    monkeypatch.setattr(gpu_lock, "exclusive", lambda *_: nullcontext())
    monkeypatch.setattr(gpu_lock, "other_processes", lambda _: on_the_gpu)
    monkeypatch.setattr(gpu_lock, "load", lambda _: load)
    log = Console(file=StringIO(), width=200)
    child: Any = SimpleNamespace(alive=ours)
    options = tuning_cli.Options(8, 1.0, "tpe", 0, None, None, compile_only=False, target=None, as_json=False)
    tuning_cli.run(ops.get("gemm").problem((256, 256, 256)), options, log, child)
    assert ("1 other process(es) compute on this GPU" in log.file.getvalue()) == warned  # type: ignore[attr-defined]
    assert asked["gpu_busy"] is busy


class TestSuite:
    """`--suite`: every shape of a file that has no measured row."""

    @pytest.fixture
    def suite(self, tmp_path: Path) -> str:
        file = tmp_path / "three.yaml"
        file.write_text(
            "operator: gemm\noptions: {layout: nt}\nshapes:\n"
            "  - {sizes: [512, 1024, 1024]}\n  - {sizes: [1024, 1024, 1024]}\n"
            "  - {sizes: [2048, 1024, 1024], options: {layout: nn}}\n"
        )
        return str(file)

    def test_tuned_shapes_are_left_out_and_failures_stop_no_other(
        self, tlxgen: Callable[..., int], tuned: list[str], suite: str
    ) -> None:
        problem = ops.get("gemm").problem((1024, 1024, 1024), layout="nt")
        keep(problem)
        assert tlxgen("--suite", suite) == 1  # 512 fails
        assert tuned == ["gemm 512 1024 1024 bf16 nt", "gemm 2048 1024 1024 bf16 nn"]
        tuned.clear()
        keep(problem, source_hash="0" * 32)  # of code that has changed
        tlxgen("--suite", suite)
        assert "gemm 1024 1024 1024 bf16 nt" in tuned

    def test_again_tunes_them_too(self, tlxgen: Callable[..., int], tuned: list[str], suite: str) -> None:
        record = keep(ops.get("gemm").problem((1024, 1024, 1024), layout="nt"))
        tlxgen("--suite", suite, "--again")
        assert tuned == [problem.label for problem in suites.problems(suite)]
        with Store.open() as store:
            assert store.get(record.key) == record

    @pytest.mark.parametrize(
        ("words", "found"),
        [
            (["nt"], [512, 1024]),
            (["1024 1024"], [512, 1024, 2048]),
            (["2048"], [2048]),
            (["1024 1024 1024"], [1024]),
            (["512 1024", "nt"], [512]),
        ],
    )
    def test_only_selects_by_words(
        self, tlxgen: Callable[..., int], tuned: list[str], suite: str, words: list[str], found: list[int]
    ) -> None:
        tlxgen("--suite", suite, *(f"--only={some}" for some in words))
        assert [int(label.split()[1]) for label in tuned] == found

    @pytest.mark.parametrize("words", [["nt", "nn"], ["102"], ["4 1024"]], ids=" and ".join)
    def test_only_without_a_match_is_bad_input(
        self,
        tlxgen: Callable[..., int],
        tuned: list[str],
        suite: str,
        words: list[str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert tlxgen("--suite", suite, *(f"--only={some}" for some in words)) == 2
        assert tuned == []
        told = " ".join(capsys.readouterr().err.split())
        assert f"has {' and '.join(map(repr, words))}; one is 'gemm 512 1024 1024 bf16 nt'" in told

    def test_only_may_select_tuned_shapes(
        self, tlxgen: Callable[..., int], tuned: list[str], suite: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keep(ops.get("gemm").problem((1024, 1024, 1024), layout="nt"))
        assert tlxgen("--suite", suite, "--only", "1024 1024 1024") == 0
        assert tuned == []
        assert "1 of 1 shapes are tuned on h200" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words",
        [
            ["--suite", "nosuch"],
            ["gemm", "8", "8", "8", "--suite", "gemm"],
            ["--untuned", "--suite", "gemm"],
            ["--untuned", "--only", "nt"],
            ["gemm", "8", "8", "8", "--again"],
            ["gemm", "8", "8", "8", "--within", "60"],
        ],
        ids=" ".join,
    )
    def test_bad_combinations_are_bad_input(
        self, tlxgen: Callable[..., int], tuned: list[str], words: list[str]
    ) -> None:
        assert tlxgen(*words) == 2
        assert tuned == []

    def test_invalid_file_is_bad_input(self, tlxgen: Callable[..., int], tuned: list[str], tmp_path: Path) -> None:
        for content in (
            "[]",
            "operator: gemm",
            "{{",
            "operator: nosuch\nshapes: []",
            "operator: gemm\nshapes: [{sizes: [-1, 2, 3]}]",
        ):
            (tmp_path / "bad.yaml").write_text(content)
            assert tlxgen("--suite", str(tmp_path / "bad.yaml")) == 2
        assert tuned == []

    @pytest.mark.parametrize("name", ["gemm", "grouped_gemm", "attention", "attention_varlen", "vector_add"])
    def test_shipped_suites_hold_problems(self, name: str) -> None:
        found = suites.problems(name)
        assert len(set(found)) == len(found) > 0
        assert {problem.operator for problem in found} == {name}


class TestPart:
    """`suites.part`."""

    def test_finds_words_and_fields(self) -> None:
        listed = suites.problems("grouped_gemm")
        found = suites.part(listed, ["gather"])
        assert found == suites.part(listed, ["form=gather"]) == [one for one in listed if "gather" in one.label]
        assert 0 < len(found) < len(listed)
        assert suites.part(found, ["swiglu", "grouped_gemm"]) == suites.part(listed, ["gather", "swiglu"])
        assert suites.part(listed, []) == listed

    def test_finds_parts_of_an_epilogue(self) -> None:
        problem = ops.get("gemm").problem((8, 8, 8), epilogue="bias+gelu")
        assert suites.part([problem], ["gelu"]) == suites.part([problem], ["bias+gelu"]) == [problem]
        assert suites.part([problem], ["gel"]) == []


class TestWithin:
    """`--within`: no problem is begun after that time."""

    @pytest.fixture(autouse=True)
    def ten_seconds_each(self, monkeypatch: pytest.MonkeyPatch, tuned: list[str]) -> None:
        monkeypatch.setattr(tuning_cli, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(tuned)))

    @pytest.mark.parametrize(("seconds", "begun"), [(0, 1), (15, 2), (25, 3), (1000, 3)])
    def test_leaves_problems_after_its_time(
        self,
        tlxgen: Callable[..., int],
        tuned: list[str],
        seconds: int,
        begun: int,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for times, m in enumerate((1024, 2048, 4096), start=1):
            ask(m, times)
        assert tlxgen("--untuned", "--within", str(seconds)) == 0
        assert tuned == [f"gemm {m} 1024 1024 bf16 nn" for m in (4096, 2048, 1024)][:begun]
        told = " ".join(capsys.readouterr().err.split())
        assert ("s are over" in told) == (begun < 3)
        if begun < 3:
            assert f"{seconds} s are over: {3 - begun} of 3 problems are left, first gemm" in told

    def test_reports_failures_too(self, tlxgen: Callable[..., int], tuned: list[str]) -> None:
        ask(512, times=2)
        ask(1024)
        assert tlxgen("--untuned", "--within", "5") == 1
        assert len(tuned) == 1
