"""`tlxgen.functional.varlen_attn`: what goes to a kernel and what to torch, the results, and the gradients."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest
from torch.testing import assert_close

import tlxgen
from tests.functional.test_products import normal
from tlxgen import functional
from tlxgen.devices import target
from tlxgen.functional import varlen, varlen_call
from tlxgen.functional import varlen_backward as backward
from tlxgen.runtime import checks
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime.kernel import Choice, Kernel
from tlxgen.space.candidates import candidates

#: Rows and keys of each sequence: as many, fewer rows, fewer keys, no rows, no keys, one of both.
LENGTHS = [(7, 7), (3, 9), (8, 5), (0, 4), (4, 0), (1, 1)]
H, KV_HEADS, D = 4, 2, 16
MAX_Q, MAX_K = 8, 9

#: Which returns a tensor or two, as torch's own; the tests know which.
varlen_attn: Any = functional.varlen_attn

MASKS = {
    "all keys": ((-1, -1), "none", 0),
    "causal": ((-1, 0), "bottom-right", 0),
    "a window": ((3, 0), "bottom-right", 4),
    "the row's own key": ((0, 0), "bottom-right", 1),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def inputs(grad: bool = False, kv_heads: int = KV_HEADS) -> tuple[Any, ...]:
    """Query, key, value, where their sequences end, and the longest."""
    rows, keys = zip(*LENGTHS, strict=True)
    q = normal(sum(rows), H, D, grad=grad)
    k, v = (normal(sum(keys), kv_heads, D, grad=grad) for _ in range(2))
    return q, k, v, ends(rows), ends(keys), MAX_Q, MAX_K


def exactly(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], scale: float | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in the tensors' dtype, sequence by sequence; minus infinity for rows that see nothing."""
    outs, sums, row, key = [], [], 0, 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for rows, keys in LENGTHS:
        one, other, values = q[row : row + rows], k[key : key + keys], v[key : key + keys]
        scores = torch.einsum("rhd,khd->hrk", one, other) * (D**-0.5 if scale is None else scale)
        ahead = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
        hidden = (ahead > 0) if window[1] == 0 else torch.zeros(rows, keys, dtype=torch.bool)
        hidden |= (ahead < -window[0]) if window[0] >= 0 else False
        blind = hidden.all(1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(hidden & ~blind, float("-inf")), 2).masked_fill(blind, 0.0)
        outs.append(torch.einsum("hrk,khd->rhd", weights, values))
        sums.append(torch.logsumexp(scores.masked_fill(hidden, float("-inf")), 2))
        row, key = row + rows, key + keys
    return torch.cat(outs), torch.cat(sums, 1)


def exact_of(call: Sequence[Any], window: tuple[int, int], scale: float | None = None) -> tuple[Tensor, Tensor]:
    """`exactly`, in float64, of a call's tensors."""
    q, k, v = (x.double() for x in call[:3])
    return exactly(q, k, v, window, scale)


class Served:
    """A get_kernel whose kernels are torch in disguise; what was asked for and launched."""

    origin = "tuned"

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.launched: list[dict[str, Any]] = []

    def __call__(self, problem: Any) -> Any:
        assert problem.operator == "attention_varlen"
        self.asked.append(problem)
        kernel, served = Kernel(problem, Choice("torch", None), None), self

        class Disguised:
            origin = served.origin

            def __call__(self, *tensors: Tensor, **named: Any) -> Tensor:
                served.launched.append(named)
                return kernel(*tensors, **named)

        return Disguised()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """As if kernels took tensors on the CPU, and torch's function too."""
    served = Served()
    monkeypatch.setattr(varlen_call, "kernel_for", served)
    monkeypatch.setattr(varlen, "_only_here", lambda _: False)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    runtime.forget()
    yield served
    runtime.forget()


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch's function was called with, by name."""
    calls: list[dict[str, Any]] = []

    def torchs(*args: Any, **named: Any) -> Tensor:
        calls.append(named)
        return torch.zeros(1)

    monkeypatch.setattr(varlen, "_torchs", torchs)
    return calls


