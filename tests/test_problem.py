"""What callers may pass as a problem, and what a refusal says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlxgen import ops
from tlxgen.devices import Gpu
from tlxgen.errors import InvalidProblemError
from tlxgen.ops.gemm.problem import ACTIVATIONS, EPILOGUE_PARTS, GemmProblem
from tlxgen.ops.vector_add.problem import VectorAddProblem
from tlxgen.problem import dtype_name, torch_dtype
from tlxgen.space.candidates import candidates

GEMM = ops.get("gemm")
VECTOR_ADD = ops.get("vector_add")


def refusal(shape: Any, operator: str = "gemm", **options: Any) -> str:
    """The message of the refusal, which is one line."""
    with pytest.raises(InvalidProblemError) as caught:
        ops.get(operator).problem(shape, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestForms:
    def test_sizes_in_order_fields_by_name_and_the_problem_itself_mean_the_same(self) -> None:
        expected = GemmProblem(M=1, N=2, K=3)
        assert GEMM.problem((1, 2, 3)) == expected
        assert GEMM.problem([1, 2, 3]) == expected
        assert GEMM.problem({"M": 1, "N": 2, "K": 3}) == expected
        assert GEMM.problem({"K": 3, "M": 1}, N=2) == expected
        assert GEMM.problem(expected) is expected

    def test_equal_problems_are_equal_keys_of_a_dict(self) -> None:
        assert {GEMM.problem((1, 2, 3)): 1}[GEMM.problem({"M": 1, "N": 2, "K": 3})] == 1

    def test_options_override_fields_of_a_problem(self) -> None:
        changed = GEMM.problem(GemmProblem(M=1, N=2, K=3, dtype="fp16", out_dtype="fp32"), layout="nt")
        assert changed == GemmProblem(M=1, N=2, K=3, dtype="fp16", out_dtype="fp32", layout="nt")

    def test_options_that_override_are_checked_like_all_others(self) -> None:
        assert "layout" in refusal(GemmProblem(M=1, N=2, K=3), layout="xx")
        assert "mode" in refusal(GemmProblem(M=1, N=2, K=3), mode="fast")

    def test_output_dtype_follows_the_dtype_unless_it_is_given(self) -> None:
        assert GEMM.problem((1, 2, 3), dtype="fp16").out_dtype == "fp16"
        assert GEMM.problem((1, 2, 3), dtype="fp16", out_dtype=None).out_dtype == "fp16"
        assert GEMM.problem((1, 2, 3), dtype="fp16", out_dtype="fp32").out_dtype == "fp32"

    def test_dtypes_may_be_torchs_or_longer_names(self) -> None:
        import torch

        for given_dtype in (torch.float16, "float16", "half", "torch.float16", "fp16"):
            assert GEMM.problem((1, 2, 3), dtype=given_dtype).dtype == "fp16"
        assert GEMM.problem((1, 2, 3), dtype="tf32").dtype == "fp32"
        assert all(dtype_name(torch_dtype(name)) == name for name in ("bf16", "fp16", "fp32"))

    def test_a_problem_cannot_be_changed(self) -> None:
        with pytest.raises(ValueError, match="frozen"):
            GEMM.problem((1, 2, 3)).M = 4


class TestRefusals:
    @pytest.mark.parametrize("shape", [(), (1,), (1, 2), (1, 2, 3, 4)])
    def test_a_wrong_number_of_sizes_names_those_that_belong(self, shape: tuple[int, ...]) -> None:
        message = refusal(shape)
        assert "M N K" in message
        assert str(shape) in message

    @pytest.mark.parametrize("shape", [5, None, 2.5])
    def test_what_is_no_shape_at_all_is_refused_too(self, shape: Any) -> None:
        assert repr(shape) in refusal(shape)
        assert repr(shape) in refusal(shape, "vector_add")

    @pytest.mark.parametrize("value", [-1, 1.0, 1.5, True, "8", None, 2**31 - 1023, 2**31, 2**70])
    @pytest.mark.parametrize("name", ["M", "N", "K"])
    def test_sizes_are_whole_numbers_in_range(self, name: str, value: Any) -> None:
        message = refusal({"M": 8, "N": 8, "K": 8, name: value})
        assert name in message
        assert repr(value) in message

    @pytest.mark.parametrize("value", [-1, 1.0, True, 2**40 + 1])
    def test_lengths_of_vectors_are_whole_numbers_in_range(self, value: Any) -> None:
        message = refusal((value,), "vector_add")
        assert "n = " in message
        assert repr(value) in message

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("dtype", "fp8"),
            ("dtype", "int8"),
            ("dtype", ""),
            ("dtype", 3),
            ("out_dtype", "fp64"),
            ("layout", "xn"),
            ("layout", "NN"),
            ("layout", ""),
            ("epilogue", "tanh"),
            ("epilogue", "bias+"),
            ("epilogue", ""),
        ],
    )
    def test_unknown_words_are_named_with_what_is_allowed(self, field: str, value: Any) -> None:
        message = refusal((8, 8, 8), **{field: value})
        assert field in message
        assert str(value) in message
        allowed = {"dtype": "bf16", "out_dtype": "bf16", "layout": "nn", "epilogue": "residual"}
        assert allowed[field] in message

    def test_unknown_fields_are_named(self) -> None:
        assert "'alpha'" in refusal((8, 8, 8), alpha=2)
        assert "'k'" in refusal({"M": 8, "N": 8, "K": 8, "k": 8})
        assert "'layout'" in refusal((8,), "vector_add", layout="nn")

    def test_missing_fields_are_named(self) -> None:
        assert "K" in refusal({"M": 8, "N": 8})

    def test_a_field_given_twice_is_refused(self) -> None:
        assert "M" in refusal((8, 8, 8), M=4)

    def test_another_operators_problem_is_refused(self) -> None:
        refusal(VectorAddProblem(n=8))

    @pytest.mark.parametrize("name", ["convolution", "GEMM", "", "ops", "__init__"])
    def test_unknown_operators_are_named_with_those_there_are(self, name: str) -> None:
        with pytest.raises(
            InvalidProblemError, match="gemm, grouped_gemm, attention, attention_varlen, vector_add"
        ) as caught:
            ops.get(name)
        assert repr(name) in str(caught.value)

    def test_refusals_end_the_command_line_as_bad_input_does(self) -> None:
        assert InvalidProblemError.exit_code == 2


class TestZeroSizes:
    @pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
    def test_are_problems_since_torch_has_an_answer(self, shape: tuple[int, ...], h200: Gpu) -> None:
        problem = GEMM.problem(shape)
        assert problem.empty
        with pytest.raises(InvalidProblemError, match="at least 1") as caught:
            candidates(problem, h200)
        for name, size in zip("MNK", shape, strict=True):
            assert f"{name} = {size}" in str(caught.value)

    def test_of_vectors(self, h200: Gpu) -> None:
        assert VECTOR_ADD.problem((0,)).empty
        with pytest.raises(InvalidProblemError, match="n = 0"):
            candidates(VECTOR_ADD.problem((0,)), h200)

    def test_sizes_of_one_are_not_empty(self, h200: Gpu) -> None:
        assert not GEMM.problem((1, 1, 1)).empty
        assert candidates(GEMM.problem((1, 1, 1)), h200)


def is_epilogue(parts: tuple[str, ...]) -> bool:
    """The rule, said another way: an ordered choice of parts with one activation at most."""
    places = [EPILOGUE_PARTS.index(part) for part in parts if part in EPILOGUE_PARTS]
    known = len(places) == len(parts)
    return known and places == sorted(set(places)) and sum(part in ACTIVATIONS for part in parts) <= 1


class TestEpilogues:
    @given(st.lists(st.sampled_from([*EPILOGUE_PARTS, "none", "tanh", "", " bias", "BIAS"]), min_size=1, max_size=6))
    def test_are_ordered_choices_of_parts_with_one_activation_at_most(self, parts: list[str]) -> None:
        text = "+".join(parts)
        if parts == ["none"] or is_epilogue(tuple(parts)):
            problem = GEMM.problem((8, 8, 8), epilogue=text)
            assert problem.epilogue_parts == (() if text == "none" else tuple(parts))
        else:
            assert repr(text) in refusal((8, 8, 8), epilogue=text)

    def test_there_are_thirty_two(self) -> None:
        accepted = 0
        for length in range(len(EPILOGUE_PARTS) + 1):
            for parts in itertools.permutations(EPILOGUE_PARTS, length):
                try:
                    GEMM.problem((8, 8, 8), epilogue="+".join(parts) or "none")
                except InvalidProblemError:
                    continue
                accepted += 1
        assert accepted == 2**3 * 4  # scale, bias, residual or not; one of three activations or none


class TestLabels:
    def test_are_the_command_lines_words_with_what_differs_from_the_defaults(self) -> None:
        assert GEMM.problem((1, 2, 3)).label == "gemm 1 2 3 bf16 nn"
        full = GEMM.problem((1, 2, 3), dtype="fp16", out_dtype="fp32", layout="tn", epilogue="bias+gelu")
        assert full.label == "gemm 1 2 3 fp16 tn out=fp32 bias+gelu"
        assert VECTOR_ADD.problem((1024,), dtype="fp32").label == "vector_add 1024 fp32"

    @given(
        st.tuples(*[st.integers(1, 9)] * 3),
        st.sampled_from(["bf16", "fp16", "fp32"]),
        st.sampled_from(["bf16", "fp16", "fp32"]),
        st.sampled_from(["nn", "nt", "tn", "tt"]),
        st.sampled_from(["none", "bias", "relu"]),
    )
    def test_tell_different_problems_apart(
        self, shape: tuple[int, ...], dtype: str, out_dtype: str, layout: str, epilogue: str
    ) -> None:
        problem = GEMM.problem(shape, dtype=dtype, out_dtype=out_dtype, layout=layout, epilogue=epilogue)
        for other in (GEMM.problem((1, 2, 3)), GEMM.problem((1, 2, 3), dtype="fp16")):
            assert (problem.label == other.label) == (problem == other)
