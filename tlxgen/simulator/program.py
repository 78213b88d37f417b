"""A file with TLX kernels, loaded so that its kernels run on the machine."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import tlx
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tlxgen.errors import InvalidProblemError
from tlxgen.simulator.dtypes import unwrap
from tlxgen.simulator.language import transform as transformed
from tlxgen.simulator.language.blocks import Block, builtin_abs, builtin_max, builtin_min, builtin_range, normalise
from tlxgen.simulator.language.descriptors import Descriptor
from tlxgen.simulator.language.global_operations import GlobalOperations
from tlxgen.simulator.language.namespace import Language
from tlxgen.simulator.machine.global_memory import GlobalMemory
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.tlx.namespace import Tlx

_BUILTINS = {"abs": builtin_abs, "max": builtin_max, "min": builtin_min, "range": builtin_range}

_TORCH_DTYPES = {
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
    "int8": tl.int8,
    "int16": tl.int16,
    "int32": tl.int32,
    "int64": tl.int64,
    "uint8": tl.uint8,
    "bool": tl.int1,
}


@dataclass
class Kernel:
    """A function that was decorated with `triton.jit`: other kernels call it, hosts launch it."""

    function: Callable[..., Any]
    constants: tuple[str, ...]
    program: Program

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    @property
    def fn(self) -> Kernel:
        """Itself: host code names so what `triton.autotune` wraps, to launch it with a config of its own."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a helper of another kernel, inlined there."""
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """`kernel[grid](...)`, as host code writes it: runs on a machine that `Program.make_machine` gives."""

        def launch(*args: Any, **kwargs: Any) -> None:
            constants = inspect.signature(self.function).bind(*args, **_own(kwargs, self.function)[0]).arguments
            sizes = grid(constants) if callable(grid) else grid
            machine = self.program.make_machine()
            self.program.machines.append(machine)
            self.launch(machine, sizes, args, kwargs)

        return launch

    def launch(self, machine: Machine, grid: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Runs it on a machine.

        Args:
            machine: where findings end up.
            grid: programs along one to three axes.
            args: CPU tensors, host descriptors over them, numbers.
            kwargs: likewise by name, and launch options (`num_warps`, `ctas_per_cga`, ...).
        """
        operations = GlobalOperations(machine)
        own, options = _own(kwargs, self.function)
        bound = inspect.signature(self.function).bind(*args, **own)
        bound.apply_defaults()
        arguments = {
            name: unwrap(value) if name in self.constants else _argument(operations, machine.memory, name, value)
            for name, value in bound.arguments.items()
        }
        cluster = int((options.get("ctas_per_cga") or (1,))[0])
        warps = int(options.get("num_warps") or 4)
        if not 1 <= warps <= 32 or warps & (warps - 1):
            machine.refuse_launch(f"num_warps is a power of two up to 32, not {warps}")
            return
        x, y, z = (*map(int, grid), 1, 1)[:3]
        with self.program.bound_to(machine, operations):
            machine.run(lambda: self.function(**arguments), (x, y, z), cluster_size=cluster, num_warps=warps)


@dataclass
class Program:
    """A loaded file: its names, of which the decorated functions are `Kernel`s.

    Attributes:
        make_machine: what `kernel[grid](...)` in the file's own host code runs on.
        machines: those that were used so.
    """

    path: str
    namespace: dict[str, Any]
    make_machine: Callable[[], Machine]
    machines: list[Machine] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  #: statements that failed
    _namespaces: list[dict[str, Any]] = field(default_factory=list)  # its own, and those of imported helpers
    _imported: dict[int, Kernel] = field(default_factory=dict)  # by the identity of the function
    _bound: bool = False

    def __getitem__(self, name: str) -> Any:
        if name not in self.namespace:
            failed = f": a statement at its top fails, {self.skipped[0]}" if self.skipped else ""
            raise InvalidProblemError(f"{self.path} defines no {name!r}{failed}")
        return self.namespace[name]

    @property
    def kernels(self) -> list[Kernel]:
        """All of them, in the file's order."""
        return [value for value in self.namespace.values() if isinstance(value, Kernel)]

    @contextlib.contextmanager
    def bound_to(self, machine: Machine, operations: GlobalOperations) -> Iterator[None]:
        """While this lasts, the kernels' `tl`, `tlx` and the like mean this machine; afterwards what they meant before.

        So a program runs on one machine at a time.

        Raises:
            RuntimeError: it runs on another one now.
        """
        if self._bound:
            raise RuntimeError(f"{self.path} runs on another machine now: load it once more for a second one")
        self._bound = True
        machine.files = frozenset({self.path})
        language, tlx_namespace = Language(operations), Tlx(machine)
        step = functools.partial(machine.pause, "loop", always=True)
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for namespace in self._namespaces:  # which grow in number where one kernel imports another
                for name, value in list(namespace.items()):
                    meaning = step if name == transformed.STEP else self._meaning(value, language, tlx_namespace)
                    if meaning is not value:
                        replaced.append((namespace, name, value))
                        namespace[name] = meaning
            yield
        finally:
            for namespace, name, value in replaced:
                namespace[name] = value
            self._bound = False

    def adopt(self, namespace: dict[str, Any]) -> None:
        """Makes a namespace of kernels one of this program's."""
        namespace |= {
            transformed.NORMALISE: normalise,
            transformed.STEP: None,  # until a machine is bound
            transformed.KERNEL: lambda constants: lambda function: Kernel(function, tuple(constants.split()), self),
            **{transformed.BUILTINS[name]: function for name, function in _BUILTINS.items()},
        }
        self._namespaces.append(namespace)

    def _meaning(self, value: Any, language: Language, tlx_namespace: Tlx) -> Any:
        """What a name in a kernel's file stands for on the machine."""
        if value is tl:
            return language
        if value is tlx:
            return tlx_namespace
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(value, JITFunction):
            return self._import(value)
        if isinstance(value, types.ModuleType) and value.__name__.startswith(f"{tl.__name__}."):
            return functools.reduce(getattr, value.__name__.split(".")[2:], language)
        return value

    def _import(self, function: JITFunction) -> Kernel:
        """A kernel's helper from another module. Findings in it point to the line of this program that calls it."""
        if id(function) not in self._imported:
            module, path = inspect.getmodule(function.fn), inspect.getsourcefile(function.fn)
            assert module is not None
            assert path is not None
            lines, first = inspect.getsourcelines(function.fn)
            tree = transformed.transform(textwrap.dedent("".join(lines)), path)
            ast.increment_lineno(tree, first - 1)
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            namespace = {name: value for name, value in module.__dict__.items() if name in used}
            self.adopt(namespace)
            exec(compile(tree, path, "exec"), namespace)  # noqa: S102 - the kernel's own code
            self._imported[id(function)] = namespace[function.fn.__name__]
        return self._imported[id(function)]


def load(path: Path | str, text: str | None = None, make_machine: Callable[[], Machine] | None = None) -> Program:
    """The kernels of a file.

    Statements at its top that fail, since they need a GPU perhaps, are passed over; the names that they would bind are
    missing then.

    Args:
        path: of the file; findings point into it.
        text: its contents, if they are not to be read from there.
        make_machine: a machine for each launch that the file's own host code makes.

    Raises:
        SyntaxError: the file is no Python.
        OSError: it cannot be read.
    """
    path = str(path)
    tree = transformed.transform(Path(path).read_text(encoding="utf-8") if text is None else text, path)
    namespace: dict[str, Any] = {"__name__": "tlxgen_simulated", "__file__": path}
    program = Program(path, namespace, make_machine or Machine)
    program.adopt(namespace)
    for statement in tree.body:
        code = compile(ast.Module([statement], []), path, "exec")
        try:
            exec(code, namespace)  # noqa: S102 - running the file is what was asked for
        except Exception as error:  # noqa: BLE001 - whatever a file does at its top
            program.skipped.append(f"line {statement.lineno}: {type(error).__name__}: {error}")
    return program


def _own(kwargs: Mapping[str, Any], function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of a launch: the kernel's own, and the launch options."""
    names = inspect.signature(function).parameters
    own = {name: value for name, value in kwargs.items() if name in names}
    return own, {name: value for name, value in kwargs.items() if name not in names}


def _argument(operations: GlobalOperations, memory: GlobalMemory, name: str, value: Any) -> Any:
    """What a kernel receives for what the host gave."""
    if isinstance(value, TensorDescriptor):
        return _descriptor(operations, memory, name, value)
    if hasattr(value, "data_ptr"):
        _require_cpu(name, value)
        memory.register(value, name)
        return Block(np.asarray(value.data_ptr(), np.int64), tl.pointer_type(_dtype(name, value)))
    if isinstance(value, tuple | list):
        return tuple(_argument(operations, memory, f"{name}[{i}]", one) for i, one in enumerate(value))
    return normalise(unwrap(value))


def _descriptor(operations: GlobalOperations, memory: GlobalMemory, name: str, host: Any) -> Descriptor:
    _require_cpu(name, host.base)
    storage = memory.register(host.base, name)
    return Descriptor(
        operations,
        storage,
        host.base.data_ptr(),
        tuple(int(n) for n in host.shape),
        tuple(int(n) for n in host.strides),
        [int(n) for n in host.block_shape],
        _dtype(name, host.base),
        host.padding,
        host.round_f32_to_tf32,
    )


def _dtype(name: str, tensor: Any) -> tl.dtype:
    """The Triton dtype of a tensor's elements."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _TORCH_DTYPES:
        raise TypeError(f"{name} is a tensor of {dtype}, which Triton does not have")
    return _TORCH_DTYPES[dtype]


def _require_cpu(name: str, tensor: Any) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: the simulator takes CPU tensors")