class TestWhatAKernelIsAskedFor:
    @pytest.mark.parametrize("mask", MASKS)
    def test_windows_are_masks(self, mask: str, served: Served, theirs: list[Any]) -> None:
        window, causal, kept = MASKS[mask]
        varlen_attn(*inputs(), window_size=window, enable_gqa=True)
        (problem,) = served.asked
        assert (problem.causal, problem.window, problem.lse) == (causal, kept, False)
        assert (problem.B, problem.H, problem.kv_heads, problem.D) == (6, H, KV_HEADS, D)
        assert (problem.total_q, problem.total_kv, problem.max_q, problem.max_kv) == (23, 26, MAX_Q, MAX_K)
        assert theirs == []

    def test_the_log_sum_exp_where_it_is_wanted(self, served: Served) -> None:
        varlen_attn(*inputs(kv_heads=H), return_aux=AuxRequest(lse=False))
        varlen_attn(*inputs(kv_heads=H), return_aux=AuxRequest(lse=True))
        assert [problem.lse for problem in served.asked] == [False, True]

    def test_a_problem_is_looked_up_once_for_each_pin(self, served: Served) -> None:
        call = inputs(kv_heads=H)
        for _ in range(3):
            varlen_attn(*call)
        assert (len(served.asked), len(served.launched)) == (1, 3)
        config = candidates(served.asked[0], target("h200"))[0]
        with tlxgen.pin("attention_varlen", config):
            varlen_attn(*call)
        assert len(served.asked) == 2

    def test_calls_that_differ_in_an_option_alone_are_told_apart(self, served: Served) -> None:
        call = inputs(kv_heads=H)
        for _ in range(2):
            for options in ({}, {"window_size": (-1, 0)}, {"scale": 0.3}, {"scale": 0.4}):
                scale: Any = options.get("scale")
                window: Any = options.get("window_size", (-1, -1))
                exact, _ = exact_of(call, window, scale)
                assert_close(varlen_attn(*call, **options).double(), exact, rtol=2e-2, atol=2e-2)


