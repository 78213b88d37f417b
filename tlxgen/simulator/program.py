"""Loading of a file with TLX kernels, and launches of its kernels on a machine."""

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
    """A function decorated with `triton.jit`: other kernels call it, host code launches it."""

    function: Callable[..., Any]
    constants: tuple[str, ...]
    program: Program

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.__name__

    @property
    def fn(self) -> Kernel:
        """Itself: host code uses `fn` for the kernel that `triton.autotune` wraps."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call by another kernel, inlined there."""
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """`kernel[grid](...)` of host code: runs on a machine from `Program.make_machine`."""

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
            machine: runs the launch and collects its findings.
            grid: programs along one to three axes.
            args: CPU tensors, host descriptors over them, numbers.
            kwargs: further arguments by name, and launch options (`num_warps`, `ctas_per_cga`, ...).
        """
        own, options = _own(kwargs, self.function)
        bound = inspect.signature(self.function).bind(*args, **own)
        bound.apply_defaults()
        arguments = {
            name: unwrap(value) if name in self.constants else _argument(machine, name, value)
            for name, value in bound.arguments.items()
        }
        cluster = int((options.get("ctas_per_cga") or (1,))[0])
        warps = int(options.get("num_warps") or 4)
        if not 1 <= warps <= 32 or warps & (warps - 1):
            machine.refuse_launch(f"num_warps is a power of two up to 32, not {warps}")
            return
        x, y, z = (*map(int, grid), 1, 1)[:3]
        with self.program.bound_to(machine):
            machine.run(lambda: self.function(**arguments), (x, y, z), cluster_size=cluster, num_warps=warps)


@dataclass
class Program:
    """The names of a loaded file; decorated functions are `Kernel`s.

    Attributes:
        make_machine: makes the machine of each `kernel[grid](...)` in the file's own host code.
        machines: the machines of these launches.
        skipped: statements at the file's top that failed.
    """

    path: str
    namespace: dict[str, Any]
    make_machine: Callable[[], Machine]
    machines: list[Machine] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
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
        """All kernels, in the file's order."""
        return [value for value in self.namespace.values() if isinstance(value, Kernel)]

    @contextlib.contextmanager
    def bound_to(self, machine: Machine) -> Iterator[None]:
        """Binds the kernels' `tl`, `tlx` and the like to a machine for a while; a program runs on one at a time.

        Raises:
            RuntimeError: the program is running on another machine.
        """
        if self._bound:
            raise RuntimeError(f"{self.path} is running on another machine: load it again for a second one")
        self._bound = True
        machine.files = frozenset({self.path})
        language, tlx_namespace = Language(GlobalOperations(machine)), Tlx(machine)
        step = functools.partial(machine.pause, "loop", always=True)
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for namespace in self._namespaces:  # grows while kernels import others
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
        """Adds a namespace of kernels to this program."""
        namespace |= {
            transformed.NORMALISE: normalise,
            transformed.STEP: None,  # until a machine is bound
            transformed.KERNEL: lambda constants: lambda function: Kernel(function, tuple(constants.split()), self),
            **{transformed.BUILTINS[name]: function for name, function in _BUILTINS.items()},
        }
        self._namespaces.append(namespace)

    def _meaning(self, value: Any, language: Language, tlx_namespace: Tlx) -> Any:
        """The simulated counterpart of a value in a kernel's namespace."""
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
        """A helper from another module; findings in it point to the line of this program that calls it."""
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
    """Loads the kernels of a file.

    Statements at its top that fail, for example for lack of a GPU, are skipped; the names that they bind are missing.

    Args:
        path: of the file; findings point into it.
        text: its contents, if not to be read from the file.
        make_machine: makes a machine for each launch by the file's own host code.

    Raises:
        SyntaxError: the file is not valid Python.
        OSError: the file cannot be read.
    """
    path = str(path)
    tree = transformed.transform(Path(path).read_text(encoding="utf-8") if text is None else text, path)
    namespace: dict[str, Any] = {"__name__": "tlxgen_simulated", "__file__": path}
    program = Program(path, namespace, make_machine or Machine)
    program.adopt(namespace)
    for statement in tree.body:
        code = compile(ast.Module([statement], []), path, "exec")
        try:
            exec(code, namespace)  # noqa: S102 - the user's own file
        except Exception as error:  # noqa: BLE001 - any statement may fail
            program.skipped.append(f"line {statement.lineno}: {type(error).__name__}: {error}")
    return program


def _own(kwargs: Mapping[str, Any], function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of a launch: the kernel's own, and the launch options."""
    names = inspect.signature(function).parameters
    own = {name: value for name, value in kwargs.items() if name in names}
    return own, {name: value for name, value in kwargs.items() if name not in names}


def _argument(machine: Machine, name: str, value: Any) -> Any:
    """The kernel's value of a host argument."""
    if isinstance(value, TensorDescriptor):
        _require_cpu(name, value.base)
        return Descriptor(
            machine,
            machine.memory.register(value.base, name),
            value.base.data_ptr(),
            tuple(int(n) for n in value.shape),
            tuple(int(n) for n in value.strides),
            [int(n) for n in value.block_shape],
            _dtype(name, value.base),
            value.padding,
            value.round_f32_to_tf32,
        )
    if hasattr(value, "data_ptr"):
        _require_cpu(name, value)
        machine.memory.register(value, name)
        return Block(np.asarray(value.data_ptr(), np.int64), tl.pointer_type(_dtype(name, value)))
    if isinstance(value, tuple | list):
        return tuple(_argument(machine, f"{name}[{i}]", one) for i, one in enumerate(value))
    return normalise(unwrap(value))


def _dtype(name: str, tensor: Any) -> tl.dtype:
    """The Triton dtype of a tensor's elements."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _TORCH_DTYPES:
        raise TypeError(f"{name} is a tensor of {dtype}, which Triton does not have")
    return _TORCH_DTYPES[dtype]


def _require_cpu(name: str, tensor: Any) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: the simulator takes CPU tensors")
