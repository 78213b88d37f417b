"""The simulated `tl`: type promotion, arithmetic, shapes, reductions, memory and control."""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.language.semantic import TritonSemantic

from tlxgen.simulator.dtypes import SCALARS, numpy_dtype
from tlxgen.simulator.language import assembly
from tlxgen.simulator.language.blocks import (
    Block,
    as_block,
    builtin_max,
    builtin_min,
    builtin_range,
    normalise,
)
from tlxgen.simulator.language.global_operations import GlobalOperations
from tlxgen.simulator.language.namespace import Language, UnsupportedOperationError

TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
INT32 = st.integers(-(2**31), 2**31 - 1)


@pytest.fixture(autouse=True)
def _no_numpy_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class FakeMachine(GlobalOperations):
    """Buffers at made-up addresses; lanes that are masked out read as 77."""

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray] = {}
        self.findings: list[tuple[str, str]] = []
        self.barriers = 0

    def allocate(self, values: Any, dtype: tl.dtype) -> Block:
        base = 1 << (20 + len(self.buffers))
        self.buffers[base] = np.array(values, numpy_dtype(dtype))
        return Block(np.int64(base), tl.pointer_type(dtype))  # type: ignore[arg-type]

    def place(self, address: int) -> tuple[np.ndarray, int]:
        base = max(b for b in self.buffers if b <= address)
        offset, size = address - base, self.buffers[base].itemsize
        assert offset % size == 0
        return self.buffers[base], offset // size

    def program_id(self, axis: int) -> int:
        return 10 + axis

    def num_programs(self, axis: int) -> int:
        return 20 + axis

    def global_load(self, addresses: np.ndarray, element: tl.dtype, mask: np.ndarray | None) -> np.ndarray:
        return self.global_atomic(addresses, addresses, element, mask, lambda old, _: old)

    def global_store(
        self, addresses: np.ndarray, values: np.ndarray, element: tl.dtype, mask: np.ndarray | None
    ) -> None:
        self.global_atomic(addresses, values, element, mask, lambda _, new: new)

    def global_atomic(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        element: tl.dtype,
        mask: np.ndarray | None,
        operation: Callable[[Any, Any], Any],
    ) -> np.ndarray:
        assert addresses.dtype == np.int64
        old = np.full(addresses.shape, 77, numpy_dtype(element))
        for lane in np.ndindex(addresses.shape):
            if mask is None or mask[lane]:
                buffer, index = self.place(int(addresses[lane]))
                old[lane] = buffer[index]
                buffer[index] = operation(old[lane], values[lane])
        return old

    def make_descriptor(
        self, base: Block, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], padding: str
    ) -> Any:
        return (shape, strides, block_shape, padding)

    def fail(self, kind: str, message: str) -> None:
        self.findings.append((kind, message))

    def block_barrier(self) -> None:
        self.barriers += 1


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def lang(machine: FakeMachine) -> Language:
    return Language(machine)


LANG = Language(FakeMachine())


def block(values: Any, dtype: tl.dtype) -> Block:
    return Block(np.asarray(values).astype(numpy_dtype(dtype))[()], dtype)


def random(shape: tuple[int, ...], dtype: tl.dtype = tl.float32, seed: int = 0) -> Block:
    values = np.random.default_rng(seed).standard_normal(shape) * 4
    return block(values, tl.float32).to(dtype)


def listed(value: Block) -> Any:
    return value.to(tl.float32).data.tolist() if value.dtype.is_floating() else value.data.tolist()


ARITHMETIC = [
    tl.int1,
    tl.int8,
    tl.int32,
    tl.int64,
    tl.uint8,
    tl.uint32,
    tl.float16,
    tl.bfloat16,
    tl.float32,
    tl.float64,
]