class TestWhatGoesToTorch:
    @pytest.mark.parametrize(
        "options",
        [
            {"window_size": (-1, 3)},
            {"window_size": (2, -1)},
            {"seqused_k": torch.ones(6, dtype=torch.int32)},
            {"block_table": torch.ones(6, 1, dtype=torch.int32)},
            {"num_splits": 1},
            {"something_new": 1},
            {"scale": float("nan")},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_options_that_kernels_do_not_have(
        self, options: dict[str, Any], served: Served, theirs: list[dict[str, Any]]
    ) -> None:
        varlen_attn(*inputs(kv_heads=H), **options)
        assert served.launched == []
        assert all(theirs[0][name] is value for name, value in options.items())

    @pytest.mark.parametrize(
        ("index", "change"),
        [
            (0, lambda x: x.float()),
            (0, lambda x: x[..., :8]),
            (0, lambda x: x.repeat(1, 1, 2)[..., ::2]),
            (1, lambda x: x[:-1]),
            (2, lambda x: x.half()),
            (3, lambda x: x.long()),
            (3, lambda x: x[:-1]),
            (4, lambda _: None),
            (5, lambda _: 2**25),
        ],
        ids=["dtype", "head", "strides", "keys and values", "dtypes", "int64", "ends", "no ends", "too long"],
    )
    def test_tensors_that_kernels_do_not_take(
        self, index: int, change: Any, served: Served, theirs: list[dict[str, Any]]
    ) -> None:
        call = list(inputs(kv_heads=H))
        call[index] = change(call[index])
        varlen_attn(*call)
        assert (len(theirs), served.launched) == (1, [])

    @pytest.mark.parametrize("here", [True, False], ids=["on a CPU", "on a GPU"])
    @pytest.mark.parametrize(
        "odd",
        [
            torch.tensor(1.0),
            torch.nested.nested_tensor([torch.ones(2, H, D)] * 2).bfloat16(),
            normal(23, H).to_sparse(),
        ],
        ids=["a number", "nested", "sparse"],
    )
    def test_what_is_no_packed_tensor(
        self, odd: Tensor, here: bool, served: Served, theirs: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(varlen, "_only_here", lambda _: here)
        varlen_attn(odd, *inputs(kv_heads=H)[1:])
        assert (len(theirs), served.launched) == (1, [])

    def test_nothing_is_passed_on_that_older_torch_does_not_know(self, served: Served, theirs: list[Any]) -> None:
        """Torch 2.11 has neither `enable_gqa` nor what came after it, and older ones not even a window."""
        call = list(inputs(kv_heads=H))
        call[0] = call[0].float()
        varlen_attn(*call)
        varlen_attn(*call, window_size=(-1, 0), scale=0.3)
        assert [set(named) for named in theirs] == [set(), {"window_size", "scale"}]

    def test_fewer_heads_of_keys_that_nobody_allowed(self, served: Served) -> None:
        with pytest.raises(ValueError, match="enable_gqa"):
            varlen_attn(*inputs())

    def test_transforms(self, served: Served, theirs: list[Any]) -> None:
        q, *rest = inputs(kv_heads=H)
        torch.vmap(lambda q: varlen_attn(q, *rest))(torch.stack([q, q]))
        assert (len(theirs), served.launched) == (1, [])

    def test_kernels_that_are_torch_anyway(self, served: Served, theirs: list[Any]) -> None:
        served.origin = "torch"
        varlen_attn(*inputs(kv_heads=H))
        assert (len(theirs), served.launched) == (1, [])

    def test_a_torch_without_the_function_is_told(self, monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
        monkeypatch.setattr(varlen, "_torchs", None)
        with pytest.raises(NotImplementedError, match=r"torch .* has none"):
            varlen_attn(*inputs(kv_heads=H), window_size=(-1, 3))


class TestOnTheCpu:
    """Torch has no such function there; its attention of padded sequences computes."""

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("scale", [None, 0.4, -0.3])
    def test_output_and_log_sum_exp(self, mask: str, scale: float | None) -> None:
        window = MASKS[mask][0]
        call = inputs()
        out, lse = varlen_attn(*call, window_size=window, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
        alone = varlen_attn(*call, window_size=window, scale=scale, enable_gqa=True)
        exact, sums = exact_of(call, window, scale)
        assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        assert_close(alone, out, rtol=2e-2, atol=2e-2)
        assert_close(lse.double(), sums.masked_fill(sums.isneginf(), float("inf")), rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("mask", MASKS)
    def test_gradients(self, mask: str) -> None:
        window = MASKS[mask][0]
        call = inputs(grad=True)
        leaves = call[:3]
        out = varlen_attn(*call, window_size=window, enable_gqa=True)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        found = torch.autograd.grad((out.float() * weights).sum(), leaves)
        exact, _ = exact_of(call, window)
        for one, other in zip(found, torch.autograd.grad((exact * weights).sum(), leaves), strict=True):
            assert_close(one, other, rtol=3e-2, atol=3e-2)

    def test_gradients_of_the_log_sum_exp(self) -> None:
        """Torch's own function takes them for zeros."""
        call = inputs(grad=True)
        out, lse = varlen_attn(*call, window_size=(-1, 0), enable_gqa=True, return_aux=AuxRequest(lse=True))
        seen = lse.isfinite()
        found = torch.autograd.grad(out.float().sum() + lse[seen].square().sum(), call[:3])
        exact, sums = exact_of(call, (-1, 0))
        expected = torch.autograd.grad(exact.sum() + sums[seen].square().sum(), call[:3])
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=3e-2, atol=3e-2)

    def test_second_derivatives(self) -> None:
        call = inputs(grad=True)
        q, k = call[:2]
        out = varlen_attn(*call, enable_gqa=True)
        (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), k)
        exact, _ = exact_of(call, (-1, -1))
        (one,) = torch.autograd.grad(exact.square().sum(), q, create_graph=True)
        (other,) = torch.autograd.grad(one.double().square().sum(), k)
        assert_close(second, other, rtol=5e-2, atol=5e-2)

    def test_only_gradients_that_are_wanted(self) -> None:
        q, k, v, *rest = inputs(kv_heads=H)
        q.requires_grad_()
        varlen_attn(q, k, v, *rest).sum().backward()
        assert q.grad is not None
        assert k.grad is None

    @pytest.mark.parametrize("lse", [False, True])
    @pytest.mark.parametrize("more", [1, 100], ids=["little", "more than six sequences may have"])
    def test_what_lies_past_the_last_end_is_nobodys(self, more: int, lse: bool) -> None:
        """Rows and keys in memory that is larger than they are."""
        *tensors, ends_q, ends_k, max_q, max_k = inputs(kv_heads=H)
        longer = [torch.cat([x, x.new_full((more, H, D), 1e4)]).requires_grad_() for x in tensors]
        options: dict[str, Any] = {"window_size": (-1, 0), "return_aux": AuxRequest(lse=lse)}
        found = varlen_attn(*longer, ends_q, ends_k, max_q, max_k, **options)
        expected = varlen_attn(*tensors, ends_q, ends_k, max_q, max_k, **options)
        out, other = (x[0] if lse else x for x in (found, expected))
        assert_close(out[:-more], other, rtol=2e-2, atol=2e-2)
        if lse:
            assert_close(found[1][:, :-more], expected[1])
        for gradient in torch.autograd.grad(out[:-more].float().sum(), longer):
            assert not gradient[-more:].any()

    def test_nothing_at_all(self) -> None:
        empty = normal(0, H, D)
        nowhere = torch.zeros(3, dtype=torch.int32)
        assert varlen_attn(empty, empty, empty, nowhere, nowhere, 0, 0).shape == (0, H, D)

    def test_heads_may_lie_in_any_order(self) -> None:
        """As in torch, the output lies as the query does."""
        q, k, v, *rest = inputs(kv_heads=H)
        across = q.transpose(0, 1).contiguous().transpose(0, 1)
        out = varlen_attn(across, k, v, *rest)
        assert out.stride() == across.stride()
        assert_close(out, varlen_attn(q, k, v, *rest))


class TestTheFlashBackward:
    """On GPUs torch's own kernel has the gradients; what it is given is seen here, what it computes in tests/gpu."""

    @pytest.fixture
    def given(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def flash(*args: Any) -> tuple[Tensor, ...]:
            calls.append(args)
            return tuple(torch.ones_like(x) for x in args[1][:3])

        monkeypatch.setattr(backward, "by_flash", flash)
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
        return calls

    def test_gets_the_log_sum_exp_as_it_wants_it(self, given: list[tuple[Any, ...]], served: Served) -> None:
        call = inputs(grad=True, kv_heads=H)
        out = varlen_attn(*call, window_size=(-1, 0))
        out.sum().backward()
        ((problem, tensors, lse, (ends_q, ends_k), grad_out, scale),) = given
        _, sums = exact_of(call, (-1, 0))
        assert_close(lse.double(), sums.masked_fill(sums.isneginf(), float("inf")), rtol=1e-3, atol=1e-3)
        assert [x is y for x, y in zip((*tensors[:3], ends_q, ends_k), call, strict=False)] == [True] * 5
        assert torch.equal(tensors[3], out)
        assert (problem.causal, grad_out.shape, scale) == ("bottom-right", out.shape, None)
        assert call[0].grad is not None

    @pytest.mark.parametrize("case", ["a negative scale", "of the log-sum-exp", "second derivatives"])
    def test_is_not_asked_for_what_it_has_not(self, case: str, given: list[tuple[Any, ...]], served: Served) -> None:
        call = inputs(grad=True, kv_heads=H)
        scale = -0.3 if case == "a negative scale" else None
        out, lse = varlen_attn(*call, scale=scale, return_aux=AuxRequest(lse=True))
        result = out.float().sum() + (lse[lse.isfinite()].sum() if case == "of the log-sum-exp" else 0.0)
        torch.autograd.grad(result, call[0], create_graph=case == "second derivatives")
        assert given == []


def test_torchs_kernel_gets_what_it_reads_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients may begin between two vectors, and ends may lie apart."""
    given: list[Tensor] = []

    def flash(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        given.extend(args[:8])
        return tuple(args[1:4])

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash)
    q, k, v, *rest = inputs(kv_heads=H)
    ends_q, ends_k = (x.repeat_interleave(2)[::2] for x in rest[:2])
    found = varlen_call.find((q, k, v, ends_q, ends_k), (MAX_Q, MAX_K), (False, 0))
    assert found is not None
    late = normal(q.numel() + 1)[1:].view(q.shape)
    backward.by_flash(found.problem, (q, k, v, q), torch.zeros(H, len(q)), (ends_q, ends_k), late, None)
    assert all(x.data_ptr() % 16 == 0 for x in given[:5])
    assert all(x.is_contiguous() for x in given[6:])
    for one, other in zip(given, (late, q, k, v, q, torch.zeros(H, len(q)), ends_q, ends_k), strict=True):
        assert torch.equal(one, other)


class TestInPlaceOfTorchs:
    """`torch.nn.attention.varlen.varlen_attn = tlxgen.functional.varlen_attn`."""

    PROGRAM = """
import sys, torch
from tlxgen import functional
assert "torch._dynamo" not in sys.modules
import torch.nn.attention.varlen as theirs
theirs.varlen_attn = functional.varlen_attn
q, ends = torch.randn(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
try:
    theirs.varlen_attn(q, q, q, ends, ends, 3, 3)  # float32 is torch's, which does not have it
except NotImplementedError as error:
    print("_flash_attention_forward" in str(error))
print(theirs.varlen_attn(*(q.bfloat16(),) * 3, ends, ends, 3, 3).shape)
"""

    def test_what_goes_to_torch_does_not_come_back_and_the_compiler_is_left_alone(self) -> None:
        done = subprocess.run([sys.executable, "-c", self.PROGRAM], capture_output=True, text=True, check=False)
        assert (done.stdout.split("\n")[:2], done.returncode) == (["True", "torch.Size([5, 2, 16])"], 0), done.stderr

    def test_there_is_no_other_name(self) -> None:
        assert "varlen_attn" in functional.__all__
        with pytest.raises(AttributeError, match="varlen_attention"):
            functional.varlen_attention  # noqa: B018


def test_a_gpu_gets_the_kernel_that_get_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import stub_launcher

    with stub_launcher.noting(monkeypatch), warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.FallbackWarning)
        monkeypatch.setattr(checks, "DEVICE", "cpu")
        call = inputs(kv_heads=H)
        q, k, v = (x.repeat(1, 1, 4) for x in call[:3])  # a head of 64
        for _ in range(3):
            varlen_attn(q, k, v, *call[3:], window_size=(-1, 0))
        assert len(stub_launcher.Noting.made) == 1
        assert len(stub_launcher.Noting.noted) == 3
