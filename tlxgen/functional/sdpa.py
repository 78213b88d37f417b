"""`scaled_dot_product_attention` and `attention`: a kernel where one takes the call, else torch; with gradients.

    >>> from tlxgen import functional as F
    >>> out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # doctest: +SKIP

Kernels come from `tlxgen.get_kernel`. In a graph of `torch.compile` operators of `tlxgen.functional.library` stand for the calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tlxgen import ops
from tlxgen.errors import InvalidProblemError, LaunchError
from tlxgen.functional import attention_backward as backward
from tlxgen.functional import library
from tlxgen.functional.dispatch import Lookups, Taken
from tlxgen.ops import torch_functions
from tlxgen.ops.attention import flash
from tlxgen.ops.attention.problem import AttentionProblem, Causal
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given, transformed, transformed_in_graph
from tlxgen.runtime.kernel import Choice, Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

__all__ = ["attention", "scaled_dot_product_attention"]

_DTYPES = frozenset({torch.bfloat16, torch.float16})
_LARGEST_HEAD = 256
_NUMBERS = frozenset({int, float})
_TRANSFORMED = "attention: kernels know neither functorch's transforms nor forward-mode differentiation"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: its arguments, its result, its errors, its gradients.

    A call goes to torch unchanged unless a kernel takes it: tensors on one CUDA device, in bf16 or fp16, with head
    dimension contiguous, a multiple of 8 and at most 256; no mask, no dropout; plain tensors, not under functorch's
    transforms. It also goes to torch where `tlxgen.get_kernel` has nothing better (`Kernel.origin` is `torch`).

    Args:
        query: (..., H, L, E), with any number of leading dimensions, or none.
        key: (..., H, S, E); with `enable_gqa` a number of heads that divides H.
        value: as `key`.
        attn_mask: as in torch.
        dropout_p: as in torch.
        is_causal: row i sees keys up to i: aligned top-left.
        scale: of the scores; 1 / sqrt(E) by default.
        enable_gqa: whether heads of `query` may share those of `key` and `value`.

    Returns:
        (..., H, L, E), in memory in the order of the query's dimensions.

    Gradients are those of torch's flash-attention backward, on the kernel's output and log-sum-exp. Calls that need
    gradients which it does not have (causal, and not as many keys as queries) go to torch, but for a `scale` that is
    not positive: those gradients, and all second derivatives of what a kernel computed, are by formulas in float32.
    """
    if torch.compiler.is_compiling():
        causal: Causal = "top-left" if is_causal else "none"
        if (
            attn_mask is None
            and dropout_p == 0.0
            and _in_graph(query, key, value, gqa=enable_gqa)
            and (_lse_for(query, key, value, causal, 0.0, scale) != library.NOBODY or not _recorded(query, key, value))
        ):
            return _attention_in_graph(query, key, value, causal, 0, 0.0, scale)[0]
        return torch_functions.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if (
        attn_mask is None
        and dropout_p == 0.0
        and (is_causal is True or is_causal is False)
        and (enable_gqa is True or enable_gqa is False)
        and (scale is None or (type(scale) in _NUMBERS and -math.inf < scale < math.inf))
    ):
        options, tensors = ("torch", is_causal, enable_gqa, scale), (query, key, value)
        taken = _TAKEN.get(options, tensors)
        if taken is not None:
            return taken.again(query, key, value)[0]
        if _plain(query, key, value):
            found = _find(query, key, value, "top-left" if is_causal else "none", 0, 0.0, gqa=enable_gqa)
            if isinstance(found, _Found):
                q, k, v = map(_four, tensors)
                call = _Call(found, q, k, v, scale)
                if not call.torch:
                    out = _like(query, call(q, k, v)[0])
                    if not call.grad:
                        _TAKEN.keep(options, tensors, call)
                    return out
    return torch_functions.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    window: int = ...,
    softcap: float = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    window: int = ...,
    softcap: float = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = "none",
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + mask) v, with all that `tlxgen.ops.attention.problem.AttentionProblem` knows.

    Args:
        q: (..., H, S, D), bf16 or fp16, with any number of leading dimensions, or none; D a multiple of 8 up to 256.
        k: (..., KV heads, KV length, D); KV heads divides H.
        v: as k.
        causal: where the diagonal ends: `bottom-right`, as FlashAttention has it, `top-left`, as torch has it.
        window: keys that a row sees, itself included; with `causal` only, 0 for all.
        softcap: scores become softcap · tanh(score / softcap); 0 for none.
        scale: of the scores, any finite number; 1 / sqrt(D) by default.
        return_lse: also return each row's log-sum-exp.

    Returns:
        out as q, and with `return_lse` also (..., H, S) natural logarithms in float32. A row that sees no key has 0 and
        minus infinity.

    Raises:
        InvalidProblemError: no kernel is for such tensors or options.
        LaunchError: `scale` is no finite number, or functorch or forward-mode differentiation is under way.

    Torch computes for tensors that are not on a CUDA device. Gradients are those of torch's flash-attention backward
    where it takes the problem: on CUDA, `scale` positive, no softcap, nothing causal that is aligned top-left unless it
    is square. Otherwise torch's attention is differentiated if it has the problem, once more computed if need be; the
    rest, second derivatives, and gradients of the log-sum-exp are by formulas in float32 from q, k and v. Rows that see
    no key give and get none.
    """
    if not (scale is None or (type(scale) in _NUMBERS and -math.inf < scale < math.inf)):
        raise LaunchError(f"attention: scale is {scale!r}; it must be a finite number")
    if torch.compiler.is_compiling():
        if transformed_in_graph():
            raise LaunchError(_TRANSFORMED)
        out, lse = _attention_in_graph(q, k, v, causal, window, softcap, scale, return_lse=return_lse)
        return (out, lse) if return_lse else out
    options, tensors = ("ours", causal, window, type(window), softcap, type(softcap), scale, return_lse), (q, k, v)
    taken = _TAKEN.get(options, tensors)
    if taken is not None:
        again = taken.again(q, k, v)
        return again if return_lse else again[0]  # type: ignore[return-value] # the log-sum-exp is there if it was asked for
    found = _find(q, k, v, causal, window, softcap, gqa=True)
    if isinstance(found, str):
        raise InvalidProblemError(found)
    if transformed():
        raise LaunchError(_TRANSFORMED)
    like = q
    q, k, v = map(_four, (q, k, v))
    call = _Call(found, q, k, v, scale, return_lse=return_lse)
    out, lse = call(q, k, v)
    if not (call.grad or call.torch):
        _TAKEN.keep(options, tensors, call)
    return (_like(like, out), _like(like, lse)) if return_lse else _like(like, out)


def _plain(*tensors: Tensor) -> bool:
    """Whether kernels see all that there is to these tensors."""
    if not checks.seen(*tensors) or checks.converted(tensors[0]):
        return False
    return all(tensor.dim() >= 3 and tensor.stride(-1) == 1 for tensor in tensors) and not transformed()


def _in_graph(q: Tensor, k: Tensor, v: Tensor, *, gqa: bool) -> bool:
    """Whether an operator of `tlxgen.functional.library` may stand for torch's, as far as a compiler can tell."""
    if not (q.device.type == k.device.type == v.device.type == checks.DEVICE and q.dtype == k.dtype == v.dtype):
        return False
    if not library.kernels_here():
        return False
    if (
        q.dtype not in _DTYPES
        or q.dim() < 3
        or k.dim() != q.dim()
        or k.shape != v.shape
        or q.shape[:-3] != k.shape[:-3]
    ):
        return False
    heads, kv_heads, head_dim = q.shape[-3], k.shape[-3], q.shape[-1]
    if head_dim != k.shape[-1] or head_dim % 8 or head_dim > _LARGEST_HEAD:
        return False
    if heads % kv_heads if gqa else heads != kv_heads:
        return False
    return not checks.converted(q)


