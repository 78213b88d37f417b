"""`tlxgen regress`: what ships is green, and each way in which a row can go bad turns it red, with what to do."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.recorded import RecordedCard
from tlxgen import devices, ops, paths
from tlxgen.cli import app, regress
from tlxgen.cli.problem_options import parse
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.codegen.facts import Facts
from tlxgen.config import Config
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord
from tlxgen.devices import target
from tlxgen.errors import CompileError, OutputError, TlxgenError, TuningError, UnsupportedDeviceError
from tlxgen.ops.command_line import command
from tlxgen.regress import ratchet, report, retime, rows
from tlxgen.regress.findings import CHECKS, Finding, Outcome, Row
from tlxgen.space import search_space
from tlxgen.toolchain import toolchain
from tlxgen.tuner import gpu_lock
from tlxgen.tuner.measure import PEER, DeviceReport, Gate, Measure, Setup, Verdict
from tlxgen.tuner.process import ChildDiedError, ChildTimeoutError
from tlxgen.tuner.runner import LIMIT_S, Runner

ROOT = Path(__file__).parents[2]
SHIPPED = paths.SHIPPED_CACHE / "h200.jsonl"
WORKERS = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
FACTS = Facts(
    registers=168,
    spill_bytes=0,
    stack_bytes=0,
    shared_bytes=200_000,
    hgmma=32,
    tma_loads=2,
    tma_stores=8,
    setmaxnreg=8,
    stmatrix=32,
    local_loads=0,
    local_stores=0,
    loop_conversions=0,
)

GEMM = next(r for r in shipped.load(SHIPPED) if [r.key.problem.get(n) for n in "MNK"] == [4096, 4096, 14336])
VECTOR = next(r for r in shipped.load(SHIPPED) if r.key.operator == "vector_add")


STORED = GEMM.ratio or 0.0


def row(record: TunedRecord, line: int = 1) -> Row:
    return Row(Path("h200.jsonl"), line, rows.row_name(record), record)


def changed(record: TunedRecord, **key: Any) -> TunedRecord:
    """The record under another key."""
    return record.model_copy(update={"key": record.key.model_copy(update=key)})


def with_params(record: TunedRecord, **params: Any) -> TunedRecord:
    config = Config(template=record.config.template, params={**record.config.params, **params})
    return record.model_copy(update={"config": config})


def with_code_of(record: TunedRecord, **params: Any) -> TunedRecord:
    """The record with other parameters, as if its kernel had been tuned with them."""
    other, operator = with_params(record, **params), ops.get(record.key.operator)
    source = emit(operator, operator.problem(record.key.problem), other.config)
    return other.model_copy(update={"source_hash": source.code_hash})


def slower(record: TunedRecord, times: float) -> TunedRecord:
    """The record of a kernel that takes so many times as long."""
    return record.model_copy(update={"time_us": record.time_us * times})


def instantly(facts: Facts = FACTS) -> rows.Compile:
    """Compilers that find the same facts in everything."""
    return lambda jobs: [Binary(source, facts, 0.5) for source, _ in jobs]


def fails(error: CompileError) -> rows.Compile:
    return lambda jobs: [error for _ in jobs]


def only(record: TunedRecord, compile_all: rows.Compile | None = None) -> Finding:
    """What is found in a row that has one thing wrong."""
    (outcome,) = rows.examine([row(record)], compile_all or instantly())
    (finding,) = outcome.findings
    assert outcome.red
    assert finding.remedy
    assert finding.check in CHECKS
    return finding


class TestRows:
    def test_a_sound_row_has_facts_and_no_findings(self) -> None:
        outcomes = rows.examine([row(GEMM), row(VECTOR, 2)], instantly())
        assert [(o.findings, o.facts, o.seconds) for o in outcomes] == [((), FACTS, 0.5)] * 2

    def test_an_unknown_operator(self) -> None:
        finding = only(changed(GEMM, operator="convolution"))
        assert finding.check == "dead"
        assert "convolution" in finding.what

    def test_an_unknown_template(self) -> None:
        config = Config(template="gemm_tma_dreamt_of", params={})
        finding = only(GEMM.model_copy(update={"config": config}))
        assert finding.check == "dead"
        assert "gemm_tma_pingpong" in finding.what

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"problem": {**GEMM.key.problem, "M": -4}}, "M = -4"),
            ({"problem": {**GEMM.key.problem, "beta": 1}}, "beta"),
            ({"problem": {k: v for k, v in GEMM.key.problem.items() if k != "layout"}}, "layout=nn"),
            ({"problem": {**GEMM.key.problem, "dtype": "bfloat16"}}, "dtype=bf16"),
            ({"device": GEMM.key.device.model_copy(update={"sm_count": 114})}, "132 SMs"),
            ({"device": GEMM.key.device.model_copy(update={"capability": "9"})}, "unpack"),
        ],
    )
    def test_a_key_that_nobody_makes(self, change: dict[str, Any], told: str) -> None:
        finding = only(changed(GEMM, **change))
        assert finding.check == "key"
        assert told in finding.what

    def test_an_unknown_gpu_is_taken_at_its_word(self) -> None:
        other = changed(GEMM, device=GEMM.key.device.model_copy(update={"gpu": "h300", "sm_count": 140}))
        (outcome,) = rows.examine([row(other)], instantly())
        assert not outcome.findings

    def test_a_stale_toolchain(self) -> None:
        finding = only(changed(GEMM, toolchain="fbtriton 3.7.3, ptxas 12.9.86"))
        assert finding.check == "toolchain"
        assert toolchain() in finding.what
        assert "tlxgen tune gemm 4096 4096 14336" in finding.remedy

    def test_a_duplicate_names_the_first(self) -> None:
        outcomes = rows.examine([row(GEMM, 3), row(VECTOR, 4), row(GEMM.model_copy(), 5)], instantly())
        assert [len(o.findings) for o in outcomes] == [0, 0, 1]
        assert outcomes[2].findings[0].check == "duplicate"
        assert "h200.jsonl:3" in outcomes[2].findings[0].what

    @pytest.mark.parametrize(
        ("params", "told"),
        [
            ({"num_stages": 7.5}, "7.5"),
            ({"num_stages": 99}, "99"),
            ({"warp": 1}, "warp"),
            ({"block_m": 256}, "block_m"),
        ],
    )
    def test_a_config_outside_the_space(self, params: dict[str, Any], told: str) -> None:
        config = Config.model_construct(template=GEMM.config.template, params={**GEMM.config.params, **params})
        finding = only(GEMM.model_copy(update={"config": config}))
        assert finding.check == "config"
        assert told in finding.what

    def test_a_config_in_the_space_and_not_legal(self) -> None:
        illegal = with_params(GEMM, block_n=256, block_m=128, num_stages=8)
        operator = ops.get("gemm")
        legal = search_space.why_illegal(operator, operator.problem(GEMM.key.problem), illegal.config, target("h200"))
        assert legal
        assert "does not hold" in legal
        assert only(illegal).what == legal

    def test_an_edited_search_space(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(paths.SEARCH_SPACES, tmp_path / "spaces")
        file = tmp_path / "spaces" / "gemm" / f"{GEMM.config.template}.yaml"
        file.write_text(re.sub(r"num_stages:.*(\n +choices:.*)?", "num_stages: [2, 3]", file.read_text(), count=1))
        monkeypatch.setattr(paths, "SEARCH_SPACES", tmp_path / "spaces")
        assert only(GEMM).check == "config"

    def test_a_broken_search_space(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "gemm").mkdir()
        (tmp_path / "gemm" / f"{GEMM.config.template}.yaml").write_text("{")
        monkeypatch.setattr(paths, "SEARCH_SPACES", tmp_path)
        finding = only(GEMM)
        assert (finding.check, "not YAML" in finding.what) == ("config", True)

    def test_an_edited_template(self, templates: Path) -> None:
        edit(templates / "vector_add" / f"{VECTOR.config.template}.py.j2", "mask=", "cache_modifier='.cg', mask=")
        finding = only(VECTOR)
        assert finding.check == "code"
        assert "other code" in finding.what
        assert f"tlxgen tune vector_add {VECTOR.key.problem['n']}" in finding.remedy

    def test_a_comment_in_a_template_changes_nothing(self, templates: Path) -> None:
        file = templates / "vector_add" / f"{VECTOR.config.template}.py.j2"
        file.write_text(f"{file.read_text()}\n# a remark\n")
        assert not rows.examine([row(VECTOR)], instantly())[0].findings

    def test_a_broken_template(self, templates: Path) -> None:
        edit(templates / "vector_add" / f"{VECTOR.config.template}.py.j2", "mask=", "{{ nobody_knows }} mask=")
        finding = only(VECTOR)
        assert finding.check == "code"
        assert "nobody_knows" in finding.what

    def test_a_template_that_emits_no_python(self, templates: Path) -> None:
        edit(templates / "vector_add" / f"{VECTOR.config.template}.py.j2", "mask=", "mask= =")
        finding = only(VECTOR)
        assert finding.check == "code"
        assert "not Python" in finding.what

    @pytest.mark.parametrize(
        ("kind", "check", "remedy"),
        [
            ("rejected", "compile", "tlxgen tune gemm"),
            ("compiler_crash", "compile", "tlxgen tune gemm"),
            ("timeout", "compile", "--workers"),
            ("unsafe", "simulator", "tlxgen check gemm 4096 4096 14336 --config 'gemm_tma_pingpong block_k=64"),
        ],
    )
    def test_what_compilers_and_simulator_refuse(self, kind: str, check: str, remedy: str) -> None:
        finding = only(GEMM, fails(CompileError(kind, "simulator: a deadlock")))
        assert (finding.check, "deadlock" in finding.what) == (check, True)
        assert remedy in finding.remedy

    @pytest.mark.parametrize(
        "change",
        [{"protocol": "graph-2/look"}, {"origin": "predicted"}, {"error": None}, {"peer_us": None}],
        ids=["no final", "never ran", "no error", "no ratio"],
    )
    def test_a_row_that_no_tuning_has_verified(self, change: dict[str, Any]) -> None:
        finding = only(GEMM.model_copy(update=change))
        assert finding.check == "unverified"
        assert "tlxgen tune gemm" in finding.remedy

    def test_a_row_of_an_older_protocol_is_remarked_on(self) -> None:
        (outcome,) = rows.examine([row(GEMM.model_copy(update={"protocol": "graph-1"}))], instantly())
        assert [finding.check for finding in outcome.findings] == ["protocol"]
        assert not outcome.red

    def test_a_bug_that_one_row_meets_is_that_row_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Pool:
            def __init__(self, *_: object, **__: object) -> None: ...
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None: ...
            def submit(self, source: Any) -> Any:
                def result() -> Binary:
                    if source.operator == "gemm":
                        raise ZeroDivisionError("a bug")
                    return Binary(source, FACTS, 0.0)

                return SimpleNamespace(result=result)

        monkeypatch.setattr(rows, "CompilePool", Pool)
        outcomes = rows.examine([row(GEMM), row(VECTOR, 2)], rows.compile_all)
        assert [o.red for o in outcomes] == [True, False]
        assert "ZeroDivisionError: a bug" in outcomes[0].findings[0].what


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the templates, in force."""
    folder = tmp_path / "templates"
    shutil.copytree(paths.TEMPLATES, folder)
    monkeypatch.setattr(paths, "TEMPLATES", folder)
    return folder


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