class TestPromotion:
    @pytest.mark.parametrize(("a", "b"), [*itertools.product(ARITHMETIC, ARITHMETIC)], ids=str)
    def test_two_blocks_promote_as_in_triton(self, a: tl.dtype, b: tl.dtype) -> None:
        expected = TritonSemantic(None).computation_type_impl(a, False, b, False, False)
        result = block([1, 2], a) + block([1, 2], b)
        assert result.dtype == expected
        assert result.data.dtype == numpy_dtype(expected)

    @pytest.mark.parametrize(("dtype", "number"), [*itertools.product(ARITHMETIC, (True, 2, 1.5))], ids=str)
    def test_number_and_block_promote_as_in_triton(self, dtype: tl.dtype, number: Any) -> None:
        semantic = TritonSemantic(None)
        expected = semantic.computation_type_impl(dtype, False, semantic.to_tensor_type(number), True, False)
        for result in (block([1], dtype) * number, number * block([1], dtype)):
            assert result.dtype == expected
            assert result.data.dtype == numpy_dtype(expected)

    @pytest.mark.parametrize(
        ("number", "dtype"),
        [(True, tl.int1), (5, tl.int32), (2**31, tl.uint32), (-(2**31) - 1, tl.int64), (2**63, tl.uint64),
         (0.5, tl.float32), (1e300, tl.float64), (math.inf, tl.float32)],
    )  # fmt: skip
    def test_number_alone_has_the_smallest_type_that_holds_it(self, number: Any, dtype: tl.dtype) -> None:
        assert as_block(number).dtype == dtype
        assert as_block(number).data == number

    def test_division_promotes_as_in_triton(self) -> None:
        assert (block(7, tl.int32) / block(2, tl.int32)).dtype == tl.float32
        assert float(block(7, tl.int32) / 2) == 3.5
        assert (block(1, tl.bfloat16) / block(3, tl.bfloat16)).dtype == tl.float32
        with pytest.raises(TypeError, match="different signedness"):
            block(1, tl.int32) // block(1, tl.uint32)
        with pytest.raises(TypeError, match="takes integers"):
            block(1, tl.float32) // 2

    def test_number_out_of_range_is_refused(self) -> None:
        with pytest.raises(ValueError, match="300 is out of range for int8"):
            block(1, tl.int8) + 300
        with pytest.raises(ValueError, match="-1 is out of range for uint32"):
            block(1, tl.uint32) + -1

    def test_compared_number_keeps_its_type(self) -> None:
        assert bool(block(0.1, tl.float16) != 0.1)
        assert bool(block(100, tl.int8) < 300)
        assert (block([1, 2], tl.int32) < 2).dtype == tl.int1

    def test_maximum_takes_a_number_as_float32(self) -> None:
        assert LANG.maximum(block(1, tl.float16), 0.0).dtype == tl.float32
        assert LANG.maximum(block(1, tl.bfloat16), block(2, tl.bfloat16)).dtype == tl.float32
        assert LANG.where(block(True, tl.int1), block(1, tl.float16), 0.0).dtype == tl.float16


