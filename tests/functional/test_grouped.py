"""`tlxgen.functional.grouped_mm`: what goes to a kernel and what to torch, and gradients through the other forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tlxgen import functional
from tlxgen.functional import grouped
from tlxgen.ops.grouped_gemm.problem import GroupedGemmProblem
from tlxgen.runtime import checks
from tlxgen.runtime.kernel import Choice, Kernel

grouped_mm: Callable[..., Tensor] = functional.grouped_mm
theirs: Callable[..., Tensor] = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)

E, ROWS, N, K = 3, 40, 24, 16
ENDS = torch.tensor([13, 13, 40], dtype=torch.int32)
FORMS = ("2d3d", "3d2d", "2d2d", "3d3d")


pytestmark = pytest.mark.usefixtures("no_cached_kernels")


@dataclass
class Served:
    """A get_kernel whose kernels are torch in disguise, and the problems that were launched."""

    origin: str = "tuned"
    launched: list[GroupedGemmProblem] = field(default_factory=list)

    def __call__(self, problem: GroupedGemmProblem) -> Any:
        assert problem.operator == "grouped_gemm"
        return Disguised(self, Kernel(problem, Choice("torch", None), None))


@dataclass
class Disguised:
    served: Served
    kernel: Kernel
    slower: bool = False

    @property
    def origin(self) -> str:
        return self.served.origin

    @property
    def problem(self) -> Any:
        return self.kernel.problem

    def __call__(self, *tensors: Tensor, **named: Any) -> Tensor:
        self.served.launched.append(self.problem)
        return self.kernel(*tensors, **named)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Kernels for the CPU."""
    served = Served()
    monkeypatch.setattr(grouped, "kernel_for", served)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    return served


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(form: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor | None]:
    """As a layer and its gradients have them; weights are stored (N, K)."""
    tokens, weights, gradients = (
        normal(ROWS, K, dtype=dtype),
        normal(E, N, K, dtype=dtype, seed=1),
        normal(ROWS, N, dtype=dtype),
    )
    if form == "3d3d":
        return normal(E, 8, K, dtype=dtype), weights.mT, None
    pairs = {"2d3d": (tokens, weights.mT), "3d2d": (weights, tokens.mT), "2d2d": (tokens.mT, gradients)}
    return (*pairs[form], ENDS)


def test_has_torchs_signature() -> None:
    assert list(inspect.signature(grouped_mm).parameters.values()) != []
    ours = inspect.signature(grouped.grouped_mm)
    names = ["mat_a", "mat_b", "offs", "bias", "out_dtype"]
    assert list(ours.parameters) == names
    assert list(inspect.signature(torch.nn.functional.grouped_mm).parameters) == names
    assert [p.kind.name for p in ours.parameters.values()][2:] == ["KEYWORD_ONLY"] * 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_form_is_served_by_a_kernel(form: str, dtype: torch.dtype, served: Served) -> None:
    a, b, offs = operands(form, dtype)
    out = grouped_mm(a, b, offs=offs)
    torch.testing.assert_close(out, theirs(a, b, offs=offs), rtol=1e-2, atol=1e-2)
    (problem,) = served.launched
    assert (problem.form, problem.E, problem.N, problem.K) == (form, E, N, K)
    assert problem.layout == {"3d2d": "nt", "2d2d": "tn"}.get(form, "nt")
    assert problem.shapes["a"] == a.shape
    assert problem.shapes["b"] == b.shape


def test_rows_are_padded_as_torchs(served: Served) -> None:
    tokens, weights = normal(37, K), normal(E, K, N)
    offs = torch.tensor([5, 5, 37], dtype=torch.int32)
    for a, b in ((tokens, weights), (weights.mT, tokens.mT)):
        ours, torchs = grouped_mm(a, b, offs=offs), theirs(a, b, offs=offs)
        assert ours.stride() == torchs.stride()
    assert len(served.launched) == 2


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_products(form: str, served: Served) -> None:
    a, b, offs = operands(form)
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    out = grouped_mm(a, b, offs=offs)
    weights = normal(*out.shape, seed=5)
    mine = torch.autograd.grad((out.float() * weights).sum(), (a, b))
    exact_a, exact_b = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    parts = []
    starts = [0, *ENDS.tolist()]
    for expert in range(E):
        own = slice(starts[expert], starts[expert + 1])
        if form == "2d3d":
            parts.append(((exact_a[own] @ exact_b[expert]) * weights[own]).sum())
        elif form == "3d2d":
            parts.append(((exact_a[expert] @ exact_b[:, own]) * weights[:, own]).sum())
        elif form == "2d2d":
            parts.append(((exact_a[:, own] @ exact_b[own]) * weights[expert]).sum())
        else:
            parts.append(((exact_a[expert] @ exact_b[expert]) * weights[expert]).sum())
    exact = torch.autograd.grad(torch.stack(parts).sum(), (exact_a, exact_b))
    for found, expected in zip(mine, exact, strict=True):
        assert (found.double() - expected).norm() <= 1e-2 * expected.norm()
    others = {"2d3d": ["2d3d", "2d2d"], "3d2d": ["2d2d", "3d2d"], "2d2d": ["3d2d", "2d3d"], "3d3d": ["3d3d", "3d3d"]}
    assert [problem.form for problem in served.launched] == [form, *others[form]]


