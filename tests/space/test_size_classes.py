"""Which problem stands for which: close in its running lengths, alike in everything else."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tlxgen import ops
from tlxgen.db import misses
from tlxgen.space.size_classes import representative, rounded_down

SIZES = st.integers(0, 2**24)
DIVISORS = st.sampled_from([1, 2, 4, 8, 16])


@given(size=SIZES, divisor=DIVISORS)
def test_a_size_is_at_most_a_quarter_octave_above_its_representative(size: int, divisor: int) -> None:
    one = rounded_down(size, divisor)
    assert one <= size < max(one + 16, one * 1.25 + 1)


@given(size=SIZES, divisor=DIVISORS)
def test_a_representative_stands_for_itself(size: int, divisor: int) -> None:
    one = rounded_down(size, divisor)
    assert rounded_down(one, divisor) == one


@given(size=SIZES, divisor=DIVISORS)
def test_alignment_stays(size: int, divisor: int) -> None:
    assert math.gcd(rounded_down(size, divisor), divisor) == math.gcd(size, divisor)


@given(one=SIZES, other=SIZES)
def test_order_stays_where_alignment_does_not_matter(one: int, other: int) -> None:
    """No more keys than rows become more keys than rows."""
    low, high = sorted((one, other))
    assert rounded_down(low, 1) <= rounded_down(high, 1)


def test_the_classes_of_lengths_to_8192_are_few() -> None:
    assert len({rounded_down(n, 1) for n in range(1, 8193)}) == 47
    assert len({rounded_down(n, 16) for n in range(1, 8193)}) == 171


@given(rows=st.integers(1, 2**14), keys=st.integers(1, 2**14), batch=st.integers(1, 512), window=st.integers(0, 4096))
@settings(max_examples=50)
def test_a_representative_differs_in_running_lengths_alone(rows: int, keys: int, batch: int, window: int) -> None:
    fields: dict[str, Any] = {"kv_heads": 2, "kv_len": keys, "causal": "bottom-right", "window": window}
    problem = ops.get("attention").problem((batch, 8, rows, 128), **fields)
    one = representative(problem)
    assert representative(one) == one
    fixed = set(problem.model_dump()) - set(problem.running)
    assert all(getattr(one, name) == getattr(problem, name) for name in fixed)


@given(
    batch=st.integers(1, 300),
    totals=st.tuples(st.integers(1, 2**16), st.integers(1, 2**16)),
    longer=st.tuples(st.floats(1, 40), st.floats(1, 40)),
)
@example(batch=3, totals=(2100, 2100), longer=(1.0, 1.0))
def test_a_representative_of_packed_sequences_holds_as_many_rows(
    batch: int, totals: tuple[int, int], longer: tuple[float, float]
) -> None:
    """However even they are: a longest sequence that was rounded down alone may not hold its share of the total."""
    most = [math.ceil(total / batch * factor) for total, factor in zip(totals, longer, strict=True)]
    fields: dict[str, Any] = {"total_kv": totals[1], "max_q": most[0], "max_kv": most[1], "causal": "bottom-right"}
    problem = ops.get("attention_varlen").problem((batch, 8, totals[0], 128), **fields)
    one = representative(problem)
    assert representative(one) == one
    assert (one.B, one.total_q, one.total_kv) == tuple(rounded_down(n, 1) for n in (batch, *totals))


def test_packed_batches_of_one_size_make_few_classes() -> None:
    """As in training: batches of 8192 tokens, of different documents each."""
    batches = [(batch, longest) for batch in range(8, 33) for longest in range(1024, 2048, 7)]
    made = (
        ops.get("attention_varlen").problem((batch, 8, 8192, 128), max_q=longest, max_kv=longest)
        for batch, longest in batches
    )
    assert len({representative(problem) for problem in made}) <= 48


def test_operators_round_lengths_only() -> None:
    for name in ops.NAMES:
        kind = ops.get(name).problem_type
        assert set(kind.running) <= set(kind.lengths) <= {*kind.sizes, *kind.extents}


class TestWhatIsNoted:
    def test_a_few_problems_of_a_class_as_they_are_and_then_the_class(self) -> None:
        misses.forget()
        asked = [ops.get("gemm").problem((m, 4096, 4096)) for m in range(4112, 5000, 16)]
        noted = [misses.to_note(problem) for problem in asked]
        assert noted[: misses.EXACT] == asked[: misses.EXACT]
        assert noted[misses.EXACT] == ops.get("gemm").problem((4096, 4096, 4096))
        assert set(noted[misses.EXACT + 1 :]) == {None}

    def test_each_once(self) -> None:
        misses.forget()
        problem = ops.get("gemm").problem((5000, 64, 64))
        assert [misses.to_note(problem) for _ in range(3)] == [problem, None, None]
