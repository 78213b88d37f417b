"""`grouped_mm`: a kernel where one takes the call, else torch; with gradients.

    >>> from tlxgen import functional as F
    >>> out = F.grouped_mm(tokens, weights, offs=offs)  # doctest: +SKIP

Gradients are grouped products of the operator's other forms, computed in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from tlxgen import ops
from tlxgen.devices import Hopper
from tlxgen.errors import InvalidProblemError
from tlxgen.functional import dispatch
from tlxgen.functional.dispatch import CallCache, LookupCache, better_than_torch
from tlxgen.ops import torch_functions
from tlxgen.ops.grouped_gemm.problem import GATED
from tlxgen.runtime import checks
from tlxgen.runtime.checks import as_given, transformed
from tlxgen.runtime.kernel import Kernel, kernel_for
from tlxgen.runtime.pinning import pinned

__all__ = ["grouped_mm"]

_DTYPES = frozenset({torch.bfloat16, torch.float16})
_EPILOGUES = {activation: epilogue for epilogue, activation in GATED.items()}


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.grouped_mm`: its arguments, its result, its errors, its gradients.

    Args:
        mat_a: (tokens, K), or (E, M, K) for a matrix of each group, or (M, tokens) where groups are summed over.
        mat_b: (E, K, N), or (K, tokens), or (tokens, N), likewise.
        offs: (E,), int32: where each group's tokens end, not decreasing. None if both operands have three dimensions.
        bias: as in torch, which takes none so far.
        out_dtype: as in torch, which takes that of the operands so far.

    Returns:
        (tokens, N), or (M, tokens), or (E, M, N) where tokens are summed over or both operands have three dimensions;
        rows are padded to 16 bytes in memory, as torch's. What lies past the last end is not written, as in torch; so
        it is in the gradients. A group without tokens gives zeros where tokens are summed over.

    A call goes to torch unchanged unless a kernel takes it: plain tensors of one dtype, bf16 or fp16, on one CUDA
    device, strides as torch asks for them, no size of zero, not under functorch's transforms. It also goes to torch
    where `tlxgen.get_kernel` has nothing better (`Kernel.origin` is `torch`, or `Kernel.slower`). Nothing waits for the
    device.
    """
    ours = bias is None and (out_dtype is None or out_dtype == mat_a.dtype)
    if torch.compiler.is_compiling():
        if ours and _in_graphs(mat_a, mat_b, offs):
            result: Tensor = grouped_mm_in_graph(mat_a, mat_b, offs, "")
            return result
        return _torch(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    kernel = None
    if ours:
        cached = _cached("none", mat_a, mat_b, offs)
        if cached is not None:
            return cached(mat_a, mat_b, offs)
        if _plain(mat_a, mat_b, offs):
            kernel = _find(mat_a, mat_b, offs)
    if kernel is None:
        return _torch(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    if torch.is_grad_enabled() and (mat_a.requires_grad or mat_b.requires_grad):
        recorded: Tensor = _GroupedProduct.apply(mat_a, mat_b, offs, kernel)  # type: ignore[no-untyped-call]
        return recorded
    return _launch_and_cache(kernel, "none", mat_a, mat_b, offs)


def gated_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor,
    activation: Literal["silu", "gelu"],
) -> Tensor:
    """act(gate) · up of `grouped_mm(mat_a, mat_b, offs=offs)`, the gate in the first N / 2 columns of that.

    Args:
        mat_a: (tokens, K).
        mat_b: (E, K, N).
        offs: (E,), int32: where each group's tokens end.
        activation: silu, or gelu by the error function.

    Returns:
        (tokens, N / 2). One kernel makes it, and rounds once, where one takes the call and no gradient is wanted. Else
        it is `grouped_mm`'s result and torch's activation of that.
    """
    differentiable = torch.is_grad_enabled() and (mat_a.requires_grad or mat_b.requires_grad)
    if torch.compiler.is_compiling():
        if not differentiable and _in_graphs(mat_a, mat_b, offs):
            gated: Tensor = grouped_mm_in_graph(mat_a, mat_b, offs, activation)
            return gated
        return _activated(mat_a, mat_b, offs, activation)
    epilogue = _EPILOGUES[activation]
    cached = _cached(epilogue, mat_a, mat_b, offs)
    if cached is not None:
        return cached(mat_a, mat_b, offs)
    if not differentiable and _plain(mat_a, mat_b, offs):
        kernel = _find(mat_a, mat_b, offs, epilogue)
        if kernel is not None:
            return _launch_and_cache(kernel, epilogue, mat_a, mat_b, offs)
    return _activated(mat_a, mat_b, offs, activation)


def _activated(mat_a: Tensor, mat_b: Tensor, offs: Tensor, activation: str) -> Tensor:
    gate, up = grouped_mm(mat_a, mat_b, offs=offs).chunk(2, dim=1)
    result: Tensor = getattr(F, activation)(gate) * up
    return result


def _torch(mat_a: Tensor, mat_b: Tensor, **named: Any) -> Tensor:
    result: Tensor = torch_functions.grouped_mm(mat_a, mat_b, **named)
    return result


def _in_graphs(a: Tensor, b: Tensor, offs: Tensor | None) -> bool:
    """Whether the operator may replace torch's in a graph, by what is known while tracing."""
    return (
        dispatch.kernels_here()
        and _seen(a, b, offs)
        and _layout(a) is not None
        and _layout(b) is not None
        and _fields(a, b, offs) is not None
        and 0 not in (*a.shape, *b.shape)
    )


def _plain(a: Tensor, b: Tensor, offs: Tensor | None) -> bool:
    """Whether a kernel can read these tensors, outside of functorch transforms."""
    return _seen(a, b, offs) and not transformed()


def _seen(a: Tensor, b: Tensor, offs: Tensor | None) -> bool:
    """Whether a kernel can read these tensors: plain, on one GPU, of a supported dtype."""
    if not checks.seen(*_given(a, b, offs)) or checks.converted(a):
        return False
    return a.dtype in _DTYPES and b.dtype == a.dtype


#: (shapes, strides, dtypes, devices) → the kernel, or None if torch computes.
_KERNELS: LookupCache[Kernel | None] = LookupCache()


def _find(a: Tensor, b: Tensor, offs: Tensor | None, epilogue: str = "none") -> Kernel | None:
    """The kernel of a call, cached; None if torch computes."""
    ends = None if offs is None else (offs.shape, offs.stride(), offs.dtype)
    key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, a.device, ends, epilogue, pinned("grouped_gemm"))
    return _KERNELS.get(key, lambda: _look_up(a, b, offs, epilogue))


