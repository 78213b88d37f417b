"""How a call of attention is computed: problem, kernel, gradients, and its operators in graphs of `torch.compile`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import attention_backward as backward
from tlxgen.functional.dispatch import CallCache, LookupCache, in_layout_of
from tlxgen.ops.attention import flash
from tlxgen.ops.attention.problem import AttentionProblem, Causal
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given
from tlxgen.runtime.kernel import Choice, Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

#: What a log-sum-exp is wanted for: by nobody, by gradients, or by the caller.
NOBODY, GRADIENTS, CALLER = range(3)


class Found:
    """A problem and its kernels, with and without the log-sum-exp."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        self._kernels: dict[bool, Kernel] = {}

    def kernel(self, q: Tensor, *, lse: bool) -> Kernel:
        """The kernel for the device of q, with or without the log-sum-exp."""
        kernel = self._kernels.get(lse)
        if kernel is None:
            problem = self.problem.model_copy(update={"lse": lse})
            kernel = self._kernels[lse] = _choose(problem, q)
        return kernel


def _choose(problem: AttentionProblem, q: Tensor) -> Kernel:
    if q.device.type != checks.DEVICE:
        return Kernel(problem, Choice("torch", None, (f"tensors on {q.device.type}: torch computes",)), None)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        return kernel_for(problem)


#: (shapes, dtypes, devices, options) → the problem and its kernels, or the reason why there are none.
_KERNELS: LookupCache[Found | str] = LookupCache()
CALLS: CallCache[Call] = CallCache("attention")