def _attention_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    window: int,
    softcap: float,
    scale: float | None,
    *,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator of `tlxgen.functional.library`, with what its gradients will need."""
    lse_for = library.CALLER if return_lse else _lse_for(q, k, v, causal, softcap, scale)
    out, lse = torch.ops.tlxgen.attention(_four(q), _four(k), _four(v), causal, window, softcap, scale, lse_for)
    return _like(q, out), _like(q, lse) if return_lse else lse


def _lse_for(q: Tensor, k: Tensor, v: Tensor, causal: Causal, softcap: float, scale: float | None) -> int:
    """Whether gradients are recorded that torch's flash-attention backward may have."""
    aligned = causal != "top-left" or q.shape[-2] == k.shape[-2]
    flash = aligned and not softcap and (scale is None or scale > 0)
    return library.GRADIENTS if flash and _recorded(q, k, v) else library.NOBODY


def _recorded(*tensors: Tensor) -> bool:
    """Whether gradients of any are."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Found:
    """A problem that there may be kernels for, and those that were asked for."""

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


#: By shapes, dtypes, devices and options: the problem and its kernels on that device, or why there are none.
_FOUND: Lookups[_Found | str] = Lookups()
_TAKEN: Taken[_Call] = Taken("attention")


def _find(q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: int, softcap: float, *, gqa: bool) -> _Found | str:
    """The problem of a call, validated the first time only; a reason if no kernel is for it."""
    same = (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    pin = pinned("attention")
    key = (q.shape, k.shape, v.shape, *same, causal, window, type(window), softcap, type(softcap), gqa, pin)
    return _FOUND.get(key, lambda: _look_up(q, k, v, causal, window, softcap, gqa=gqa))


def _look_up(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, window: int, softcap: float, *, gqa: bool
) -> _Found | str:
    reason = _why_no_problem(q, k, v, gqa=gqa)
    if reason is not None:
        return reason
    *batch, heads, rows, head_dim = q.shape
    kv_heads, kv_len = k.shape[-3:-1]
    if causal == "top-left" and rows == kv_len:
        causal = "bottom-right"  # the same; rows of the database are of that name
    shape = (math.prod(batch), heads, rows, head_dim)
    options = {"kv_heads": kv_heads, "kv_len": kv_len, "dtype": q.dtype, "causal": causal}
    try:
        problem = ops.get("attention").problem(shape, **options, window=window, softcap=softcap)
    except InvalidProblemError as error:
        return str(error)
    assert isinstance(problem, AttentionProblem)
    return _Found(problem)


def _why_no_problem(q: Tensor, k: Tensor, v: Tensor, *, gqa: bool) -> str | None:
    """Why these tensors cannot be attention's, or None; sizes and dtypes are the Problem's to judge."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() < 3 or k.shape != v.shape or q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        return f"attention: {shapes}: it takes q (..., H, S, D), k and v (..., KV heads, KV length, D)"
    if not gqa and q.shape[-3] != k.shape[-3]:
        return f"attention: {shapes}: heads differ"
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        found = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        return f"attention: q, k and v are {found}; they must have one dtype and one device"
    return None


