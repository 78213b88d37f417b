"""Calls like one before: what a kernel is launched on when its checks were done, and what is checked anew.

There is no GPU here: tensors are the CPU's, and what would launch a binary notes what it would read.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.problems import small_problem
from tests.support.stub_launcher import Noted, Noting, noting
from tlxgen import api, ops
from tlxgen.devices import target
from tlxgen.errors import LaunchError
from tlxgen.problem import Problem
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime import plans, repeat, replay
from tlxgen.runtime.kernel import Kernel
from tlxgen.space.candidates import candidates

H200 = target("h200")
GEMM = ops.get("gemm")
PREFILL = ops.get("attention").problem((1, 2, 128, 128), causal="bottom-right")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
    """A card that there is not."""
    with noting(monkeypatch):
        yield


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls whose arguments an emitted `arguments` made."""
    calls: list[str] = []
    launch = plans.KernelPlan.launch

    def noting(plan: plans.KernelPlan, *rest: Any) -> None:
        calls.append("general")
        launch(plan, *rest)

    monkeypatch.setattr(plans.KernelPlan, "launch", noting)
    return calls


def gemm(**options: Any) -> Problem:
    problem: Problem = GEMM.problem((128, 128, 128), **options)
    return problem


def static(problem: Problem, template: str) -> Kernel:
    """A kernel without scratch, so that all that it reads is known."""
    legal = candidates(problem, H200, (template,))
    config = next(config for config in legal if config.params.get("schedule") != "dynamic")
    return api.get_kernel(problem.operator, problem, config=config)


def ab() -> tuple[Tensor, Tensor]:
    return torch.randn(128, 128).bfloat16(), torch.randn(128, 128).bfloat16()


def pointers(noted: Noted) -> list[int]:
    """Addresses that a launch of a gemm through TMA read: of a, b and c."""
    return [value[0] for value in noted[2:] if isinstance(value, tuple)]