class TestIntegers:
    @given(INT32, INT32.filter(bool))
    def test_division_truncates_as_in_c(self, a: int, b: int) -> None:
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        wrapped = (quotient + 2**31) % 2**32 - 2**31
        for x, y in ((block(a, tl.int32), block(b, tl.int32)), (block([a], tl.int32), block([b], tl.int32))):
            assert np.ravel((x // y).data).tolist() == [wrapped]
            assert np.ravel((x % y).data).tolist() == [int(math.fmod(a, b)) if abs(b) > 1 else 0]

    @given(INT32, INT32, st.sampled_from([operator.add, operator.sub, operator.mul]))
    def test_arithmetic_wraps_around(self, a: int, b: int, op: Any) -> None:
        expected = (op(a, b) + 2**31) % 2**32 - 2**31
        assert int(op(block(a, tl.int32), block(b, tl.int32))) == expected
        assert op(block([a], tl.int32), b).data.tolist() == [expected]

    def test_division_by_zero_gives_zero(self) -> None:
        assert int(block(5, tl.int32) // block(0, tl.int32)) == 0

    def test_booleans_compute_modulo_two(self) -> None:
        t, f = block(True, tl.int1), block(False, tl.int1)
        assert [bool(t + t), bool(t + f), bool(t - t), bool(t * t), bool(~t), bool(t ^ f)] == [0, 1, 0, 1, 0, 1]

    def test_shifts_follow_signedness(self) -> None:
        assert int(block(-8, tl.int32) >> 1) == -4
        assert int(block(2**32 - 8, tl.uint32) >> 1) == 2**31 - 4
        assert int(1 << block(5, tl.int32)) == 32

    @given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
    def test_umulhi_gives_the_upper_half(self, a: int, b: int) -> None:
        assert int(LANG.umulhi(block(a, tl.uint64), block(b, tl.uint64))) == a * b >> 64
        a, b = a & 0xFFFFFFFF, b & 0xFFFFFFFF
        result = LANG.umulhi(block([a], tl.uint32), block([b], tl.uint32))
        assert result.data.tolist() == [a * b >> 32]

    def test_only_scalars_are_indices_and_conditions(self) -> None:
        assert [10, 20, 30][block(1, tl.int32)] == 20
        assert not block(0, tl.int32)
        for use in (bool, int, float, operator.index):
            with pytest.raises(TypeError, match="no single value"):
                use(block([1, 2], tl.int32))
        with pytest.raises(TypeError, match="no index"):
            operator.index(block(1.0, tl.float32))


class TestRounding:
    @pytest.mark.parametrize("name", ["fp16", "bf16"])
    @pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul])
    def test_halves_round_after_each_operation(self, name: str, op: Any) -> None:
        a, b = random((64,), seed=1), random((64,), seed=2)
        ours = op(a.to(SCALARS[name]), b.to(SCALARS[name]))
        theirs = op(torch.from_numpy(a.data).to(TORCH[name]), torch.from_numpy(b.data).to(TORCH[name]))
        assert listed(ours) == theirs.float().tolist()

    @pytest.mark.parametrize("source", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("target", ["bf16", "fp16", "fp8e4nv", "fp8e5", "fp32"])
    def test_conversions_round_to_nearest_even(self, source: str, target: str) -> None:
        values = random((4096,), SCALARS[source], seed=3)
        theirs = torch.from_numpy(values.to(tl.float32).data).to(TORCH[target])
        assert listed(values.to(SCALARS[target])) == theirs.float().tolist()

    @pytest.mark.parametrize(("name", "largest"), [("fp8e4nv", 448.0), ("fp8e5", 57344.0)])
    def test_float8_saturates_and_keeps_nan(self, name: str, largest: float) -> None:
        signalling = np.uint32(0x7F800001).view(np.float32)
        assert math.isnan(float(block(signalling, tl.float32).to(SCALARS[name]).to(tl.float32)))
        result = listed(block([1e6, -1e6, math.inf, math.nan, largest], tl.float32).to(SCALARS[name]))
        assert result[:3] == [largest, -largest, largest]
        assert math.isnan(result[3])
        assert result[4] == largest

    @pytest.mark.parametrize("name", ["bf16", "fp16", "fp8e4nv"])
    def test_rounding_toward_zero_never_grows(self, name: str) -> None:
        values = random((4096,), seed=4)
        rounded = values.to(SCALARS[name], fp_downcast_rounding="rtz").to(tl.float32).data
        nearest = values.to(SCALARS[name]).to(tl.float32).data
        assert (np.abs(rounded) <= np.abs(values.data)).all()
        assert ((rounded == nearest) | (np.abs(nearest) > np.abs(values.data))).all()

    def test_floats_truncate_to_integers_and_integers_compare_with_zero(self) -> None:
        assert block([1.9, -1.9], tl.float32).to(tl.int32).data.tolist() == [1, -1]
        assert block([0, 2, 256], tl.int32).to(tl.int1).data.tolist() == [False, True, True]
        assert block([300, -1], tl.int32).to(tl.uint8).data.tolist() == [44, 255]
        assert block([-1.9, 0.5], tl.bfloat16).to(tl.int32).data.tolist() == [-1, 0]

    def test_bitcast_keeps_the_bits(self) -> None:
        assert int(block(1.0, tl.float32).to(tl.int32, bitcast=True)) == 0x3F800000
        with pytest.raises(ValueError, match="32 bits"):
            block(1.0, tl.float32).to(tl.int16, bitcast=True)

    def test_minus_zero_is_positive_zero_as_in_triton(self) -> None:
        assert math.copysign(1, float(-block(0.0, tl.float32))) == 1

    def test_overflow_and_nan_give_no_warning(self) -> None:
        big = block(3e38, tl.float32)
        assert float(big * big) == math.inf
        assert math.isnan(float(big * big - big * big))
        assert float(LANG.exp2(block(1000.0, tl.float32))) == math.inf
        assert float(block(1e6, tl.float32).to(tl.float16)) == math.inf


class TestPointers:
    P = tl.pointer_type(tl.float32)

    def test_offsets_count_elements(self) -> None:
        pointer = block(1000, self.P)
        moved = pointer + LANG.arange(0, 4)
        assert moved.dtype == self.P
        assert moved.data.tolist() == [1000, 1004, 1008, 1012]
        assert int((2 + pointer).data) == 1008
        assert int((pointer - 2).data) == 992
        assert int((block(0, self.P) + block(2**31 - 1, tl.int32)).data) == 4 * (2**31 - 1)
        assert int((block(0, self.P) + block(2**32 - 1, tl.uint32)).data) == 4 * (2**32 - 1)

    def test_differences_count_elements_and_addresses_compare(self) -> None:
        difference = block(1008, self.P) - block(1000, self.P)
        assert (int(difference), difference.dtype) == (2, tl.int64)
        assert bool(block(1008, self.P) > block(1000, self.P))
        assert bool(block(0, self.P) == 0)

    def test_invalid_operators_are_refused(self) -> None:
        senseless: list[Callable[[Block], Any]] = [lambda p: p + 1.5, lambda p: p + p, lambda p: p * 2, lambda p: 2 - p]
        for operation in senseless:
            with pytest.raises(TypeError, match="does not take"):
                operation(block(1000, self.P))

    def test_cast_changes_the_element_type(self) -> None:
        pointer = block(1000, self.P).to(tl.pointer_type(tl.int8), bitcast=True) + 1
        assert int(pointer.to(tl.int64)) == 1001


class TestShapes:
    def test_shapes_broadcast_from_the_last_dimension(self) -> None:
        column, row = LANG.arange(0, 4)[:, None], LANG.arange(0, 8)[None, :]
        assert (column + row).shape == (4, 8)
        assert (column * 8 + row).data.tolist() == np.arange(32).reshape(4, 8).tolist()
        assert (LANG.arange(0, 8) + LANG.zeros([4, 8], tl.int32)).shape == (4, 8)

    def test_error_names_different_shapes(self) -> None:
        with pytest.raises(ValueError, match=r"\+: the shapes \[4\] and \[8\] do not broadcast"):
            LANG.arange(0, 4) + LANG.arange(0, 8)
        with pytest.raises(ValueError, match="do not broadcast"):
            LANG.where(LANG.arange(0, 4) > 1, LANG.arange(0, 8), 0)
        with pytest.raises(ValueError, match=r"\[4\] does not broadcast to \[8\]"):
            LANG.arange(0, 4).broadcast_to(8)

    def test_scalars_take_new_dimensions(self) -> None:
        scalar = as_block(3)
        assert scalar[None].shape == (1,)
        assert scalar[None, None].shape == (1, 1)
        assert scalar.broadcast_to(2, 2).data.tolist() == [[3, 3], [3, 3]]
        with pytest.raises(ValueError, match="None and full slices only"):
            LANG.arange(0, 4)[0]
        with pytest.raises(ValueError, match="too many slices"):
            scalar[:]

    def test_elements_are_rearranged_as_in_triton(self) -> None:
        x = LANG.arange(0, 8)
        low, high = x.reshape(4, 2).split()
        assert (low.data.tolist(), high.data.tolist()) == ([0, 2, 4, 6], [1, 3, 5, 7])
        assert LANG.interleave(low, high).data.tolist() == x.data.tolist()
        assert LANG.join(as_block(1), as_block(2)).data.tolist() == [1, 2]
        assert LANG.join(as_block(1), as_block(2)).split()[1].shape == ()
        assert LANG.cat(low, high, can_reorder=True).data.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
        assert x.reshape([2, 4]).T.data.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert LANG.permute(x.reshape(2, 2, 2), (2, 0, 1)).shape == (2, 2, 2)
        assert LANG.expand_dims(x, [0, 2]).shape == (1, 8, 1)
        assert LANG.flip(x).data.tolist() == list(range(7, -1, -1))
        assert operator.add(x.shape, [1]) == (8, 1)
        assert x.type == tl.block_type(tl.int32, [8])
        assert as_block(1).type == tl.int32
        with pytest.raises(ValueError, match="number of elements"):
            x.reshape(3)
        with pytest.raises(ValueError, match="power of two"):
            LANG.arange(0, 3)

    def test_swizzle_runs_by_columns_of_a_group_of_rows(self) -> None:
        i, j = LANG.arange(0, 4)[:, None], LANG.arange(0, 4)[None, :]
        a, b = LANG.swizzle2d(i, j, 4, 4, 2)
        places = np.zeros((4, 4), int)
        places[a.data, b.data] = np.arange(16).reshape(4, 4)
        assert places.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]


class TestBuiltins:
    def test_range_yields_run_time_scalars(self) -> None:
        values = list(builtin_range(as_block(7), 0, -3))
        assert [int(v) for v in values] == [7, 4, 1]
        assert {v.dtype for v in values} == {tl.int32}
        assert next(builtin_range(block(3, tl.int64))).dtype == tl.int64

    def test_min_and_max_of_constants_are_constants(self) -> None:
        assert builtin_min(3, 2) == 2
        assert isinstance(builtin_max(3, 2), int)
        assert int(builtin_max(as_block(3), 5)) == 5

    def test_assignment_makes_run_time_scalars(self) -> None:
        one, (two, name) = normalise((1, [2.0, "x"]))
        assert (one.dtype, two.dtype, name) == (tl.int32, tl.float32, "x")
        assert normalise(True).dtype == tl.int1
        assert normalise(None) is None

    def test_constexpr_arguments_are_unwrapped(self) -> None:
        assert LANG.arange(0, tl.constexpr(4)).shape == (4,)
        assert LANG.zeros([tl.constexpr(2), 4], tl.constexpr(tl.float32)).shape == (2, 4)
        assert int(as_block(2) + tl.constexpr(3)) == 5
        assert LANG.constexpr(3) == 3

    def test_subclass_may_compute_its_data(self) -> None:
        class Late(Block):
            __slots__ = ()

            def __init__(self) -> None:
                self.dtype = tl.int32

            @property
            def data(self) -> Any:  # type: ignore[override]
                return np.arange(4, dtype=np.int32)

        assert (Late() + 1).data.tolist() == [1, 2, 3, 4]
        assert LANG.sum(Late()).data == 6


class TestReductions:
    X = random((8, 16), seed=5)

    @pytest.mark.parametrize("axis", [0, 1, -1, None])
    @pytest.mark.parametrize("keep", [False, True])
    def test_reductions_agree_with_numpy(self, axis: int | None, keep: bool) -> None:
        for name in ("sum", "max", "min"):
            expected = getattr(np, name)(self.X.data, axis=axis, keepdims=keep)
            for ours in (
                getattr(LANG, name)(self.X, axis, keep_dims=keep),
                getattr(self.X, name)(axis, keep_dims=keep),
            ):
                np.testing.assert_allclose(ours.data, expected, rtol=1e-5)

    def test_reductions_promote_as_in_triton(self) -> None:
        full = np.full(4, 100)
        assert int(LANG.sum(block(full, tl.int8))) == 400
        table = {tl.int8: tl.int32, tl.uint8: tl.uint32, tl.int1: tl.uint32, tl.bfloat16: tl.float32}
        for dtype, expected in {**table, tl.float16: tl.float16}.items():
            assert LANG.sum(block(full, dtype)).dtype == expected
        assert LANG.max(block(full, tl.float16)).dtype == tl.float32
        assert LANG.max(block(full, tl.int8)).dtype == tl.int32
        assert LANG.sum(block(full, tl.int32), dtype=tl.int64).dtype == tl.int64
        wrapped = LANG.sum(block([2**31 - 1, 1], tl.int32))
        assert (int(wrapped), wrapped.dtype) == (-(2**31), tl.int32)

    def test_extrema_ignore_nan_and_take_the_leftmost(self) -> None:
        x = block([1, math.nan, 3, 3, -2, -2], tl.float32)
        assert [float(LANG.max(x)), float(LANG.min(x))] == [3, -2]
        assert [int(LANG.argmax(x, 0)), int(LANG.argmin(x, 0))] == [2, 4]
        value, index = LANG.max(self.X, 1, return_indices=True)
        assert index.data.tolist() == self.X.data.argmax(1).tolist()
        assert (value.data == self.X.data.max(1)).all()
        assert float(LANG.maximum(as_block(math.nan), 1.0)) == 1
        assert math.isnan(float(LANG.maximum(as_block(math.nan), 1.0, propagate_nan=tl.PropagateNan.ALL)))

    @pytest.mark.parametrize("axis", [0, 1, None])
    def test_combine_function_must_only_be_associative(self, axis: int | None) -> None:
        def last(a: Block, b: Block) -> Block:
            return b

        x = LANG.arange(0, 32).reshape(4, 8)
        expected = {0: x.data[-1], 1: x.data[:, -1], None: 31}[axis]
        assert (LANG.reduce(x, axis, last).data == expected).all()
        assert (LANG.reduce(x, axis, last, keep_dims=True).shape) == {0: (1, 8), 1: (4, 1), None: (1, 1)}[axis]

    def test_tuples_are_reduced_and_scanned(self) -> None:
        def affine(a1: Block, b1: Block, a2: Block, b2: Block) -> tuple[Block, Block]:
            return a1 * a2, b1 * a2 + b2

        a, b = block([2, 3, 1, 2], tl.int32), block([1, 0, 5, 1], tl.int32)
        assert [int(x) for x in LANG.reduce((a, b), 0, affine)] == [12, 17]
        scanned = LANG.associative_scan((a, b), 0, affine)
        assert [x.data.tolist() for x in scanned] == [[2, 6, 6, 12], [1, 3, 8, 17]]

    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("axis", [0, 1])
    def test_scans_agree_with_numpy(self, axis: int, reverse: bool) -> None:
        x = LANG.arange(0, 32).reshape(4, 8)
        data = np.flip(x.data, axis) if reverse else x.data
        expected = np.cumsum(data, axis)
        expected = (np.flip(expected, axis) if reverse else expected).tolist()
        assert LANG.cumsum(x, axis, reverse).data.tolist() == expected
        assert LANG.associative_scan(x, axis, lambda a, b: a + b, reverse).data.tolist() == expected
        assert LANG.cumprod(block([1, 2, 3, 4], tl.int32)).data.tolist() == [1, 2, 6, 24]

    @pytest.mark.parametrize("dtype", [tl.float32, tl.bfloat16, tl.int32])
    def test_sort_and_topk_agree_with_numpy(self, dtype: tl.dtype) -> None:
        x = self.X.to(dtype)
        expected = np.sort(x.to(tl.float32).data, -1)
        assert listed(LANG.sort(x)) == expected.tolist()
        assert listed(LANG.sort(x, descending=True)) == expected[:, ::-1].tolist()
        assert listed(LANG.topk(x, 4)) == expected[:, :-5:-1].tolist()

    def test_gather_histogram_and_bitwise_sum(self) -> None:
        x = LANG.arange(0, 8) * 10
        assert LANG.gather(x, block([3, 0, 3], tl.int32), 0).data.tolist() == [30, 0, 30]
        assert LANG.histogram(block([0, 1, 1, 9, -1], tl.int32), 4).data.tolist() == [1, 2, 0, 0]
        assert int(LANG.xor_sum(x)) == np.bitwise_xor.reduce(x.data)
        with pytest.raises(ValueError, match="axis 2"):
            LANG.sum(x, 2)


class TestMathematics:
    @pytest.mark.parametrize("name", ["exp", "exp2", "sin", "cos", "erf", "floor", "ceil"])
    @pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
    def test_halves_are_computed_in_float32_and_rounded_once(self, name: str, dtype: str) -> None:
        x = random((256,), SCALARS[dtype], seed=6)
        theirs = getattr(torch, name)(torch.from_numpy(x.to(tl.float32).data)).to(TORCH[dtype]).float()
        ours = getattr(LANG, name)(x)
        assert ours.dtype.name == dtype
        np.testing.assert_allclose(ours.to(tl.float32).data, theirs, rtol=1e-2 if dtype != "fp32" else 1e-5, atol=1e-6)

    def test_integers_are_refused(self) -> None:
        with pytest.raises(TypeError, match="exp takes floats, not int32"):
            LANG.exp(as_block(1))

    def test_composed_functions(self) -> None:
        x = random((4, 8), seed=7)
        np.testing.assert_allclose(LANG.sigmoid(x).data, 1 / (1 + np.exp(-x.data)), rtol=1e-5)
        np.testing.assert_allclose(LANG.softmax(x, 1, keep_dims=True).data.sum(1), 1, rtol=1e-5)
        assert LANG.clamp(block([-5.0, 0.5, math.nan], tl.float32), 0.0, 1.0).data.tolist() == [0, 0.5, 0]
        assert float(LANG.rsqrt(as_block(4.0))) == 0.5
        assert float(LANG.fma(as_block(2.0), as_block(3.0), as_block(1.0))) == 7
        assert (LANG.cdiv(7, 2), int(LANG.cdiv(as_block(7), 2))) == (4, 4)
        assert float(LANG.abs(block(-2.0, tl.bfloat16))) == 2

    def test_libdevice_and_its_aliases(self) -> None:
        x = random((16,), seed=8)
        for lib in (LANG.extra.libdevice, LANG.extra.cuda.libdevice):
            np.testing.assert_allclose(lib.tanh(x).data, np.tanh(x.data), rtol=1e-6)
            assert float(lib.pow(as_block(2.0), as_block(3.0))) == 8
            assert lib.isnan(x).dtype == tl.int1
        assert float(LANG.extra.libdevice.fast_expf(as_block(0.0))) == 1
        assert LANG.math.exp(x).data.tolist() == LANG.exp(x).data.tolist()
        LANG.extra.cuda.gdc_wait()


class TestDot:
    @pytest.mark.parametrize("name", ["fp16", "bf16", "fp8e4nv"])
    def test_products_sum_in_float32(self, name: str) -> None:
        a, b = random((32, 64), SCALARS[name], 9), random((64, 16), SCALARS[name], 10)
        acc = random((32, 16), seed=11)
        expected = a.to(tl.float64).data @ b.to(tl.float64).data + acc.data
        result = LANG.dot(a, b, acc)
        assert result.dtype == tl.float32
        np.testing.assert_allclose(result.data, expected, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(LANG.dot(b.T, a.T, acc.T).data, expected.T, rtol=1e-4, atol=1e-3)
        assert acc.data.tolist() == random((32, 16), seed=11).data.tolist()

    def test_tf32_ignores_13_bits(self) -> None:
        one = block(np.eye(16), tl.float32)
        x = LANG.full([16, 16], 1 + 2**-10 + 2**-11, tl.float32)
        assert set(np.unique(LANG.dot(x, one).data)) == {np.float32(1 + 2**-10)}
        for precise in ({"input_precision": "ieee"}, {"allow_tf32": False}):
            assert (LANG.dot(x, one, **precise).data == x.data).all()

    def test_int8_sums_in_int32(self) -> None:
        a = block(np.random.default_rng(0).integers(-128, 128, (16, 64)), tl.int8)
        result = LANG.dot(a, a.T)
        assert (result.dtype, result.data.dtype) == (tl.int32, np.int32)
        assert result.data.tolist() == (a.data.astype(int) @ a.data.T.astype(int)).tolist()

    def test_operands_that_do_not_fit_are_refused(self) -> None:
        a, b = random((16, 32)), random((16, 16))
        with pytest.raises(ValueError, match="do not fit"):
            LANG.dot(a, b)
        with pytest.raises(TypeError, match="the operands have the dtypes"):
            LANG.dot(b, b.to(tl.float16))
        with pytest.raises(ValueError, match="accumulator's shape"):
            LANG.dot(b, b, a)
        assert LANG.dot(b.to(tl.float16), b.to(tl.float16), out_dtype=tl.float16).dtype == tl.float16


class TestMemory:
    def test_masks_of_loads_and_stores(self, machine: FakeMachine, lang: Language) -> None:
        source, target = machine.allocate(range(8), tl.float32), machine.allocate([0] * 8, tl.bfloat16)
        offsets = lang.arange(0, 8)
        x = lang.load(source + offsets, mask=offsets < 6, other=-1, cache_modifier=".cg")
        assert (x.dtype, x.data.tolist()) == (tl.float32, [0, 1, 2, 3, 4, 5, -1, -1])
        lang.store(target + offsets, x + 1, mask=offsets != 2, eviction_policy="evict_first")
        assert machine.buffers[int(target.data)].tolist() == [1, 2, 0, 4, 5, 6, 0, 0]
        assert lang.load(source + offsets, offsets < 1).data.tolist() == [0] + [77] * 7

    def test_scalars_and_booleans_are_loaded_and_stored(self, machine: FakeMachine, lang: Language) -> None:
        flags = machine.allocate([0, 2], tl.int8).to(tl.pointer_type(tl.int1))
        assert lang.load(flags + lang.arange(0, 2)).data.tolist() == [False, True]
        lang.store(flags, 1)
        scalar = lang.load(flags)
        assert (scalar.shape, bool(scalar), scalar.dtype) == ((), True, tl.int1)
        assert int(lang.load(flags, mask=False, other=0)) == 0

    def test_store_has_the_shape_of_its_pointers(self, machine: FakeMachine, lang: Language) -> None:
        pointer = machine.allocate([0] * 4, tl.int32)
        lang.store(pointer + lang.arange(0, 4), 5)
        assert machine.buffers[int(pointer.data)].tolist() == [5] * 4
        with pytest.raises(ValueError, match=r"the pointers have the shape \[\]"):
            lang.store(pointer, lang.arange(0, 4))
        with pytest.raises(TypeError, match="is a pointer"):
            lang.load(as_block(1))
        with pytest.raises(ValueError, match="const"):
            lang.store(pointer.to(tl.pointer_type(tl.int32, const=True)), 0)

    def test_atomics_return_the_old_value(self, machine: FakeMachine, lang: Language) -> None:
        pointer = machine.allocate([10, 20], tl.int32)
        pointers = pointer + lang.arange(0, 2)
        assert lang.atomic_add(pointers, 1, sem="relaxed").data.tolist() == [10, 20]
        assert int(lang.atomic_max(pointer, 50)) == 11
        assert lang.atomic_xchg(pointers, lang.arange(0, 2), mask=lang.arange(0, 2) > 0).data.tolist()[1] == 21
        assert lang.atomic_cas(pointers, block([50, 9], tl.int32), 7).data.tolist() == [50, 1]
        assert machine.buffers[int(pointer.data)].tolist() == [7, 1]


class TestMachine:
    def test_grid_and_barrier_reach_the_machine(self, machine: FakeMachine, lang: Language) -> None:
        pid = lang.program_id(axis=1)
        assert (int(pid), pid.dtype, int(lang.num_programs(0))) == (11, tl.int32, 20)
        lang.debug_barrier()
        assert machine.barriers == 1

    def test_descriptor_arguments_are_plain_numbers(self, lang: Language) -> None:
        base = block(0, tl.pointer_type(tl.float16))
        made = lang.make_tensor_descriptor(base, [as_block(8), 16], [16, tl.constexpr(1)], [4, tl.constexpr(8)])
        assert made == ([8, 16], [16, 1], [4, 8], "zero")

    def test_false_assertions_are_findings(self, machine: FakeMachine, lang: Language) -> None:
        lang.device_assert(lang.arange(0, 4) < 4, "fine")
        lang.device_assert(lang.arange(0, 4) < 3, "too large", mask=lang.arange(0, 4) < 3)
        lang.device_assert(lang.arange(0, 4) < 3, "too large")
        assert machine.findings == [("device_assert", "too large")]
        lang.assume(as_block(1) > 2)
        assert machine.findings[1][0] == "assume"
        with pytest.raises(AssertionError, match="why"):
            lang.static_assert(False, "why")

    def test_registered_assembly_is_computed(
        self, machine: FakeMachine, lang: Language, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(assembly._MEANINGS, "swap", lambda a, b: (b, a))
        monkeypatch.setitem(assembly._MEANINGS, "double", lambda a: a * 2)
        x = lang.arange(0, 4)
        assert lang.inline_asm_elementwise("double", "=r,r", [x], tl.int32, True, 1).data.tolist() == [0, 2, 4, 6]
        a, b = lang.inline_asm_elementwise("swap", "", [x, 1], (tl.int32, tl.float32), is_pure=True, pack=1)
        assert (a.data.tolist(), b.dtype) == ([1, 1, 1, 1], tl.float32)
        assert machine.findings == []

    def test_unknown_assembly_is_a_finding(self, machine: FakeMachine, lang: Language) -> None:
        zeros = lang.inline_asm_elementwise("bar.sync 0;", "", [lang.arange(0, 4)], tl.float32, False, 1)
        assert (zeros.dtype, zeros.data.tolist()) == (tl.float32, [0, 0, 0, 0])
        assert machine.findings[0][0] == "unknown_instruction"
        assert "bar.sync" in machine.findings[0][1]

    def test_unsupported_name_is_an_error_of_one_line(self, lang: Language) -> None:
        with pytest.raises(UnsupportedOperationError, match=r"^tl.dot_scaled is not supported by the simulator$"):
            _ = lang.dot_scaled
        assert not hasattr(lang.extra.libdevice, "j0")
        assert lang.float32 is tl.float32
        assert list(lang.static_range(3)) == [0, 1, 2]
