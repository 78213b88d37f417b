"""The accuracy gate: what a broken candidate writes is refused, what the library's own dtype cannot avoid is not."""

from __future__ import annotations

import math

import pytest
import torch

from tlxgen.ops.accuracy import error, why_far, why_wrong

NAN, INF = math.nan, math.inf


class Case:
    """A product with its float64 reference and the library's own result in bf16."""

    def __init__(self, m: int = 64, n: int = 96, k: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(m, k, generator=generator).to(dtype)
        b = torch.randn(k, n, generator=generator).to(dtype)
        self.reference = a.double() @ b.double()
        self.library = (a.float() @ b.float()).to(dtype)

    def why_wrong(self, result: torch.Tensor) -> str | None:
        return why_wrong(result, self.reference, self.library)

    def scaled_error(self, factor: float) -> torch.Tensor:
        """A result whose error is the library's, scaled; kept in float32, so that no rounding adds to it."""
        return (self.reference + factor * (self.library.double() - self.reference)).float()


@pytest.fixture
def case() -> Case:
    return Case()


class TestAccepted:
    def test_the_librarys_own_result(self, case: Case) -> None:
        assert case.why_wrong(case.library) is None

    def test_the_reference_rounded(self, case: Case) -> None:
        assert case.why_wrong(case.reference.to(torch.bfloat16)) is None

    @pytest.mark.parametrize("factor", [0.0, 1.2, 1.9, -1.5])
    def test_results_slightly_worse_than_the_librarys(self, case: Case, factor: float) -> None:
        assert case.why_wrong(case.scaled_error(factor)) is None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_another_order_of_summation(self, dtype: torch.dtype) -> None:
        case = Case(k=4096, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(64, 4096, generator=generator).to(dtype)
        b = torch.randn(4096, 96, generator=generator).to(dtype)
        parts = [a[:, i : i + 512].float() @ b[i : i + 512].float() for i in range(0, 4096, 512)]
        assert case.why_wrong(torch.stack(parts).sum(0).to(dtype)) is None

    def test_exact_results_where_the_library_is_exact(self) -> None:
        x = torch.arange(1000, dtype=torch.float32)
        assert why_wrong(2 * x, 2 * x.double(), 2 * x) is None

    def test_the_rounding_of_the_dtype_where_the_library_is_more_exact(self) -> None:
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert why_wrong(x.to(torch.bfloat16), x, x.float()) is None

    def test_zeros_for_a_product_over_nothing(self) -> None:
        zeros = torch.zeros(8, 8, dtype=torch.bfloat16)
        assert why_wrong(zeros, zeros.double(), zeros) is None

    def test_empty_results(self) -> None:
        empty = torch.zeros(0, 8, dtype=torch.bfloat16)
        assert why_wrong(empty, empty.double(), empty) is None


class TestNeverWritten:
    """Outputs are filled with NaN before each run, so what nobody wrote is NaN."""

    def test_a_kernel_that_stores_nothing(self, case: Case) -> None:
        assert "NaN" in str(case.why_wrong(torch.full_like(case.library, NAN)))

    def test_a_kernel_that_writes_half_of_the_output(self, case: Case) -> None:
        for half in (case.library[:32], case.library[32:], case.library[:, ::2]):
            result = case.library.clone()
            result[: half.shape[0], : half.shape[1]] = NAN
            message = str(case.why_wrong(result))
            assert message.startswith(f"{half.numel()} of {result.numel()} elements are NaN")

    def test_one_element_that_was_left_out(self, case: Case) -> None:
        result = case.library.clone()
        result[-1, -1] = NAN
        assert "1 of" in str(case.why_wrong(result))


class TestInfinities:
    @pytest.mark.parametrize("value", [INF, -INF, NAN])
    def test_one_that_the_reference_does_not_have(self, case: Case, value: float) -> None:
        result = case.library.clone()
        result[3, 5] = value
        assert case.why_wrong(result) is not None

    @pytest.mark.parametrize("value", [INF, -INF, NAN])
    def test_those_of_the_reference_belong_in_the_result(self, case: Case, value: float) -> None:
        reference, library = case.reference.clone(), case.library.clone()
        reference[3, 5], library[3, 5] = value, value
        assert why_wrong(library.clone(), reference, library) is None
        assert why_wrong(case.library, reference, library) is not None  # a finite value instead
        elsewhere = case.library.clone()
        elsewhere[5, 3] = value
        assert why_wrong(elsewhere, reference, library) is not None

    def test_of_the_wrong_sign(self, case: Case) -> None:
        reference, library = case.reference.clone(), case.library.clone()
        reference[3, 5], library[3, 5] = INF, INF
        result = library.clone()
        result[3, 5] = -INF
        assert why_wrong(result, reference, library) is not None

    def test_nan_is_no_infinity(self, case: Case) -> None:
        reference, library = case.reference.clone(), case.library.clone()
        reference[3, 5], library[3, 5] = INF, INF
        result = library.clone()
        result[3, 5] = NAN
        assert why_wrong(result, reference, library) is not None

    def test_values_beyond_the_dtypes_range_are_infinities_there_too(self) -> None:
        reference = torch.tensor([1e6, -1e6, 1.0], dtype=torch.float64)
        result = reference.to(torch.float16)
        assert torch.isinf(result).sum() == 2
        assert why_wrong(result, reference, result.clone()) is None

    def test_the_rest_is_compared_as_ever(self, case: Case) -> None:
        reference, library = case.reference.clone(), case.library.clone()
        reference[0, 0], library[0, 0] = NAN, NAN
        result = library.clone()
        result[1] = 0
        assert "error" in str(why_wrong(result, reference, library))


class TestErrors:
    @pytest.mark.parametrize("factor", [3.0, -3.0, 10.0])
    def test_three_times_the_librarys_own_is_too_much(self, case: Case, factor: float) -> None:
        assert "error" in str(case.why_wrong(case.scaled_error(factor)))

    def test_one_wrong_element_among_millions(self) -> None:
        generator = torch.Generator().manual_seed(0)
        reference = torch.randn(2048, 2048, generator=generator, dtype=torch.float64)
        library = reference.to(torch.bfloat16)
        result = library.clone()
        assert why_wrong(result, reference, library) is None
        result[1234, 567] += 0.5
        assert "largest error" in str(why_wrong(result, reference, library))

    def test_one_row_in_the_wrong_place(self, case: Case) -> None:
        result = case.library.clone()
        result[[7, 8]] = result[[8, 7]]
        assert "error" in str(case.why_wrong(result))

    def test_a_missing_step_of_a_long_sum(self) -> None:
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(64, 4096, generator=generator).bfloat16()
        b = torch.randn(4096, 64, generator=generator).bfloat16()
        reference, library = a.double() @ b.double(), (a.float() @ b.float()).bfloat16()
        short = (a[:, :-64].float() @ b[:-64].float()).bfloat16()
        assert "error" in str(why_wrong(short, reference, library))

    def test_anything_but_zero_where_all_is_zero(self) -> None:
        zeros = torch.zeros(8, 8, dtype=torch.bfloat16)
        result = zeros.clone()
        result[0, 0] = 1e-3
        assert why_wrong(result, zeros.double(), zeros) is not None

    def test_a_result_one_off_where_the_library_is_exact(self) -> None:
        x = torch.arange(1000, dtype=torch.float32)
        result = 2 * x
        result[500] += 1
        assert why_wrong(result, 2 * x.double(), 2 * x) is not None

    def test_are_relative_to_the_reference(self) -> None:
        reference = torch.tensor([3.0, 4.0], dtype=torch.float64)
        found = error(torch.tensor([3.0, 4.5]), reference)
        assert found.norm == pytest.approx(0.5 / 5)
        assert found.largest == pytest.approx(0.5 / 4)

    def test_leave_out_what_is_not_finite(self) -> None:
        reference = torch.tensor([INF, 3.0, 4.0, NAN], dtype=torch.float64)
        found = error(torch.tensor([INF, 3.0, 4.5, NAN]), reference)
        assert found.norm == pytest.approx(0.5 / 5)


class TestWithoutALibrary:
    """What no library gives for comparison is bounded by a tolerance."""

    REFERENCE = torch.tensor([1.0, 2.0, float("-inf")], dtype=torch.float64)

    def test_rounding_is_right(self) -> None:
        assert why_far(self.REFERENCE.float(), self.REFERENCE, 1e-6) is None

    def test_an_error_beyond_the_tolerance_is_named(self) -> None:
        off = self.REFERENCE.float() + torch.tensor([0.0, 1e-3, 0.0])
        assert "largest error 1.00e-03" in str(why_far(off, self.REFERENCE, 1e-4))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
    def test_infinities_must_stand_where_they_belong(self, value: float) -> None:
        wrong = self.REFERENCE.float()
        wrong[2] = value
        assert why_far(wrong, self.REFERENCE, 1e-4) is not None

    def test_nothing_is_right(self) -> None:
        assert why_far(torch.empty(0), torch.empty(0, dtype=torch.float64), 1e-4) is None


def test_a_library_that_gives_nan_sets_no_bound() -> None:
    reference = torch.ones(4, 4, dtype=torch.float64)
    library = torch.ones(4, 4, dtype=torch.bfloat16)
    library[0, 0] = float("nan")
    reason = why_wrong(torch.ones(4, 4, dtype=torch.bfloat16), reference, library)
    assert reason is not None
    assert "the library sets no bound" in reason
