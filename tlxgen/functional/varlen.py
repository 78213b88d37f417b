"""Attention over packed sequences in place of torch's: the best kernel where one takes the call, else torch.

    >>> from tlxgen import functional as F
    >>> out = F.varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0))  # doctest: +SKIP

A module of its own that `tlxgen.functional` imports when it is first asked for `varlen_attn`: torch's function, which
must be known before a program puts this one in its place, brings the compiler with it, more than a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from tlxgen import ops
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import library, library_varlen
from tlxgen.functional import varlen_backward as backward
from tlxgen.functional.dispatch import Lookups, Taken
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given, transformed, transformed_in_graph
from tlxgen.runtime.kernel import Choice, Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

try:
    from torch.nn.attention.varlen import varlen_attn as _known
except ImportError:  # before torch 2.10
    _torchs: Any = None
else:
    _torchs = _known

__all__ = ["varlen_attn"]

_DTYPES = frozenset({torch.bfloat16, torch.float16})
_LARGEST_HEAD = 256
_NUMBERS = frozenset({int, float})


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn`: its arguments, its result, its errors, its gradients.

    Args:
        query: (T_q, H, D), sequences one after the other.
        key: (T_k, KV heads, D).
        value: as `key`.
        cu_seq_q: (N + 1,), int32: where sequences begin and end in `query`, from 0 on. It stays on the device.
        cu_seq_k: likewise, in `key`.
        max_q: rows of the longest sequence, or more.
        max_k: keys of the longest sequence, or more.
        return_aux: with its `lse`, the log-sum-exp is returned as well.
        scale: of the scores; 1 / sqrt(D) by default.
        window_size: (-1, -1) for all keys; (-1, 0) for those up to the row, aligned to the sequences' ends; (W, 0) for
            W keys before that one, and itself. Others are torch's.
        enable_gqa: whether heads of `query` may share those of `key` and `value`; torch has that from 2.12 on.
        **others: what torch's function has beyond that, such as `seqused_k`, `block_table` and `num_splits`: calls with
            any of them that is not None are torch's. Torch refuses by name what it does not know.

    Returns:
        (T_q, H, D), in memory in the order of the query's dimensions; and (H, T_q) natural logarithms in float32 if
        they are asked for. A row that sees no key has 0 and plus infinity, as torch's has. What lies past the last end
        is not written.

    A call goes to torch unchanged unless a kernel takes it: plain tensors in bf16 or fp16 on one CUDA device, the head
    dimension contiguous, a multiple of 8 and at most 256, no size of zero, not under functorch's transforms; and where
    `tlxgen.get_kernel` has nothing better (`Kernel.origin` is `torch`). On CPUs, for which torch has no such function,
    torch's attention of padded sequences computes it.

    Gradients are those of torch's flash-attention backward, as torch's own function has them, from the kernel's output
    and log-sum-exp. Where it does not run (a `scale` that is not positive, a CPU), and for gradients of the
    log-sum-exp, which torch takes for zeros, and second derivatives, which it has not, sequences are computed once
    more, one after the other, by formulas in float32; that waits for the device.
    """
    mask, wants_lse = _mask(window_size), return_aux is not None and return_aux.lse
    tensors = (query, key, value, cu_seq_q, cu_seq_k)
    if mask is not None and _ours(tensors, max_q, max_k, scale) and all(other is None for other in others.values()):
        if torch.compiler.is_compiling():
            if _in_graphs(tensors, enable_gqa):
                out, lse = _in_graph(tensors, (max_q, max_k), mask, scale, wants_lse=wants_lse)
                return (out, lse) if wants_lse else out
        else:
            result = _outside(tensors, (max_q, max_k), mask, scale, gqa=enable_gqa, wants_lse=wants_lse)
            if result is not None:
                return result if wants_lse else result[0]
    # What is as by default goes unsaid: older versions of torch have fewer arguments.
    others |= {"return_aux": return_aux} if return_aux is not None else {}
    others |= {"scale": scale} if scale is not None else {}
    others |= {"window_size": window_size} if window_size != (-1, -1) else {}
    others |= {"enable_gqa": True} if enable_gqa else {}
    return _torch(*tensors, max_q, max_k, **others)


