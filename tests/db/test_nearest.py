"""The row of a similar problem in place of the row that is not there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db import nearest
from tlxgen.db.nearest import SLACK, Neighbourhood, distance, why_worse
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.devices import Gpu, target
from tlxgen.ops.gemm.problem import GemmProblem
from tlxgen.space.candidates import candidates, default_config
from tlxgen.toolchain import toolchain

GEMM = ops.get("gemm")
H200 = target("h200")
TOOLCHAIN = toolchain()

SIZE = st.integers(1, 2**16)
PROBLEMS = st.builds(
    lambda m, n, k, dtype, layout: gemm(m, n, k, dtype=dtype, layout=layout),
    *(SIZE, SIZE, SIZE, st.sampled_from(["bf16", "fp16"]), st.sampled_from(["nn", "nt"])),
)


def gemm(m: int, n: int, k: int, **options: Any) -> GemmProblem:
    problem = GEMM.problem((m, n, k), **options)
    assert isinstance(problem, GemmProblem)
    return problem


def row(problem: GemmProblem, config: Config | None = None, gpu: Gpu = H200, **changes: Any) -> TunedRecord:
    config = config or candidates(problem, gpu)[0]
    fields: dict[str, Any] = {
        "key": tuning_key(problem, gpu.key),
        "config": config,
        "origin": "measured",
        "source_hash": emit(GEMM, problem, config).code_hash,
        "time_us": 10.0,
        "protocol": "graph-2",
    }
    return TunedRecord.model_validate({**fields, **changes})


def find(problem: GemmProblem, *rows: TunedRecord, gpu: Gpu = H200) -> tuple[nearest.Neighbour | None, str]:
    return Neighbourhood("gemm", rows).nearest(problem, gpu, TOOLCHAIN, default_config(problem, gpu))


class TestDistance:
    @given(a=PROBLEMS, b=PROBLEMS)
    def test_is_symmetric_and_zero_between_equals_alone(self, a: GemmProblem, b: GemmProblem) -> None:
        assert distance(a, b) == pytest.approx(distance(b, a))
        assert (distance(a, b) == 0.0) == (a == b)

    @given(a=PROBLEMS, b=PROBLEMS, c=PROBLEMS)
    def test_no_detour_is_shorter(self, a: GemmProblem, b: GemmProblem, c: GemmProblem) -> None:
        assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9

    def test_counts_octaves_by_weight(self) -> None:
        at = gemm(1024, 1024, 1024)
        assert distance(at, gemm(2048, 1024, 1024)) == 1.0
        assert distance(at, gemm(1024, 512, 1024)) == 1.0
        assert distance(at, gemm(1024, 1024, 4096)) == 1.0  # K counts half

    @pytest.mark.parametrize(
        "other",
        [{"dtype": "fp16"}, {"layout": "nt"}, {"out_dtype": "fp32"}, {"epilogue": "bias"}],
        ids=lambda fields: next(iter(fields)),
    )
    def test_is_infinite_between_different_kernels(self, other: dict[str, str]) -> None:
        assert distance(gemm(64, 64, 64), gemm(64, 64, 64, **other)) == math.inf

    def test_head_dimension_and_mask_make_other_kernels(self) -> None:
        attention = ops.get("attention")
        at = attention.problem((1, 8, 1024, 128))
        assert distance(at, attention.problem((1, 8, 1024, 64))) == math.inf
        assert distance(at, attention.problem((1, 8, 1024, 128), causal="bottom-right")) == math.inf
        assert distance(at, attention.problem((1, 8, 2048, 128))) == 2.0  # rows and keys


class TestNearest:
    def test_the_nearest_row_serves(self) -> None:
        near, far = row(gemm(4096, 4096, 4096)), row(gemm(8192, 4096, 4096))
        found, _ = find(gemm(5000, 4096, 4096), far, near)
        assert found is not None
        assert found.record == near
        assert found.problem == gemm(4096, 4096, 4096)

    def test_the_order_of_rows_does_not_matter(self) -> None:
        rows = [row(gemm(m, 4096, 4096)) for m in (2048, 4096, 8192)]
        answers = [find(gemm(5792, 4096, 4096), *order)[0] for order in (rows, rows[::-1])]
        assert answers[0] is not None
        assert answers[1] is not None
        assert answers[0].record == answers[1].record

    def test_a_row_that_is_too_far_does_not(self) -> None:
        found, why = find(gemm(64, 4096, 4096), row(gemm(4096, 4096, 4096)))
        assert found is None
        assert "1 further than 2 octaves" in why

    def test_fields_that_differ_are_accounted_for_one_by_one(self) -> None:
        rows = [row(gemm(1024, 1024, 1024, dtype="fp16")), row(gemm(1024, 1024, 1024, layout="nt"))]
        found, why = find(gemm(1024, 1024, 1024), *rows)
        assert found is None
        assert "dtype is bf16, theirs fp16 (1)" in why
        assert "layout is nn, theirs nt (1)" in why

    def test_a_config_that_is_not_legal_for_the_problem_does_not(self) -> None:
        config = candidates(gemm(4096, 4096, 4096), H200, ("gemm_tma_pingpong",))[0]
        found, why = find(gemm(4096, 4095, 4096), row(gemm(4096, 4096, 4096), config))
        assert found is None
        assert "16" in why  # the alignment rule

    def test_a_row_of_other_code_does_not(self) -> None:
        found, why = find(gemm(4097, 4096, 4096), row(gemm(4096, 4096, 4096), source_hash="0" * 32))
        assert found is None
        assert "emits other code" in why

    def test_predicted_rows_do_not(self) -> None:
        found, _ = find(gemm(4097, 4096, 4096), row(gemm(4096, 4096, 4096), origin="predicted", protocol="model-2"))
        assert found is None

    def test_rows_of_other_gpus_and_toolchains_do_not(self) -> None:
        elsewhere = row(gemm(4096, 4096, 4096), gpu=target("h100"))
        old = row(gemm(4096, 4096, 4096))
        old = old.model_copy(update={"key": old.key.model_copy(update={"toolchain": "fbtriton 3.6.0, ptxas 12.8.93"})})
        assert find(gemm(4097, 4096, 4096), elsewhere, old)[0] is None
        rows = Neighbourhood("gemm", [elsewhere, old])
        told = rows.elsewhere(gemm(4096, 4096, 4096), H200, TOOLCHAIN)
        where = "it was tuned for fbtriton 3.6.0, ptxas 12.8.93, gpu h100 (132 SMs)"
        assert told == f"{where}, and a row serves its own GPU model and toolchain alone"
        assert rows.elsewhere(gemm(4096, 4096, 64), H200, TOOLCHAIN) == ""

    def test_another_sm_count_is_another_gpu(self) -> None:
        assert find(gemm(4097, 4096, 4096), row(gemm(4096, 4096, 4096)), gpu=replace(H200, sm_count=114))[0] is None


@given(m=st.integers(128, 16384), n=st.sampled_from([1024, 4096, 8192]), tuned=st.sampled_from([512, 2048, 8192]))
@settings(max_examples=40, deadline=None)
def test_a_neighbour_is_never_worse_than_the_default_by_the_time_model(m: int, n: int, tuned: int) -> None:
    """Both start level where the neighbour was measured to be best, and the model says which grows more."""
    problem, at = gemm(m, n, 4096), gemm(tuned, n, 4096)
    default = default_config(problem, H200)
    assert default is not None
    for config in candidates(at, H200)[:40:8]:
        if why_worse(problem, config, at, default, H200) is None:
            ours, theirs = (GEMM.predict_us(problem, one, H200) for one in (config, default))
            anchored = theirs / GEMM.predict_us(at, default, H200) * GEMM.predict_us(at, config, H200)
            assert ours <= max(theirs, anchored) * SLACK * (1 + 1e-9)


def test_a_neighbour_that_the_model_prefers_to_the_default_serves() -> None:
    problem = gemm(4096, 4096, 4096)
    best, *_, worst = candidates(problem, H200)
    assert why_worse(problem, best, gemm(2048, 4096, 4096), worst, H200) is None


def test_a_neighbour_made_for_few_rows_does_not_serve_many() -> None:
    few, many = gemm(16, 8192, 8192), gemm(60, 8192, 8192)
    config = next(c for c in candidates(few, H200) if c.params["block_m"] == 64 and c.params["block_n"] == 64)
    tall = gemm(16384, 8192, 8192)
    assert why_worse(many, config, few, default_config(many, H200), H200) is None
    assert "faster" in (why_worse(tall, config, few, default_config(tall, H200), H200) or "")
