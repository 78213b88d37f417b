"""Compiles an emitted kernel, with or without a GPU: KernelSource → Binary.

The signature, attributes and options come from Triton's own binder, given the very arguments that a launch builds, so
the first launch finds the binary in Triton's cache and compiles nothing.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from tlxgen import ops, toolchain
from tlxgen.codegen import binaries, loader, specializations
from tlxgen.codegen.emit import KernelSource
from tlxgen.errors import CompileError
from tlxgen.startup import collector

if TYPE_CHECKING:
    from tlxgen.codegen.facts import Facts


@dataclass(frozen=True)
class Binary:
    """A compiled candidate: its source, the facts of its machine code, and the seconds that compiling took."""

    source: KernelSource
    facts: Facts
    seconds: float


#: A compute capability, such as (9, 0), or the name of an AMD architecture, such as `gfx942`.
Architecture: TypeAlias = tuple[int, int] | str


def compile_kernel(module: ModuleType, args: Sequence[Any], capability: Architecture) -> Any:
    """The emitted module's kernel, compiled for these arguments; Triton's `CompiledKernel`.

    Tensors may live on the `meta` device: only their dtype and alignment matter.
    """
    import triton
    from triton.compiler.compiler import ASTSource

    target = _target(capability)
    kernel = module.kernel
    with collector.paused():
        backend, bind = _binder(kernel, target)
        bound, specialization, options = bind(*args, **module.OPTIONS)
        options, signature, constants, attributes = kernel._pack_args(  # noqa: SLF001 - a launch calls it too
            backend, dict(module.OPTIONS), bound, specialization, options
        )
        source = ASTSource(kernel, signature, constants, attributes)
        known = binaries.recall(source, options, target)
    if known is not None:
        return known
    with _driver_for(target):
        compiled = triton.compile(source, target=target, options=options.__dict__)
    binaries.remember(compiled, source, options, target)
    return compiled


def specialization(module: ModuleType, args: Sequence[Any], capability: Architecture) -> tuple[Any, ...]:
    """Triton's specialization of a kernel's arguments: calls with equal ones share a binary on a device."""
    _, bind = _binder(module.kernel, _target(capability))
    return tuple(bind(*args, **module.OPTIONS)[1])


def _target(capability: Architecture) -> Any:
    from triton.backends.compiler import GPUTarget

    if isinstance(capability, str):
        return GPUTarget("hip", capability, _WAVE)
    return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)


#: Threads of one wavefront of AMD's data-centre GPUs (CDNA).
_WAVE = 64


@lru_cache(maxsize=256)
def _binder(kernel: Any, target: Any) -> tuple[Any, Any]:
    """Triton's backend, and its function from arguments to their specialization; cached, since it takes 1 ms."""
    from triton._C import libtriton
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    native = getattr(libtriton, "native_specialize_impl", None)
    # Another Triton may have another function that looks at more; on AMD's GPUs it looks at sizes too.
    if target.backend == "cuda" and native is not None and bind.__globals__.get("specialize_impl") is native:
        bind.__globals__["specialize_impl"] = specializations.noted(native, str(target))
    return backend, bind


@dataclass(frozen=True)
class _TargetOnly:
    """Replaces Triton's driver where there is no GPU: some TLX operations ask it for the target."""

    target: Any

    def get_current_target(self) -> Any:
        """The target."""
        return self.target


@contextlib.contextmanager
def _driver_for(target: Any) -> Iterator[None]:
    from triton.runtime import driver

    try:
        driver.active  # noqa: B018 - asking for it makes it
    except RuntimeError:
        driver.set_active(_TargetOnly(target))
        try:
            yield
        finally:
            driver._active = None  # noqa: SLF001 - `reset_active` would look for a GPU
    else:
        yield


def compile_candidate(source: KernelSource, capability: tuple[int, int]) -> Binary:
    """Compiles an emitted kernel for contiguous, aligned operands and reads its facts.

    Raises:
        CompileError: its `kind` is the class of the failure.
    """
    from tlxgen.codegen import facts  # a launch does without

    started = time.perf_counter()
    operator = ops.get(source.operator)
    module = loader.load(source)
    inputs = operator.inputs(source.problem, "meta", 0)
    output = operator.output(source.problem, inputs)
    _, args = operator.arguments(module, inputs, output, num_sms=1)
    kernel, log = _compile_and_log(module, args, capability)
    found = facts.read(kernel.asm["cubin"], kernel.asm["ttgir"], kernel.metadata.shared, log)
    reason = facts.why_rejected(
        found,
        wants_setmaxnreg="registers=" in source.text,
        wants_wgmma="async_dot" in source.text,
        allowed_spill_bytes=operator.allowed_spill_bytes,
    )
    if reason:
        raise CompileError("rejected", reason)
    return Binary(source, found, time.perf_counter() - started)


def _compile_and_log(module: ModuleType, args: Sequence[Any], capability: tuple[int, int]) -> tuple[Any, str]:
    """The kernel and the output of `ptxas -v`, which is run again if the kernel came from the cache."""
    from triton import knobs

    printed = io.StringIO()
    before = knobs.nvidia.dump_ptxas_log
    knobs.nvidia.dump_ptxas_log = True
    try:
        with contextlib.redirect_stdout(printed):
            kernel = compile_kernel(module, args, capability)
    except Exception as error:
        raise _classified(error) from error
    finally:
        knobs.nvidia.dump_ptxas_log = before
    log = printed.getvalue()
    return kernel, log if "registers" in log else _ptxas_log(kernel.asm["ptx"], capability)


def _ptxas_log(ptx: str, capability: tuple[int, int]) -> str:
    suffix = "a" if capability[0] >= 9 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        arch = f"sm_{capability[0]}{capability[1]}{suffix}"
        command = [str(toolchain.binary("ptxas")), "-lineinfo", "-v", "--regAllocOptLevel=2", f"--gpu-name={arch}"]
        done = subprocess.run([*command, str(path), "-o", f"{path}.o"], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CompileError("ptxas", f"ptxas: {last}"[:500])
    return done.stderr


def _classified(error: Exception) -> CompileError:
    """A CompileError from any of Triton's exceptions, with the failure class that the tuner counts."""
    name = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    telling = next((line for line in lines if "error" in line or "fatal" in line), lines[-1])
    message = f"{name}: {telling.strip()}"[:500]
    if name == "OutOfResources":
        return CompileError("out_of_resources", message)
    if name == "PTXASError":
        return CompileError("ptxas", message)
    return CompileError("compiler_error", message)
