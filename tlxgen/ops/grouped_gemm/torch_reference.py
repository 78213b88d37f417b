"""Grouped GEMM as torch computes it: the reference in float64, and the peer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from tlxgen.ops.grouped_gemm.problem import GATED
from tlxgen.problem import torch_dtype

if TYPE_CHECKING:
    import torch

    from tlxgen.ops.base import Tensors
    from tlxgen.ops.grouped_gemm.problem import Form, GroupedGemmProblem

_ALIGNMENT = 16  # bytes: what torch's kernels ask of strides


def reference(problem: GroupedGemmProblem, inputs: Tensors) -> torch.Tensor:
    """The result in float64, expert by expert; NaN where nothing is written."""
    import torch

    result = torch.full(problem.shapes["c"], float("nan"), dtype=torch.float64, device=inputs["a"].device)
    inputs = _gathered(problem, inputs)
    if problem.scaled:
        inputs = {**inputs, "a": inputs["a"].double() * inputs["scale_a"].double()[:, None]}
    for expert, a, b, c in _experts(problem.gathered, inputs, result):
        product = a.double() @ b.double()
        if problem.scaled:
            product = product * inputs["scale_b"][expert].double()
        if "bias" in problem.epilogue_parts:
            product = product + inputs["bias"][expert].double()
        c.copy_(_activated(problem, product))
    return result


def eager(problem: GroupedGemmProblem, inputs: Tensors) -> torch.Tensor:
    """The result of torch's own kernels, rounded to the dtype before the epilogue, without a question to the host.

    A gated activation is computed in the dtype, as layers in torch do: its two operations stream through memory.
    The product is `torch._grouped_mm`, or on a GPU `torch._scaled_grouped_mm` where operands have scales, of operands
    that are copied where it does not take them as they lie; or the product of all rows in form masked. Where torch has
    no grouped product, it is one product after another, which waits for the device.
    """
    inputs = _gathered(problem, inputs)
    # Torch reads these as if they were contiguous, without a look.
    inputs |= {name: inputs[name].contiguous() for name in ("offs", "scale_a", "scale_b") if name in inputs}
    product = _product(problem, inputs)
    if (problem.epilogue_parts and not problem.gated) or problem.out_dtype != problem.dtype:
        product = product.float()
    if "bias" in problem.epilogue_parts:
        product = product + _bias_of_rows(problem, inputs).to(product.dtype)
    return _activated(problem, product).to(torch_dtype(problem.out_dtype))


def _gathered(problem: GroupedGemmProblem, inputs: Tensors) -> Tensors:
    """The inputs with rows of A in the order of C's."""
    return {**inputs, "a": inputs["a"][inputs["rows"]]} if problem.form == "gather" else dict(inputs)


def _product(problem: GroupedGemmProblem, inputs: Tensors) -> torch.Tensor:
    import torch

    a, b = inputs["a"], inputs["b"]
    if problem.scaled:
        return _scaled_product(problem, inputs)
    if problem.form in ("masked", "3d3d"):
        return torch.bmm(a, b)
    if problem.empty or not hasattr(torch, "_grouped_mm"):
        result = a.new_zeros(_product_shape(problem))
        for _, one, other, c in _experts(problem.gathered, inputs, result):
            c.copy_(one @ other)
        return result
    if problem.form == "2d2d":
        product = torch._grouped_mm(_taken(a.mT).mT, _taken(b), offs=inputs["offs"])  # noqa: SLF001 - its oldest name
        return product[:, : problem.K, : problem.N]
    if problem.form == "3d2d":  # transposed, since torch wants columns of the result to end at multiples of 16 bytes
        return torch._grouped_mm(_taken(b.mT), _taken(a.mT), offs=inputs["offs"])[:, : problem.N].mT  # noqa: SLF001
    return torch._grouped_mm(_taken(a), _taken(b), offs=inputs["offs"])[:, : problem.N]  # noqa: SLF001


