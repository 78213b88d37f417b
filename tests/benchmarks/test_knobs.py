"""The benchmark of knobs: what a change makes of a tuned config, where it is legal, and what is told of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import knobs
from tlxgen import devices, ops
from tlxgen.config import Config
from tlxgen.problem import Problem
from tlxgen.space.candidates import candidates
from tlxgen.tuner.measure import DeviceReport

H200 = devices.target("h200")
ATTENTION = ops.get("attention")
SUITE = """
operator: attention
shapes:
  - {sizes: [1, 32, 4096, 128], at_least: 1.0}
  - {sizes: [1, 32, 4096, 128], options: {causal: bottom-right}, at_least: 1.0}
"""


def tuned(problem: Problem) -> Config:
    return candidates(problem, H200, ("attention_tma",))[0]


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("head_group=1", {"head_group": 1}),
        ("pingpong=off,order=affine", {"pingpong": "off", "order": "affine"}),
        (" staging=q, unroll=2", {"staging": "q", "unroll": 2}),
    ],
)
def test_a_change_names_parameters_and_their_values(text: str, params: dict[str, Any]) -> None:
    assert knobs.change(text) == params


@pytest.mark.parametrize("text", ["", "head_group", "head_group=1,", "=1", "head_group="])
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="name=value"):
        knobs.change(text)


def test_a_change_is_left_out_where_it_is_not_legal_or_makes_no_difference() -> None:
    problem = ATTENTION.problem((1, 32, 4096, 128), causal="bottom-right")
    config = tuned(problem)
    texts = ("staging=q", "tail=split", "schedule=dynamic", "head_group=2", "colour=red", "staging=q,schedule=dynamic")
    made = knobs.variants(problem, config, {text: knobs.change(text) for text in texts}, H200)
    assert made == {
        "tuned": config,
        "staging=q": Config(template=config.template, params={**config.params, "staging": "q"}),
    }


def test_each_shape_of_the_suite_has_its_rows_and_what_became_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = DeviceReport(H200, {"torch": "2"}, 0.0, 1.0, 1.0)

    def measure(problem: Problem, changes: dict[str, Any], *_: Any) -> Any:
        kept = knobs.variants(problem, tuned(problem), changes, H200)
        rows = [{"change": name, "kind": "-", "time_us": 1.0, "ratio": 1.0, "config_short": "-"} for name in kept]
        return report, rows, [{"change": "unroll=2", "reason": "spills 8 bytes"}]

    monkeypatch.setattr(knobs, "Child", lambda: SimpleNamespace(kill=lambda: None))
    monkeypatch.setattr(knobs, "measure", measure)
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE)
    words = ["knobs", str(suite), "--with", "tail=split", "--with", "schedule=dynamic", "-o", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    knobs.main()
    monkeypatch.setattr(sys, "argv", [*words, "--only", "softcap"])
    with pytest.raises(SystemExit, match="'softcap' in its label"):
        knobs.main()
    monkeypatch.setattr(sys, "argv", words)
    (file,) = tmp_path.glob("*-knobs-h200.json")
    content = json.loads(file.read_text())
    assert [row["change"] for row in content["rows"]].count("tuned") == 2
    assert len(content["failures"]) == 2
    assert "spills 8 bytes" in capsys.readouterr().out
