"""Shortcut into Triton's cache of compiled kernels.

Triton's cache key covers the whole compiler, half a second of hashing in each process. A note stores that key under
what decides the binary for one installed toolchain: source, signature, options, target and Triton's environment
variables. Any defect of a note is a miss, and Triton computes the key.
"""

from __future__ import annotations

from typing import Any

from tlxgen.startup import notes
from tlxgen.toolchain import toolchain

_KIND = "binaries"
#: LLVM IR of a kernel, up to 8 MB, which Triton would read into memory for nothing.
_LLVM = ".llir"


def recall(source: Any, options: Any, target: Any) -> Any | None:
    """The `CompiledKernel` of an `ASTSource` that was compiled before; None on a miss."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager

    try:
        note = notes.recall(_KIND, _parts(source, options, target))
        if note is None:
            return None
        filed_under = note["hash"]
        group = get_cache_manager(filed_under).get_group(f"{source.name[:150]}.json")
        if not group:
            return None
        read = {name: path for name, path in group.items() if not name.endswith(_LLVM)}
        kernel = CompiledKernel(source, read, filed_under)
        kernel.metadata_group = group  # Triton's hooks, such as its profiler's, look for files there
    except Exception:  # noqa: BLE001 - a miss only costs Triton's own look-up
        return None
    return kernel


def remember(kernel: Any, source: Any, options: Any, target: Any) -> None:
    """Notes the key under which Triton stored the kernel."""
    notes.remember(_KIND, _parts(source, options, target), {"hash": kernel.hash})


def _parts(source: Any, options: Any, target: Any) -> list[str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    environment = sorted(get_cache_invalidating_env_vars().items())
    return [source.name, source.hash(), options.hash(), str(target), toolchain(), str(environment)]
