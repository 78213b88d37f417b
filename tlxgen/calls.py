"""What a function in place of torch's must know of the call that it is in: compiling, transforms, autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, which would import the compiler at once, for those who do not compile too."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            hidden: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return hidden(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def transformed() -> bool:
    """Whether operations are vectorised or differentiated by what a kernel launch escapes: functorch, dual numbers."""
    functorch: bool = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public way
    traced: bool = torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None  # noqa: SLF001 - the same
    return functorch or traced or torch.autograd.forward_ad._current_level >= 0  # noqa: SLF001 - the same


def as_given(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where autocast converts nothing; entered only where it would, since that takes its time."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
