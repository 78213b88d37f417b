"""Imports an emitted file as a module: KernelSource → module.

`triton.jit` needs source lines, so the text is written to a file. The file's name contains the hash of its bytes, so an
existing file is the right one. The module's name contains the hash of the code alone, so that sources which differ in
comments only share a module.
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
    """The emitted file as a module, imported at most once per process."""
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
                with collector.paused(), plugins.spared():  # the first import in a process imports triton
                    spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return module


def loaded(source: KernelSource) -> ModuleType | None:
    """The module if `load` was called for the same code before, else None."""
    with _LOCK:  # another thread may still be executing the module
        return sys.modules.get(_module_name(source))


def _module_name(source: KernelSource) -> str:
    return f"tlxgen_kernels.{source.config.template}_{source.code_hash}"


def write(source: KernelSource, directory: Path | None = None) -> Path:
    """Writes the file to `directory`, the user's cache or a temporary folder, whichever is writable first."""
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
    """Candidate folders, lazily: the temporary folder is created only if the others fail."""
    yield first
    yield _temporary_dir()


@cache
def _temporary_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="tlxgen-"))  # private, since its content is imported
