"""Check of every structure: the kernels that it takes, and its findings."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import structures
from tlxgen import ops
from tlxgen.space import search_space


def test_plain_parameters_exist() -> None:
    known = {
        name
        for operator in structures.PROBLEMS
        for template in ops.get(operator).templates
        for name in search_space.load(template).parameters
    }
    assert known >= structures.PLAIN


def test_kernels_take_every_value_of_other_parameters() -> None:
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


def test_a_structure_is_checked_once_for_a_problem() -> None:
    seen = set()
    for one in structures.kernels("gemm"):
        structural = {name: value for name, value in one.config.params.items() if name not in structures.PLAIN}
        seen.add((one.problem, one.config.template, *sorted(structural.items())))
    assert len(seen) == len(list(structures.kernels("gemm")))


@pytest.mark.parametrize("clean", [True, False])
def test_findings_are_printed_written_and_end_in_status_1(
    clean: bool, monkeypatch: pytest.MonkeyPatch, run: Callable[..., dict[str, Any]]
) -> None:
    made = list(structures.kernels("grouped_gemm"))[:5]
    report = SimpleNamespace(clean=clean, findings=[] if clean else ["deadlock at kernel:7"])
    monkeypatch.setattr(structures, "kernels", lambda _: made)
    monkeypatch.setattr(structures, "check", lambda *_: report)
    monkeypatch.setattr(structures, "ProcessPoolExecutor", ThreadPoolExecutor)
    written = run(structures, "grouped_gemm", ends="0" if clean else "1")
    assert written["file"].endswith("-structures.json")
    assert sum(written["checked"].values()) == 5
    assert len(written["rows"]) == (0 if clean else 5)
    assert ("deadlock at kernel:7" in written["printed"]) is not clean
