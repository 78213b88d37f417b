"""The check of every structure: which kernels it takes, and what becomes of a finding."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import structures
from tlxgen import ops
from tlxgen.space import search_space


def test_the_parameters_that_are_passed_over_are_such() -> None:
    known = {
        name
        for operator in structures.PROBLEMS
        for template in ops.get(operator).templates
        for name in search_space.load(template).parameters
    }
    assert known >= structures.PLAIN


def test_every_value_of_the_others_is_among_the_kernels() -> None:
    made = list(structures.kernels("attention"))
    values: dict[str, set[Any]] = {}
    for one in made:
        if one.config.template == "attention_tma":
            for name, value in one.config.params.items():
                values.setdefault(name, set()).add(value)
    parameters = search_space.load("attention_tma").parameters
    for name in parameters.keys() - structures.PLAIN:
        assert values[name] == set(parameters[name].choices), name
    assert {one.config.template for one in made} == set(ops.get("attention").templates)


def test_no_structure_comes_twice_for_a_problem() -> None:
    seen = set()
    for one in structures.kernels("gemm"):
        structural = {name: value for name, value in one.config.params.items() if name not in structures.PLAIN}
        seen.add((one.problem, one.config.template, *sorted(structural.items())))
    assert len(seen) == len(list(structures.kernels("gemm")))


@pytest.mark.parametrize("clean", [True, False])
def test_a_finding_is_told_written_and_ends_in_status_1(
    clean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list(structures.kernels("grouped_gemm"))[:5]
    report = SimpleNamespace(clean=clean, findings=[] if clean else ["deadlock at kernel:7"])
    monkeypatch.setattr(structures, "kernels", lambda _: made)
    monkeypatch.setattr(structures, "check", lambda *_: report)
    monkeypatch.setattr(structures, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(sys, "argv", ["structures", "grouped_gemm", "-o", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        structures.main()
    assert ended.value.code == (0 if clean else 1)
    (file,) = tmp_path.glob("*-structures.json")
    content = json.loads(file.read_text())
    assert sum(content["checked"].values()) == 5
    assert len(content["findings"]) == (0 if clean else 5)
    assert ("deadlock at kernel:7" in capsys.readouterr().out) is not clean
