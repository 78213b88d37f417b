"""The accuracy gate: compares a kernel's result with a float64 reference.

The bound is the library's own error in the same dtype on the same inputs, times a margin. The norm catches errors that
are spread out, the largest element those in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Factors by which a result may be worse than the library's. A different order of summation changes the norm by a few
#: percent and the largest error by less than a factor of two.
NORM_MARGIN = 2.0
MAX_MARGIN = 4.0

#: Bound where the library is exact (integers, sums of two): this times the rounding error of the output dtype.
EXACT_MARGIN = 1.0


@dataclass(frozen=True)
class Error:
    """Relative error of a result: Frobenius norm and largest element, each over the reference's."""

    norm: float
    largest: float


def error(result: torch.Tensor, reference: torch.Tensor) -> Error:
    """Relative error of `result` against `reference` (float64), over elements that are finite in both."""
    import torch

    difference = result.double() - reference
    finite = torch.isfinite(difference)
    difference = torch.where(finite, difference, 0.0)
    known = torch.where(torch.isfinite(reference), reference, 0.0)
    norm, largest = known.norm().item(), known.abs().max().item() if known.numel() else 0.0
    return Error(
        norm=difference.norm().item() / norm if norm else difference.norm().item(),
        largest=difference.abs().max().item() / largest if largest else 0.0,
    )


def why_wrong(result: torch.Tensor, reference: torch.Tensor, library: torch.Tensor) -> str | None:
    """Why `result` is wrong, or None: NaNs or infinities that differ from the reference's, or too large an error.

    Args:
        result: the kernel's output, which was filled with NaN before.
        reference: the unrounded result in float64.
        library: the peer's result in the output dtype, which sets the bound.
    """
    expected = reference.to(result.dtype)  # values beyond the dtype's range become infinities there too
    reason = _why_unlike(result, expected)
    if reason:
        return reason
    wrong = int((library.isnan() & ~expected.isnan()).sum())
    if wrong:
        return f"the library sets no bound: {wrong} elements of its own result are NaN, unlike the reference"
    found, bound = error(result, reference), error(library, reference)
    rounding = error(expected, reference)
    norm_bound = max(NORM_MARGIN * bound.norm, EXACT_MARGIN * rounding.norm)
    largest_bound = max(MAX_MARGIN * bound.largest, MAX_MARGIN * rounding.largest)
    if found.norm > norm_bound:
        return f"relative error {found.norm:.2e} exceeds {norm_bound:.2e} (the library's own is {bound.norm:.2e})"
    if found.largest > largest_bound:
        return (
            f"largest error {found.largest:.2e} exceeds {largest_bound:.2e} (the library's own is {bound.largest:.2e})"
        )
    return None


def why_far(result: torch.Tensor, reference: torch.Tensor, tolerance: float) -> str | None:
    """Why a result without a library's result to compare is wrong, or None.

    Args:
        result: the kernel's output, which was filled with NaN before.
        reference: the result in float64.
        tolerance: the largest error that counts as rounding, over the reference's largest element (at least 1).
    """
    import torch

    reason = _why_unlike(result, reference)
    if reason:
        return reason
    finite = torch.isfinite(reference)
    found, known = result.double()[finite], reference[finite]
    largest = (found - known).abs().max().item() if known.numel() else 0.0
    bound = tolerance * max(1.0, known.abs().max().item()) if known.numel() else tolerance
    return f"largest error {largest:.2e} exceeds {bound:.2e}" if largest > bound else None


def _why_unlike(result: torch.Tensor, expected: torch.Tensor) -> str | None:
    """NaNs or infinities that differ from the reference's."""
    import torch

    for name, kind in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = int((kind(result) != kind(expected)).sum())
        if wrong:
            return f"{wrong} of {result.numel()} elements are {name} or not, unlike the reference"
    return None