class TestGemm:
    @pytest.fixture
    def mm(self) -> Kernel:
        """Called twice: checked, then traced."""
        kernel = static(gemm(), "gemm_tma_cooperative")
        for _ in range(2):
            kernel(*ab())
        return kernel

    def test_third_calls_read_their_own_tensors(self, mm: Kernel, general: list[str]) -> None:
        for _ in range(3):
            a, b = ab()
            out = mm(a, b)
            assert pointers(Noting.noted[-1]) == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
            assert (out.shape, out.dtype, out.is_contiguous()) == ((128, 128), torch.bfloat16, True)
        assert general == []
        assert (
            len({(noted[:2], *(x[1:] if isinstance(x, tuple) else x for x in noted[2:])) for noted in Noting.noted})
            == 1
        )

    def test_results_are_memory_of_their_own(self, mm: Kernel) -> None:
        a, b = ab()
        results = [mm(a, b) for _ in range(4)]
        assert len({result.data_ptr() for result in results}) == 4

    def test_no_operand_is_kept(self, mm: Kernel) -> None:
        a, b = ab()
        out = mm(a, b)
        gone = [weakref.ref(x) for x in (a, b, out)]
        del a, b, out
        gc.collect()
        assert [x() for x in gone] == [None] * 3

    def test_of_another_layout_or_alignment_are_looked_at_anew(self, mm: Kernel, general: list[str]) -> None:
        a, b = ab()
        wide = torch.zeros(128, 144, dtype=torch.bfloat16)[:, :128]
        odd = torch.zeros(128 * 128 + 1, dtype=torch.bfloat16)[1:].view(128, 128)
        for number, other in enumerate((wide, odd), 1):
            for _ in range(2):
                mm(other, b)
            assert len(general) == 2 * number
            mm(other, b)
            assert len(general) == 2 * number
        assert "vanilla" in Noting.modules[-1]  # no base of TMA's is odd
        mm(a, b)
        assert "cooperative" in Noting.modules[-1]
        assert len(general) == 4

    def test_slices_of_one_parent_are_alike(self, mm: Kernel, general: list[str]) -> None:
        parent = torch.zeros(128, 512, dtype=torch.bfloat16)
        b = ab()[1]
        for start in (0, 128, 256, 384):
            a = parent[:, start : start + 128]
            out = mm(a, b)
            assert pointers(Noting.noted[-1]) == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
        assert len(general) == 2

    @pytest.mark.parametrize(
        "other",
        [
            lambda a: a[:127],
            lambda a: a.half(),
            lambda a: a.clone().requires_grad_(),
            lambda a: a.tolist(),
            lambda _: None,
        ],
        ids=["rows", "dtype", "gradients", "no tensor", "nothing"],
    )
    def test_wrong_ones_are_refused_as_first_ones(self, mm: Kernel, other: Any) -> None:
        a, b = ab()
        before = len(Noting.noted)
        with pytest.raises((LaunchError, AttributeError)):
            mm(other(a), b)
        for wrong in ((a,), (a, b, a), ()):
            with pytest.raises(LaunchError):
                mm(*wrong)
        assert len(Noting.noted) == before

    def test_parameters_are_taken_without_gradients_and_refused_with_them(self, mm: Kernel, general: list[str]) -> None:
        a, weight = ab()[0], torch.nn.Parameter(ab()[1])
        with torch.no_grad():
            for _ in range(4):
                mm(a, weight)
        assert len(general) == 2
        with pytest.raises(LaunchError, match="requires gradients"):
            mm(a, weight)

    def test_inference_mode_gives_inference_tensors(self, mm: Kernel) -> None:
        a, b = ab()
        with torch.inference_mode():
            assert all(mm(a, b).is_inference() for _ in range(4))
        assert not mm(a, b).is_inference()

    def test_outputs_of_the_caller(self, mm: Kernel, general: list[str]) -> None:
        a, b = ab()
        for _ in range(5):
            out = torch.empty(128, 128, dtype=torch.bfloat16)
            assert mm(a, b, out=out) is out
            assert pointers(Noting.noted[-1]) == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
        assert len(general) == 2

    def test_outputs_that_overlap_are_refused_the_third_time_too(self, mm: Kernel) -> None:
        parent = torch.zeros(384, 128, dtype=torch.bfloat16)
        a, b = parent[:128], ab()[1]
        for _ in range(4):
            mm(a, b, out=parent[128:256])
        before = len(Noting.noted)
        for start in (0, 8, 120):
            with pytest.raises(LaunchError, match="overlaps"):
                mm(a, b, out=parent[start : start + 128])
        with pytest.raises(LaunchError, match="overlaps"):
            mm(parent[128:256], b, out=parent[120:248])
        assert len(Noting.noted) == before

    def test_outputs_between_the_rows_of_an_operand_are_right(self, mm: Kernel, general: list[str]) -> None:
        """First and last bytes interleave, elements do not: checked each time, and allowed."""
        parent, b = torch.zeros(128, 256, dtype=torch.bfloat16), ab()[1]
        for _ in range(4):
            a, out = parent[:, :128], parent[:, 128:]
            mm(a, b, out=out)
            assert pointers(Noting.noted[-1]) == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
        with pytest.raises(LaunchError, match="overlaps"):
            mm(parent[:, :128], b, out=parent[:, 64:192])

    def test_wrong_outputs_are_refused_the_third_time_too(self, mm: Kernel) -> None:
        a, b = ab()
        for _ in range(3):
            mm(a, b, out=torch.empty(128, 128, dtype=torch.bfloat16))
        for out in (torch.empty(128, 128), torch.empty(64, 128, dtype=torch.bfloat16)):
            with pytest.raises(LaunchError, match="out has"):
                mm(a, b, out=out)

    def test_one_tensor_for_both_operands(self, mm: Kernel, general: list[str]) -> None:
        for _ in range(4):
            a, b = ab()
            mm(a, a)
            assert pointers(Noting.noted[-1])[:2] == [a.data_ptr()] * 2
            mm(a, b)
            assert pointers(Noting.noted[-1])[:2] == [a.data_ptr(), b.data_ptr()]

    def test_keywords_in_any_order(self, mm: Kernel, general: list[str]) -> None:
        for _ in range(4):
            a, b = ab()
            for out in (mm(a=a, b=b), mm(b=b, a=a), mm(a, b=b)):
                assert pointers(Noting.noted[-1])[:2] == [a.data_ptr(), b.data_ptr()]
                assert out.shape == (128, 128)
        assert len(general) == 6

    def test_many_ways_to_lie_are_right_and_do_not_pile_up(self, mm: Kernel) -> None:
        b = ab()[1]
        for extra in range(0, 800, 8):
            a = torch.zeros(128, 128 + extra, dtype=torch.bfloat16)[:, :128]
            out = mm(a, b)
            assert pointers(Noting.noted[-1]) == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
        assert all(len(known) <= 16 for known in mm._repeats.values())

    def test_sixteen_threads_read_their_own_tensors(self, mm: Kernel) -> None:
        failures: list[Any] = []
        mine = threading.local()
        note = Noting.dispatcher

        def dispatcher(launcher: Noting, *args: Any) -> None:
            note(launcher, *args)
            mine.noted = Noting.noted[-1]

        def work() -> None:
            for _ in range(50):
                a, b = ab()
                out = mm(a, b)
                found = pointers(mine.noted)
                if found != [a.data_ptr(), b.data_ptr(), out.data_ptr()]:
                    failures.append(found)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Noting, "dispatcher", dispatcher)
            runtime.forget()
            kernel = static(gemm(), "gemm_tma_cooperative")
            kernel(*ab())
            mm = kernel
            threads = [threading.Thread(target=work) for _ in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failures == []

    def test_while_a_graph_is_captured_nothing_is_traced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Scratch of a launch that is made only to look at it would be part of the graph."""
        kernel = static(gemm(), "gemm_tma_cooperative")
        kernel(*ab())
        traces: list[object] = []
        trace = replay.trace
        monkeypatch.setattr(replay, "trace", lambda *args: traces.append(1) or trace(*args))  # type: ignore[func-returns-value]
        monkeypatch.setattr(plans, "is_capturing", lambda: True)
        for _ in range(3):
            kernel(*ab())
        assert traces == []
        monkeypatch.setattr(plans, "is_capturing", lambda: False)
        for _ in range(3):
            kernel(*ab())
        assert traces == [1]
        monkeypatch.setattr(plans, "is_capturing", lambda: True)
        a, b = ab()
        out = kernel(a, b)
        assert pointers(Noting.noted[-1]) == [a.data_ptr(), b.data_ptr(), out.data_ptr()]

    def test_on_another_device_than_the_current_one_it_is_made_current(
        self, mm: Kernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered: list[Any] = []

        @contextmanager
        def on_device(device: int) -> Iterator[None]:
            entered.append(device)
            yield
            entered.append("left")

        monkeypatch.setattr(plans, "on_device", on_device)
        mm(*ab())
        assert entered == []
        monkeypatch.setattr(plans, "current_device", lambda: 1)
        mm(*ab())
        assert entered == [0, "left"]

    def test_the_stream_is_the_current_one_of_each_call(self, mm: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        for stream in (7, 9):
            monkeypatch.setattr(plans, "raw_stream", lambda _, stream=stream: stream)
            mm(*ab())
            assert Noting.noted[-1][1] == stream


class TestNumbers:
    """A kernel's arguments depend on numbers of the call, in ways that only `arguments` knows."""

    @pytest.fixture
    def scaled(self) -> Kernel:
        return static(gemm(epilogue="scale"), "gemm_tma_cooperative")

    @pytest.mark.parametrize("values", [(0.5, 2.0), (1, 1.0, True), (0.0, -0.0), (0, -0.0), (3, 3.5)])
    def test_each_is_its_own(self, scaled: Kernel, values: tuple[float, ...]) -> None:
        for _ in range(4):
            for value in values:
                scaled(*ab(), scale=value)
                assert str(float(value)) in [str(x) for x in Noting.noted[-1]]

    def test_that_come_again_are_replayed(self, scaled: Kernel, general: list[str]) -> None:
        for _ in range(6):
            for scale in (0.5, 2.0):
                scaled(*ab(), scale=scale)
        assert len(general) == 6

    def test_that_never_come_again_are_not_kept(self, scaled: Kernel) -> None:
        for scale in range(1, 40):
            scaled(*ab(), scale=float(scale))
        assert scaled._repeats == {}

    def test_no_number_equals_none(self, scaled: Kernel) -> None:
        for _ in range(3):
            scaled(*ab(), scale=float("nan"))
            assert "nan" in [str(x) for x in Noting.noted[-1]]
        assert scaled._repeats == {}

    def test_scales_of_attention_of_both_signs(self) -> None:
        kernel = static(PREFILL, "attention_vanilla")
        inputs = ops.get("attention").inputs(PREFILL, "cpu", 0)
        for _ in range(4):
            for scale in (None, 0.25, -0.25, 0):
                kernel(*inputs.values(), scale=scale)
                q = Noting.noted[-1][2]
                assert (q == inputs["q"].data_ptr()) == (scale is None or scale >= 0)  # the sign goes into a copy
                wanted = max((128**-0.5 if scale is None else abs(scale)) * 1.4426950408889634, 1e-30)
                assert wanted in Noting.noted[-1]

    def test_a_wrong_one_is_refused_the_third_time_too(self, scaled: Kernel) -> None:
        for _ in range(3):
            scaled(*ab(), scale=0.5)
        for wrong in (None, "0.5", torch.tensor(0.5)):
            with pytest.raises(LaunchError):
                scaled(*ab(), scale=wrong)


def test_a_launch_is_traced_once_it_has_come_often(monkeypatch: pytest.MonkeyPatch, general: list[str]) -> None:
    monkeypatch.setattr(repeat, "TRACED_AT", 4)
    mm = static(gemm(), "gemm_tma_cooperative")
    for _ in range(20):
        a, b = ab()
        out = mm(a, b)
        assert pointers(Noting.noted[-1]) == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
    assert len(general) == 5


def test_named_tensors_are_read_where_they_are() -> None:
    problem = gemm(epilogue="bias+residual")
    kernel = static(problem, "gemm_vanilla")
    for _ in range(4):
        inputs = GEMM.inputs(problem, "cpu", 0)
        out = kernel(inputs["a"], inputs["b"], residual=inputs["residual"], bias=inputs["bias"])
        assert {*(x.data_ptr() for x in inputs.values()), out.data_ptr()} <= set(Noting.noted[-1][2:])
    residual = inputs["residual"]
    for _ in range(3):  # each element of which one thread reads and writes
        assert kernel(**inputs, out=residual) is residual


@pytest.mark.parametrize("name", ops.NAMES)
def test_every_operator_has_the_same_launches_again(name: str, general: list[str]) -> None:
    operator = ops.get(name)
    problem = small_problem(operator)
    kernel = api.get_kernel(name, problem)
    inputs = operator.inputs(problem, "cpu", 0)
    out = operator.output(problem, inputs)
    for _ in range(5):
        kernel(**inputs, out=out)
    numbers = any(not isinstance(value, Tensor) for value in inputs.values())
    assert len(general) == (3 if numbers else 2)
    fixed = {x.data_ptr() for x in (*inputs.values(), out) if isinstance(x, Tensor)}
    shown = [[x for x in noted if not isinstance(x, int) or x in fixed or x < 2**32] for noted in Noting.noted]
    assert all(one == shown[0] for one in shown)  # all but addresses of scratch


class TestWhatTorchWouldNotSee:
    @pytest.fixture
    def mm(self) -> Kernel:
        return static(gemm(), "gemm_tma_cooperative")

    def test_versions_of_what_is_written_grow(self, mm: Kernel) -> None:
        """So that autograd refuses to go back through another value than it went forward with."""
        buffer, weight = ab()[0], ab()[0].requires_grad_()
        for _ in range(6):
            loss = (weight * buffer).sum()
            with torch.no_grad():
                mm(*ab(), out=buffer)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, weight)

    def test_traces_and_stand_ins_are_refused_the_fourth_time_too(self, mm: Kernel) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        for _ in range(5):
            with pytest.raises(LaunchError, match="would not be seen"):
                make_fx(lambda a, b: mm(a, b) * 1)(*ab())
            a, b = ab()
            with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(LaunchError, match="would not be seen"):
                mm(a, b)
            with torch.autograd.forward_ad.dual_level():
                a, b = ab()
                dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))  # type: ignore[no-untyped-call]
                with pytest.raises(LaunchError, match="tangent"):
                    mm(dual, b)
            mm(*ab())

    def test_memory_that_was_given_back_is_refused(self, mm: Kernel) -> None:
        for _ in range(6):
            mm(*ab())
        a, b = ab()
        a.untyped_storage().resize_(0)
        with pytest.raises(LaunchError, match="no memory"):
            mm(a, b)

    def test_a_nested_tensor_is_an_error_and_no_end_of_the_process(self, mm: Kernel) -> None:
        for _ in range(6):
            mm(*ab())
        with pytest.raises((LaunchError, RuntimeError)):
            mm(torch.nested.nested_tensor([torch.zeros(8, 8)] * 2), ab()[1])


