"""How a call of `varlen_attn` is computed: problem, kernel, gradients, and its operators in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import varlen_backward as backward
from tlxgen.functional.attention_call import CALLER, NOBODY
from tlxgen.functional.dispatch import CallCache, LookupCache, in_layout_of
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given
from tlxgen.runtime.kernel import Choice, Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

#: Whether attention is causal, aligned to the end, and its window in keys; 0 for all.
Mask = tuple[bool, int]


class Found:
    """A problem and its kernels, with and without the log-sum-exp."""

    def __init__(self, problem: AttentionVarlenProblem) -> None:
        self.problem = problem
        self._kernels: dict[bool, Kernel] = {}

    def kernel(self, q: Tensor, *, lse: bool) -> Kernel:
        """The kernel for the device of q, with or without the log-sum-exp."""
        kernel = self._kernels.get(lse)
        if kernel is None:
            kernel = self._kernels[lse] = _choose(self.problem.model_copy(update={"lse": lse}), q)
        return kernel


def _choose(problem: AttentionVarlenProblem, q: Tensor) -> Kernel:
    if problem.empty or q.device.type != checks.DEVICE:
        return Kernel(problem, Choice("torch", None, (f"on {q.device.type}: torch computes",)), None)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        return kernel_for(problem)


#: (shapes, lengths, dtype, device, options) → the problem and its kernels, or None if torch computes.
_KERNELS: LookupCache[Found | None] = LookupCache()


def find(tensors: Sequence[Tensor], longest: tuple[int, int], mask: Mask) -> Found | None:
    """The problem of a call and its kernels, cached; None if torch computes."""
    q, k, _, ends_q, _ = tensors
    key = (q.shape, k.shape, ends_q.shape, q.dtype, q.device, longest, mask, pinned("attention_varlen"))
    return _KERNELS.get(key, lambda: _look_up(q, k, ends_q, longest, mask))


def _look_up(q: Tensor, k: Tensor, ends_q: Tensor, longest: tuple[int, int], mask: Mask) -> Found | None:
    causal, window = mask
    fields = dict(zip(("total_q", "H", "D", "total_kv", "kv_heads"), (*q.shape, *k.shape[:2]), strict=True))
    sequences = len(ends_q) - 1
    # The given maxima may be too large, and too small if there are many rows past the last end.
    most = (max(given, -(-len(x) // sequences)) for given, x in zip(longest, (q, k), strict=True))
    fields |= {"B": sequences, **dict(zip(("max_q", "max_kv"), most, strict=True))}
    options = {"dtype": q.dtype, "causal": "bottom-right" if causal else "none", "window": window}
    try:
        problem = ops.get("attention_varlen").problem(fields, **options)
    except InvalidProblemError:  # larger than kernels support
        return None
    assert isinstance(problem, AttentionVarlenProblem)
    return Found(problem)


@dataclass(frozen=True)
class Call:
    """One call: kernels, scale, and how gradients are computed.

    Attributes:
        found: the problem and its kernels.
        scale: of the scores.
        lse: whether the kernel writes the log-sum-exp.
        flash: whether torch's flash-attention backward computes the gradients from output and log-sum-exp.
    """

    found: Found
    scale: float | None
    lse: bool
    flash: bool

    def launch(self, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> tuple[Tensor, Tensor]:
        """Launches the kernel; output and log-sum-exp, which is empty unless `lse`."""
        named: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        lse = q.new_empty((q.shape[1], q.shape[0]) if self.lse else (0,), dtype=torch.float32)
        if self.lse:
            named["lse"] = lse
        if not q.is_contiguous():
            named["out"] = torch.empty_like(q)
        out = self.found.kernel(q, lse=self.lse)(q, k, v, ends_q, ends_k, **named)
        if self.lse:  # of rows that see no key, as in torch, whose backward needs exp(-inf - lse) to be 0
            lse.masked_fill_(lse.isneginf(), float("inf"))
        return out, lse

    def gradients(
        self,
        tensors: Sequence[Tensor],
        of_forward: Sequence[Tensor],
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from those of output and log-sum-exp, one of which is given."""
        (q, k, v), ends = tensors[:3], tensors[3:]
        if grad_out is not None and grad_lse is None and self.flash and not torch.is_grad_enabled():
            out, lse = of_forward
            return backward.by_flash(self.found.problem, (q, k, v, out), lse, ends, grad_out, self.scale)
        return backward.by_formula(self.found.problem, (q, k, v), ends, grad_out, grad_lse, self.scale)