def _torch(*args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
    if _torchs is None:
        raise NotImplementedError(f"varlen_attn: torch {torch.__version__} has none, and no kernel takes this call")
    result: Tensor | tuple[Tensor, Tensor] = _torchs(*args, **named)
    return result


#: Whether rows see keys up to themselves alone, aligned to the end, and how many of these; 0 for all.
_Mask = tuple[bool, int]


def _mask(window_size: Any) -> _Mask | None:
    """What torch's window means; None for what kernels do not have."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        return None
    left, right = window_size
    if right == -1:
        return (False, 0) if left == -1 else None
    if right != 0 or left < -1:
        return None
    return True, left + 1


def _ours(tensors: Sequence[Any], max_q: Any, max_k: Any, scale: Any) -> TypeGuard[tuple[Tensor, ...]]:
    """Whether these are what the operator's call takes: five tensors and plain numbers."""
    return (
        all(isinstance(tensor, Tensor) for tensor in tensors)
        and isinstance(max_q, int)
        and isinstance(max_k, int)
        and (scale is None or (type(scale) in _NUMBERS and -math.inf < scale < math.inf))
    )


def _fit(tensors: Sequence[Tensor], gqa: bool) -> bool:
    """Whether sizes and dtypes are such as kernels have; how many of a size are too many, the Problem judges."""
    q, k, v, ends_q, ends_k = tensors
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES and ends_q.dtype == ends_k.dtype == torch.int32):
        return False
    if (q.dim(), k.dim(), ends_q.dim()) != (3, 3, 1) or k.shape != v.shape or ends_q.shape != ends_k.shape:
        return False
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if head_dim != k.shape[2] or head_dim % 8 or head_dim > _LARGEST_HEAD or ends_q.shape[0] < 2:
        return False
    return bool(heads % kv_heads == 0 if gqa else heads == kv_heads)


# Outside of graphs.


def _outside(
    tensors: tuple[Tensor, ...],
    longest: tuple[int, int],
    mask: _Mask,
    scale: float | None,
    *,
    gqa: bool,
    wants_lse: bool,
) -> tuple[Tensor, Tensor] | None:
    """The output and the log-sum-exp, which is empty unless it is wanted; None where torch is to compute."""
    options = (longest, mask, scale, gqa, wants_lse)
    taken = _TAKEN.get(options, tensors)
    if taken is not None:
        return taken.launch(*tensors)
    if not _plain(tensors) or not _fit(tensors, gqa):
        return None
    found = find(tensors, longest, mask)
    if found is None:
        return None
    q, k, v = tensors[:3]
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    flash = grad and backward.flash_takes(found.problem, q, k, v, scale)
    call = Call(found, scale, lse=wants_lse or flash, flash=flash)
    if found.kernel(q, lse=call.lse).origin == "torch" and q.device.type == checks.DEVICE and not _only_here(q):
        return None
    with as_given(q):
        if grad:
            out, lse = _Attention.apply(*tensors, call, wants_lse)  # type: ignore[no-untyped-call]
            return out, lse
        result = call.launch(*tensors)
    _TAKEN.keep(options, tensors, call)
    return result


def _plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether kernels see all that there is to these tensors, or, on a CPU, torch's own operations do."""
    if transformed() or not (_ordinary(tensors) if _only_here(tensors[0]) else checks.seen(*tensors)):
        return False
    return all(tensor.dim() > 0 and tensor.stride(-1) == 1 for tensor in tensors[:3])


def _ordinary(tensors: tuple[Tensor, ...]) -> bool:
    """As `eligible.seen`, on a CPU."""
    return checks.plain(tensors) and all(
        tensor.device == tensors[0].device and not tensor.is_nested and tensor.layout is torch.strided
        for tensor in tensors
    )


def _only_here(q: Tensor) -> bool:
    """Whether torch's own function does not run on the device."""
    return q.device.type == "cpu"


class Found:
    """A problem that there may be kernels for, and those that were asked for."""

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


#: By shapes, lengths, dtypes, devices and options: the problem and its kernels, or None where torch is to compute.
_FOUND: Lookups[Found | None] = Lookups()


