"""`tlxgen.functional.add`: which kernel is asked for, what goes to torch, gradients, and its operator for graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.functional.test_graphs import compiled
from tests.functional.test_products import normal
from tlxgen import functional
from tlxgen.functional import dispatch, sums
from tlxgen.runtime import checks, selection
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime.kernel import Choice, Kernel

KERNELS_HERE = dispatch.kernels_here


class Served:
    """A get_kernel whose kernels are torch in disguise; what was asked for, and how often one was launched."""

    origin = "tuned"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.launched = 0

    def __call__(self, problem: Any) -> Any:
        assert problem.operator == "vector_add"
        self.asked.append(problem.label)
        kernel, served = Kernel(problem, Choice("torch", None), None), self

        class Disguised:
            origin, slower = served.origin, False

            def __call__(self, *tensors: Tensor) -> Tensor:
                served.launched += 1
                return kernel(*tensors)

        return Disguised()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    served = Served()
    monkeypatch.setattr(sums, "kernel_for", served)
    monkeypatch.setattr(dispatch, "kernels_here", lambda: True)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    runtime.forget()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield served
    runtime.forget()


class TestWhatAKernelTakes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4), ()])
    def test_tensors_of_one_shape_are_vectors(self, shape: tuple[int, ...], dtype: torch.dtype, served: Served) -> None:
        x, y = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
        assert torch.equal(functional.add(x, y), x + y)
        assert served.launched == 1

    def test_a_length_is_looked_up_once(self, served: Served) -> None:
        for shape in ((4, 6), (24,), (6, 4)):
            functional.add(normal(*shape), normal(*shape))
        assert served.asked == ["vector_add 24 bf16"]


class TestWhatGoesToTorch:
    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (normal(4, 6), normal(6)),
            (normal(4, 6), normal(6, 4).T),
            (normal(4, 6).half(), normal(4, 6)),
            (normal(4, 6).double(), normal(4, 6).double()),
            (normal(4, 12)[:, :6], normal(4, 6)),
            (normal(1, 6).expand(4, 6), normal(4, 6)),
            (normal(0, 6), normal(0, 6)),
            (normal(4, 6), 2.5),
        ],
        ids=["broadcast", "transposed", "dtypes", "float64", "padded rows", "expanded", "nothing", "a number"],
    )
    def test_unchanged(self, x: Tensor, y: Any, served: Served) -> None:
        assert torch.equal(functional.add(x, y), torch.add(x, y))
        assert served.launched == 0

    def test_multiples(self, served: Served) -> None:
        x, y = normal(8), normal(8)
        for alpha in (2, 1.0, -0.5):
            assert torch.equal(functional.add(x, y, alpha=alpha), torch.add(x, y, alpha=alpha))
        assert served.launched == 0

    def test_errors_are_torchs(self, served: Served) -> None:
        with pytest.raises(RuntimeError, match="must match"):
            functional.add(normal(8), normal(7))

    def test_transforms(self, served: Served) -> None:
        x, y = normal(3, 8), normal(8)
        assert torch.equal(torch.vmap(lambda x: functional.add(x, y))(x), x + y)
        assert served.launched == 0

    def test_kernels_that_are_torch_anyway(self, served: Served) -> None:
        served.origin = "torch"
        x, y = normal(8), normal(8)
        assert torch.equal(functional.add(x, y), x + y)
        assert (len(served.asked), served.launched) == (1, 0)

    def test_cpu_tensors(self) -> None:
        x, y = normal(8), normal(8)
        assert torch.equal(functional.add(x, y), x + y)


class TestGradients:
    def test_are_those_of_the_sum(self, served: Served) -> None:
        x, y = normal(4, 6, grad=True), normal(4, 6, grad=True)
        of_x, of_y = torch.autograd.grad((functional.add(x, y) * 3).sum(), (x, y))
        assert torch.equal(of_x, torch.full_like(x, 3))
        assert torch.equal(of_y, of_x)
        assert served.launched == 1

    def test_only_those_that_are_wanted(self, served: Served) -> None:
        x, y = normal(8), normal(8, grad=True)
        functional.add(x, y).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is None
        assert y.grad is not None

    def test_a_sum_may_be_changed_in_place(self, served: Served) -> None:
        x, y = normal(4, 6, grad=True), normal(4, 6)
        functional.add(x, y).relu_().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert torch.equal(x.grad, (x + y > 0).to(x.dtype))
        functional.add(y, y).detach_()  # which views refuse
        assert served.launched == 2

    def test_have_gradients(self, served: Served) -> None:
        x, y = normal(8, grad=True), normal(8, grad=True)
        (first,) = torch.autograd.grad(functional.add(x, y).float().pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), y)
        assert_close(second, 6 * (x + y).detach(), rtol=2e-2, atol=2e-2)

    def test_nothing_is_recorded_without(self, served: Served) -> None:
        with torch.no_grad():
            assert functional.add(normal(8, grad=True), normal(8)).grad_fn is None


class TestGraphs:
    def test_opcheck(self, served: Served) -> None:
        torch.library.opcheck(torch.ops.tlxgen.vector_add, (normal(4, 6, grad=True), normal(4, 6, grad=True)))
        torch.library.opcheck(torch.ops.tlxgen.vector_add, (normal(6, 4).T, normal(4, 6)))

    def test_any_length_is_one_graph(self, served: Served) -> None:
        model, graphs = compiled(functional.add, dynamic=True)
        for rows in (5, 9, 33):
            x, y = normal(rows, 4), normal(rows, 4)
            assert torch.equal(model(x, y), x + y)
        assert (graphs.compiled, graphs.operators.count("tlxgen.vector_add.default")) == (1, 1)
        assert served.launched == 3

    def test_gradients_are_those_outside(self, served: Served) -> None:
        model = torch.compile(lambda x, y: functional.add(x * 2, y) * 3, fullgraph=True, backend="aot_eager")
        x, y = normal(4, 6, grad=True), normal(4, 6, grad=True)
        of_x, of_y = torch.autograd.grad(model(x, y).sum(), (x, y))
        assert torch.equal(of_x, torch.full_like(x, 6))
        assert torch.equal(of_y, torch.full_like(x, 3))

    @pytest.mark.parametrize("sum_of", [functional.add, functional.linear])
    def test_so_are_those_of_functorch(self, sum_of: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        """Operators refuse them, and in forward mode drop them without a word."""
        monkeypatch.setattr(dispatch, "kernels_here", KERNELS_HERE)
        monkeypatch.setattr(runtime, "_current_device", lambda: 0)
        monkeypatch.setattr(selection, "has_triton", lambda: True)
        x, y = normal(6, 6), normal(6, 6)

        def backward(x: Tensor) -> Any:
            return torch.func.grad(lambda x: sum_of(x, y).float().sum())(x)

        def forward(x: Tensor) -> Any:
            return torch.func.jvp(lambda x: sum_of(x, y), (x,), (y,))[1]

        def plain(x: Tensor) -> Any:
            return sum_of(x, y)

        for function in (backward, forward):
            graph = torch.compile(function, backend="aot_eager")
            assert_close(graph(x), function(x))
        model, graphs = compiled(plain)
        assert_close(model(x), plain(x))
        assert any("tlxgen" in name for name in graphs.operators)

    def test_what_is_torchs_stays_torchs(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        model, graphs = compiled(functional.add)
        model(normal(4, 6), normal(6))
        monkeypatch.setattr(dispatch, "kernels_here", lambda: False)
        torch._dynamo.reset()
        model(normal(4, 6), normal(4, 6))
        assert graphs.compiled == 2
        assert not any("tlxgen" in name for name in graphs.operators)
