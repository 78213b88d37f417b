"""Products in place of torch's: which kernel is asked for, what goes to torch, and the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tlxgen
from tlxgen import functional
from tlxgen.devices import target
from tlxgen.functional import products
from tlxgen.runtime import checks
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime.kernel import Choice, Kernel
from tlxgen.space.candidates import candidates


class Served:
    """A get_kernel whose kernels are torch in disguise, and what was asked for and launched."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.launched: list[str] = []
        self.slower = False

    def __call__(self, problem: Any) -> Any:
        self.asked.append(problem)
        kernel = Kernel(problem, Choice("torch", None), None)
        served = self

        class Disguised:
            origin, slower = "tuned", served.slower

            def __call__(self, *tensors: Tensor, **named: Any) -> Tensor:
                served.launched.append(problem.label)
                return kernel(*tensors, **named)

        assert problem.operator == "gemm"
        return Disguised()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    served = Served()
    monkeypatch.setattr(products, "kernel_for", served)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    runtime.forget()
    torch.manual_seed(0)
    yield served
    runtime.forget()


def normal(*shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


class TestWhatAKernelIsAskedFor:
    @pytest.mark.parametrize(
        ("a", "b", "layout"),
        [
            (normal(8, 32), normal(32, 16), "nn"),
            (normal(8, 32), normal(16, 32).mT, "nt"),
            (normal(32, 8).mT, normal(32, 16), "tn"),
            (normal(32, 8).mT, normal(16, 32).mT, "tt"),
            (normal(8, 64)[:, :32], normal(32, 16), "nn"),
            (normal(1, 32), normal(32, 1), "nn"),
        ],
        ids=["nn", "nt", "tn", "tt", "padded rows", "one row, one column"],
    )
    def test_the_layout_is_that_of_memory(self, a: Tensor, b: Tensor, layout: str, served: Served) -> None:
        assert_close(functional.matmul(a, b), a @ b)
        assert [problem.layout for problem in served.asked] == [layout]

    def test_linear_has_the_bias_in_the_kernel(self, served: Served) -> None:
        x, weight, bias = normal(4, 8, 32), normal(16, 32), normal(16)
        assert_close(functional.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
        assert served.launched == ["gemm 32 16 32 bf16 nt bias"]

    def test_leading_dimensions_are_rows(self, served: Served) -> None:
        a, b = normal(2, 3, 4, 32), normal(32, 16)
        assert functional.matmul(a, b).shape == (2, 3, 4, 16)
        assert served.launched == ["gemm 24 16 32 bf16 nn"]

    def test_a_problem_is_looked_up_once_for_each_pin(self, served: Served) -> None:
        a, b = normal(8, 32), normal(32, 16)
        for _ in range(3):
            functional.matmul(a, b)
        assert (len(served.asked), len(served.launched)) == (1, 3)
        config = candidates(served.asked[0], target("h200"))[0]
        with tlxgen.pin("gemm", config):
            functional.matmul(a, b)
        assert len(served.asked) == 2


class TestWhatGoesToTorch:
    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (normal(8, 32, dtype=torch.float32), normal(32, 16, dtype=torch.float32)),
            (normal(2, 8, 32), normal(2, 32, 16)),
            (normal(32), normal(32, 16)),
            (normal(0, 32), normal(32, 16)),
            (normal(8, 0), normal(0, 16)),
        ],
        ids=["fp32", "a batch of both", "a vector", "no rows", "nothing to sum"],
    )
    def test_unchanged(self, a: Tensor, b: Tensor, served: Served) -> None:
        assert torch.equal(functional.matmul(a, b), torch.matmul(a, b))
        assert served.launched == []

    def test_errors_are_torchs(self, served: Served) -> None:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            functional.matmul(normal(8, 32), normal(16, 8))
        with pytest.raises(RuntimeError):
            functional.linear(normal(8, 32), normal(16, 32), normal(8))
        assert served.launched == []

    def test_autocast_to_another_dtype(self, served: Served) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            assert functional.matmul(normal(8, 32), normal(32, 16)).dtype == torch.float16
        assert served.launched == []

    def test_transforms(self, served: Served) -> None:
        a, b = normal(4, 8, 32), normal(32, 16)
        assert_close(torch.vmap(lambda x: functional.matmul(x, b))(a), a @ b)
        assert served.launched == []

    def test_cpu_tensors(self) -> None:
        a, b = normal(8, 32), normal(32, 16)
        assert torch.equal(functional.matmul(a, b), a @ b)

    def test_kernels_that_are_torch_anyway(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "DEVICE", "cpu")
        runtime.forget()
        monkeypatch.setattr(products, "kernel_for", lambda problem: Kernel(problem, Choice("torch", None), None))
        a, b = normal(8, 32), normal(32, 16)
        assert torch.equal(functional.matmul(a, b), a @ b)

    def test_kernels_that_were_measured_to_be_slower(self, served: Served) -> None:
        served.slower = True
        x, weight, bias = normal(8, 32), normal(16, 32), normal(16)
        assert torch.equal(functional.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
        for _ in range(3):
            assert torch.equal(functional.matmul(x, weight.mT), x @ weight.mT)
        assert torch.equal(functional.matmul(x.view(2, 4, 32), weight.mT), x.view(2, 4, 32) @ weight.mT)
        assert len(served.asked) == 2, "torch is known to compute it then"
        assert served.launched == []


class TestGradients:
    def test_are_products_by_kernels(self, served: Served) -> None:
        x, weight, bias = normal(8, 32, grad=True), normal(16, 32, grad=True), normal(16, grad=True)
        found = torch.autograd.grad(functional.linear(x, weight, bias).float().square().sum(), (x, weight, bias))
        exact = torch.autograd.grad(
            torch.nn.functional.linear(x, weight, bias).float().square().sum(), (x, weight, bias)
        )
        for one, other in zip(found, exact, strict=True):
            assert_close(one, other, rtol=2e-2, atol=2e-2)
        assert served.launched == [
            "gemm 8 16 32 bf16 nt bias",
            "gemm 8 32 16 bf16 nn",
            "gemm 32 16 8 bf16 tn",
        ]

    def test_only_those_that_are_asked_for(self, served: Served) -> None:
        x, weight = normal(8, 32), normal(16, 32, grad=True)
        functional.linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
        assert len(served.launched) == 2

    def test_have_gradients(self, served: Served) -> None:
        a, b = normal(4, 8, grad=True), normal(8, 4, grad=True)
        (first,) = torch.autograd.grad(functional.matmul(a, b).square().sum(), a, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), b)
        (exact,) = torch.autograd.grad((a @ b).square().sum(), a, create_graph=True)
        assert_close(second, torch.autograd.grad(exact.square().sum(), b)[0], rtol=5e-2, atol=5e-1)

    def test_nothing_is_recorded_without(self, served: Served) -> None:
        a, b = normal(8, 32, grad=True), normal(32, 16)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert functional.matmul(a, b).grad_fn is None
        assert len(served.launched) == 2


