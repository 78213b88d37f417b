"""Checks of rows without a GPU: each defect is one finding with a remedy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tuned_rows import (
    FACTS,
    GEMM,
    VECTOR,
    edit,
    fails,
    finding_of,
    outcomes_of,
    row,
    with_key,
    with_params,
)
from tlxgen import ops, paths
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord
from tlxgen.devices import target
from tlxgen.errors import CompileError
from tlxgen.regress import rows
from tlxgen.regress.findings import CHECKS
from tlxgen.space import search_space
from tlxgen.toolchain import toolchain

DEVICE, FIELDS = GEMM.key.device, GEMM.key.problem


def config(**params: Any) -> TunedRecord:
    """The row with a config that need not be valid."""
    made = Config.model_construct(template=GEMM.config.template, params={**GEMM.config.params, **params})
    return GEMM.model_copy(update={"config": made})


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the templates, in use."""
    shutil.copytree(paths.TEMPLATES, tmp_path / "templates")
    monkeypatch.setattr(paths, "TEMPLATES", tmp_path / "templates")
    return tmp_path / "templates"


def test_sound_rows_have_facts_and_no_findings() -> None:
    assert [(o.findings, o.facts, o.seconds) for o in outcomes_of(GEMM, VECTOR)] == [((), FACTS, 0.5)] * 2


