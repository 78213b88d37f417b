"""Every template of every operator is right however tensors lie, or leaves them to another; nothing else is written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.operands import CASES, LAYOUTS, LONE, ONE_FOR_ALL, SIZES, TAKEN, Call, Case
from tlxgen import devices, ops
from tlxgen.errors import LaunchError
from tlxgen.runtime import kernel
from tlxgen.space.candidates import favourite

pytestmark = pytest.mark.gpu

#: Of these, outputs are tried in every way beside operands without holes; of the others, where operands lie so too.
_OPERATORS = ("gemm", "grouped_gemm", "grouped_gemm 3d3d", "attention", "attention_varlen", "vector_add")


@pytest.fixture(scope="module", autouse=True)
def _begun_anew() -> Iterator[None]:
    kernel.forget()
    yield
    kernel.forget()


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings of this test alone, unless it asks for them."""
    monkeypatch.setattr(kernel, "_WARNED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kernel.FallbackWarning)
        yield


def calls(call: Call, case: Case) -> Iterator[Call]:
    """The same by one kernel of each template, and by the one that `get_kernel` gives."""
    yield call
    gpu, problem = devices.detect(), case.problem
    assert gpu is not None
    for template in ops.get(case.operator).templates:
        for config in favourite(problem, gpu, template):
            yield replace(call, kernel=kernel.Kernel(problem, kernel.Choice("default", config), gpu))


@pytest.mark.parametrize("way", [*LAYOUTS, ONE_FOR_ALL])
@pytest.mark.parametrize("name", CASES)
def test_operands_and_outputs_may_lie_in_any_way(name: str, way: str) -> None:
    for call in calls(Call.of(CASES[name], "cuda", way), CASES[name]):
        call.right(call.output(way if way in LAYOUTS else TAKEN[0]))


@pytest.mark.parametrize("way", TAKEN)
@pytest.mark.parametrize("name", CASES)
def test_a_template_computes_itself_what_it_is_for(name: str, way: str) -> None:
    """Else the tests above would be of fall-backs alone."""
    for call in calls(Call.of(CASES[name], "cuda", way), CASES[name]):
        with warnings.catch_warnings():
            warnings.simplefilter("error", kernel.FallbackWarning)
            call.right(call.output(way))


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("name", _OPERATORS)
def test_outputs_may_lie_otherwise_than_operands(name: str, way: str) -> None:
    for call in calls(Call.of(CASES[name], "cuda"), CASES[name]):
        call.right(call.output(way))


@pytest.mark.parametrize("way", ["one element late", "every other element", "rows and columns swapped"])
@pytest.mark.parametrize("name", CASES)
def test_so_may_what_has_one_number_for_each_row_or_group(name: str, way: str) -> None:
    Call.of(CASES[name], "cuda", small=way).right()


@pytest.mark.parametrize("name", _OPERATORS)
def test_an_output_whose_elements_share_memory_is_refused(name: str) -> None:
    call = Call.of(CASES[name], "cuda")
    with pytest.raises(LaunchError, match="share memory"):
        call.right(call.output(ONE_FOR_ALL))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_one_and_zero(name: str) -> None:
    call = Call.of(SIZES[name], "cuda", LONE)
    call.right()
    call.right(call.output("padded rows"))
