"""`tlxgen tune` of many problems: what programs asked for, most wanted first (`--untuned`), or a suite's shapes."""

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
    """What was lent to each run: a process that measures, and compilers."""
    return []


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, processes: list[tuple[object, ...]]) -> list[str]:
    """Labels of what was tuned; nothing is."""
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
    """A measured row of today's code, but for changes, in the database."""
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


def test_what_was_asked_for_is_tuned_in_the_order_of_wishes(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    ask(1024)
    ask(2048, times=3)
    ask(4096, gpu=target("h100"))  # of another machine that shares the database
    assert tlxgen("--untuned") == 0
    assert tuned == ["gemm 2048 1024 1024 bf16 nn", "gemm 1024 1024 1024 bf16 nn"]


def test_an_operator_limits_the_list(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    ask(1024)
    assert tlxgen("attention", "--untuned") == 0
    assert tuned == []
    assert tlxgen("gemm", "--untuned") == 0
    assert len(tuned) == 1


def test_one_failure_stops_no_other_and_is_told_at_the_end(
    tlxgen: Callable[..., int], tuned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ask(512, times=2)
    ask(1024)
    assert tlxgen("--untuned") == 1
    assert len(tuned) == 2
    assert "1 of 2 problems have no working candidate: gemm 512 1024 1024 bf16 nn" in " ".join(
        capsys.readouterr().err.split()
    )


def test_all_are_measured_in_one_process_and_compiled_in_one_pool(
    tlxgen: Callable[..., int], tuned: list[str], processes: list[tuple[object, ...]]
) -> None:
    ask(1024)
    ask(2048)
    assert tlxgen("--untuned") == 0
    first, second = processes
    assert [type(one) for one in first] == [Child, CompilePool]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_an_interruption_ends_the_list(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    ask(1536, times=2)
    ask(1024)
    assert tlxgen("--untuned") == 0
    assert len(tuned) == 1


def test_keys_of_other_versions_are_left_alone(tlxgen: Callable[..., int], tuned: list[str]) -> None:
    strange = tuning_key(ops.get("gemm").problem((8, 8, 8)), H200.key)
    strange = strange.model_copy(update={"problem": {**strange.problem, "colour": "blue"}})
    with Store.open(read_only_ok=False) as store:
        store.note_untuned(strange)
    assert tlxgen("--untuned") == 0
    assert tuned == []


@pytest.mark.parametrize("words", [("gemm", "8", "8", "8", "--untuned"), ()], ids=["and a problem", "nothing"])
def test_a_problem_or_the_list(words: tuple[str, ...], tlxgen: Callable[..., int], tuned: list[str]) -> None:
    assert tlxgen(*words) == 2
    assert tuned == []


@pytest.mark.parametrize(
    ("lent", "on_the_gpu", "load", "told", "busy"),
    [
        (True, 1, 90, False, False),
        (True, 2, 90, True, True),
        (False, 0, 90, False, False),
        (False, 1, 90, True, True),
        (False, 1, 0, True, False),
    ],
    ids=["the lent process", "it and a stranger", "nobody", "a stranger", "a stranger that does nothing"],
)
def test_strangers_on_the_gpu_are_told_of_and_count_where_they_load_it(
    lent: bool, on_the_gpu: int, load: int, told: bool, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that went on from the last problem is none."""
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
    child: Any = SimpleNamespace(alive=lent)
    options = tuning_cli.Options(8, 1.0, "tpe", 0, None, None, compile_only=False, target=None, as_json=False)
    tuning_cli.run(ops.get("gemm").problem((256, 256, 256)), options, log, child)
    assert ("1 other process(es) compute on this GPU" in log.file.getvalue()) == told  # type: ignore[attr-defined]
    assert asked["gpu_busy"] is busy


class TestSuite:
    """`tlxgen tune --suite`: every shape of a file that has no measured row."""

    @pytest.fixture
    def suite(self, tmp_path: Path) -> str:
        file = tmp_path / "three.yaml"
        file.write_text(
            "operator: gemm\noptions: {layout: nt}\nshapes:\n"
            "  - {sizes: [512, 1024, 1024]}\n  - {sizes: [1024, 1024, 1024]}\n"
            "  - {sizes: [2048, 1024, 1024], options: {layout: nn}}\n"
        )
        return str(file)

    def test_what_is_tuned_is_left_out_and_a_failure_stops_no_other(
        self, tlxgen: Callable[..., int], tuned: list[str], suite: str
    ) -> None:
        problem = ops.get("gemm").problem((1024, 1024, 1024), layout="nt")
        keep(problem)
        assert tlxgen("--suite", suite) == 1  # of 512 no candidate survives
        assert tuned == ["gemm 512 1024 1024 bf16 nt", "gemm 2048 1024 1024 bf16 nn"]
        tuned.clear()
        keep(problem, source_hash="0" * 32)  # of code that has changed
        tlxgen("--suite", suite)
        assert "gemm 1024 1024 1024 bf16 nt" in tuned

    def test_what_is_tuned_is_tuned_again_on_demand(
        self, tlxgen: Callable[..., int], tuned: list[str], suite: str
    ) -> None:
        record = keep(ops.get("gemm").problem((1024, 1024, 1024), layout="nt"))
        tlxgen("--suite", suite, "--again")
        assert tuned == [problem.label for problem in suites.problems(suite)]
        with Store.open() as store:
            assert store.get(record.key) == record, "it takes part in the new final"

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
    def test_words_choose_a_part(
        self, tlxgen: Callable[..., int], tuned: list[str], suite: str, words: list[str], found: list[int]
    ) -> None:
        tlxgen("--suite", suite, *(f"--only={some}" for some in words))
        assert [int(label.split()[1]) for label in tuned] == found

    @pytest.mark.parametrize("words", [["nt", "nn"], ["102"], ["4 1024"]], ids=" and ".join)
    def test_words_that_no_shape_has_are_bad_input(
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

    def test_what_is_chosen_may_be_tuned_already(
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
    def test_what_makes_no_list_is_bad_input(
        self, tlxgen: Callable[..., int], tuned: list[str], words: list[str]
    ) -> None:
        assert tlxgen(*words) == 2
        assert tuned == []

    def test_a_file_that_is_no_suite_is_bad_input(
        self, tlxgen: Callable[..., int], tuned: list[str], tmp_path: Path
    ) -> None:
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
    def test_the_suites_that_come_with_the_source_hold_problems(self, name: str) -> None:
        found = suites.problems(name)
        assert len(set(found)) == len(found) > 0
        assert {problem.operator for problem in found} == {name}


class TestPart:
    """`suites.part`: shapes by words of their labels."""

    def test_finds_values_of_fields(self) -> None:
        listed = suites.problems("grouped_gemm")
        found = suites.part(listed, ["gather"])
        assert found == suites.part(listed, ["form=gather"]) == [one for one in listed if "gather" in one.label]
        assert 0 < len(found) < len(listed)
        assert suites.part(found, ["swiglu", "grouped_gemm"]) == suites.part(listed, ["gather", "swiglu"])
        assert suites.part(listed, []) == listed

    def test_ends_words_where_an_epilogue_has_another_part(self) -> None:
        problem = ops.get("gemm").problem((8, 8, 8), epilogue="bias+gelu")
        assert suites.part([problem], ["gelu"]) == suites.part([problem], ["bias+gelu"]) == [problem]
        assert suites.part([problem], ["gel"]) == []


class TestWithin:
    """`--within`: a list ends where its time is over, between two problems."""

    @pytest.fixture(autouse=True)
    def ten_seconds_each(self, monkeypatch: pytest.MonkeyPatch, tuned: list[str]) -> None:
        monkeypatch.setattr(tuning_cli, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(tuned)))

    @pytest.mark.parametrize(("seconds", "begun"), [(0, 1), (15, 2), (25, 3), (1000, 3)])
    def test_no_problem_is_begun_after_it(
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

    def test_a_failure_is_told_all_the_same(self, tlxgen: Callable[..., int], tuned: list[str]) -> None:
        ask(512, times=2)
        ask(1024)
        assert tlxgen("--untuned", "--within", "5") == 1
        assert len(tuned) == 1