@pytest.mark.parametrize(
    ("record", "check", "what", "remedy"),
    [
        (with_key(GEMM, operator="convolution"), "dead", "convolution", ""),
        (
            GEMM.model_copy(update={"config": Config(template="gemm_tma_unknown", params={})}),
            "dead",
            "gemm_tma_pingpong",
            "",
        ),
        (with_key(GEMM, problem={**FIELDS, "M": -4}), "key", "M = -4", ""),
        (with_key(GEMM, problem={**FIELDS, "beta": 1}), "key", "beta", ""),
        (with_key(GEMM, problem={k: v for k, v in FIELDS.items() if k != "layout"}), "key", "layout=nn", ""),
        (with_key(GEMM, problem={**FIELDS, "dtype": "bfloat16"}), "key", "dtype=bf16", ""),
        (with_key(GEMM, device=DEVICE.model_copy(update={"sm_count": 114})), "key", "132 SMs", ""),
        (with_key(GEMM, device=DEVICE.model_copy(update={"capability": "9"})), "key", "unpack", ""),
        (
            with_key(GEMM, toolchain="fbtriton 3.7.3, ptxas 12.9.86"),
            "toolchain",
            toolchain(),
            "tlxgen tune gemm 4096 4096 14336",
        ),
        (config(num_stages=7.5), "config", "7.5", ""),
        (config(num_stages=99), "config", "99", ""),
        (config(warp=1), "config", "warp", ""),
        (config(block_m=256), "config", "block_m", ""),
        (GEMM.model_copy(update={"protocol": "graph-2/look"}), "unverified", "provisional", "tlxgen tune gemm"),
        (GEMM.model_copy(update={"origin": "predicted"}), "unverified", "never ran", "tlxgen tune gemm"),
        (GEMM.model_copy(update={"error": None}), "unverified", "error", "tlxgen tune gemm"),
        (GEMM.model_copy(update={"peer_us": None}), "unverified", "library's time", "tlxgen tune gemm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_defect_is_found(record: TunedRecord, check: str, what: str, remedy: str) -> None:
    finding = finding_of(record)
    assert finding.check == check
    assert finding.check in CHECKS
    assert what in finding.what
    assert remedy in finding.remedy


def test_unknown_gpu_is_accepted() -> None:
    (outcome,) = outcomes_of(with_key(GEMM, device=DEVICE.model_copy(update={"gpu": "h300", "sm_count": 140})))
    assert not outcome.findings


def test_duplicate_names_the_first_line() -> None:
    first, other, second = outcomes_of(GEMM, VECTOR, GEMM.model_copy())
    assert (first.findings, other.findings) == ((), ())
    (finding,) = second.findings
    assert (finding.check, "h200.jsonl:1" in finding.what) == ("duplicate", True)


def test_illegal_config_is_found_with_the_constraint() -> None:
    illegal = with_params(GEMM, block_n=256, block_m=128, num_stages=8)
    operator = ops.get("gemm")
    why = search_space.why_illegal(operator, operator.problem(FIELDS), illegal.config, target("h200"))
    assert why
    assert "does not hold" in why
    assert finding_of(illegal).what == why


@pytest.mark.parametrize(
    ("pattern", "what"), [(r"num_stages:.*(\n +choices:.*)?", "num_stages"), (r"(?s).*", "")], ids=["value", "all"]
)
def test_changed_search_space_is_found(
    pattern: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(paths.SEARCH_SPACES, tmp_path / "spaces")
    monkeypatch.setattr(paths, "SEARCH_SPACES", tmp_path / "spaces")
    file = tmp_path / "spaces" / "gemm" / f"{GEMM.config.template}.yaml"
    file.write_text(re.sub(pattern, f"{what}: [2, 3]" if what else "{", file.read_text(), count=1))
    finding = finding_of(GEMM)
    assert (finding.check, (what or "not YAML") in finding.what) == ("config", True)


@pytest.mark.parametrize(
    ("new", "what", "remedy"),
    [
        ("cache_modifier='.cg', mask=", "other code", f"tlxgen tune vector_add {VECTOR.key.problem['n']}"),
        ("{{ unknown_name }} mask=", "unknown_name", ""),
        ("mask= =", "not Python", ""),
    ],
    ids=["changed", "does not render", "no Python"],
)
def test_changed_template_is_found(new: str, what: str, remedy: str, templates: Path) -> None:
    edit(templates / "vector_add" / f"{VECTOR.config.template}.py.j2", "mask=", new)
    finding = finding_of(VECTOR)
    assert finding.check == "code"
    assert what in finding.what
    assert remedy in finding.remedy
    assert not outcomes_of(GEMM)[0].findings


def test_comment_in_a_template_changes_nothing(templates: Path) -> None:
    file = templates / "vector_add" / f"{VECTOR.config.template}.py.j2"
    file.write_text(f"{file.read_text()}\n# a remark\n")
    assert not outcomes_of(VECTOR)[0].findings


@pytest.mark.parametrize(
    ("kind", "check", "remedy"),
    [
        ("rejected", "compile", "tlxgen tune gemm"),
        ("compiler_crash", "compile", "tlxgen tune gemm"),
        ("timeout", "compile", "--workers"),
        ("unsafe", "simulator", "tlxgen check gemm 4096 4096 14336 --config 'gemm_tma_pingpong block_k=64"),
    ],
)
def test_refusal_by_compiler_or_simulator_is_found(kind: str, check: str, remedy: str) -> None:
    finding = finding_of(GEMM, fails(CompileError(kind, "simulator: a deadlock")))
    assert (finding.check, "deadlock" in finding.what) == (check, True)
    assert remedy in finding.remedy


def test_older_protocol_is_a_remark() -> None:
    (outcome,) = outcomes_of(GEMM.model_copy(update={"protocol": "graph-1"}))
    assert [finding.check for finding in outcome.findings] == ["protocol"]
    assert not outcome.red


def test_bug_in_one_row_hides_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [outcome.red for outcome in outcomes] == [True, False]
    assert "ZeroDivisionError: a bug" in outcomes[0].findings[0].what


@pytest.mark.slow
def test_deadlock_in_a_template_is_found_although_the_row_has_its_hash(templates: Path) -> None:
    """Like a row that was exported by hand, past `tlxgen tune`."""
    wait = "acc = tlx.async_dot_wait(0, acc)\n"
    edit(templates / "gemm" / "macros" / "tma.j2", f"{wait}                tlx.barrier_arrive(empty[previous])\n", wait)
    wrong = emit(ops.get("gemm"), ops.get("gemm").problem(FIELDS), GEMM.config)
    assert wrong.code_hash != GEMM.source_hash
    finding = finding_of(GEMM.model_copy(update={"source_hash": wrong.code_hash}), rows.compile_all)
    assert (finding.check, "deadlock" in finding.what) == ("simulator", True)
