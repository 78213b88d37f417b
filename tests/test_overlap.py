"""Tensors that share memory, and those that only share a parent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlxgen.overlap import overlap


def x() -> torch.Tensor:
    return torch.zeros(64, 64, dtype=torch.bfloat16)


P = x()

PAIRS = {
    "itself": (P, P, True),
    "its transpose": (P, P.T, True),
    "rows that meet": (P[:33], P[32:], True),
    "rows apart": (P[:32], P[32:], False),
    "columns that meet": (P[:, :33], P[:, 32:], True),
    "columns apart": (P[:, :32], P[:, 32:], False),
    "columns apart, the other way round": (P[:, 32:], P[:, :32], False),
    "all and a slice": (P, P[:, 5:9], True),
    "columns apart of other rows": (P[:40, :32], P[8:, 32:], False),
    "another tensor": (P, x(), False),
    "nothing": (P, P[:0], False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    one, other, expected = PAIRS[name]
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected


@given(
    spans=st.tuples(*[st.tuples(st.integers(0, 15), st.integers(1, 16)) for _ in range(4)]),
)
def test_slices_of_one_parent_are_told_exactly(spans: tuple[tuple[int, int], ...]) -> None:
    parent = torch.zeros(16, 16)
    rows, columns, other_rows, other_columns = (slice(min(a, b - 1), max(a + 1, b)) for a, b in spans)
    one, other = parent[rows, columns], parent[other_rows, other_columns]
    one.fill_(1.0)
    truth = bool((other == 1.0).any())
    pitched = one.shape[0] > 1 and other.shape[0] > 1
    if pitched or truth:
        assert overlap(one, other) in ({truth} if pitched else {True, False})
