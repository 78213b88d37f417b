"""Dispatches a call to a kernel of the table, or to torch; the conditions under which a kernel may be launched."""

from __future__ import annotations

import importlib
import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ALIGNMENT = 16  # bytes: TMA's alignment of base addresses and strides
_LOCK = threading.Lock()
_NAMES = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

#: Types whose memory is their value; a subclass may hold more, or override operations.
_PLAIN = (Tensor, torch.nn.Parameter)

#: Modules that failed to import or launch, with the reason; they are not tried again.
_BROKEN: dict[str, str] = {}


@lru_cache(maxsize=1)
def manifest() -> dict[str, Any]:
    """The content of `manifest.json`."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "manifest.json").read_text(encoding="utf-8"))
    if found["format"] != 1:
        raise ImportError(f"manifest.json has format {found['format']}; this package reads format 1")
    return found


def entries() -> list[dict[str, Any]]:
    """The entries of the table."""
    return list(manifest()["entries"])


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return {_key(entry["operator"], entry["problem"]): entry for entry in entries()}


def _key(operator: str, problem: Mapping[str, Any]) -> str:
    return json.dumps([operator, problem], sort_keys=True)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in problems; torch's name for other dtypes."""
    return _NAMES.get(dtype, str(dtype))


def explain(operator: str, problem: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> str:
    """Which kernel serves a problem, or why torch does.

    Args:
        operator: `gemm`, `grouped_gemm`, `attention` or `vector_add`.
        problem: its fields, as in the manifest.
        tensors: of a call, operands first; device and gradients matter too.
    """
    entry = _table().get(_key(operator, problem))
    if entry is None:
        return "torch: no kernel of this package is for the problem"
    reason = _unseen(tensors) or _why_not(entry, tensors)
    return f"torch: {reason}" if reason else f"kernels/{entry['module']}.py: {entry['config']['template']}"


def run(
    operator: str,
    problem: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    fits: Callable[[], bool],
    otherwise: Callable[[], Any],
) -> Any:
    """The kernel's result, or `otherwise()`.

    Args:
        operator: as in the table.
        problem: as in the table.
        tensors: arguments of the kernel's `launch`, operands first.
        fits: whether the tensors' layout is what the kernel needs.
        otherwise: the same operation through torch.
    """
    present = [value for value in tensors.values() if isinstance(value, Tensor)]
    if _unseen(present):
        return otherwise()
    entry = _table().get(_key(operator, problem))
    if entry is None or _why_not(entry, present) or not fits():
        return otherwise()
    module = _load(entry)
    if module is None:
        return otherwise()
    try:
        with torch.cuda.device(present[0].device):
            return module.launch(**tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything; torch computes instead
        _give_up(entry, error)
        return otherwise()


def _unseen(tensors: Sequence[Tensor]) -> str | None:
    """Why only torch computes such a call correctly (subclass, gradients, autocast, tracing, ...), or None."""
    if any(type(tensor) not in _PLAIN for tensor in tensors):
        return "a tensor is of a subclass"
    if any(tensor.is_neg() or tensor.is_conj() for tensor in tensors):
        return "a tensor's memory is not its value: it is negated or conjugated"
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        return "a tensor is nested or has no strides"
    if _transformed():
        return "operations are traced, transformed or differentiated forward"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "gradients are recorded"
    return "autocast converts the operands" if tensors and _converted(tensors[0]) else None


def _converted(tensor: Tensor) -> bool:
    """Whether autocast would convert the tensor; it ignores 8-bit floats."""
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind) or tensor.element_size() == 1:
        return False
    return torch.get_autocast_dtype(kind) != tensor.dtype


def _transformed() -> bool:
    """Whether functorch, a dispatch mode, a trace or forward-mode AD is active; torch has no public API for these."""
    return (
        torch._C._are_functorch_transforms_active()  # noqa: SLF001
        or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001
        or torch._C._get_tracing_state() is not None  # noqa: SLF001
        or forward_ad._current_level >= 0  # noqa: SLF001
    )


def _why_not(entry: Mapping[str, Any], tensors: Sequence[Tensor]) -> str | None:
    """Why a kernel of the table cannot run on these tensors on this machine, or None."""
    if entry["module"] in _BROKEN:
        return _BROKEN[entry["module"]]
    device = tensors[0].device if tensors else torch.device("cuda")
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return f"tensors are on {device.type}" if tensors else "no CUDA GPU here"
    if any(tensor.device != device for tensor in tensors):
        return "tensors are on several devices"
    if torch.cuda.get_device_capability(device) != tuple(manifest()["capability"]):
        return "the kernels are for another compute capability"
    return None


def _load(entry: Mapping[str, Any]) -> Any | None:
    with _LOCK:
        try:
            return importlib.import_module(f".kernels.{entry['module']}", __package__)
        except Exception as error:  # noqa: BLE001 - for example a triton without TLX; torch computes instead
            _give_up(entry, error)
            return None


def _give_up(entry: Mapping[str, Any], error: Exception) -> None:
    _BROKEN[entry["module"]] = f"{type(error).__name__}: {error}"
    warnings.warn(f"{entry['label']}: torch computes, since {_BROKEN[entry['module']]}", stacklevel=4)


def is_aligned(tensor: Tensor) -> bool:
    """Whether the last dimension is contiguous, and base address and other strides are aligned for TMA."""
    size = tensor.element_size()
    strides = tensor.stride()
    return (
        strides[-1] == 1
        and tensor.data_ptr() % _ALIGNMENT == 0
        and all(stride > 0 and stride * size % _ALIGNMENT == 0 for stride in strides[:-1])
    )
