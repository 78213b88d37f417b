"""Emitted kernels without findings: at least 300 pairs of config and shape, twenty schedules each."""

from __future__ import annotations

import random

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.errors import TuningError
from tlxgen.ops.base import Operator
from tlxgen.problem import Problem
from tlxgen.simulator.check import check, small_cases
from tlxgen.space.candidates import candidates

H200 = devices.target("h200")
GEMM, ATTENTION, VECTOR_ADD = ops.get("gemm"), ops.get("attention"), ops.get("vector_add")
ATTENTION_VARLEN = ops.get("attention_varlen")
GROUPED_GEMM = ops.get("grouped_gemm")
SCHEDULES = 20

PROBLEMS: list[Problem] = [
    *(GEMM.problem((4096, 4096, 4096), layout=layout) for layout in ("nn", "nt", "tn", "tt")),
    GEMM.problem((4096, 4096, 4096), dtype="fp16", out_dtype="fp32"),
    GEMM.problem((4096, 4096, 4096), dtype="fp32", layout="nt"),
    *(
        GEMM.problem((4096, 4096, 4096), epilogue=epilogue)
        for epilogue in ("bias+relu", "residual", "scale+bias+gelu+residual")
    ),
    GEMM.problem((4097, 4095, 4099)),
    GEMM.problem((1024, 1024, 1024)),  # with programmatic dependent launch
    GROUPED_GEMM.problem((64, 8192, 2048, 4096), form="2d2d"),
    ATTENTION.problem((4, 32, 4096, 128)),
    ATTENTION.problem((4, 32, 4096, 128), kv_heads=8, causal="bottom-right", lse=True),
    ATTENTION.problem((4, 32, 4096, 64), causal="top-left", window=100, dtype="fp16"),
    ATTENTION.problem((4, 16, 4096, 256), causal="bottom-right", softcap=30.0),
    ATTENTION.problem((4, 32, 4096, 96), causal="bottom-right", window=200, softcap=50.0),
    ATTENTION.problem((64, 32, 1, 128), kv_heads=8, kv_len=4096),
    ATTENTION.problem((8, 32, 4, 64), kv_heads=8, kv_len=8192, causal="bottom-right", lse=True, dtype="fp16"),
    ATTENTION.problem((8, 16, 3, 80), kv_heads=2, kv_len=8192, causal="bottom-right", window=600, softcap=50.0),
    ATTENTION.problem((8, 16, 60, 256), kv_len=60, causal="top-left", window=30),
    ATTENTION_VARLEN.problem((8, 32, 8192, 128), max_q=4096),
    ATTENTION_VARLEN.problem((8, 32, 8192, 128), max_q=4096, kv_heads=8, causal="bottom-right", lse=True),
    ATTENTION_VARLEN.problem((8, 32, 8192, 64), max_q=4096, causal="top-left", window=100, dtype="fp16"),
    ATTENTION_VARLEN.problem((8, 16, 8192, 256), max_q=4096, causal="top-left", softcap=30.0),
    ATTENTION_VARLEN.problem((8, 32, 8192, 96), max_q=4096, causal="bottom-right", window=200, softcap=50.0),
    VECTOR_ADD.problem((2**20,)),
    VECTOR_ADD.problem((2**20 + 1,), dtype="fp32"),
]


#: One config a problem is enough: plain Triton has no barriers, the others few knobs or those of `attention_tma`.
ONCE = ("vanilla", "attention_decode", "attention_varlen")


def sample(operator: Operator[Problem], problem: Problem) -> list[KernelSource]:
    """Two configs of each template that serves the problem, or one."""
    rng = random.Random(problem.label)
    chosen = []
    for template in operator.templates:
        try:
            legal = candidates(problem, H200, (template,))
        except TuningError:
            continue
        chosen += rng.sample(legal, min(1 if template.endswith(ONCE) else 2, len(legal)))
    return [emit(operator, problem, config) for config in chosen]


SOURCES = [source for problem in PROBLEMS for source in sample(ops.get(problem.operator), problem)]


def test_at_least_300_pairs_of_config_and_shape_are_checked() -> None:
    assert sum(len(small_cases(source)) for source in SOURCES) >= 300


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.problem.label} {source.config.short}")
def test_emitted_kernel_is_clean(source: KernelSource) -> None:
    """In twenty schedules; in two if it is plain Triton, whose programs do not wait for each other."""
    schedules = SCHEDULES if "language.extra.tlx" in source.text else 2
    report = check(source, schedules)
    assert report.clean, "\n".join(map(str, report.findings))
    assert report.runs == schedules * len(report.cases)