#: Calls without gradients → their `Call`.
CALLS: CallCache[Call] = CallCache("attention_varlen")


def recorded(call: Call, tensors: Sequence[Tensor], *, wants_lse: bool) -> tuple[Tensor, Tensor]:
    """Launches the call with autograd; output and log-sum-exp."""
    out, lse = _Recorded.apply(*tensors, call, wants_lse)  # type: ignore[no-untyped-call]
    return out, lse


class _Recorded(torch.autograd.Function):
    """A call recorded by autograd: five tensors, the `Call`, and whether the caller gets the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, call, wants_lse = given
        out, lse = call.launch(*tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if not wants_lse:
            ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(*tensors, *((out, lse) if call.flash else ()))
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        with as_given(saved[0]):
            gradients = ctx.call.gradients(saved[:5], saved[5:], grad_out, grad_lse)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return (*(gradient if needed else None for gradient, needed in wanted), None, None, None, None)


@torch.library.custom_op("tlxgen::attention_varlen", mutates_args=())
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    scale: float | None,
    lse_for: int,
) -> tuple[Tensor, Tensor]:
    """See `tlxgen.functional.varlen_attn`.

    Args:
        q: any dtype and device that `varlen_attn` takes.
        k: as q.
        v: as q.
        ends_q: `cu_seq_q`.
        ends_k: `cu_seq_k`.
        max_q: rows of the longest sequence.
        max_k: keys of the longest sequence.
        causal: aligned to the ends of sequences.
        window: keys that a row sees; 0 for all.
        scale: as in `varlen_attn`.
        lse_for: what the log-sum-exp is for: `NOBODY`, `GRADIENTS` or the `CALLER`.

    Returns:
        out in the layout of `torch.empty_like(q)`, and the log-sum-exp (H, total_q), empty for `NOBODY`.
    """
    with torch.no_grad(), as_given(q):
        found = _found((q, k, v, ends_q, ends_k), (max_q, max_k), (causal, window))
        call = Call(found, scale, lse=lse_for != NOBODY, flash=False)
        out, lse = call.launch(q, k, v, ends_q, ends_k)
    return in_layout_of(q, out), lse


@attention_varlen.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    lse = (0,) if others[-1] == NOBODY else (q.shape[1], q.shape[0])
    return torch.empty_like(q), q.new_empty(lse, dtype=torch.float32)


@torch.library.custom_op("tlxgen::attention_varlen_backward", mutates_args=())
def attention_varlen_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their layouts, from gradients and values of output and log-sum-exp."""
    tensors = (q, k, v, ends_q, ends_k)
    found = _found(tensors, (max_q, max_k), (causal, window))
    with torch.no_grad(), as_given(q):
        written = lse.shape == (q.shape[1], q.shape[0])  # not if it was for nobody
        flash = written and backward.flash_takes(found.problem, q, k, v, scale)
        call = Call(found, scale, lse=True, flash=flash)
        gradients = call.gradients(tensors, (out, lse), grad_out, grad_lse)
    of_q, of_k, of_v = (in_layout_of(x, gradient) for x, gradient in zip((q, k, v), gradients, strict=True))
    return of_q, of_k, of_v


@attention_varlen_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (torch.empty_like(x) for x in inputs[4:7])
    return of_q, of_k, of_v


def _found(tensors: Sequence[Tensor], longest: tuple[int, int], mask: tuple[bool, int]) -> Any:
    """As `find`, for operators.

    Raises:
        InvalidProblemError: there is no kernel for these sizes.
    """
    from tlxgen.errors import InvalidProblemError

    found = find(tensors, longest, mask)
    if found is None:
        q, k, _, ends, _ = tensors
        given = f"query {tuple(q.shape)} and key {tuple(k.shape)}, {len(ends) - 1} sequences"
        most = f"of at most {longest[0]} rows and {longest[1]} keys"
        raise InvalidProblemError(f"varlen_attn: no kernel is for {given} {most}")
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, lse_for = inputs
    out, lse = output
    ctx.options = given[5:]
    ctx.set_materialize_grads(False)
    if lse_for != CALLER:
        ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, *given[:5])


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 11
    gradients = torch.ops.tlxgen.attention_varlen_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.options)
    needed = [gradient if wanted else None for gradient, wanted in zip(gradients, ctx.needs_input_grad, strict=False)]
    return (*needed, *(None,) * 8)


attention_varlen.register_autograd(_differentiate, setup_context=_keep)
