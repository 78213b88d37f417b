"""`tlxgen tune` of many problems: what programs asked for, most wanted first (`--untuned`), or a suite's shapes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tlxgen import cli, devices, ops, runtime, suites, tuning_cli
from tlxgen.candidates import default_config
from tlxgen.devices import target
from tlxgen.emit import emit
from tlxgen.errors import TuningError
from tlxgen.keys import tuning_key
from tlxgen.record import TunedRecord
from tlxgen.selection import select
from tlxgen.store import Store

H200 = target("h200")


@pytest.fixture(autouse=True)
def on_h200(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
    monkeypatch.setattr(devices, "detect", lambda _=None: H200)
    runtime.forget()
    yield
    runtime.forget()


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of what was tuned; nothing is."""
    labels: list[str] = []

    def run(problem: Any, options: tuning_cli.Options, _log: object, _child: object) -> SimpleNamespace:
        labels.append(problem.label)
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
            cli.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
        return 0

    yield command
    signal.signal(signal.SIGTERM, before)


def ask(m: int, times: int = 1, gpu: devices.Gpu = H200) -> None:
    for _ in range(times):
        runtime.forget()
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
        config = default_config(problem, H200)
        assert config is not None
        record = TunedRecord(
            key=tuning_key(problem, H200.key),
            config=config,
            origin="measured",
            source_hash=emit(ops.get("gemm"), problem, config).code_hash,
            time_us=10.0,
            protocol="graph-2",
        )
        with Store.open() as store:
            store.put(record)
        assert tlxgen("--suite", suite) == 1  # of 512 no candidate survives
        assert tuned == ["gemm 512 1024 1024 bf16 nt", "gemm 2048 1024 1024 bf16 nn"]
        tuned.clear()
        with Store.open() as store:
            store.delete([record.key])
            store.put(record.model_copy(update={"source_hash": "0" * 32}))  # of code that has changed
        tlxgen("--suite", suite)
        assert "gemm 1024 1024 1024 bf16 nt" in tuned

    @pytest.mark.parametrize(
        "words", [["--suite", "nosuch"], ["gemm", "8", "8", "8", "--suite", "gemm"], ["--untuned", "--suite", "gemm"]]
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
