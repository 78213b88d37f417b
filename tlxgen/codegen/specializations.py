"""Cache of Triton's argument specialization across processes; Triton's own first call imports all of Gluon, 30 ms.

The key of an argument is its `form`: all that Triton looks at, such as dtype, divisibility of an address or integer by
16, width of an integer, block of a descriptor. Arguments without a form are passed to Triton each time.
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
#: Entries of a note, far more than the kernels of one machine need.
_MOST = 1000


class Noted:
    """Triton's `specialize_impl` behind the cache."""

    def __init__(self, native: Specialize, target: str) -> None:
        self._native = native
        self._parts = [toolchain(), target]
        self._known = _usable(notes.recall(_KIND, self._parts) or {})

    def __call__(self, backend: Any, argument: Any, *flags: bool) -> tuple[Any, Any]:
        """As Triton's `specialize_impl`."""
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
    """The cache of a target."""
    return Noted(native, target)


def form(argument: Any) -> str | None:
    """All that Triton looks at in an argument on NVIDIA GPUs; None for a type that is not known here."""
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
    """Whether a specialization survives a note unchanged."""
    return isinstance(made, tuple) and len(made) == 2 and all(type(x) in {str, int, bool, type(None)} for x in made)


def _usable(note: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    made = {key: tuple(value) for key, value in note.items() if isinstance(value, list)}
    return {key: value for key, value in made.items() if _is_plain(value)}