class TestGatedMm:
    @pytest.mark.parametrize("activation", ["silu", "gelu"])
    def test_is_one_kernel(self, activation: Any, served: Served) -> None:
        a, b, offs = operands("2d3d")
        assert offs is not None
        out = grouped.gated_mm(a, b, offs=offs, activation=activation)
        gate, up = theirs(a.float(), b.float(), offs=offs).chunk(2, 1)
        expected = getattr(torch.nn.functional, activation)(gate) * up
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        (problem,) = served.launched
        assert (problem.epilogue, problem.N, out.shape) == (
            {"silu": "swiglu", "gelu": "geglu"}[activation],
            N,
            (ROWS, N // 2),
        )
        grouped_mm(a, b, offs=offs)  # of the same tensors, and another kernel
        assert served.launched[1].epilogue == "none"

    def test_with_gradients_is_a_product_and_torchs_activation(self, served: Served) -> None:
        a, b, offs = operands("2d3d")
        assert offs is not None
        a.requires_grad_()
        grouped.gated_mm(a, b, offs=offs, activation="silu").sum().backward()  # type: ignore[no-untyped-call]
        assert a.grad is not None
        assert [(problem.form, problem.epilogue) for problem in served.launched] == [("2d3d", "none")] * 2
        with torch.no_grad():
            grouped.gated_mm(a, b, offs=offs, activation="silu")
        assert served.launched[2].epilogue == "swiglu"

    def test_goes_to_torch_where_nothing_better_is_known(self, served: Served) -> None:
        served.origin = "torch"
        a, b, offs = operands("2d3d")
        assert offs is not None
        gate, up = theirs(a, b, offs=offs).chunk(2, 1)
        out = grouped.gated_mm(a, b, offs=offs, activation="silu")
        assert torch.equal(out, torch.nn.functional.silu(gate) * up)
        assert not served.launched


def test_an_expanded_gradient_is_no_trouble(served: Served) -> None:
    a, b, offs = operands("2d3d")
    a.requires_grad_()
    grouped_mm(a, b, offs=offs).sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    torch.testing.assert_close(a.grad[:13].float(), b[0].float().sum(1).expand(13, K), rtol=2e-2, atol=2e-2)
    assert len(served.launched) == 2  # of b, no gradient is wanted


def test_second_derivatives_are_products_too(served: Served) -> None:
    a, b, offs = operands("2d3d")
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    (first,) = torch.autograd.grad(grouped_mm(a, b, offs=offs).float().pow(2).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), b)
    assert second.shape == b.shape
    assert second[0].isfinite().all()
    assert second[0].norm() > 0
    assert len(served.launched) > 4


