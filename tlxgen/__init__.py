"""tlxgen: tuned TLX kernels for Hopper GPUs.

    >>> import tlxgen
    >>> mm = tlxgen.get_kernel("gemm", (256, 256, 256), dtype="bf16")  # doctest: +SKIP
    >>> c = mm(a, b)  # doctest: +SKIP

Importing this module imports neither torch, triton nor optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tlxgen._version import __version__

if TYPE_CHECKING:
    from tlxgen import functional
    from tlxgen.api import get_kernel
    from tlxgen.config import Config
    from tlxgen.errors import TlxgenError
    from tlxgen.runtime.kernel import FallbackWarning, Kernel
    from tlxgen.runtime.pinning import pin

__all__ = ["Config", "FallbackWarning", "Kernel", "TlxgenError", "__version__", "functional", "get_kernel", "pin"]

_HOMES = {
    "Config": "tlxgen.config",
    "FallbackWarning": "tlxgen.runtime.kernel",
    "Kernel": "tlxgen.runtime.kernel",
    "TlxgenError": "tlxgen.errors",
    "functional": "tlxgen.functional",
    "get_kernel": "tlxgen.api",
    "pin": "tlxgen.runtime.pinning",
}


def __getattr__(name: str) -> Any:
    """Public names, imported when they are first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tlxgen' has no attribute {name!r}")
    from importlib import import_module

    from tlxgen.startup import collector, plugins

    with collector.paused():
        if name == "functional":
            import_module("torch")  # which looks for plugins of its own, and takes seconds
        with plugins.spared():
            home = import_module(_HOMES[name])
    return home if name == "functional" else getattr(home, name)
