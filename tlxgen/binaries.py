"""Compiled kernels found again without asking what the compiler would call them.

Triton files a binary under a hash that covers the whole compiler, half a second of reading in each process. Here a
small file remembers that hash under what decides the binary for one installed toolchain: source, signature, options,
target, and the environment variables that Triton heeds. Whatever is amiss is a miss, and the compiler is asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from tlxgen import paths
from tlxgen.toolchain import toolchain


def recall(source: Any, options: Any, target: Any) -> Any | None:
    """The `CompiledKernel` of an `ASTSource` compiled before, or None."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.cache import get_cache_manager

    try:
        filed_under = json.loads(_note(source, options, target).read_text(encoding="utf-8"))["hash"]
        group = get_cache_manager(filed_under).get_group(f"{source.name[:150]}.json")
        return CompiledKernel(source, group, filed_under) if group else None
    except Exception:  # noqa: BLE001 - a miss costs a look at the compiler's own cache, nothing else
        return None


def remember(kernel: Any, source: Any, options: Any, target: Any) -> None:
    """Notes where Triton filed the kernel; quietly does nothing where nothing can be written."""
    with contextlib.suppress(OSError):
        paths.write_atomically(_note(source, options, target), json.dumps({"hash": kernel.hash}))


def _note(source: Any, options: Any, target: Any) -> Path:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    environment = sorted(get_cache_invalidating_env_vars().items())
    parts = [source.name, source.hash(), options.hash(), str(target), toolchain(), str(environment)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return paths.user_cache_dir() / "binaries" / f"{digest}.json"