def _look_up(a: Tensor, b: Tensor, offs: Tensor | None, epilogue: str) -> Kernel | None:
    layouts = [_layout(a), _layout(b)]
    fields = _fields(a, b, offs)
    if fields is None or None in layouts:
        return None
    try:
        options = {"layout": "".join(map(str, layouts)), "dtype": a.dtype, "epilogue": epilogue}
        problem = ops.get("grouped_gemm").problem(fields, **options)
    except InvalidProblemError:
        return None
    if problem.empty:
        return None
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        return better_than_torch(kernel_for(problem))


def _fields(a: Tensor, b: Tensor, offs: Tensor | None) -> dict[str, Any] | None:
    """Form and sizes of the problem; None for operands that torch refuses."""
    form = f"{a.dim()}d{b.dim()}d"
    if form == "3d3d":
        if offs is not None or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
            return None
        experts, rows, k = a.shape
        return {"form": form, "E": experts, "ROWS": experts * rows, "N": b.shape[2], "K": k}
    if offs is None or offs.dim() != 1 or offs.dtype != torch.int32 or not offs.is_contiguous():
        return None
    experts, fits = offs.shape[0], False
    sizes: tuple[int, ...] = ()
    if form == "2d3d":
        fits, sizes = b.shape[:2] == (experts, a.shape[1]), (a.shape[0], b.shape[2], a.shape[1])
    elif form == "3d2d":
        fits, sizes = (a.shape[0], a.shape[2]) == (experts, b.shape[0]), (b.shape[1], a.shape[1], a.shape[2])
    elif form == "2d2d":
        fits, sizes = a.shape[1] == b.shape[0], (a.shape[1], b.shape[1], a.shape[0])
    return {"form": form, "E": experts, **dict(zip(("ROWS", "N", "K"), sizes, strict=True))} if fits else None


def _layout(matrix: Tensor) -> str | None:
    """The letter of the problem's layout; None for strides that torch refuses."""
    rows, columns = matrix.shape[-2:]
    row, column = matrix.stride()[-2:]
    aligned = Hopper.TMA_ALIGNMENT // matrix.element_size()
    if column == 1 and row >= max(1, columns) and row % aligned == 0:
        return "n"
    return "t" if row == 1 and column >= max(1, rows) and column % aligned == 0 else None


