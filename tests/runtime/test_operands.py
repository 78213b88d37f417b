"""Every operator, on operands and outputs that lie in any way, where torch computes; tests/gpu has it for kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.operands import CASES, GUARD, LAYOUTS, LONE, ONE_FOR_ALL, SIZES, Call, Placed, placed
from tlxgen.errors import LaunchError
from tlxgen.runtime import kernel as runtime


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    runtime.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.FallbackWarning)
        yield
    runtime.forget()


@pytest.mark.parametrize("way", [*LAYOUTS, ONE_FOR_ALL])
@pytest.mark.parametrize("name", CASES)
def test_operands_may_lie_in_any_way(name: str, way: str) -> None:
    Call.of(CASES[name], "cpu", way).right()


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_so_may_what_has_one_number_for_each_row_or_group(name: str, way: str) -> None:
    Call.of(CASES[name], "cpu", small=way).right()


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_may_lie_in_any_way_and_nothing_beside_them_is_touched(name: str, way: str) -> None:
    call = Call.of(CASES[name], "cpu")
    call.right(call.output(way))


@pytest.mark.parametrize("name", CASES)
def test_an_output_whose_elements_share_memory_is_refused(name: str) -> None:
    call = Call.of(CASES[name], "cpu")
    with pytest.raises(LaunchError, match="share memory"):
        call.right(call.output(ONE_FOR_ALL))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_one_and_zero(name: str) -> None:
    call = Call.of(SIZES[name], "cpu", LONE)
    call.right()
    call.right(call.output("padded rows"))


def test_every_operator_is_in_the_table() -> None:
    assert {case.operator for case in CASES.values()} == {case.operator for case in SIZES.values()}
    forms = {case.problem.form for case in CASES.values() if case.operator == "grouped_gemm"}  # type: ignore[attr-defined]
    assert forms == {"2d3d", "3d2d", "2d2d", "3d3d", "masked", "gather"}


class TestTheTableItself:
    """A table that finds nothing is none."""

    @pytest.mark.parametrize("way", LAYOUTS)
    def test_ways_hold_the_values(self, way: str) -> None:
        x = torch.arange(24.0).view(2, 3, 4)
        for like in (x, x.mT, x[:, :1], x[:, :0], x[0, 0]):
            there = placed(like, way, 7.0)
            assert torch.equal(there.tensor, like)
            assert there.others().eq(7.0).all()
            assert there.memory[:GUARD].eq(7.0).all()
            assert there.memory[-GUARD:].eq(7.0).all()

    def test_ways_differ(self) -> None:
        x = torch.zeros(2, 3, 4)
        there = [placed(x, way, 7.0).tensor for way in [*LAYOUTS, ONE_FOR_ALL]]
        found = {(y.stride(), y.storage_offset() - GUARD) for y in there}
        assert len(found) == len(LAYOUTS)  # no size is one

    @pytest.mark.parametrize("fault", ["a wrong number", "beside the output", "an operand", "beside lse", "NaN"])
    def test_faults_are_found(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        call = Call.of(CASES["attention"], "cpu", "padded rows")
        out = call.output("padded rows")
        right = runtime.Kernel.__call__

        def wrong(kernel: Any, *tensors: Any, **named: Any) -> Any:
            result = right(kernel, *tensors, **named)
            places: dict[str, Placed] = {"beside the output": out, "an operand": call.memory["q"]}
            places["beside lse"] = call.memory["lse"]
            if fault in places:
                places[fault].memory[GUARD - 1] = 0.5
            else:
                result[1, 2, 3, 4] = float("nan") if fault == "NaN" else 100.0
            return result

        monkeypatch.setattr(runtime.Kernel, "__call__", wrong)
        with pytest.raises(AssertionError):
            call.right(out)
