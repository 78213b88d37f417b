"""Tensors that share memory, and those that only share a parent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.stub_launcher import Noting, noting
from tlxgen import api, ops
from tlxgen.devices import target
from tlxgen.errors import LaunchError
from tlxgen.runtime import overlap as module
from tlxgen.runtime.kernel import Kernel
from tlxgen.runtime.overlap import overlap, overlaps_itself
from tlxgen.space.candidates import candidates


def x() -> torch.Tensor:
    return torch.zeros(64, 64, dtype=torch.bfloat16)


P = x()
LONG = torch.zeros(128 * 256, dtype=torch.bfloat16)


def rows(count: int, width: int, pitch: int, start: int = 0) -> torch.Tensor:
    return LONG.as_strided((count, width), (pitch, 1), start)


PACKED = torch.zeros(2, 64, 4, 4, 32, dtype=torch.bfloat16)
Q, K, V, OUT = (PACKED[:, :, i].transpose(1, 2) for i in range(4))

PAIRS = {
    "itself": (P, P, True),
    "its transpose": (P, P.T, True),
    "rows that meet": (P[:33], P[32:], True),
    "rows apart": (P[:32], P[32:], False),
    "every second row and those between": (P[::2], P[1::2], False),
    "every second row and every third": (P[::2], P[1::3], True),
    "every second column and those between": (P[:, ::2], P[:, 1::2], False),
    "columns that meet": (P[:, :33], P[:, 32:], True),
    "columns apart": (P[:, :32], P[:, 32:], False),
    "columns apart, one transposed": (P[:, :32].T, P[:32, 32:], False),
    "all and a slice": (P, P[:, 5:9], True),
    "all and a column": (P, P[:, 5], True),
    "columns apart of other rows": (P[:40, :32], P[8:, 32:], False),
    "blocks of which only the addresses interleave": (P[:2, :40], P[1:, 56:], False),
    "a row, expanded, beside another": (P[0].expand(64, 64), P[1], False),
    "a row, expanded, and itself": (P[1].expand(64, 64), P, True),
    "another dtype, in its memory": (P[:, :32], P.view(torch.float32)[:, 15:], True),
    "another dtype, beside it": (P[:, :32], P.view(torch.float32)[:, 16:], False),
    "bytes in its elements": (P[:, 5:6], P.view(torch.float8_e4m3fn)[:, 11:12], True),
    "bytes beside its elements": (P[:, 5:6], P.view(torch.float8_e4m3fn)[:, 12:13], False),
    "rows of other pitches that meet": (rows(128, 128, 256), rows(128, 128, 160, 64), True),
    "rows of other pitches, apart": (rows(64, 32, 128), rows(64, 32, 192, 32), False),
    "even and odd columns of other pitches": (rows(64, 32, 90)[:, ::2], rows(64, 32, 74, 1)[:, ::2], False),
    "packed heads and themselves": (K, K, True),
    "packed queries and keys": (Q, K, False),
    "packed queries and a place for the output": (Q, OUT, False),
    "packed values and a place for the output": (V, OUT, False),
    "packed heads, one head off": (Q[:, 1:], Q[:, :-1], True),
    "packed heads, one position off": (Q[:, :, 1:], Q[:, :, :-1], True),
    "packed heads of other batches": (Q[:1], Q[1:], False),
    "heads that reach into the next tensor's": (PACKED[:, :, 0, 1:], PACKED.flatten(2, 3)[:, :, 2:5], True),
    "another tensor": (P, x(), False),
    "nothing": (P, P[:0], False),
    "no memory": (P, P.to("meta"), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    one, other, expected = PAIRS[name]
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected


#: Sizes and strides of up to four dimensions, and the first element.
Lies = tuple[list[tuple[int, int]], int]
lies = st.tuples(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=4), st.integers(0, 60))
dtypes = st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex64])
BUFFER = torch.zeros(4096, dtype=torch.uint8)


def lying(at: Lies, dtype: torch.dtype) -> torch.Tensor:
    dimensions, start = at
    return BUFFER.view(dtype).as_strided([size for size, _ in dimensions], [stride for _, stride in dimensions], start)


def elements(at: Lies) -> list[int]:
    """Where each lies, counted one by one."""
    dimensions, start = at
    steps = [[index * stride for index in range(size)] for size, stride in dimensions]
    return [start + sum(indices) for indices in itertools.product(*steps)]


def bytes_of(at: Lies, dtype: torch.dtype) -> set[int]:
    return {element * dtype.itemsize + byte for element in elements(at) for byte in range(dtype.itemsize)}


@given(one=lies, other=lies, dtype=dtypes, other_dtype=dtypes)
@example(([(3, 4), (2, 1)], 0), ([(3, 4), (2, 1)], 2), torch.bfloat16, torch.bfloat16)  # between each other's rows
@example(([(3, 4), (2, 1)], 0), ([(2, 5), (2, 1)], 2), torch.bfloat16, torch.bfloat16)  # in another pitch
def test_tensors_share_memory_where_one_byte_is_in_both(
    one: Lies, other: Lies, dtype: torch.dtype, other_dtype: torch.dtype
) -> None:
    truth = not bytes_of(one, dtype).isdisjoint(bytes_of(other, other_dtype))
    assert overlap(lying(one, dtype), lying(other, other_dtype)) is truth


@given(at=lies, dtype=dtypes)
@example(([(3, 2), (2, 3)], 0), torch.bfloat16)  # 0 2 4 and 3 5 7
@example(([(3, 2), (3, 3)], 0), torch.bfloat16)  # 0 2 4, 3 5 7 and 6 8 10
@example(([(4, 2), (3, 3)], 0), torch.bfloat16)  # 0 2 4 6, 3 5 7 9 and 6 ...
@example(([(2, 1), (0, 0)], 0), torch.bfloat16)  # nothing
def test_a_tensor_overlaps_itself_where_two_elements_lie_at_one_place(at: Lies, dtype: torch.dtype) -> None:
    places = elements(at)
    assert overlaps_itself(lying(at, dtype)) is (len(places) > len(set(places)))


OF_THEMSELVES = {
    "a matrix": (P, False),
    "its transpose": (P.T, False),
    "a slice": (P[:, 3:9], False),
    "packed heads": (Q, False),
    "a number": (P[0, 0], False),
    "expanded": (P[0].expand(64, 64), True),
    "expanded by one": (P[:1].expand(1, 64), False),
    "windows that meet": (LONG.unfold(0, 16, 8), True),
    "windows apart": (LONG.unfold(0, 16, 16), False),
    "windows with a gap": (LONG.unfold(0, 16, 24), False),
    "rows in each other's holes": (LONG.as_strided((64, 2), (2, 1001)), False),
    "without memory": (P.to("meta"), False),
}


@pytest.mark.parametrize("name", OF_THEMSELVES)
def test_tensors_and_themselves(name: str) -> None:
    tensor, expected = OF_THEMSELVES[name]
    assert overlaps_itself(tensor) is expected


class Elsewhere:
    """A tensor at an address that this process may not read, as a GPU's is."""

    shape = (64, 32)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, int]:
        return 64, 1

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return 64 * 32


