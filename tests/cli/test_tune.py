"""`tlxgen tune` of lists of problems: `--untuned`, `--suite`, `--only`, `--within`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tlxgen import devices, ops
from tlxgen.cli import tune as tuning_cli
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


Run = Callable[..., Any]
Keep = Callable[..., TunedRecord]


def tuned_row(keep: Keep, m: int = 1024, **changes: Any) -> TunedRecord:
    problem = ops.get("gemm").problem((m, 1024, 1024), layout="nt")
    config = default_config(problem, H200)
    assert config is not None
    return keep(problem, config, **changes)


def ask(m: int, times: int = 1, gpu: devices.Gpu = H200) -> None:
    for _ in range(times):
        kernel.forget()
        select(ops.get("gemm").problem((m, 1024, 1024)), gpu)


def test_untuned_problems_are_tuned_most_wanted_first(run: Run, tuned: list[str]) -> None:
    ask(1024)
    ask(2048, times=3)
    ask(4096, gpu=target("h100"))  # of another machine with the same database
    assert run("tune", "--untuned").status == 0
    assert tuned == ["gemm 2048 1024 1024 bf16 nn", "gemm 1024 1024 1024 bf16 nn"]


def test_operator_limits_the_list(run: Run, tuned: list[str]) -> None:
    ask(1024)
    assert run("tune", "attention", "--untuned").status == 0
    assert tuned == []
    assert run("tune", "gemm", "--untuned").status == 0
    assert len(tuned) == 1


def test_failure_stops_no_other_and_is_reported_at_the_end(run: Run, tuned: list[str]) -> None:
    ask(512, times=2)
    ask(1024)
    done = run("tune", "--untuned")
    assert (done.status, len(tuned)) == (1, 2)
    assert "1 of 2 problems have no working candidate: gemm 512 1024 1024 bf16 nn" in done.message


def test_all_problems_share_a_child_and_a_pool(run: Run, tuned: list[str], processes: list[tuple[object, ...]]) -> None:
    ask(1024)
    ask(2048)
    assert run("tune", "--untuned").status == 0
    first, second = processes
    assert [type(one) for one in first] == [Child, CompilePool]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_interruption_ends_the_list(run: Run, tuned: list[str]) -> None:
    ask(1536, times=2)
    ask(1024)
    assert run("tune", "--untuned").status == 0
    assert len(tuned) == 1


def test_keys_of_other_versions_are_ignored(run: Run, tuned: list[str]) -> None:
    strange = tuning_key(ops.get("gemm").problem((8, 8, 8)), H200.key)
    strange = strange.model_copy(update={"problem": {**strange.problem, "colour": "blue"}})
    with Store.open(read_only_ok=False) as store:
        store.note_untuned(strange)
    assert run("tune", "--untuned").status == 0
    assert tuned == []


@pytest.mark.parametrize("words", [("gemm", "8", "8", "8", "--untuned"), ()], ids=["and a problem", "nothing"])
def test_problem_and_list_exclude_each_other(words: tuple[str, ...], run: Run, tuned: list[str]) -> None:
    assert run("tune", *words).status == 2
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
        self, run: Run, keep: Keep, tuned: list[str], suite: str
    ) -> None:
        tuned_row(keep)
        assert run("tune", "--suite", suite).status == 1  # 512 fails
        assert tuned == ["gemm 512 1024 1024 bf16 nt", "gemm 2048 1024 1024 bf16 nn"]
        tuned.clear()
        tuned_row(keep, source_hash="0" * 32)  # of code that has changed
        run("tune", "--suite", suite)
        assert "gemm 1024 1024 1024 bf16 nt" in tuned

    def test_again_tunes_them_too(self, run: Run, keep: Keep, tuned: list[str], suite: str) -> None:
        record = tuned_row(keep)
        run("tune", "--suite", suite, "--again")
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
        self, run: Run, tuned: list[str], suite: str, words: list[str], found: list[int]
    ) -> None:
        run("tune", "--suite", suite, *(f"--only={some}" for some in words))
        assert [int(label.split()[1]) for label in tuned] == found

    @pytest.mark.parametrize("words", [["nt", "nn"], ["102"], ["4 1024"]], ids=" and ".join)
    def test_only_without_a_match_is_bad_input(
        self,
        run: Run,
        tuned: list[str],
        suite: str,
        words: list[str],
    ) -> None:
        done = run("tune", "--suite", suite, *(f"--only={some}" for some in words))
        assert (done.status, tuned) == (2, [])
        message = done.message
        assert f"has {' and '.join(map(repr, words))}; one is 'gemm 512 1024 1024 bf16 nt'" in message

    def test_only_may_select_tuned_shapes(self, run: Run, keep: Keep, tuned: list[str], suite: str) -> None:
        tuned_row(keep)
        done = run("tune", "--suite", suite, "--only", "1024 1024 1024")
        assert (done.status, tuned) == (0, [])
        assert "1 of 1 shapes are tuned on h200" in done.message

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
    def test_bad_combinations_are_bad_input(self, run: Run, tuned: list[str], words: list[str]) -> None:
        assert run("tune", *words).status == 2
        assert tuned == []

    def test_invalid_file_is_bad_input(self, run: Run, tuned: list[str], tmp_path: Path) -> None:
        for content in (
            "[]",
            "operator: gemm",
            "{{",
            "operator: nosuch\nshapes: []",
            "operator: gemm\nshapes: [{sizes: [-1, 2, 3]}]",
        ):
            (tmp_path / "bad.yaml").write_text(content)
            assert run("tune", "--suite", str(tmp_path / "bad.yaml")).status == 2
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
        run: Run,
        tuned: list[str],
        seconds: int,
        begun: int,
    ) -> None:
        for times, m in enumerate((1024, 2048, 4096), start=1):
            ask(m, times)
        done = run("tune", "--untuned", "--within", str(seconds))
        assert (done.status, tuned) == (0, [f"gemm {m} 1024 1024 bf16 nn" for m in (4096, 2048, 1024)][:begun])
        message = done.message
        assert ("s are over" in message) == (begun < 3)
        if begun < 3:
            assert f"{seconds} s are over: {3 - begun} of 3 problems are left, first gemm" in message

    def test_reports_failures_too(self, run: Run, tuned: list[str]) -> None:
        ask(512, times=2)
        ask(1024)
        assert run("tune", "--untuned", "--within", "5").status == 1
        assert len(tuned) == 1
