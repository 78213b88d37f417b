"""`tlxgen.ops.command_line.command` and the command line's parser are inverse."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

from tlxgen import ops
from tlxgen.cli import app
from tlxgen.cli.problem_options import parse
from tlxgen.ops.command_line import command

TUNE: Any = get_command(app.app).commands["tune"]  # type: ignore[attr-defined]
SIZES = st.integers(1, 2**16)


def assert_parsed_back(problem: Any) -> None:
    given = TUNE.make_context("tune", shlex.split(command("tune", problem))[2:]).params
    options = {name: given[name] for name in type(problem).model_fields if given.get(name)}
    assert parse(given["operator"], given["sizes"], options) == problem


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    out_dtype=st.sampled_from([None, "bf16", "fp32"]),
    layout=st.sampled_from(["nn", "nt", "tt"]),
    epilogue=st.sampled_from(["none", "bias+gelu", "scale+residual"]),
)
def test_gemm(sizes: tuple[int, int, int], **options: Any) -> None:
    assert_parsed_back(ops.get("gemm").problem(sizes, **options))


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
def test_other_operators(operator: str, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    assert_parsed_back(ops.get(operator).problem(sizes, **options))