class TestOutputsThatShareMemory:
    def test_a_residual_may_be_the_output_and_overlap_it_in_no_other_way(self) -> None:
        add = static(gemm(epilogue="residual"), "gemm_vanilla")
        buffer = torch.randn(129, 128).bfloat16()
        for _ in range(6):
            add(*ab(), residual=buffer[:128], out=buffer[:128])
            with pytest.raises(LaunchError, match="overlaps one, residual"):
                add(*ab(), residual=buffer[:128], out=buffer[1:])

    def test_an_output_that_overlaps_itself_is_refused(self) -> None:
        attend = static(PREFILL, "attention_vanilla")
        q = torch.randn(1, 2, 128, 128).bfloat16()
        for _ in range(6):
            attend(q, q, q, out=torch.empty_like(q))
            with pytest.raises(LaunchError, match="share memory"):
                attend(q, q, q, out=torch.empty(1, 1, 128, 128).bfloat16().expand(1, 2, 128, 128))


def test_a_module_that_holds_a_kernel_is_copied_and_pickled() -> None:
    kernel = api.get_kernel("gemm", gemm())
    module: Any = torch.nn.Identity()
    module.kernel = kernel
    assert copy.deepcopy(module).kernel is kernel
    assert pickle.loads(pickle.dumps(kernel)).problem == kernel.problem
