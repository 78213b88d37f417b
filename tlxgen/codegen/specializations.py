"""What Triton makes of kernel arguments, from notes: asking it for the first time imports all of Gluon, 30 ms.

Of an argument Triton sees no more than its `form` has: dtypes, whether 16 divides an address or an integer, how wide
that is and whether it is 1, the block of a descriptor. What has no form here is asked for each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from tlxgen.startup import notes
from tlxgen.toolchain import toolchain

#: Backend, argument, whether it is constant, whether to specialise it, whether on alignment → type and specialization.
Specialize: TypeAlias = Callable[[Any, Any, bool, bool, bool], tuple[Any, Any]]

_KIND = "specializations"
#: Far more than kernels of one machine have.
_MOST = 1000


class Noted:
    """Triton's function, asked once for each form, whatever the number of processes."""

    def __init__(self, native: Specialize, target: str) -> None:
        self._native = native
        self._parts = [toolchain(), target]
        self._known = _usable(notes.recall(_KIND, self._parts) or {})

    def __call__(self, backend: Any, argument: Any, *flags: bool) -> tuple[Any, Any]:
        """As Triton's own."""
        seen = form(argument)
        if seen is None:
            return self._native(backend, argument, *flags)
        key = f"{seen} {flags}"
        known = self._known.get(key)
        if known is None:
            known = self._native(backend, argument, *flags)
            if len(self._known) < _MOST and _is_plain(known):
                self._known[key] = known
                notes.remember(_KIND, self._parts, dict(self._known))
        return known


@cache
def noted(native: Specialize, target: str) -> Noted:
    """One for all kernels of a target."""
    return Noted(native, target)


def form(argument: Any) -> str | None:
    """All that Triton sees of an argument on NVIDIA's GPUs; None where that cannot be told."""
    kind = type(argument)
    if argument is None or kind is bool:
        return repr(argument)
    if kind is int:
        return _form_of_integer(argument)
    if kind is float:
        return "float"
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == "torch.Tensor":
        return f"tensor {argument.dtype} {argument.data_ptr() % 16 == 0}"
    if name == "triton.tools.tensor_descriptor.TensorDescriptor":
        block = list(argument.block_shape)
        return f"descriptor {argument.base.dtype} {block} {argument.padding} {argument.round_f32_to_tf32}"
    return None


def _form_of_integer(value: int) -> str | None:
    for kind, least, beyond in (("i32", -(2**31), 2**31), ("i64", -(2**63), 2**63), ("u64", 0, 2**64)):
        if least <= value < beyond:
            return f"{kind} {value == 1} {value % 16 == 0}"
    return None


def _is_plain(made: Any) -> bool:
    """Whether a note gives back what it was given."""
    return isinstance(made, tuple) and len(made) == 2 and all(type(x) in {str, int, bool, type(None)} for x in made)


def _usable(note: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    made = {key: tuple(value) for key, value in note.items() if isinstance(value, list)}
    return {key: value for key, value in made.items() if _is_plain(value)}
