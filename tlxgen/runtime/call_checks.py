"""Checks of a kernel's call: shapes, dtypes, overlapping memory, gradients, devices. Each raises `LaunchError`.

A call that repeats an earlier one (`tlxgen.runtime.repeat`) skips them. Which tensors `tlxgen.functional` passes to a
kernel at all is decided in `tlxgen.runtime.checks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tlxgen import devices
from tlxgen.errors import LaunchError
from tlxgen.runtime.overlap import overlap, overlaps_itself, same

if TYPE_CHECKING:
    import torch

    from tlxgen.devices import Gpu
    from tlxgen.ops.base import Operator
    from tlxgen.problem import Problem

#: The operand that may be the output itself, since each element is read by the thread that writes it.
IN_PLACE = "residual"

#: Type of the devices that kernels run on.
KIND = "cuda"


def refuse_wrong_tensors(
    operator: Operator[Any], problem: Problem, inputs: dict[str, Any], out: torch.Tensor | None
) -> None:
    """Refuses inputs and outputs that are not the problem's, or that overlap."""
    wrong = operator.check_call(problem, inputs) or _wrong_output(operator, problem, inputs, out)
    if wrong:
        raise LaunchError(f"{problem.label}: {wrong}")


def refuse_for_kernels(
    operator: Operator[Any], problem: Problem, inputs: dict[str, Any], out: torch.Tensor | None
) -> None:
    """Refuses what torch would compute and a kernel cannot: traced calls, freed memory, recorded gradients."""
    from tlxgen.runtime.checks import unseen

    reason = unseen([inputs[name] for name in operator.inputs_in_order])
    if reason:
        raise LaunchError(f"{problem.label}: {reason}; use tlxgen.functional, which gives such calls to torch")
    for name, value in {**inputs, "out": out}.items():
        if hasattr(value, "data_ptr") and not value.is_meta and value.numel() and not value.data_ptr():
            raise LaunchError(f"{problem.label}: {name} has no memory: it was given back, or never there")
    if _recorded(inputs, out):
        raise LaunchError(
            f"{problem.label}: a tensor requires gradients, and a kernel records none; use tlxgen.functional, "
            "which has them, or torch.no_grad()"
        )


def refuse_other_devices(problem: Problem, gpu: Gpu, inputs: dict[str, Any], output: torch.Tensor) -> None:
    """Refuses tensors on several devices, on another GPU than the kernel was chosen for, or negated views."""
    for name, value in {**inputs, "out": output}.items():
        if hasattr(value, "is_neg") and value.is_neg():
            raise LaunchError(
                f"{problem.label}: {name} is negated when read, which a kernel misses; call resolve_neg()"
            )
        device = getattr(value, "device", output.device)
        if device.type != KIND or device != output.device:
            raise LaunchError(
                f"{problem.label}: {name} is on {device}, the output on {output.device}; the kernel runs on one GPU"
            )
    there = devices.present(output.device.index) if output.device.type == "cuda" else None
    if there is not None and there.key != gpu.key:
        raise LaunchError(
            f"{problem.label}: the kernel was chosen for {gpu.slug} ({gpu.sm_count} SMs), the tensors are on "
            f"{output.device}, {there.slug} ({there.sm_count} SMs); call get_kernel under torch.cuda.device"
        )


def _wrong_output(
    operator: Operator[Any], problem: Problem, inputs: dict[str, Any], out: torch.Tensor | None
) -> str | None:
    """Why `out`, or an input that is written, cannot take the result."""
    for written in (name for name in operator.also_written if name in inputs):
        for name, value in inputs.items():
            if name != written and hasattr(value, "data_ptr") and overlap(inputs[written], value):
                return f"{written} is written, and shares memory with {name}"
    if out is None:
        return None
    shape, dtype = operator.output_like(problem)
    device = inputs[operator.inputs_in_order[0]].device
    if overlaps_itself(out):
        return f"out has strides {out.stride()}, by which elements share memory"
    for name, value in inputs.items():
        if hasattr(value, "data_ptr") and overlap(out, value) and not (name == IN_PLACE and same(out, value)):
            return (
                f"out is one of the operands, or overlaps one, {name}: tiles would be overwritten while others "
                "read them"
            )
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        found = f"shape {tuple(out.shape)}, dtype {out.dtype} and device {out.device}"
        return f"out has {found}; the result has {shape}, {dtype} and {device}"
    return None


def _recorded(inputs: dict[str, Any], out: torch.Tensor | None) -> bool:
    """Whether autograd records operations on one of the tensors."""
    if not any(getattr(value, "requires_grad", False) for value in (*inputs.values(), out)):
        return False
    import torch

    return torch.is_grad_enabled()
