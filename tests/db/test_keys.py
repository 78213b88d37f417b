"""Keys of the database: two requests share a key exactly when every answer to one is an answer to the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tlxgen import ops
from tlxgen.db import record
from tlxgen.db.record import TuningKey, tuning_key
from tlxgen.devices import TARGETS, DeviceKey, target
from tlxgen.ops.gemm.problem import GemmProblem
from tlxgen.problem import Problem

H200 = target("h200").key
ROOT = Path(__file__).parents[2]

SIZES = st.integers(0, 2**31 - 1024)
DTYPES = st.sampled_from(["bf16", "fp16", "fp32"])
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "gemm": {
        "M": SIZES,
        "N": SIZES,
        "K": SIZES,
        "dtype": DTYPES,
        "out_dtype": DTYPES,
        "layout": st.sampled_from(["nn", "nt", "tn", "tt"]),
        "epilogue": st.sampled_from(["none", "bias", "bias+gelu", "relu", "scale", "residual", "bias+residual"]),
    },
    "grouped_gemm": {
        "E": st.sampled_from([4, 8, 12]),
        "ROWS": st.integers(0, 10**4),
        "N": SIZES,
        "K": SIZES,
        "dtype": st.sampled_from(["bf16", "fp16"]),
        "out_dtype": DTYPES,
        "form": st.just("masked"),  # the one that has every field
        "layout": st.sampled_from(["nn", "nt", "tn", "tt"]),
        "epilogue": st.sampled_from(["none", "bias", "bias+gelu", "relu"]),
        "max_rows": st.integers(10**4, 10**6),
        "group_sizes": st.sampled_from(["even", "dirichlet", "zipf"]),
    },
    "attention": {
        "B": st.integers(0, 2**20),
        "H": st.sampled_from([12, 24, 48]),
        "S": st.integers(0, 2**24),
        "D": st.integers(1, 32).map(lambda eights: 8 * eights),
        "kv_heads": st.sampled_from([1, 2, 3, 4, 6, 12]),
        "kv_len": st.integers(0, 2**24),
        "dtype": st.sampled_from(["bf16", "fp16"]),
        "causal": st.sampled_from(["bottom-right", "top-left"]),
        "window": st.integers(0, 5000),
        "softcap": st.floats(0.0, 100.0),
        "lse": st.booleans(),
        "exact": st.booleans(),
    },
    "attention_varlen": {
        "B": st.integers(100, 2**20),
        "H": st.sampled_from([12, 24, 48]),
        "total_q": st.integers(0, 10**5),
        "D": st.integers(1, 32).map(lambda eights: 8 * eights),
        "kv_heads": st.sampled_from([1, 2, 3, 4, 6, 12]),
        "total_kv": st.integers(0, 10**5),
        "max_q": st.integers(1000, 2**24),
        "max_kv": st.integers(1000, 2**24),
        "dtype": st.sampled_from(["bf16", "fp16"]),
        "causal": st.sampled_from(["bottom-right", "top-left"]),
        "window": st.integers(0, 5000),
        "softcap": st.floats(0.0, 100.0),
        "lse": st.booleans(),
    },
    "vector_add": {"n": st.integers(0, 2**40), "dtype": DTYPES},
}


def problems(operator: str) -> st.SearchStrategy[Problem]:
    return st.fixed_dictionaries(FIELDS[operator]).map(ops.get(operator).problem)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Problem, Problem]:
    """Two problems of one operator that differ in exactly one field."""
    operator = draw(st.sampled_from(sorted(FIELDS)))
    problem = draw(problems(operator))
    name = draw(st.sampled_from(sorted(FIELDS[operator])))
    value = draw(FIELDS[operator][name].filter(lambda value: value != getattr(problem, name)))
    other = ops.get(operator).problem({**problem.model_dump(), name: value})
    assume(other != problem)  # windows that hide nothing are one problem
    return problem, other


@pytest.mark.parametrize("operator", FIELDS)
def test_the_properties_below_vary_every_field(operator: str) -> None:
    assert set(FIELDS[operator]) == set(ops.get(operator).problem_type.model_fields)


@given(pairs())
def test_problems_that_differ_in_one_field_have_different_keys(pair: tuple[Problem, Problem]) -> None:
    one, other = pair
    assert tuning_key(one, H200).id != tuning_key(other, H200).id


@given(st.sampled_from(sorted(FIELDS)).flatmap(problems))
def test_equal_problems_have_equal_keys(problem: Problem) -> None:
    fields = dict(reversed(problem.model_dump().items()))
    again = ops.get(problem.operator).problem(fields)
    assert tuning_key(again, H200).id == tuning_key(problem, H200).id


def test_sizes_do_not_run_into_each_other() -> None:
    ids = {
        tuning_key(GemmProblem(M=m, N=n, K=k), H200).id for m, n, k in ((1, 11, 1), (11, 1, 1), (1, 1, 11), (111, 1, 1))
    }
    assert len(ids) == 4


def test_an_operator_is_part_of_the_key() -> None:
    key = tuning_key(GemmProblem(M=1, N=1, K=1), H200)
    assert key.model_copy(update={"operator": "vector_add"}).id != key.id


@pytest.mark.parametrize(
    "other",
    [
        DeviceKey(gpu="h100", sm_count=H200.sm_count, capability=H200.capability),
        DeviceKey(gpu=H200.gpu, sm_count=114, capability=H200.capability),
        DeviceKey(gpu=H200.gpu, sm_count=H200.sm_count, capability="9.1"),
    ],
    ids=["name", "SM count", "capability"],
)
def test_each_field_of_the_device_is_part_of_the_key(other: DeviceKey) -> None:
    problem = GemmProblem(M=8, N=8, K=8)
    assert tuning_key(problem, other).id != tuning_key(problem, H200).id


def test_every_known_gpu_has_keys_of_its_own() -> None:
    problem = GemmProblem(M=8, N=8, K=8)
    assert len({tuning_key(problem, gpu.key).id for gpu in TARGETS.values()}) == len(TARGETS)


@pytest.mark.parametrize(
    "other", ["fbtriton 3.8.0, ptxas 12.9.86", "fbtriton 3.7.4, ptxas 13.0.1", "fbtriton 3.8.0.dev+g1"]
)
def test_the_toolchain_is_part_of_the_key(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GemmProblem(M=8, N=8, K=8)
    here = tuning_key(problem, H200)
    assert "3.7" in here.toolchain
    assert "ptxas" in here.toolchain
    monkeypatch.setattr(record, "toolchain", lambda: other)
    assert tuning_key(problem, H200).id != here.id


def test_keys_survive_the_trip_through_json() -> None:
    key = tuning_key(GemmProblem(M=8, N=8, K=8, epilogue="bias"), H200)
    assert TuningKey.model_validate_json(key.model_dump_json()).id == key.id


@pytest.mark.parametrize("seed", ["0", "1", "31337"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    script = (
        "from tlxgen import ops, devices\nfrom tlxgen.db import record\n"
        "problem = ops.get('gemm').problem((4096, 8192, 512), dtype='fp16', epilogue='bias+gelu')\n"
        "print(record.tuning_key(problem, devices.target('h200').key).id)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    problem = ops.get("gemm").problem((4096, 8192, 512), dtype="fp16", epilogue="bias+gelu")
    assert done.stdout.strip() == tuning_key(problem, H200).id