def find(tensors: Sequence[Tensor], longest: tuple[int, int], mask: _Mask) -> Found | None:
    """The problem of a call of tensors that `_fit`, validated the first time only; None if there is none."""
    q, k, _, ends_q, _ = tensors
    key = (q.shape, k.shape, ends_q.shape, q.dtype, q.device, longest, mask, pinned("attention_varlen"))
    return _FOUND.get(key, lambda: _look_up(q, k, ends_q, longest, mask))


def _look_up(q: Tensor, k: Tensor, ends_q: Tensor, longest: tuple[int, int], mask: _Mask) -> Found | None:
    causal, window = mask
    fields = dict(zip(("total_q", "H", "D", "total_kv", "kv_heads"), (*q.shape, *k.shape[:2]), strict=True))
    sequences = len(ends_q) - 1
    # Sequences may be said to be longer than they are, and are where there is much past the last end.
    most = (max(given, -(-len(x) // sequences)) for given, x in zip(longest, (q, k), strict=True))
    fields |= {"B": sequences, **dict(zip(("max_q", "max_kv"), most, strict=True))}
    options = {"dtype": q.dtype, "causal": "bottom-right" if causal else "none", "window": window}
    try:
        problem = ops.get("attention_varlen").problem(fields, **options)
    except InvalidProblemError:  # larger than any kernel is for
        return None
    assert isinstance(problem, AttentionVarlenProblem)
    return Found(problem)


@dataclass(frozen=True)
class Call:
    """How a call is computed.

    Attributes:
        found: the problem and its kernels.
        scale: of the scores.
        lse: whether the kernel gives the log-sum-exp.
        flash: whether torch's flash-attention backward will be given the output and the log-sum-exp.
    """

    found: Found
    scale: float | None
    lse: bool
    flash: bool

    def launch(self, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> tuple[Tensor, Tensor]:
        """What the kernel gives; see `varlen_attn`. The log-sum-exp is empty unless it does."""
        named: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        lse = q.new_empty((q.shape[1], q.shape[0]) if self.lse else (0,), dtype=torch.float32)
        if self.lse:
            named["lse"] = lse
        if not q.is_contiguous():
            named["out"] = torch.empty_like(q)
        out = self.found.kernel(q, lse=self.lse)(q, k, v, ends_q, ends_k, **named)
        if self.lse:  # of rows that see nothing, as torch has it, and its backward needs it: exp(-inf - lse) is to be 0
            lse.masked_fill_(lse.isneginf(), float("inf"))
        return out, lse

    def gradients(
        self,
        tensors: Sequence[Tensor],
        of_forward: Sequence[Tensor],
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, k and v, from those of the output and the log-sum-exp, one of which there is."""
        (q, k, v), ends = tensors[:3], tensors[3:]
        if grad_out is not None and grad_lse is None and self.flash and not torch.is_grad_enabled():
            out, lse = of_forward
            return backward.by_flash(self.found.problem, (q, k, v, out), lse, ends, grad_out, self.scale)
        return backward.by_formula(self.found.problem, (q, k, v), ends, grad_out, grad_lse, self.scale)


#: What takes calls without gradients.
_TAKEN: Taken[Call] = Taken("attention_varlen")


class _Attention(torch.autograd.Function):
    """What autograd knows of a call: its five tensors, the `Call`, and whether the log-sum-exp is the caller's."""

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


# In graphs.


def _in_graphs(tensors: tuple[Tensor, ...], gqa: bool) -> bool:
    """Whether an operator stands for a call in a graph, as far as a compiler can tell."""
    device = tensors[0].device.type
    if any(tensor.device.type != device for tensor in tensors) or transformed_in_graph():
        return False
    here = device == "cpu" or (device == checks.DEVICE and library.kernels_here())
    return here and _fit(tensors, gqa)


def _in_graph(
    tensors: tuple[Tensor, ...], longest: tuple[int, int], mask: _Mask, scale: float | None, *, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    """The operator of `tlxgen.functional.library_varlen`, with what its gradients will need."""
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors[:3])
    lse_for = library.CALLER if wants_lse else library.GRADIENTS if grad else library.NOBODY
    result: tuple[Tensor, Tensor] = library_varlen.attention_varlen(*tensors, *longest, *mask, scale, lse_for)
    return result