class TestGoesToTorch:
    """Unchanged: the same result or the same error, and no kernel was asked."""

    @pytest.mark.parametrize(
        "change",
        [
            {"bias": torch.zeros(N, dtype=torch.bfloat16)},
            {"out_dtype": torch.float32},
            {"offs": None},
            {"offs": ENDS.long()},
            {"offs": ENDS[:2]},
            {"mat_a": normal(ROWS, K + 1)[:, :-1]},
            {"mat_b": normal(E, K + 8, N)},
            {"mat_a": normal(ROWS, K, dtype=torch.float32)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_what_it_refuses(self, change: dict[str, Any], served: Served) -> None:
        call: dict[str, Any] = {"mat_a": normal(ROWS, K), "mat_b": normal(E, K, N), "offs": ENDS, **change}
        with pytest.raises(RuntimeError) as expected:
            theirs(**call)
        with pytest.raises(RuntimeError) as caught:
            grouped_mm(**call)
        assert str(caught.value) == str(expected.value)
        assert not served.launched

    def test_other_dtypes(self, served: Served) -> None:
        a, b, offs = operands("2d3d", torch.float32)
        assert torch.equal(grouped_mm(a, b, offs=offs), theirs(a, b, offs=offs))
        assert not served.launched

    def test_tensors_elsewhere(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "DEVICE", "cuda")
        a, b, offs = operands("2d3d")
        assert torch.equal(grouped_mm(a, b, offs=offs), theirs(a, b, offs=offs))
        assert not served.launched

    def test_where_nothing_better_is_known(self, served: Served) -> None:
        served.origin = "torch"
        a, b, offs = operands("2d3d")
        assert torch.equal(grouped_mm(a, b, offs=offs), theirs(a, b, offs=offs))
        assert not served.launched

    def test_no_tokens(self, served: Served) -> None:
        a, b, _ = operands("2d3d")
        offs = torch.zeros(E, dtype=torch.int32)
        assert grouped_mm(a[:0], b, offs=offs).shape == (0, N)
        assert not served.launched


def test_a_problem_is_looked_up_once_for_each_shape(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def counted(problem: GroupedGemmProblem) -> Any:
        looked_up.append(problem)
        return served(problem)

    monkeypatch.setattr(grouped, "kernel_for", counted)
    a, b, offs = operands("2d3d")
    for _ in range(3):
        grouped_mm(a, b, offs=offs)
    grouped_mm(a, b, offs=torch.tensor([1, 2, 3], dtype=torch.int32))  # other counts are no other problem
    assert len(looked_up) == 1
    grouped_mm(a[:8], b, offs=ENDS.clamp(max=8))
    assert len(looked_up) == 2


class TestSecondCalls:
    """Of what a kernel took before."""

    @pytest.mark.parametrize("form", FORMS)
    def test_give_the_same(self, form: str, served: Served) -> None:
        a, b, offs = operands(form)
        expected = theirs(a, b, offs=offs)
        for _ in range(3):
            torch.testing.assert_close(grouped_mm(a, b, offs=offs), expected)
        assert len(served.launched) == 3

    def test_have_rows_padded_as_torchs(self, served: Served) -> None:
        a, weights, offs = operands("2d3d")
        for _ in range(3):
            result = grouped_mm(a, weights[..., :20], offs=offs)
            assert result.stride() == (24, 1)
            torch.testing.assert_close(result, theirs(a, weights, offs=offs)[:, :20])

    def test_know_one_activation_from_the_other(self, served: Served) -> None:
        a, b, offs = operands("2d3d")
        assert offs is not None
        for _ in range(3):
            silu = grouped.gated_mm(a, b, offs=offs, activation="silu")
            gelu = grouped.gated_mm(a, b, offs=offs, activation="gelu")
            assert not torch.equal(silu, gelu)
        assert [problem.epilogue for problem in served.launched] == ["swiglu", "geglu"] * 3

    def test_may_be_changed_in_place(self, served: Served) -> None:
        """Rows of 20 columns are padded in memory."""
        a, b, offs = normal(8, 16).requires_grad_(), normal(2, 20, 16).mT, torch.tensor([3, 8], dtype=torch.int32)
        product = grouped_mm(a, b, offs=offs)
        assert product.stride() == (24, 1)
        product.relu_().sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            both = grouped_mm(normal(3, 8, 16), normal(3, 20, 16).mT)
        assert both.stride() == (8 * 24, 24, 1)

    def test_have_gradients_once_they_are_recorded(self, served: Served) -> None:
        a, b, offs = operands("2d3d")
        weight = b.detach().requires_grad_()
        with torch.no_grad():
            for _ in range(3):
                assert grouped_mm(a, weight, offs=offs).grad_fn is None
        assert grouped_mm(a, weight, offs=offs).grad_fn is not None

    def test_are_refused_as_first_ones(self, served: Served) -> None:
        a, b, offs = operands("2d3d")
        for _ in range(3):
            grouped_mm(a, b, offs=offs)
        for wrong in (ENDS.long(), ENDS[:2], None):
            with pytest.raises(RuntimeError):
                grouped_mm(a, b, offs=wrong)
        assert len(served.launched) == 3