def _four(tensor: Tensor) -> Tensor:
    """(..., H, S, D) as (B, H, S, D)."""
    if tensor.dim() == 4:
        return tensor
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor.unsqueeze(0)


def _like(q: Tensor, result: Tensor) -> Tensor:
    """(B, H, ...) with the leading dimensions of q (..., H, S, D)."""
    return result if q.dim() == 4 else result.reshape(*q.shape[:-3], *result.shape[1:])


class _Call:
    """How one call on tensors (B, H, S, D) is computed.

    Attributes:
        grad: whether gradients are recorded.
        flash: whether torch's flash-attention backward will be given the output and the log-sum-exp.
        lse: whether the kernel gives the log-sum-exp.
        kernel: what computes the output, unless torch does.
        torch: whether torch's own attention does, and its gradients: it is no worse, or would have to run as well.
    """

    def __init__(
        self, found: _Found, q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, return_lse: bool = False
    ) -> None:
        self.problem = found.problem
        self.scale = scale
        self.grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        self.flash = self.grad and flash.takes(self.problem, q, k, v, scale)
        self.lse = return_lse or self.flash
        self.kernel = found.kernel(q, lse=self.lse)
        if self.kernel.origin == "torch" and self.flash and not return_lse:
            # Torch has a log-sum-exp only from all scores: no cheaper than computing them again for the gradients.
            self.flash, self.lse, self.kernel = False, False, found.kernel(q, lse=False)
        again = self.grad and not self.flash and backward.sdpa_differentiates(self.problem, scale)
        hidden = self.problem.causal != "none"  # which takes a positive scale in torch's fused kernels
        exists = backward.sdpa_differentiates(self.problem, scale) if hidden else backward.is_sdpa(self.problem)
        no_better = self.kernel.origin == "torch" and exists
        self.torch = not return_lse and (again or no_better)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp, which is empty unless the kernel gives it."""
        with as_given(q):
            if self.torch:
                return backward.sdpa(self.problem, q, k, v, self.scale), _nothing(q)
            if not self.grad:
                out, lse = self.launch(q, k, v)
                return out, _nothing(q) if lse is None else lse
            out, lse = _Attention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
            return out, lse

    def launch(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the kernel gives."""
        named: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        lse = None
        if self.lse:
            lse = named["lse"] = q.new_empty(q.shape[:3], dtype=torch.float32)
        # Heads that lie between rows do so in the output too: the caller's transpose back is then a view.
        if not q.is_contiguous():
            named["out"] = torch.empty_like(q)
        return self.kernel(q, k, v, **named), lse

    def again(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of a call like this one without gradients, on tensors with any leading dimensions."""
        if q.dim() == 4:
            return self.launch(q, k, v)
        out, lse = self.launch(_four(q), _four(k), _four(v))
        return _like(q, out), None if lse is None else _like(q, lse)


def _nothing(q: Tensor) -> Tensor:
    """A log-sum-exp that nobody asked for."""
    return q.new_empty(0, dtype=torch.float32)


class _Attention(torch.autograd.Function):
    """What autograd knows of a call: q, k and v (B, H, S, D), and the `_Call`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
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
    call: _Call,
    tensors: Sequence[Tensor],
    of_forward: Sequence[Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needed: Sequence[bool],
) -> backward.Gradients:
    """Of q, k and v (`tensors`), from those of the output and the log-sum-exp, by the cheapest way that has them."""
    problem, scale = call.problem, call.scale
    if grad_out is None and grad_lse is None:
        return None, None, None
    if grad_out is None or grad_lse is not None or torch.is_grad_enabled():  # what is enabled is a second derivative
        return backward.by_formula(problem, tensors, grad_out, grad_lse, scale)
    if call.flash:
        out, lse = of_forward
        return backward.by_flash(problem, (*tensors, out), lse, grad_out, scale)
    if backward.sdpa_differentiates(problem, scale):
        return backward.by_recomputing(problem, tensors, grad_out, scale, needed)
    return backward.by_formula(problem, tensors, grad_out, None, scale)