SIZES = st.integers(1, 2**16)


@settings(deadline=None, max_examples=25)
@given(
    SIZES,
    SIZES,
    SIZES,
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.sampled_from([None, "bf16", "fp32"]),
    st.sampled_from(["nn", "nt", "tt"]),
    st.sampled_from(["none", "bias+gelu", "scale+residual"]),
)
def test_the_command_of_a_problem_means_that_problem(
    m: int, n: int, k: int, dtype: str, out_dtype: str | None, layout: str, epilogue: str
) -> None:
    options = {"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "epilogue": epilogue}
    assert_means(ops.get("gemm").problem((m, n, k), **options))


@pytest.mark.parametrize(
    ("operator", "sizes", "options"),
    [
        ("attention", (4, 32, 4096, 128), {}),
        (
            "attention",
            (1, 8, 128, 64),
            {"kv_heads": 2, "kv_len": 999, "causal": "top-left", "window": 7, "softcap": 30.0},
        ),
        ("attention", (1, 8, 128, 64), {"lse": True, "exact": True, "dtype": "fp16"}),
        ("attention_varlen", (8, 8, 8192, 64), {"kv_heads": 4, "max_q": 2048, "causal": "bottom-right", "lse": True}),
        ("attention_varlen", (3, 8, 1000, 64), {"total_kv": 50, "max_q": 999, "max_kv": 50}),
        ("grouped_gemm", (8, 8192, 14336, 4096), {"layout": "nt", "epilogue": "bias+silu", "group_sizes": "zipf"}),
        ("grouped_gemm", (8, 8192, 1024, 4096), {"form": "2d2d", "out_dtype": "fp32"}),
        ("grouped_gemm", (3, 8, 1024, 4096), {"form": "masked", "max_rows": 64, "group_sizes": "0,1,7"}),
        ("vector_add", (1 << 20,), {"dtype": "fp32"}),
    ],
)
def test_so_does_that_of_other_operators(operator: str, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    assert_means(ops.get(operator).problem(sizes, **options))


def assert_means(problem: Any) -> None:
    """By way of the command line's own parser."""
    given = click_command("tune").make_context("tune", shlex.split(command("tune", problem))[2:]).params
    options = {name: given[name] for name in type(problem).model_fields if given.get(name)}
    assert parse(given["operator"], given["sizes"], options) == problem


class TestRatchet:
    FILE = Path("h200.jsonl")

    def made(self, *records: TunedRecord, labels: Sequence[str] = ()) -> ratchet.Ratchet:
        outcomes = rows.examine([row(r, i) for i, r in enumerate(records, 1)], instantly())
        return ratchet.updated(None, outcomes, labels)[0]

    def compare(self, held: ratchet.Ratchet | None, *records: TunedRecord, facts: Facts = FACTS) -> list[Finding]:
        outcomes = rows.examine([row(r, i) for i, r in enumerate(records, 1)], instantly(facts))
        return [finding for outcome in ratchet.compare(held, self.FILE, outcomes) for finding in outcome.findings]

    def test_the_same_facts_are_green(self) -> None:
        assert self.compare(self.made(GEMM, VECTOR), GEMM, VECTOR) == []

    @pytest.mark.parametrize(
        ("name", "value", "red"),
        [
            ("registers", 176, None),
            ("registers", 184, True),
            ("registers", 160, None),
            ("registers", 128, False),
            ("spill_bytes", 4, True),
            ("stack_bytes", 8, True),
            ("shared_bytes", 200_512, None),
            ("shared_bytes", 202_000, True),
            ("shared_bytes", 100_000, False),
            ("hgmma", 31, True),
            ("hgmma", 33, True),
            ("tma_loads", 0, True),
            ("tma_stores", 4, True),
            ("setmaxnreg", 0, True),
            ("stmatrix", 64, True),
            ("local_loads", 1, True),
            ("local_stores", 1, True),
            ("loop_conversions", 1, True),
            ("warnings", ("C7510",), True),
        ],
    )
    def test_facts_beyond_their_limits(self, name: str, value: Any, red: bool | None) -> None:
        """`red` is None for what is within the limits, False for what has become better."""
        found = self.compare(self.made(GEMM), GEMM, facts=FACTS.model_copy(update={name: value}))
        assert [finding.red for finding in found] == ([] if red is None else [red])
        assert all(name in finding.what and "--update" in finding.remedy for finding in found)

    def test_a_warning_less_is_better(self) -> None:
        noisy = FACTS.model_copy(update={"warnings": ("C7508",)})
        held = ratchet.updated(None, rows.examine([row(GEMM)], instantly(noisy)))[0]
        assert [finding.red for finding in self.compare(held, GEMM)] == [False]

    def test_a_fact_that_was_not_counted_then(self) -> None:
        held = self.made(GEMM)
        (key,) = held.rows
        facts = {name: fact for name, fact in held.rows[key].facts.items() if name != "stmatrix"}
        held = held.model_copy(update={"rows": {key: held.rows[key].model_copy(update={"facts": facts})}})
        (finding,) = self.compare(held, GEMM)
        assert finding.what == "stmatrix: 32, none stored"

    def test_a_row_without_facts(self) -> None:
        (finding,) = self.compare(self.made(GEMM), GEMM, VECTOR)
        assert (finding.check, finding.what, finding.red) == ("unrecorded", "no facts stored", True)

    def test_a_row_with_the_facts_of_another_kernel(self) -> None:
        held = self.made(GEMM)
        kept = held.rows[GEMM.key.id].model_copy(update={"code": "of another"})
        (finding,) = self.compare(held.model_copy(update={"rows": {GEMM.key.id: kept}}), GEMM)
        assert (finding.check, "another kernel" in finding.what) == ("unrecorded", True)

    @pytest.mark.parametrize(
        ("factor", "red"), [(0.5, True), (0.979, True), (0.981, None), (1.0, None), (1.019, None), (1.1, False)]
    )
    def test_a_row_that_claims_another_ratio_than_before(self, factor: float, red: bool | None) -> None:
        """Of the same kernel, as when it was tuned again beside a load. `red` as above."""
        found = self.compare(self.made(GEMM), slower(GEMM, 1 / factor))
        assert [(finding.check, finding.red) for finding in found] == ([] if red is None else [("ratio", red)])
        assert all(f"said {STORED:.3f}" in finding.what and "--update" in finding.remedy for finding in found)

    def test_a_slower_config_of_a_row_that_was_tuned_again(self) -> None:
        found = self.compare(self.made(GEMM), slower(with_code_of(GEMM, num_stages=5), 1.1))
        assert [(finding.check, finding.red) for finding in found] == [("ratio", True), ("unrecorded", True)]

    def test_a_fast_config_may_take_the_place_of_a_row(self) -> None:
        (finding,) = self.compare(self.made(GEMM), with_code_of(GEMM, num_stages=5))
        assert finding.check == "unrecorded"

    @pytest.mark.parametrize("change", [{"protocol": "graph-1"}, {"time_us": 2 * GEMM.time_us, "protocol": "graph-1"}])
    def test_ratios_of_other_protocols_are_not_compared(self, change: dict[str, Any]) -> None:
        older = GEMM.model_copy(update=change)
        assert "ratio" not in {finding.check for finding in self.compare(self.made(GEMM), older)}
        assert self.compare(self.made(older), slower(GEMM, 2.0)) == []

    def test_a_ratchet_of_before_ratios_were_kept(self, tmp_path: Path) -> None:
        held = self.made(GEMM)
        path = tmp_path / "h200.ratchet.json"
        ratchet.dump(held, path)
        edit(path, f'   "ratio": {STORED:.4f},\n', "")
        old = ratchet.load(path)
        assert self.compare(old, slower(GEMM, 2.0)) == []
        outcomes = rows.examine([row(GEMM)], instantly())
        assert ratchet.updated(old, outcomes) == (held, [f"{row(GEMM).name}: ratio none stored → {STORED:.4f}"])

    def test_no_ratchet_is_a_remark(self) -> None:
        (finding,) = self.compare(None, GEMM, VECTOR)
        assert (finding.check, finding.red) == ("unrecorded", False)
        assert "h200.ratchet.json" in finding.remedy

    def test_a_removed_row(self) -> None:
        (finding,) = self.compare(self.made(GEMM, VECTOR), GEMM)
        assert (finding.check, finding.red) == ("removed", True)

    def test_a_shape_that_lost_its_row(self) -> None:
        label = ops.get("gemm").problem(GEMM.key.problem).label
        held = self.made(GEMM, VECTOR, labels=[label, "gemm 1 1 1 bf16 nn"])
        assert held.shapes == (f"{label} on h200",)
        (finding,) = self.compare(held, VECTOR)
        assert (finding.check, finding.red) == ("coverage", True)
        assert label in finding.what
        assert "h200.ratchet.json" in finding.remedy

    def test_a_tampered_size_is_two_findings(self) -> None:
        """The row speaks of another problem now, for which nothing is known, and its own shape has none."""
        label = ops.get("gemm").problem(GEMM.key.problem).label
        held = self.made(GEMM, labels=[label])
        tampered = changed(GEMM, problem={**GEMM.key.problem, "M": 8192})
        assert [finding.check for finding in self.compare(held, tampered)] == ["unrecorded", "coverage"]

    def test_update_tells_what_it_changes_and_drops_no_shape(self) -> None:
        label = ops.get("gemm").problem(GEMM.key.problem).label
        held = self.made(GEMM, labels=[label])
        outcomes = rows.examine([row(VECTOR)], instantly())
        after, changes = ratchet.updated(held, outcomes, [label])
        assert after.shapes == held.shapes
        assert list(after.rows) == [VECTOR.key.id]
        assert changes == [f"{label} on h200: the row is gone, and its facts", f"{outcomes[0].row.name}: facts stored"]
        again, changes = ratchet.updated(after, outcomes, [label])
        assert (again, changes) == (after, [])

    def test_update_tells_facts_one_by_one(self) -> None:
        worse = FACTS.model_copy(update={"registers": 200, "warnings": ("C7508",)})
        _, changes = ratchet.updated(self.made(GEMM), rows.examine([row(GEMM)], instantly(worse)))
        assert changes == [f"{row(GEMM).name}: registers 168 → 200, warnings none → C7508"]

    def test_update_takes_what_a_row_claims_and_tells(self) -> None:
        outcomes = rows.examine([row(slower(GEMM, 2.0))], instantly())
        after, changes = ratchet.updated(self.made(GEMM), outcomes)
        assert changes == [f"{row(GEMM).name}: ratio {STORED:.4f} → {STORED / 2:.4f}"]
        assert self.compare(after, slower(GEMM, 2.0)) == []
        _, changes = ratchet.updated(after, rows.examine([row(with_code_of(GEMM, num_stages=5))], instantly()))
        assert changes == [f"{row(GEMM).name}: facts of another kernel stored, ratio {STORED / 2:.4f} → {STORED:.4f}"]

    def test_update_leaves_what_is_kept_of_a_red_row(self) -> None:
        held = self.made(GEMM)
        outcomes = rows.examine([row(with_params(GEMM, num_stages=99))], instantly())
        assert ratchet.updated(held, outcomes) == (held, [])

    def test_it_comes_back_as_it_was_written(self, tmp_path: Path) -> None:
        held = self.made(GEMM, VECTOR)
        path = ratchet.path_of(tmp_path / "h200.jsonl")
        assert ratchet.load(path) is None
        ratchet.dump(held, path)
        first = path.read_bytes()
        loaded = ratchet.load(path)
        assert loaded == held
        ratchet.dump(held, path)
        assert path.read_bytes() == first
        assert list(tmp_path.iterdir()) == [path]

    def test_the_suites_name_their_problems(self) -> None:
        labels = ratchet.suite_labels(ROOT / "benchmarks" / "suites")
        assert {"gemm 4096 4096 14336 bf16 nn", "vector_add 1048576 bf16"} <= labels

    def test_every_shape_of_the_suites_with_a_shipped_row_is_held(self) -> None:
        held = ratchet.load(ratchet.path_of(SHIPPED))
        assert held is not None
        labels = ratchet.suite_labels(ROOT / "benchmarks" / "suites")
        names = {rows.row_name(record) for record in shipped.load(SHIPPED)}
        assert {f"{label} on h200" for label in labels} & names <= set(held.shapes)


def on_card(card: Any, record: TunedRecord = GEMM) -> Outcome:
    return retime.retime(Outcome(row(record), facts=FACTS), lambda problem: card)


def recorded(time_us: float = GEMM.time_us, **options: Any) -> RecordedCard:
    return RecordedCard({GEMM.config: time_us}, GEMM.peer_us or 0.0, **options)


@dataclass
class Child:
    """Answers a card's jobs as the process on a GPU would; with `dies`, timing ends it."""

    time_us: float
    dies: bool
    alive: bool = False

    def call(self, job: Any, timeout: float) -> Any:
        self.alive = True
        if isinstance(job, Setup):
            return DeviceReport(target("h200"), {}, 0.0, 1.0)
        if isinstance(job, Gate):
            return Verdict("ok", error=0.0, launch_us=1.0)
        assert isinstance(job, Measure)
        if self.dies:
            self.kill()
            raise ChildTimeoutError("no result")
        return {**{name: [self.time_us] * job.rounds for name in job.names}, PEER: [GEMM.peer_us] * job.rounds}

    def kill(self) -> None:
        self.alive = False


class TestCard:
    def test_the_stored_speed_is_green(self) -> None:
        card = recorded()
        outcome = on_card(card)
        assert outcome.findings == ()
        assert outcome.retimed is not None
        assert outcome.retimed.ratio == pytest.approx(STORED, rel=0.01)
        assert outcome.retimed.rounds == 31
        assert not card.child.alive

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_is_no_regression(self, seed: int) -> None:
        card = recorded(noise=0.03)
        card.rng.seed(seed)
        assert not on_card(card).red

    def test_a_slower_kernel_is_measured_twice_and_red(self) -> None:
        measured = []
        outcome = on_card(recorded(GEMM.time_us * 1.05, on_measure=lambda: measured.append(1)))
        (finding,) = outcome.findings
        assert (finding.check, finding.red, len(measured)) == ("time", True, 2)
        assert f"stored {STORED:.3f}" in finding.what
        assert "torch 2.11.0+cu130 → recorded" in finding.what
        assert "tlxgen tune gemm 4096 4096 14336" in finding.remedy
        assert outcome.retimed is not None
        assert outcome.retimed.rounds == 62

    def test_a_slower_look_that_does_not_come_back_is_green(self) -> None:
        card = recorded()

        def throttle() -> None:
            measured.append(1)
            card.times[GEMM.config] = GEMM.time_us * (1.2 if len(measured) == 1 else 1.0)

        measured: list[int] = []
        card.on_measure = throttle
        assert not on_card(card).red
        assert len(measured) == 2

    def test_a_card_that_is_slow_with_everything_is_green(self) -> None:
        card = recorded(GEMM.time_us * 1.5)
        card.peer_us *= 1.5
        assert on_card(card).findings == ()

    def test_a_fall_within_the_margin_is_green(self) -> None:
        outcome = on_card(recorded(GEMM.time_us * 1.01, noise=0.0))
        assert outcome.findings == ()
        assert outcome.retimed is not None
        assert outcome.retimed.margin == pytest.approx(0.02 * STORED)

    def test_the_margin_follows_the_formula(self) -> None:
        """Ratios 1 to 31 in hundredths: an interquartile range of 0.16."""
        spread = GEMM.model_copy(update={"spread_us": 0.1 * GEMM.time_us})
        times = [100.0 / (1 + i / 100) for i in range(31)]
        card: Any = SimpleNamespace(measure=lambda names, rounds: {"row": times, "peer": [100.0] * 31})
        found = retime._measured(card, spread, 1.0, 31)
        assert found is not None
        error = 1.2533 / 1.349 / 31**0.5
        assert found.margin == pytest.approx(3 * error * (0.16**2 + 0.1**2) ** 0.5, rel=1e-3)

    def test_times_that_scatter_too_much_are_remarked_on(self) -> None:
        (finding,) = on_card(recorded(noise=0.3)).findings
        assert (finding.check, finding.red) == ("time", False)
        assert "scatter" in finding.what

    @pytest.mark.parametrize(
        ("status", "check", "remedy"),
        [
            ("wrong_result", "numerics", "tlxgen check gemm"),
            ("unstable_result", "numerics", "tlxgen check gemm"),
            ("hang", "card", "tlxgen check gemm"),
            ("launch_failed", "card", "tlxgen check gemm"),
            ("out_of_memory", "card", "run again"),
        ],
    )
    def test_what_the_gate_refuses_is_not_timed(self, status: str, check: str, remedy: str) -> None:
        measured: list[int] = []
        verdicts = {GEMM.config: Verdict(status, "relative norm\n0.7")}
        outcome = on_card(recorded(verdicts=verdicts, on_measure=lambda: measured.append(1)))
        (finding,) = outcome.findings
        assert (finding.check, finding.red, measured) == (check, True, [])
        assert finding.what == f"{status}: relative norm 0.7"
        assert remedy in finding.remedy

    def test_a_kernel_that_falls_when_timed(self) -> None:
        card = recorded()
        card.measure = lambda names, rounds: {}  # type: ignore[method-assign]
        (finding,) = on_card(card).findings
        assert (finding.check, "repeated launches" in finding.what) == ("card", True)

    @pytest.mark.parametrize("error", [TuningError("too little memory"), ChildDiedError("exit status 1")])
    def test_a_card_that_does_not_come_up(self, error: Exception) -> None:
        def fail() -> Any:
            raise error

        card = recorded()
        card.setup = fail  # type: ignore[method-assign]
        (finding,) = on_card(card).findings
        assert (finding.check, finding.what) == ("card", str(error))
        assert not card.child.alive

    @pytest.mark.parametrize(("slow", "dies", "check"), [(1.0, False, None), (1.1, False, "time"), (1.0, True, "card")])
    def test_by_way_of_the_tuner_s_own_card(self, slow: float, dies: bool, check: str | None) -> None:
        child = Child(slow * GEMM.time_us, dies)
        outcome = on_card(Runner("gemm", ops.get("gemm").problem(GEMM.key.problem), seed=0, child=child))  # type: ignore[arg-type]
        assert [finding.check for finding in outcome.findings] == ([] if check is None else [check])
        assert not child.alive

    @pytest.mark.parametrize("change", [{"protocol": "graph-1"}, {"origin": "predicted"}, {"peer_us": None}])
    def test_what_has_no_ratio_of_today_s_kind_is_gated_alone(self, change: dict[str, Any]) -> None:
        measured: list[int] = []
        card = recorded(on_measure=lambda: measured.append(1))
        outcome = on_card(card, GEMM.model_copy(update=change))
        assert (outcome.findings, outcome.retimed, measured, card.gated) == ((), None, [], [GEMM.config])

    def test_only_rows_of_the_model_go_on_the_card(self) -> None:
        assert retime.is_of(target("h200"), row(GEMM))
        assert not retime.is_of(target("h100"), row(GEMM))
        assert not retime.is_of(None, row(GEMM))
        assert not retime.is_of(target("h200"), Row(Path("h200.jsonl"), 1, "line 1", trouble="{"))


Run = Callable[..., SimpleNamespace]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what ships, in force; a machine without a GPU, whose compilers find the facts that are stored."""
    copy = tmp_path / "cache"
    shutil.copytree(paths.SHIPPED_CACHE, copy)
    monkeypatch.setattr(paths, "SHIPPED_CACHE", copy)
    monkeypatch.setattr(devices, "detect", lambda index=None: None)
    held = ratchet.load(ratchet.path_of(SHIPPED))
    assert held is not None
    stored = {kept.code: Facts.model_validate(kept.facts) for kept in held.rows.values()}

    def remember(jobs: Sequence[rows.Job], workers: int | None = None) -> list[Binary | CompileError]:
        return [Binary(source, stored.get(source.code_hash, FACTS), 0.25) for source, _ in jobs]

    monkeypatch.setattr(rows, "compile_all", remember)
    return copy


def run(*words: object, status: int = 0) -> str:
    """What `tlxgen regress` prints."""
    result = CliRunner().invoke(app.app, ["regress", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


def refused(*words: object) -> TlxgenError:
    with pytest.raises(TlxgenError) as told:
        run(*words)
    assert "\n" not in str(told.value)
    return told.value


def lines_of(folder: Path) -> list[str]:
    """The rows, first the one that faults are put into."""
    lines = (folder / "h200.jsonl").read_text().splitlines()
    return sorted(lines, key=lambda line: '"K":1024,"M":1024,"N":1024' not in line)


def write_lines(folder: Path, lines: Sequence[str]) -> None:
    (folder / "h200.jsonl").write_text("".join(f"{line}\n" for line in lines))


def as_line(change: Callable[..., TunedRecord], line: str, **how: Any) -> str:
    """A row with a change."""
    return shipped._line(change(TunedRecord.model_validate_json(line), **how))


class TestCommand:
    def test_what_ships_is_green(self, folder: Path) -> None:
        assert run() == f"{len(lines_of(folder))} rows checked without a GPU: green\n"
        assert json.loads(run("--json"))["green"]

    @pytest.mark.parametrize(
        ("fault", "check"),
        [
            (lambda lines: [*lines, "{"], "schema"),
            (lambda lines: [*lines, '{"surprise": 1}'], "schema"),
            (lambda lines: [*lines, lines[0]], "duplicate"),
            (lambda lines: lines[1:], "coverage"),
            (lambda lines: [lines[0].replace('"gemm"', '"conv"'), *lines[1:]], "dead"),
            (lambda lines: [lines[0].replace('"sm_count":132', '"sm_count":78'), *lines[1:]], "key"),
            (lambda lines: [lines[0].replace("fbtriton 3.7.4", "fbtriton 3.6.0"), *lines[1:]], "toolchain"),
            (lambda lines: [lines[0].replace('"num_stages":8', '"num_stages":99'), *lines[1:]], "config"),
            (lambda lines: [lines[0].replace('"num_stages":8', '"num_stages":7'), *lines[1:]], "code"),
            (lambda lines: [as_line(with_code_of, lines[0], num_stages=7), *lines[1:]], "unrecorded"),
            (lambda lines: [as_line(slower, lines[0], times=1.03), *lines[1:]], "ratio"),
            (lambda lines: [lines[0].replace('"K":1024', '"K":2048'), *lines[1:]], "unrecorded"),
            (lambda lines: [re.sub('"source_hash":"..', '"source_hash":"zz', lines[0]), *lines[1:]], "code"),
        ],
    )
    def test_a_fault_in_the_file_turns_it_red(
        self, folder: Path, fault: Callable[[list[str]], list[str]], check: str
    ) -> None:
        before = lines_of(folder)
        after = fault(before)
        assert after != before
        write_lines(folder, after)
        found = json.loads(run("--json", status=1))["findings"]
        assert check in {finding["check"] for finding in found if finding["red"]}
        assert all(finding["remedy"] for finding in found)

    def test_an_edited_template_turns_it_red(self, folder: Path, templates: Path) -> None:
        edit(templates / "vector_add" / "vector_add_vanilla.py.j2", "mask=", "cache_modifier='.cg', mask=")
        found = json.loads(run("--json", status=1))["findings"]
        assert {(finding["check"], finding["row"].split()[0]) for finding in found} == {("code", "vector_add")}

    def test_stored_facts_that_differ_turn_it_red_until_they_are_updated(self, folder: Path) -> None:
        path = folder / "h200.ratchet.json"
        before = path.read_bytes()
        edit(path, '"registers": 168', '"registers": 144')
        assert "registers 144 → 168" in run(status=1)
        content = (folder / "h200.jsonl").read_bytes()
        assert re.search(r"updated: .* on h200: registers 144 → 168\n", run("--update"))
        assert path.read_bytes() == before
        assert (folder / "h200.jsonl").read_bytes() == content
        assert "updated" not in run("--update")

    def test_update_makes_a_ratchet_where_there_is_none(self, folder: Path) -> None:
        path = folder / "h200.ratchet.json"
        before = ratchet.load(path)
        path.unlink()
        assert "no facts stored" in run(status=1)  # of the files that come with tlxgen; of others it is a remark
        told = run("--update")
        after = ratchet.load(path)
        assert before is not None
        assert after is not None
        assert told.count(": facts stored") == len(lines_of(folder))
        assert told.count("must have a row from now on") == len(after.shapes)
        assert (after.rows, set(after.shapes) <= set(before.shapes)) == (before.rows, True)

    def test_update_does_not_heal_a_removed_row_of_a_suite(self, folder: Path) -> None:
        write_lines(folder, lines_of(folder)[1:])
        assert "coverage" in run("--update", status=1)
        assert "coverage" in run(status=1)

    def test_the_table_says_what_to_do_about_each(self, folder: Path) -> None:
        write_lines(folder, [*lines_of(folder), "{"])
        lines = run(status=1).splitlines()
        number = len(lines_of(folder))
        assert lines[0].split() == ["where", "row", "check", "found"]
        assert lines[1].startswith(f"h200.jsonl:{number}  line {number}")
        assert f"  h200.jsonl:{number} schema: correct or remove the line" in "\n".join(lines)
        assert lines[-1] == f"{number} rows checked without a GPU: 1 regressed"

    def test_reports_for_machines(self, folder: Path, tmp_path: Path) -> None:
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

    def test_a_green_summary(self, folder: Path, tmp_path: Path) -> None:
        run("--markdown", tmp_path / "summary.md")
        assert (tmp_path / "summary.md").read_text().startswith("### ✅ Tuned configs: ")

    def test_files_of_one_s_own(self, folder: Path, tmp_path: Path) -> None:
        own = tmp_path / "own.jsonl"
        shipped.dump([GEMM], own)
        assert "1 rows checked" in run("--cache", own)
        both = json.loads(run("--cache", own, "--cache", folder / "h200.jsonl", "--json", status=1))
        assert [f["check"] for f in both["findings"] if f["red"]] == ["duplicate"]

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda folder: (folder / "h200.jsonl").unlink(),
            lambda folder: (folder / "h200.ratchet.json").write_text("{"),
            lambda folder: (folder / "h200.ratchet.json").write_text('{"version": 2}'),
            lambda folder: [path.unlink() for path in folder.iterdir()],
        ],
        ids=["file", "ratchet", "version", "nothing"],
    )
    def test_what_cannot_be_read_is_bad_input(self, folder: Path, spoil: Callable[[Path], object]) -> None:
        spoil(folder)
        assert refused().exit_code == 2

    @pytest.mark.parametrize("text", ["{", "shapes: []", "operator: conv\nshapes: []", "operator: gemm\nshapes: [1]"])
    def test_a_suite_that_cannot_be_read_is_bad_input(self, folder: Path, tmp_path: Path, text: str) -> None:
        (tmp_path / "suites").mkdir()
        (tmp_path / "suites" / "own.yaml").write_text(text)
        error = refused("--update", "--suites", tmp_path / "suites")
        assert (error.exit_code, "own.yaml" in str(error)) == (2, True)

    def test_a_file_that_cannot_be_written_is_told(self, folder: Path, tmp_path: Path) -> None:
        for option in ("--junit", "--markdown"):
            error = refused(option, tmp_path / "missing" / "file")
            assert isinstance(error, OutputError)
            assert option in str(error)

    def test_a_ratchet_that_cannot_be_written_is_told(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        edit(folder / "h200.ratchet.json", '"registers": 168', '"registers": 144')
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
        assert isinstance(refused("--update"), OutputError)


class TestCommandOnAGpu:
    """An H200 whose times are recorded: those of the rows, but for what a test changes."""

    @pytest.fixture
    def limits(self) -> list[float]:
        """What each kernel was given on the card."""
        return []

    @pytest.fixture
    def slow(self, folder: Path, limits: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
        """How many times slower a config has become, by its id."""
        factors: dict[str, float] = {}

        @contextmanager
        def lock(*_: object) -> Iterator[None]:
            yield

        def card(problem: Any, limit: float) -> RecordedCard:
            limits.append(limit)
            record = next(r for r in shipped.load(SHIPPED) if r.key.problem == problem.model_dump())
            time_us = record.time_us * factors.get(record.config.id, 1.0)
            return RecordedCard({record.config: time_us}, record.peer_us or 1.0, noise=0.002)

        monkeypatch.setattr(devices, "detect", lambda index=None: target("h200"))
        monkeypatch.setattr(devices, "uuid", lambda: "0")
        monkeypatch.setattr(gpu_lock, "exclusive", lock)
        monkeypatch.setattr(gpu_lock, "other_processes", lambda gpu: 0)
        monkeypatch.setattr(retime, "make_runner", card)
        return factors

    def test_all_rows_are_timed(self, slow: dict[str, float], folder: Path) -> None:
        found = json.loads(run("--json", "--gpu"))
        assert (found["green"], found["gpu"], len(found["timed"])) == (True, "h200", len(lines_of(folder)))

    def test_a_kernel_may_take_so_long(self, slow: dict[str, float], limits: list[float]) -> None:
        run("--gpu")
        assert set(limits) == {LIMIT_S}
        limits.clear()
        run("--gpu", "--limit", 90)
        assert set(limits) == {90.0}

    def test_a_slower_config_turns_it_red(self, slow: dict[str, float], folder: Path, tmp_path: Path) -> None:
        slow[VECTOR.config.id] = 1.1
        told = run("--markdown", tmp_path / "summary.md", status=1)
        assert told.splitlines()[0].split() == ["timed", "µs", "ratio", "stored", "margin"]
        assert told.rstrip().endswith(f"{len(lines_of(folder))} of them timed on h200: 1 regressed")
        assert "| timed | µs | ratio | stored | margin |" in (tmp_path / "summary.md").read_text()

    def test_update_never_heals_a_slower_config(self, slow: dict[str, float], folder: Path) -> None:
        slow[VECTOR.config.id] = 1.1
        before = (folder / "h200.jsonl").read_bytes()
        assert "updated" not in run("--update", status=1)
        assert (folder / "h200.jsonl").read_bytes() == before

    def test_a_red_row_costs_no_time_on_the_card(self, slow: dict[str, float], folder: Path) -> None:
        write_lines(folder, [lines_of(folder)[0].replace('"num_stages":8', '"num_stages":99'), *lines_of(folder)[1:]])
        assert len(json.loads(run("--json", status=1))["timed"]) == len(lines_of(folder)) - 1

    def test_the_card_can_be_left_alone(self, slow: dict[str, float]) -> None:
        assert json.loads(run("--json", "--no-gpu"))["timed"] == []

    def test_another_model_times_nothing(self, slow: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "detect", lambda index=None: target("h100"))
        assert "0 of them timed on h100" in run()
        error = refused("--gpu")
        assert isinstance(error, UnsupportedDeviceError)
        assert "h100" in str(error)

    def test_gpu_insists_on_one(self, folder: Path) -> None:
        assert refused("--gpu").exit_code == 2

    def test_a_card_that_does_not_answer_is_not_asked_for_every_row(
        self, slow: dict[str, float], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def dead(problem: Any) -> Any:
            asked.append(problem.label)
            raise TuningError("RuntimeError on the card: no CUDA-capable device is detected")

        timer = SimpleNamespace(close=lambda: None)
        monkeypatch.setattr(retime, "make_runner", lambda problem, limit: timer)
        monkeypatch.setattr(retime, "_on", lambda timer, outcome, record, problem: dead(problem))
        found = run("--gpu", status=1)
        assert len(asked) == 3
        assert found.count("no CUDA-capable device") == 3
        assert found.count("not tried: the card did not answer") == len(lines_of(folder)) - 3

    def test_a_busy_card_is_told(
        self, slow: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(gpu_lock, "other_processes", lambda gpu: 2)
        told: list[str] = []
        monkeypatch.setattr(regress, "_report", lambda *_: None)
        log = SimpleNamespace(print=lambda text, **_: told.append(text), status=lambda text: quiet())
        options = {"update": False, "suites": None, "gpu": None, "workers": None}
        regress.run([], regress.Outputs(), log=log, **options)  # type: ignore[arg-type]
        assert any("2 other process(es)" in line for line in told)


@contextmanager
def quiet() -> Iterator[None]:
    yield


def test_remarks_come_last_and_do_not_fail() -> None:
    remark, red = Finding("time", "a", "b", red=False), Finding("facts", "c", "d")
    found = report.Report((Outcome(row(GEMM), (remark,)), Outcome(row(VECTOR, 2), (red,))))
    assert [finding for _, finding in found.findings()] == [red, remark]
    assert "<system-out>time: a</system-out>" in report.to_junit(found)
    assert not found.green
    assert report.Report((Outcome(row(GEMM), (remark,)),)).green


def test_the_example_s_workflow_asks_for_what_there_is() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "regress.yml").read_text())
    scripts = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    words = [word for script in scripts for word in shlex.split(script.replace("\\\n", " ")) if word.startswith("--")]
    known = {option for p in click_command("regress").params for option in [*p.opts, *p.secondary_opts]}
    assert {"--junit", "--markdown", "--gpu"} <= set(words) <= known
    assert sum("tlxgen regress" in script for script in scripts) == 2


@cache
def click_command(name: str) -> Any:
    return app.typer.main.get_command(app.app).commands[name]  # type: ignore[attr-defined]


@pytest.mark.slow
class TestForReal:
    """With compilers and simulator."""

    def test_what_ships_is_green(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The gate on this project's own rows."""
        monkeypatch.setattr(devices, "detect", lambda index=None: None)
        found = json.loads(run("--json", "--workers", WORKERS))
        assert found["findings"] == []
        assert found["rows"] == sum(len(shipped.load(file)) for file in paths.SHIPPED_CACHE.glob("*.jsonl"))

    def test_a_template_that_deadlocks_is_found_though_the_row_has_its_hash(self, templates: Path) -> None:
        """As if the kernel had been tuned and exported by hand, past `tlxgen tune`."""
        waited = "acc = tlx.async_dot_wait(0, acc)\n"
        release = "                tlx.barrier_arrive(empty[previous])\n"
        edit(templates / "gemm" / "macros" / "tma.j2", waited + release, waited)
        wrong = emit(ops.get("gemm"), ops.get("gemm").problem(GEMM.key.problem), GEMM.config)
        assert wrong.code_hash != GEMM.source_hash
        finding = only(GEMM.model_copy(update={"source_hash": wrong.code_hash}), rows.compile_all)
        assert finding.check == "simulator"
        assert "deadlock" in finding.what
