"""Emitted files stay right when a user edits their constants: what depends on a constant follows it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tlxgen import ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.devices import target
from tlxgen.simulator.check import check
from tlxgen.space.search_space import legal_configs

H200 = target("h200")

#: Template → problem and parameters of the file that is edited.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "vector_add_tma": ("vector_add", {"n": 4096}, {"block": 1024, "num_stages": 4}),
    "gemm_tma_cooperative": (
        "gemm",
        {"M": 512, "N": 512, "K": 512, "epilogue": "residual"},
        {"block_m": 128, "block_n": 128, "block_k": 64, "consumers": 2, "num_stages": 4, "tail": "whole"},
    ),
    "gemm_tma_pingpong": (
        "gemm",
        {"M": 512, "N": 512, "K": 512},
        {"block_m": 64, "block_n": 128, "block_k": 64, "num_stages": 6},
    ),
    "gemm_cp_async": (
        "gemm",
        {"M": 512, "N": 512, "K": 512},
        {"block_m": 64, "block_n": 64, "block_k": 64, "num_stages": 4},
    ),
    "grouped_gemm_tma": (
        "grouped_gemm",
        {"E": 4, "ROWS": 512, "N": 512, "K": 512},
        {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 4, "walk": "after"},
    ),
    "attention_tma": (
        "attention",
        {"B": 1, "H": 8, "S": 512, "D": 64, "causal": "bottom-right", "lse": True},
        {"consumers": 2, "rescale": "lazy", "schedule": "dynamic", "head_group": 4, "staging": "own"},
    ),
    "attention_decode": (
        "attention",
        {"B": 1, "H": 8, "S": 1, "kv_len": 2048, "D": 64},
        {"block_n": 128, "kv_stages": 4, "splits": 3},
    ),
    "attention_varlen": (
        "attention_varlen",
        {"B": 4, "H": 8, "total_q": 512, "D": 64, "causal": "bottom-right"},
        {"consumers": 3, "q_stages": 1, "kv_stages": 2, "head_group": 4, "pingpong": "values"},
    ),
}

GEMMS = [name for name in FILES if "gemm" in name]

EDITS: list[tuple[str, dict[str, int]]] = [
    ("vector_add_tma", {"BLOCK": 2048}),
    ("vector_add_tma", {"NUM_STAGES": 2}),
    *((name, {"NUM_STAGES": 2}) for name in GEMMS),
    *((name, {"BLOCK_K": 32}) for name in GEMMS),
    *((name, {"BLOCK_N": 64}) for name in ("gemm_tma_cooperative", "gemm_tma_pingpong", "grouped_gemm_tma")),
    ("gemm_cp_async", {"BLOCK_N": 128}),
    ("gemm_tma_cooperative", {"BLOCK_N": 256, "NUM_STAGES": 2}),
    ("gemm_tma_cooperative", {"BLOCK_M": 256, "NUM_STAGES": 2}),
    ("gemm_tma_pingpong", {"BLOCK_M": 128, "NUM_STAGES": 3}),
    ("grouped_gemm_tma", {"BLOCK_M": 256, "NUM_STAGES": 2}),
    *((name, {"GROUP_M": 2}) for name in FILES if name.startswith("gemm")),
    *((name, {"BLOCK_N": 64}) for name in FILES if name.startswith("attention")),
    *((name, {"KV_STAGES": 2, "HEAD": 128}) for name in ("attention_tma", "attention_varlen")),
    ("attention_tma", {"CONSUMERS": 3, "HEAD_GROUP": 2}),
    ("attention_tma", {"Q_STAGES": 1, "KV_STAGES": 1}),
    ("attention_varlen", {"CONSUMERS": 2}),
    ("attention_varlen", {"Q_STAGES": 2, "HEAD_GROUP": 16}),
    ("attention_decode", {"SPLITS": 5}),
]


def emitted(template: str) -> KernelSource:
    name, fields, params = FILES[template]
    operator = ops.get(name)
    problem = operator.problem(fields)
    legal = legal_configs(operator, problem, H200, (template,))
    return emit(operator, problem, next(config for config in legal if params.items() <= config.params.items()))


def edited(source: KernelSource, changes: dict[str, int]) -> KernelSource:
    """The source with other values of some constants, as a user would type them."""
    text = source.text
    for constant, value in changes.items():
        line = re.search(rf"^((?:\w+, )*{constant}(?:, \w+)*) = (.*?)  #", text, re.MULTILINE)
        assert line is not None, f"{source.config.template} has no {constant}"
        names, values = line[1].split(", "), line[2].split(", ")
        values[names.index(constant)] = str(value)
        text = text.replace(f"{line[1]} = {line[2]}", f"{line[1]} = {', '.join(values)}", 1)
    assert text != source.text
    return replace(source, text=text)


@pytest.mark.parametrize("template", FILES)
def test_the_files_are_clean_as_emitted(template: str) -> None:
    assert check(emitted(template), 1).clean


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        ("attention_tma", {"CONSUMERS": 4}, "CONSUMERS"),
        ("attention_tma", {"WG_M": 128}, "64 rows"),
        ("attention_tma", {"HEAD": 32}, "the head dimension is 64; this kernel takes up to 32"),
        ("attention_decode", {"HEAD": 128}, "the head dimension is 64; this kernel is for 128"),
        ("attention_decode", {"BLOCK_M": 128}, "64 rows"),
        ("attention_decode", {"KV_STAGES": 1, "BLOCK_N": 64}, "staged in the memory of the keys"),
    ],
    ids=str,
)
def test_an_edit_that_cannot_work_is_refused(template: str, changes: dict[str, int], message: str) -> None:
    source = edited(emitted(template), changes)
    with pytest.raises(AssertionError, match=message):
        call(source)


def call(source: KernelSource) -> None:
    """Imports the file, then calls `arguments`, in the simulator."""
    loader.load(source)
    check(source, 1, stop_early=True)


@pytest.mark.parametrize(("template", "changes"), EDITS, ids=str)
def test_an_edited_constant_gives_a_right_kernel(template: str, changes: dict[str, int]) -> None:
    report = check(edited(emitted(template), changes), 1, stop_early=True)
    assert report.clean, report.findings[0].message