@dataclass(frozen=True)
class _Launch:
    """A kernel, and shape and strides of its result: torch's, and no view, so that it can be changed in place."""

    kernel: Kernel
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: rows padded

    def __call__(self, a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
        named = {} if offs is None else {"offs": offs}
        if self.strides[-2] == self.shape[-1]:
            return self.kernel(a, b, **named)
        return self.kernel(a, b, out=a.new_empty_strided(self.shape, self.strides), **named)


def _launch(kernel: Kernel, a: Tensor) -> _Launch:
    shape, _ = ops.get("grouped_gemm").output_like(kernel.problem)
    elements = Hopper.TMA_ALIGNMENT // a.element_size()
    pitch = -(-shape[-1] // elements) * elements
    return _Launch(kernel, shape, (*(pitch * math.prod(shape[i:-1]) for i in range(1, len(shape))), 1))


#: Calls without gradients → their launch.
_CALLS: CallCache[_Launch] = CallCache("grouped_gemm")


def _cached(epilogue: str, a: Any, b: Any, offs: Any) -> _Launch | None:
    """The cached launch of such a call, or None."""
    return _CALLS.get(epilogue, _given(a, b, offs))


def _launch_and_cache(kernel: Kernel, epilogue: str, a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    """Launches the kernel and caches the launch for such calls."""
    launch = _launch(kernel, a)
    result = launch(a, b, offs)
    _CALLS.keep(epilogue, _given(a, b, offs), launch)
    return result


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


class _GroupedProduct(torch.autograd.Function):
    """A grouped product recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Tensor | None, kernel: Kernel) -> Tensor:
        ctx.save_for_backward(a, b, offs)
        return _launch(kernel, a)(a, b, offs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """For C = A B: dA = dC Bᵀ, dB = Aᵀ dC."""
        a, b, offs = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad[:2]
        grad = grad if _layout(grad) else _aligned(grad)
        with as_given(grad):
            return (
                grouped_mm(grad, b.mT, offs=offs) if needs_a else None,
                grouped_mm(a.mT, grad, offs=offs) if needs_b else None,
                None,
                None,
            )


def _aligned(grad: Tensor) -> Tensor:
    """A copy with rows padded to 16 bytes, as torch requires; gradients may be expanded or have rows of any length."""
    columns, elements = grad.shape[-1], Hopper.TMA_ALIGNMENT // grad.element_size()
    return grad.new_empty((*grad.shape[:-1], -(-columns // elements) * elements))[..., :columns].copy_(grad)


@torch.library.custom_op("tlxgen::grouped_mm", mutates_args=())
def grouped_mm_in_graph(a: Tensor, b: Tensor, offs: Tensor | None, activation: str) -> Tensor:
    """See `tlxgen.functional.grouped_mm`, or `tlxgen.functional.grouped.gated_mm` with an activation; contiguous.

    Args:
        a: as in `grouped_mm`.
        b: as in `grouped_mm`.
        offs: as in `grouped_mm`.
        activation: of the gate, without gradients; empty for the product alone.
    """
    with torch.no_grad(), as_given(a):  # a graph may run under another autocast than it was traced
        if not activation:
            return grouped_mm(a, b, offs=offs).contiguous()
        assert offs is not None
        return gated_mm(a, b, offs=offs, activation=activation).contiguous()  # type: ignore[arg-type]


@grouped_mm_in_graph.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor | None, activation: str) -> Tensor:
    columns = b.shape[-1] // 2 if activation else b.shape[-1]
    if a.dim() == 3:
        return a.new_empty((a.shape[1], columns) if b.dim() == 2 else (*a.shape[:2], columns))
    if b.dim() == 3:
        return a.new_empty(a.shape[0], columns)
    assert offs is not None
    return a.new_empty(offs.shape[0], a.shape[0], columns)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's
    a, b, offs, activation = inputs
    assert not activation, "the product has gradients, and torch's activation of it"
    ctx.save_for_backward(a, b, offs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    a, b, offs = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad[:2]
    grad = _with_aligned_rows(grad)
    return (
        torch.ops.tlxgen.grouped_mm(grad, b.mT, offs, "") if of_a else None,
        torch.ops.tlxgen.grouped_mm(a.mT, grad, offs, "") if of_b else None,
        None,
        None,
    )


def _with_aligned_rows(grad: Tensor) -> Tensor:
    """The gradient with rows aligned to 16 bytes, which kernels and torch require."""
    elements = Hopper.TMA_ALIGNMENT // grad.element_size()
    columns = grad.shape[-1]
    padding = -columns % elements
    if padding:
        return F.pad(grad, (0, padding))[..., :columns]
    row, column = grad.stride()[-2:]
    # `contiguous` does not copy a single row, whatever its stride.
    whole = column == 1 and row >= columns and row % elements == 0
    return grad if whole else grad.clone(memory_format=torch.contiguous_format)


grouped_mm_in_graph.register_autograd(_differentiate, setup_context=_save_operands)
