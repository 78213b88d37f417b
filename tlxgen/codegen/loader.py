"""KernelSource → imported module.

`triton.jit` needs the function's source lines, so the text becomes a real file. Its name holds the hash of its bytes: a
file that is there already is the right one. The module's name holds the hash of the code alone: two variants never
share a module, and problems whose kernels differ in nothing but the sizes in a comment do.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from tlxgen import paths, toolchain
from tlxgen.codegen.emit import KernelSource
from tlxgen.startup import collector, plugins

_LOCK = threading.Lock()


def load(source: KernelSource, directory: Path | None = None) -> ModuleType:
    """The emitted file as a module, imported at most once a process."""
    name = _module_name(source)
    with _LOCK:
        module = sys.modules.get(name)
        if module is None:
            if "extra.tlx" in source.text:
                toolchain.require_tlx()
            path = write(source, directory)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                with collector.paused(), plugins.spared():  # the first of a process imports triton
                    spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return module


def loaded(source: KernelSource) -> ModuleType | None:
    """The module, if `load` was called for the same code before."""
    with _LOCK:  # a module that is there may not be whole yet
        return sys.modules.get(_module_name(source))


def _module_name(source: KernelSource) -> str:
    return f"tlxgen_kernels.{source.config.template}_{source.code_hash}"


def write(source: KernelSource, directory: Path | None = None) -> Path:
    """Writes the file where it can: `directory`, the user's cache, or a temporary folder of this process."""
    for folder in _places(directory or paths.kernel_dir()):
        path = folder / source.file_name
        try:
            if path.is_file() and path.read_text(encoding="utf-8") == source.text:
                return path
            paths.write_atomically(path, source.text)
        except OSError:
            continue
        return path
    raise OSError(f"no folder can be written: neither {directory or paths.kernel_dir()} nor {tempfile.gettempdir()}")


def _places(first: Path) -> Iterator[Path]:
    """Made when asked for: no temporary folder where the first place will do."""
    yield first
    yield _temporary_dir()


@cache
def _temporary_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="tlxgen-"))  # ours alone: what is in it gets imported