def find(q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: int, softcap: float, *, gqa: bool) -> Found | str:
    """The problem of a call and its kernels, cached; the reason if there is no such problem."""
    same = (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    pin = pinned("attention")
    key = (q.shape, k.shape, v.shape, *same, causal, window, type(window), softcap, type(softcap), gqa, pin)
    return _KERNELS.get(key, lambda: _look_up(q, k, v, causal, window, softcap, gqa=gqa))


def _look_up(q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: int, softcap: float, *, gqa: bool) -> Found | str:
    reason = _why_no_problem(q, k, v, gqa=gqa)
    if reason is not None:
        return reason
    *batch, heads, rows, head_dim = q.shape
    kv_heads, kv_len = k.shape[-3:-1]
    if causal == "top-left" and rows == kv_len:
        causal = "bottom-right"  # equal, and the name that rows have
    shape = (math.prod(batch), heads, rows, head_dim)
    options = {"kv_heads": kv_heads, "kv_len": kv_len, "dtype": q.dtype, "causal": causal}
    try:
        problem = ops.get("attention").problem(shape, **options, window=window, softcap=softcap)
    except InvalidProblemError as error:
        return str(error)
    assert isinstance(problem, AttentionProblem)
    return Found(problem)


def _why_no_problem(q: Tensor, k: Tensor, v: Tensor, *, gqa: bool) -> str | None:
    """Why these tensors are not operands of attention, or None; the Problem checks sizes and dtypes."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() < 3 or k.shape != v.shape or q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        return f"attention: {shapes}: it takes q (..., H, S, D), k and v (..., KV heads, KV length, D)"
    if not gqa and q.shape[-3] != k.shape[-3]:
        return f"attention: {shapes}: heads differ"
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        found = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        return f"attention: q, k and v are {found}; they must have one dtype and one device"
    return None


def with_four_dims(tensor: Tensor) -> Tensor:
    """(..., H, S, D) as (B, H, S, D)."""
    if tensor.dim() == 4:
        return tensor
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor.unsqueeze(0)


def with_dims_of(q: Tensor, result: Tensor) -> Tensor:
    """(B, H, ...) with the leading dimensions of q (..., H, S, D)."""
    return result if q.dim() == 4 else result.reshape(*q.shape[:-3], *result.shape[1:])


class Call:
    """One call on tensors (B, H, S, D): by a kernel or by torch, and how its gradients are computed.

    Attributes:
        grad: whether gradients are recorded.
        flash: whether torch's flash-attention backward computes the gradients from output and log-sum-exp.
        lse: whether the kernel writes the log-sum-exp.
        kernel: computes the output, unless `torch`.
        torch: whether torch's attention computes output and gradients, being as good or needed for the gradients.
    """

    def __init__(
        self, found: Found, q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, return_lse: bool = False
    ) -> None:
        self.problem = found.problem
        self.scale = scale
        self.grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        self.flash = self.grad and flash.takes(self.problem, q, k, v, scale)
        self.lse = return_lse or self.flash
        self.kernel = found.kernel(q, lse=self.lse)
        if self.kernel.origin == "torch" and self.flash and not return_lse:
            # Torch computes a log-sum-exp from all scores, no cheaper than recomputing them for the gradients.
            self.flash, self.lse, self.kernel = False, False, found.kernel(q, lse=False)
        again = self.grad and not self.flash and backward.sdpa_differentiates(self.problem, scale)
        hidden = self.problem.causal != "none"  # fused kernels mask before they scale
        exists = backward.sdpa_differentiates(self.problem, scale) if hidden else backward.is_sdpa(self.problem)
        no_better = self.kernel.origin == "torch" and exists
        self.torch = not return_lse and (again or no_better)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; the latter is empty unless the kernel writes it."""
        with as_given(q):
            if self.torch:
                return backward.sdpa(self.problem, q, k, v, self.scale), _nothing(q)
            if not self.grad:
                out, lse = self.launch(q, k, v)
                return out, _nothing(q) if lse is None else lse
            out, lse = _Attention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
            return out, lse

    def launch(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Launches the kernel; output, and log-sum-exp or None."""
        named: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        lse = None
        if self.lse:
            lse = named["lse"] = q.new_empty(q.shape[:3], dtype=torch.float32)
        # The output has the layout of q, so that the caller's transpose back is a view.
        if not q.is_contiguous():
            named["out"] = torch.empty_like(q)
        return self.kernel(q, k, v, **named), lse

    def again(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Repeats the call without gradients on tensors of the same layout, with any leading dimensions."""
        if q.dim() == 4:
            return self.launch(q, k, v)
        out, lse = self.launch(with_four_dims(q), with_four_dims(k), with_four_dims(v))
        return with_dims_of(q, out), None if lse is None else with_dims_of(q, lse)


def _nothing(q: Tensor) -> Tensor:
    """An empty log-sum-exp."""
    return q.new_empty(0, dtype=torch.float32)


class _Attention(torch.autograd.Function):
    """A call recorded by autograd: q, k and v (B, H, S, D), and the `Call`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, written = call.launch(q, k, v)
        lse = _nothing(q) if written is None else written
        ctx.call = call
        ctx.save_for_backward(q, k, v, *((out, lse) if call.flash else ()))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *of_forward = ctx.saved_tensors
        with as_given(q):
            return (*_gradients(ctx.call, (q, k, v), of_forward, grad_out, grad_lse, ctx.needs_input_grad[:3]), None)


def _gradients(
    call: Call,
    tensors: Sequence[Tensor],
    of_forward: Sequence[Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needed: Sequence[bool],
) -> backward.Gradients:
    """Gradients of q, k and v (`tensors`) from those of output and log-sum-exp, by the cheapest method that applies."""
    problem, scale = call.problem, call.scale
    if grad_out is None and grad_lse is None:
        return None, None, None
    if grad_out is None or grad_lse is not None or torch.is_grad_enabled():  # a second derivative
        return backward.by_formula(problem, tensors, grad_out, grad_lse, scale)
    if call.flash:
        out, lse = of_forward
        return backward.by_flash(problem, (*tensors, out), lse, grad_out, scale)
    if backward.sdpa_differentiates(problem, scale):
        return backward.by_recomputing(problem, tensors, grad_out, scale, needed)
    return backward.by_formula(problem, tensors, grad_out, None, scale)


@torch.library.custom_op("tlxgen::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: str, window: int, softcap: float, scale: float | None, lse_for: int
) -> tuple[Tensor, Tensor]:
    """See `tlxgen.functional.attention`, for q (B, H, S, D), k and v (B, KV heads, KV length, D).

    Args:
        q: any dtype and device that `attention` takes.
        k: as q.
        v: as q.
        causal: as in `attention`.
        window: as in `attention`.
        softcap: as in `attention`.
        scale: as in `attention`.
        lse_for: what the log-sum-exp is for: `NOBODY`, `GRADIENTS` or the `CALLER`.

    Returns:
        out in the layout of `torch.empty_like(q)`, and the log-sum-exp (B, H, S): empty for `NOBODY`, and zeros if it
        is for gradients while torch computes the output, since the gradients then do without.
    """
    found = _found(q, k, v, causal, window, softcap)
    computed = lse_for == CALLER or (lse_for == GRADIENTS and found.kernel(q, lse=True).origin != "torch")
    with torch.no_grad(), as_given(q):
        call = Call(found, q, k, v, scale, return_lse=computed)
        out, lse = call(q, k, v)
    return in_layout_of(q, out), lse if computed else _no_lse(q, lse_for)


@attention.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _no_lse(q, lse_for=others[-1])


def _no_lse(q: Tensor, lse_for: int) -> Tensor:
    return q.new_zeros((0,) if lse_for == NOBODY else q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tlxgen::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: str,
    window: int,
    softcap: float,
    scale: float | None,
    lse_for: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their layouts, from gradients and values of output and log-sum-exp."""
    found = _found(q, k, v, causal, window, softcap)
    written = lse_for == CALLER or (lse_for == GRADIENTS and found.kernel(q, lse=True).origin != "torch")
    with torch.no_grad(), as_given(q):
        if written and grad_out is not None and grad_lse is None and flash.takes(found.problem, q, k, v, scale):
            gradients = backward.by_flash(found.problem, (q, k, v, out), lse, grad_out, scale)
        else:  # an operator cannot call autograd, and so not torch's gradients of attention
            gradients = backward.by_formula(found.problem, (q, k, v), grad_out, grad_lse, scale)
    of_q, of_k, of_v = (
        torch.zeros_like(x) if gradient is None else in_layout_of(x, gradient)
        for x, gradient in zip((q, k, v), gradients, strict=True)
    )
    return of_q, of_k, of_v


@attention_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (torch.empty_like(x) for x in inputs[2:5])
    return of_q, of_k, of_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    if ctx.options[-1] != CALLER:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 8
    gradients = torch.ops.tlxgen.attention_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.options)
    needed = [gradient if wanted else None for gradient, wanted in zip(gradients, ctx.needs_input_grad, strict=False)]
    return (*needed, None, None, None, None, None)


attention.register_autograd(_differentiate, setup_context=_keep)


def _found(q: Tensor, k: Tensor, v: Tensor, causal: str, window: int, softcap: float) -> Any:
    """As `find`, for operators.

    Raises:
        InvalidProblemError: there is no kernel for these tensors or options.
    """
    from tlxgen.errors import InvalidProblemError

    found = find(q, k, v, cast("Causal", causal), window, softcap, gqa=True)
    if isinstance(found, str):
        raise InvalidProblemError(found)
    return found