def _scaled_product(problem: GroupedGemmProblem, inputs: Tensors) -> torch.Tensor:
    """With tensor cores' own sums, as kernels have them; torch has a kernel of Hopper's and newer GPUs alone."""
    import torch

    a = inputs["a"]
    if problem.empty or a.device.type != "cuda" or not hasattr(torch, "_scaled_grouped_mm"):
        result = torch.zeros(_product_shape(problem), dtype=torch.bfloat16, device=a.device)
        for expert, one, other, c in _experts("2d3d", {**inputs, "a": a.float() * inputs["scale_a"][:, None]}, result):
            c.copy_((one @ other.float()) * inputs["scale_b"][expert])
        return result
    operands = scaled_operands(inputs)
    options = {"offs": inputs["offs"], "out_dtype": torch.bfloat16, "use_fast_accum": True}
    result = torch._scaled_grouped_mm(*operands, **options)  # type: ignore[arg-type]  # noqa: SLF001 - its oldest name
    return result[:, : problem.N]


def scaled_operands(inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and their scales as torch's kernel takes them: B's columns contiguous, and sizes that 16 divides."""
    import torch.nn.functional as F  # noqa: N812 - torch's own convention

    a, b, scale_a, scale_b = (inputs[name] for name in ("a", "b", "scale_a", "scale_b"))
    columns = _taken(b.mT, by_rows=True)
    return _taken(a), columns.mT, scale_a, F.pad(scale_b, (0, -b.shape[2] % _ALIGNMENT))


def _product_shape(problem: GroupedGemmProblem) -> tuple[int, ...]:
    """That of C before the epilogue."""
    *lead, columns = problem.shapes["c"]
    return (*lead, problem.N if problem.gated else columns)


def _taken(x: torch.Tensor, *, by_rows: bool = False) -> torch.Tensor:
    """Tokens or weights as torch's grouped kernels take them whatever the ends: sizes and strides are whole 16 bytes.

    Rows of tokens are contiguous; weights may lie either way, unless `by_rows`. What is not so is copied, with zeros
    behind.
    """
    elements = _ALIGNMENT // x.element_size()
    inner, outer = (-1, -2) if by_rows or x.stride(-1) == 1 or x.dim() == 2 else (-2, -1)
    sizes = x.shape[1:]  # of tokens, any number
    whole = x.stride(inner) == 1 and x.stride(outer) >= x.shape[inner] and x.stride(outer) % elements == 0
    whole = whole and (x.dim() == 2 or x.stride(0) % elements == 0)
    if whole and not any(size % elements for size in sizes) and x.data_ptr() % _ALIGNMENT == 0:
        return x
    padded = x.new_zeros((x.shape[0], *(-(-size // elements) * elements for size in sizes)))
    padded[(slice(None), *map(slice, sizes))] = x
    return padded


def _bias_of_rows(problem: GroupedGemmProblem, inputs: Tensors) -> torch.Tensor:
    """The bias of each row's expert, in a shape that broadcasts to the result."""
    import torch

    bias = inputs["bias"]
    if problem.gathered != "2d3d":
        return bias[:, None]
    rows = torch.arange(problem.ROWS, device=bias.device)
    expert = torch.searchsorted(inputs["offs"].long(), rows, right=True)
    return bias[expert.clamp(max=problem.E - 1)]


def _activated(problem: GroupedGemmProblem, x: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional as F  # noqa: N812 - torch's own convention

    for part in problem.epilogue_parts:
        if part in GATED:
            gate, up = x.chunk(2, -1)
            x = getattr(F, GATED[part])(gate) * up
        elif part != "bias":
            x = getattr(F, part)(x)
    return x


def _experts(
    form: Form, inputs: Tensors, c: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each expert's number and its parts of A, B and C; asks the device where they are."""
    a, b = inputs["a"], inputs["b"]
    if form == "3d3d":
        yield from ((expert, a[expert], b[expert], c[expert]) for expert in range(len(a)))
        return
    if form == "masked":
        for expert, count in enumerate(inputs["counts"].tolist()):
            yield expert, a[expert, :count], b[expert], c[expert, :count]
        return
    for expert, own in enumerate(pairwise([0, *inputs["offs"].tolist()])):
        tokens = slice(*own)
        if form == "2d3d":
            yield expert, a[tokens], b[expert], c[tokens]
        elif form == "3d2d":
            yield expert, a[expert], b[:, tokens], c[:, tokens]
        else:
            yield expert, a[:, tokens], b[tokens], c[expert]