class TestSecondCalls:
    """Of what a kernel took before: whatever could make a difference is looked at again."""

    def test_give_the_same(self, served: Served) -> None:
        bias = normal(16)
        for _ in range(3):
            x, weight = normal(2, 4, 32), normal(16, 32)
            assert_close(functional.matmul(x, weight.mT), x @ weight.mT)
            assert_close(functional.linear(x, weight), torch.nn.functional.linear(x, weight))
            assert_close(functional.linear(x[0], weight, bias), torch.nn.functional.linear(x[0], weight, bias))
        assert len(served.launched) == 9
        assert len(served.asked) == 2

    def test_of_a_square_weight_are_products_or_layers(self, served: Served) -> None:
        x, weight = normal(8, 32), normal(32, 32)
        for _ in range(3):
            assert_close(functional.matmul(x, weight), x @ weight)
            assert_close(functional.linear(x, weight), x @ weight.mT)

    def test_with_a_bias_are_not_those_without(self, served: Served) -> None:
        x, weight, bias = normal(8, 32), normal(16, 32), normal(16)
        for _ in range(3):
            assert_close(functional.linear(x, weight), torch.nn.functional.linear(x, weight))
            assert_close(functional.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))

    def test_have_gradients_once_they_are_recorded(self, served: Served) -> None:
        x, weight = normal(8, 32), normal(16, 32, grad=True)
        with torch.no_grad():
            for _ in range(3):
                assert functional.linear(x, weight).grad_fn is None
        assert functional.linear(x, weight).grad_fn is not None

    def test_go_to_torch_in_autocast_and_transforms(self, served: Served) -> None:
        a, b = normal(8, 32), normal(32, 16)
        for _ in range(3):
            functional.matmul(a, b)
        with torch.autocast("cpu", dtype=torch.float16):
            assert functional.matmul(a, b).dtype == torch.float16
        batch = normal(4, 8, 32)
        assert_close(torch.vmap(lambda x: functional.matmul(x, b))(batch), batch @ b)
        assert len(served.launched) == 3

    def test_go_to_torch_for_a_subclass(self, served: Served) -> None:
        class Named(Tensor):
            pass

        a, b = normal(8, 32), normal(32, 16)
        for _ in range(3):
            functional.matmul(a, b)
        assert type(functional.matmul(a.as_subclass(Named), b)) is Named
        assert len(served.launched) == 3
