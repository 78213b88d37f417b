"""Ratchets: worse facts and ratios and missing rows are red, better ones remarks; `updated` records changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.tuned_rows import (
    FACTS,
    GEMM,
    RATIO,
    SHIPPED,
    VECTOR,
    edit,
    outcomes_of,
    row,
    slower,
    with_code_of,
    with_key,
    with_params,
)
from tlxgen import ops, paths
from tlxgen.codegen.facts import Facts
from tlxgen.db import shipped
from tlxgen.db.record import TunedRecord
from tlxgen.regress import ratchet, rows
from tlxgen.regress.findings import Finding

FILE = Path("h200.jsonl")
LABEL = ops.get("gemm").problem(GEMM.key.problem).label
OTHER_KERNEL = with_code_of(GEMM, num_stages=5)


def made(*records: TunedRecord, labels: Sequence[str] = (), facts: Facts = FACTS) -> ratchet.Ratchet:
    return ratchet.updated(None, outcomes_of(*records, facts=facts), labels)[0]


def compare(held: ratchet.Ratchet | None, *records: TunedRecord, facts: Facts = FACTS) -> list[Finding]:
    compared = ratchet.compare(held, FILE, outcomes_of(*records, facts=facts))
    return [finding for outcome in compared for finding in outcome.findings]


def checks(findings: Sequence[Finding]) -> list[tuple[str, bool]]:
    return [(finding.check, finding.red) for finding in findings]


def changed(held: ratchet.Ratchet, **fields: Any) -> ratchet.Ratchet:
    """The ratchet of one row with other fields."""
    ((key, kept),) = held.rows.items()
    return held.model_copy(update={"rows": {key: kept.model_copy(update=fields)}})


class TestFacts:
    def test_unchanged_are_green(self) -> None:
        assert compare(made(GEMM, VECTOR), GEMM, VECTOR) == []

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
    def test_have_limits(self, name: str, value: Any, red: bool | None) -> None:
        """`red` is None within the limits, and False for what has become better."""
        found = compare(made(GEMM), GEMM, facts=FACTS.model_copy(update={name: value}))
        assert [finding.red for finding in found] == ([] if red is None else [red])
        assert all(name in finding.what and "--update" in finding.remedy for finding in found)

    def test_fewer_warnings_are_better(self) -> None:
        noisy = FACTS.model_copy(update={"warnings": ("C7508",)})
        assert checks(compare(made(GEMM, facts=noisy), GEMM)) == [("facts", False)]

    def test_new_fact_is_red(self) -> None:
        held = made(GEMM)
        facts = {name: fact for name, fact in held.rows[GEMM.key.id].facts.items() if name != "stmatrix"}
        (finding,) = compare(changed(held, facts=facts), GEMM)
        assert finding.what == "stmatrix: 32, none stored"

    def test_of_no_or_another_kernel_are_unrecorded(self) -> None:
        (finding,) = compare(made(GEMM), GEMM, VECTOR)
        assert (finding.check, finding.what, finding.red) == ("unrecorded", "no facts stored", True)
        (finding,) = compare(changed(made(GEMM), code="of another"), GEMM)
        assert (finding.check, "another kernel" in finding.what) == ("unrecorded", True)


class TestRatios:
    @pytest.mark.parametrize(
        ("factor", "red"), [(0.5, True), (0.979, True), (0.981, None), (1.0, None), (1.019, None), (1.1, False)]
    )
    def test_have_a_limit(self, factor: float, red: bool | None) -> None:
        """`red` is None within the limit, and False for a better ratio."""
        found = compare(made(GEMM), slower(GEMM, 1 / factor))
        assert checks(found) == ([] if red is None else [("ratio", red)])
        assert all(f"said {RATIO:.3f}" in finding.what and "--update" in finding.remedy for finding in found)

    def test_of_another_config_are_compared_too(self) -> None:
        assert checks(compare(made(GEMM), slower(OTHER_KERNEL, 1.1))) == [("ratio", True), ("unrecorded", True)]
        assert checks(compare(made(GEMM), OTHER_KERNEL)) == [("unrecorded", True)]

    @pytest.mark.parametrize("times", [1, 2])
    def test_of_other_protocols_are_not_compared(self, times: float) -> None:
        older = slower(GEMM, times).model_copy(update={"protocol": "graph-1"})
        assert "ratio" not in {finding.check for finding in compare(made(GEMM), older)}
        assert compare(made(older), slower(GEMM, 2.0)) == []

    def test_may_be_missing_in_the_file(self, tmp_path: Path) -> None:
        """As in ratchets of older versions."""
        held, path = made(GEMM), tmp_path / "h200.ratchet.json"
        ratchet.dump(held, path)
        edit(path, f'   "ratio": {RATIO:.4f},\n', "")
        old = ratchet.load(path)
        assert compare(old, slower(GEMM, 2.0)) == []
        change = f"{row(GEMM).name}: ratio none stored → {RATIO:.4f}"
        assert ratchet.updated(old, outcomes_of(GEMM)) == (held, [change])


class TestRows:
    def test_without_a_ratchet_get_a_remark(self) -> None:
        (finding,) = compare(None, GEMM, VECTOR)
        assert (finding.check, finding.red) == ("unrecorded", False)
        assert "h200.ratchet.json" in finding.remedy

    def test_that_are_removed_are_red(self) -> None:
        assert checks(compare(made(GEMM, VECTOR), GEMM)) == [("removed", True)]

    def test_of_a_suite_that_are_removed_are_red(self) -> None:
        held = made(GEMM, VECTOR, labels=[LABEL, "gemm 1 1 1 bf16 nn"])
        assert held.shapes == (f"{LABEL} on h200",)
        (finding,) = compare(held, VECTOR)
        assert (finding.check, finding.red) == ("coverage", True)
        assert LABEL in finding.what
        assert "h200.ratchet.json" in finding.remedy

    def test_with_a_changed_size_leave_their_shape_without_a_row(self) -> None:
        other = with_key(GEMM, problem={**GEMM.key.problem, "M": 8192})
        assert checks(compare(made(GEMM, labels=[LABEL]), other)) == [("unrecorded", True), ("coverage", True)]


class TestUpdate:
    def test_reports_changes_and_drops_no_shape(self) -> None:
        held = made(GEMM, labels=[LABEL])
        outcomes = outcomes_of(VECTOR)
        after, changes = ratchet.updated(held, outcomes, [LABEL])
        assert after.shapes == held.shapes
        assert list(after.rows) == [VECTOR.key.id]
        assert changes == [f"{LABEL} on h200: the row is gone, and its facts", f"{outcomes[0].row.name}: facts stored"]
        assert ratchet.updated(after, outcomes, [LABEL]) == (after, [])

    def test_reports_facts_one_by_one(self) -> None:
        worse = FACTS.model_copy(update={"registers": 200, "warnings": ("C7508",)})
        _, changes = ratchet.updated(made(GEMM), outcomes_of(GEMM, facts=worse))
        assert changes == [f"{row(GEMM).name}: registers 168 → 200, warnings none → C7508"]

    def test_records_and_reports_ratios(self) -> None:
        after, changes = ratchet.updated(made(GEMM), outcomes_of(slower(GEMM, 2.0)))
        assert changes == [f"{row(GEMM).name}: ratio {RATIO:.4f} → {RATIO / 2:.4f}"]
        assert compare(after, slower(GEMM, 2.0)) == []
        _, changes = ratchet.updated(after, outcomes_of(OTHER_KERNEL))
        assert changes == [f"{row(GEMM).name}: facts of another kernel stored, ratio {RATIO / 2:.4f} → {RATIO:.4f}"]

    def test_leaves_what_is_stored_of_a_red_row(self) -> None:
        held = made(GEMM)
        assert ratchet.updated(held, outcomes_of(with_params(GEMM, num_stages=99))) == (held, [])


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    held = made(GEMM, VECTOR)
    path = ratchet.path_of(tmp_path / "h200.jsonl")
    assert ratchet.load(path) is None
    ratchet.dump(held, path)
    first = path.read_bytes()
    assert ratchet.load(path) == held
    ratchet.dump(held, path)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_shipped_ratchet_holds_every_shape_of_the_suites_with_a_row() -> None:
    held = ratchet.load(ratchet.path_of(SHIPPED))
    assert held is not None
    labels = ratchet.suite_labels(paths.SUITES)
    assert {"gemm 4096 4096 14336 bf16 nn", "vector_add 1048576 bf16"} <= labels
    names = {rows.row_name(record) for record in shipped.load(SHIPPED)}
    assert {f"{label} on h200" for label in labels} & names <= set(held.shapes)
