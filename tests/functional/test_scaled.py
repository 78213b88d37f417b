"""`tlxgen.functional.scaled_grouped_mm`: what goes to a kernel and what to torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.functional.test_graphs import compiled
from tlxgen import functional, ops
from tlxgen.functional import dispatch
from tlxgen.functional import scaled as functional_scaled
from tlxgen.ops import accuracy
from tlxgen.runtime import checks as eligible
from tlxgen.runtime.kernel import Choice, Kernel

E, ROWS, N, K = 3, 40, 32, 48
GROUPED = ops.get("grouped_gemm")


pytestmark = pytest.mark.usefixtures("no_cached_kernels")


@pytest.fixture
def inputs() -> dict[str, Any]:
    problem = GROUPED.problem((E, ROWS, N, K), dtype="e4m3")
    return {{"a": "mat_a", "b": "mat_b"}.get(name, name): x for name, x in GROUPED.inputs(problem, "cpu", 0).items()}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Problems that were asked for; their kernels are torch in disguise, of tensors on the CPU."""
    asked = []

    def kernel_for(problem: Any) -> Any:
        asked.append(problem)
        return Disguised(Kernel(problem, Choice("torch", None), None))

    monkeypatch.setattr(eligible, "DEVICE", "cpu")
    monkeypatch.setattr(functional_scaled, "kernel_for", kernel_for)
    return asked


@dataclass
class Disguised:
    """Torch, as if a row had been tuned."""

    kernel: Kernel
    origin: str = "tuned"
    slower: bool = False

    def __call__(self, *tensors: Tensor, **named: Any) -> Tensor:
        return self.kernel(*tensors, **named)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch's function was called with."""
    calls: list[dict[str, Any]] = []

    def scaled(*tensors: Tensor, **named: Any) -> Tensor:
        calls.append(named)
        return torch.zeros(1)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled, raising=False)
    return calls


def test_a_kernel_computes(inputs: dict[str, Any], served: list[Any], theirs: list[Any]) -> None:
    out = functional.scaled_grouped_mm(**inputs)
    problem = served[0]
    assert (problem.E, problem.ROWS, problem.N, problem.K, problem.dtype) == (E, ROWS, N, K, "e4m3")
    named = {{"mat_a": "a", "mat_b": "b"}.get(name, name): x for name, x in inputs.items()}
    assert accuracy.error(out, GROUPED.reference(problem, named)).norm < 5e-3
    functional.scaled_grouped_mm(**inputs)
    assert len(served) == 1  # found once
    assert theirs == []


def test_what_kernels_do_not_have_is_torchs(
    inputs: dict[str, Any], served: list[Any], theirs: list[dict[str, Any]]
) -> None:
    def at(**changes: Any) -> dict[str, Any]:
        return {**inputs, **changes}

    rows_contiguous = inputs["mat_b"].contiguous()
    for call in (
        at(use_fast_accum=False),
        at(out_dtype=torch.float16),
        at(mat_a=inputs["mat_a"].to(torch.float8_e5m2)),
        at(mat_b=rows_contiguous),
        at(scale_a=inputs["scale_a"][:, None]),
        at(scale_b=inputs["scale_b"][:, :1]),
        at(offs=inputs["offs"].long()),
        at(mat_a=inputs["mat_a"][:, :16]),
    ):
        functional.scaled_grouped_mm(**call)
    assert len(theirs) == 8
    assert theirs[0]["use_fast_accum"] is False
    assert theirs[1]["out_dtype"] is torch.float16
    assert served == []


def test_on_the_cpu_torch_says_what_it_says(inputs: dict[str, Any], theirs: list[Any]) -> None:
    functional.scaled_grouped_mm(**inputs)
    assert len(theirs) == 1


def test_what_is_no_tensor_is_refused_by_torch() -> None:
    a, b, scale_a, scale_b, offs = (None,) * 5
    with pytest.raises(TypeError, match="_scaled_grouped_mm"):
        functional.scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs)  # type: ignore[arg-type]


class TestGraphs:
    @pytest.fixture(autouse=True)
    def _kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "kernels_here", lambda: True)
        torch._dynamo.reset()

    def test_opcheck(self, inputs: dict[str, Any], served: list[Any]) -> None:
        """But for the schema, of which torch asks by arithmetic that 8-bit floats do not have."""
        checks = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.tlxgen.scaled_grouped_mm, tuple(inputs.values()), test_utils=checks)

    def test_a_product_is_whole_and_what_it_is_outside(self, inputs: dict[str, Any], served: list[Any]) -> None:
        model, graphs = compiled(lambda **named: functional.scaled_grouped_mm(**named).relu())
        assert torch.equal(model(**inputs), functional.scaled_grouped_mm(**inputs).relu())
        assert [name for name in graphs.operators if "mm" in name] == ["tlxgen.scaled_grouped_mm.default"]

    def test_any_number_of_tokens_is_one_graph(self, served: list[Any]) -> None:
        model, graphs = compiled(functional.scaled_grouped_mm, dynamic=True)
        for rows in (40, 56, 72):
            call = GROUPED.inputs(GROUPED.problem((E, rows, N, K), dtype="e4m3"), "cpu", 0)
            a, b, scale_a, scale_b, offs = (call[name] for name in ("a", "b", "scale_a", "scale_b", "offs"))
            out = model(a, b, scale_a, scale_b, offs=offs)
            assert torch.equal(out, functional.scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs))
        assert (graphs.compiled, graphs.operators.count("tlxgen.scaled_grouped_mm.default")) == (1, 1)

    def test_torch_computes_where_nothing_is_better(self, inputs: dict[str, Any], theirs: list[Any]) -> None:
        """Of a problem that has no kernel, which only the call itself can tell."""
        torch.ops.tlxgen.scaled_grouped_mm(*inputs.values())
        assert [call["use_fast_accum"] for call in theirs] == [True]

    @pytest.mark.parametrize("case", ["exact sums", "no kernels here", "other scales"])
    def test_what_is_torchs_stays_torchs(
        self, case: str, inputs: dict[str, Any], served: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes: dict[str, Any] = {"use_fast_accum": False} if case == "exact sums" else {}
        if case == "no kernels here":
            monkeypatch.setattr(dispatch, "kernels_here", lambda: False)
        if case == "other scales":
            changes = {"scale_b": inputs["scale_b"][:, :1]}
        monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda a, b, *_, **__: a.float() @ b[0].float())
        model, graphs = compiled(functional.scaled_grouped_mm)
        model(**{**inputs, **changes})
        assert not any("tlxgen" in name for name in graphs.operators)
        assert served == []