@pytest.mark.parametrize("address", [16, 1 << 46, (1 << 63) - (1 << 20)])
def test_memory_is_not_read(address: int) -> None:
    one: Any = Elsewhere(address)
    beside: Any = Elsewhere(address + 64)
    off: Any = Elsewhere(address + 62)
    assert overlap(one, off)
    assert not overlap(one, beside)
    assert not overlaps_itself(one)


def test_what_is_hard_to_tell_counts_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(200_000, dtype=torch.bfloat16)
    one = memory.as_strided((26, 3, 8), (166, 5939, 3640))
    other = memory.as_strided((16, 29, 6), (2263, 4347, 5448), 3082)
    assert overlap(one, other)
    monkeypatch.setattr(module, "_WORK", 10**8)
    assert not overlap(one, other)


class TestCalls:
    @pytest.fixture(autouse=True)
    def card(self, monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
        """A card that there is not; what would launch on it notes that it would."""
        with noting(monkeypatch):
            yield

    @staticmethod
    def kernel(operator: str, shape: tuple[int, ...]) -> Kernel:
        problem = ops.get(operator).problem(shape)
        config = candidates(problem, target("h200"), (f"{operator}_vanilla",))[0]
        return api.get_kernel(operator, problem, config=config)

    def test_an_output_within_packed_heads_is_refused_where_they_are_read_each_time(self) -> None:
        """Also after calls that only the addresses tell from one with an output of its own."""
        attend = self.kernel("attention", (2, 2, 64, 32))
        packed = torch.zeros(2, 64, 4, 4, 32, dtype=torch.bfloat16)
        q, k, v, out = (packed[:, :, i, :2].transpose(1, 2) for i in range(4))
        apart = torch.zeros_like(packed)[:, :, 3, :2].transpose(1, 2)
        off = packed[:, :, 0, 1:3].transpose(1, 2)
        for number in range(1, 11):
            for place in (apart, out):
                assert attend(q, k, v, out=place) is place
            for place in (q, k, v, off):
                with pytest.raises(LaunchError, match="overlaps"):
                    attend(q, k, v, out=place)
            assert len(Noting.noted) == 2 * number

    def test_an_output_in_another_pitch_is_refused_where_rows_meet_each_time(self) -> None:
        multiply = self.kernel("gemm", (128, 128, 128))
        a, b = rows(128, 128, 256), torch.zeros(128, 128, dtype=torch.bfloat16)
        for number in range(1, 11):
            multiply(a, b, out=torch.zeros_like(LONG).as_strided((128, 128), (160, 1), 64))
            multiply(a, b, out=rows(128, 128, 256, 128))
            with pytest.raises(LaunchError, match="overlaps one, a"):
                multiply(a, b, out=rows(128, 128, 160, 64))
            assert len(Noting.noted) == 2 * number

    def test_room_for_the_log_sum_exp_must_be_apart_each_time_too(self) -> None:
        problem = ops.get("attention").problem((2, 2, 64, 32), lse=True)
        config = candidates(problem, target("h200"), ("attention_vanilla",))[0]
        attend = api.get_kernel("attention", problem, config=config)
        q, k, v, out = (torch.zeros(2, 2, 64, 32, dtype=torch.bfloat16) for _ in range(4))
        memory = torch.zeros(4096, dtype=torch.float32)
        within_k = k.view(torch.float32).view(-1)[:256].view(2, 2, 64)
        within_out = out.view(torch.float32).view(-1)[:256].view(2, 2, 64)
        for number in range(1, 11):
            attend(q, k, v, lse=memory[:256].view(2, 2, 64))
            attend(q, k, v, out=out, lse=memory[256:512].view(2, 2, 64))
            with pytest.raises(LaunchError, match="lse is written, and shares memory with k"):
                attend(q, k, v, lse=within_k)
            with pytest.raises(LaunchError, match="overlaps one, lse"):
                attend(q, k, v, out=out, lse=within_out)
            assert len(Noting.noted) == 2 * number
