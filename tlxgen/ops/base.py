"""`Operator`: everything that tlxgen asks about one operation (problem, resources, inputs, reference, peer).

An operator is a folder of this package (`problem.py`, `operator.py`, `time_model.py`), a folder of templates and one of
search spaces; see docs/adding_an_operator.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from tlxgen.config import Config, Value
from tlxgen.ops import accuracy
from tlxgen.problem import ITEM_BYTES, Problem, parse_problem, torch_dtype

if TYPE_CHECKING:
    import torch

P = TypeVar("P", bound=Problem)

#: Error of a float32 side output: some hundred times that of approximate instructions.
SIDE_TOLERANCE = 1e-4

#: Tensors of one call by parameter name, in the order of the emitted `launch`.
Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Resources:
    """What one CTA of a config takes, by formula."""

    shared_bytes: int  #: tiles, staging, barriers and the compiler's slack: an upper bound within 2 KB
    mbarriers: int
    threads: int
    accumulator_registers: int  #: per thread of a consumer


@dataclass(frozen=True)
class Case(Generic[P]):
    """A small problem that a kernel is simulated on, and the number of multiprocessors of the simulated GPU."""

    problem: P
    num_sms: int


class Operator(ABC, Generic[P]):
    """One operation that tlxgen has templates for."""

    name: ClassVar[str]
    #: Competing templates; the last is plain Triton, which serves every GPU.
    templates: ClassVar[tuple[str, ...]]
    #: Name of the library that computes the same and is timed beside every candidate.
    peer: ClassVar[str]
    #: Names of the input tensors, in the order of positional arguments of a call.
    inputs_in_order: ClassVar[tuple[str, ...]]
    #: Names of further tensors of a call that the kernel writes to.
    also_written: ClassVar[tuple[str, ...]] = ()
    #: Name of the output among the parameters of the emitted `arguments` and `launch`.
    output_name: ClassVar[str]
    problem_type: type[P]
    #: Fields of problems that derived tests compile and simulate with every template, the first of a usual size.
    examples: ClassVar[tuple[Mapping[str, Any], ...]]
    #: Parameters whose best value changes from size to size, since it depends on how full the last round of tiles is.
    by_size: ClassVar[tuple[str, ...]] = ()
    #: Register spills that are accepted, in bytes per thread; kernels with more are not timed.
    allowed_spill_bytes: ClassVar[int] = 0

    # What is computed

    def problem(self, shape: P | Sequence[int] | Mapping[str, Any], **options: Any) -> P:
        """The Problem that a shape and options mean.

        Raises:
            InvalidProblemError: naming the argument, its value and what is allowed.
        """
        return parse_problem(self.problem_type, shape, options)

    def twins(self, problem: P) -> Sequence[P]:
        """Problems that only the device can tell from this one; one row serves them all, so it must be fast on each."""
        return ()

    @abstractmethod
    def flops(self, problem: P) -> float:
        """Floating-point operations of one call."""

    @abstractmethod
    def bytes_moved(self, problem: P) -> float:
        """Bytes of one call if every operand crosses device memory once."""

    # Which kernels there are

    def variables(self, problem: P) -> dict[str, Value]:
        """Names that search-space constraints may use beside a config's parameters; by default the problem's fields."""
        return {**problem.model_dump(), "item_bytes": ITEM_BYTES[_dtype(problem)]}

    @abstractmethod
    def resources(self, problem: P, config: Config) -> Resources:
        """Shared memory, barriers, threads and accumulator registers of one CTA."""

    def template_context(self, problem: P, config: Config) -> dict[str, Any]:
        """Variables of the template beside the config's parameters; by default names and size of the dtype."""
        name = str(torch_dtype(_dtype(problem))).removeprefix("torch.")
        return {
            "torch_dtype": name,
            "tl_dtype": f"tl.{name}",
            "item_bytes": ITEM_BYTES[_dtype(problem)],
            "hopper": config.template != self.templates[-1],
        }

    @abstractmethod
    def small_cases(self, problem: P, config: Config) -> Sequence[Case[P]]:
        """Problems of a few tiles that exercise the kernel's corners: tails, rings that wrap, several programs.

        They differ from `problem` in size alone, and keep what of its sizes the emitted code depends on.
        """

    @abstractmethod
    def predict_us(self, problem: P, config: Config, gpu: Any) -> float:
        """Predicted time of a config on a GPU, in microseconds: ranks candidates, is never stored as measured."""

    def why_not_exported(self, problem: P) -> str | None:
        """Why a kernel of this problem cannot be part of an exported package, or None."""
        return None

    # Tensors of a call

    def operands(self, problem: P) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each input, by name; `inputs` and `check_call` follow from it unless overridden."""
        raise NotImplementedError(f"{self.name}: define `operands`, or both `inputs` and `check_call`")

    def inputs(self, problem: P, device: torch.device | str, seed: int) -> Tensors:
        """Fresh random inputs (meta tensors for device `meta`), without the output."""
        normal = normal_tensors(device, seed)
        return {name: normal(shape, torch_dtype(dtype)) for name, (shape, dtype) in self.operands(problem).items()}

    def call_defaults(self, problem: P) -> dict[str, Any]:
        """Arguments of the emitted `arguments` that a call may leave out, since the problem implies them."""
        return {}

    @abstractmethod
    def output_like(self, problem: P) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the result."""

    def output(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """An uninitialised output tensor on the inputs' device."""
        shape, dtype = self.output_like(problem)
        return inputs[self.inputs_in_order[0]].new_empty(shape, dtype=dtype)

    def check_call(self, problem: P, tensors: Tensors) -> str | None:
        """Why these inputs are not the problem's (shape, dtype, missing or unknown operand), or None if they are."""
        operands = self.operands(problem)
        shapes = {name: shape for name, (shape, _) in operands.items()}
        reason = why_other_tensors(tensors, shapes, {name: dtype for name, (_, dtype) in operands.items()})
        if reason:
            return reason
        surplus = sorted(set(tensors) - set(operands))
        return f"{surplus[0]} is not a parameter" if surplus else None

    @abstractmethod
    def launchable(self, problem: P, config: Config, tensors: Tensors, out: torch.Tensor) -> str | None:
        """Why the config's template cannot take these tensors' strides or alignment, or None if it can."""

    def arguments(
        self, module: ModuleType, inputs: Tensors, output: torch.Tensor, *, num_sms: int, **options: Any
    ) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        """Grid and kernel arguments of one call, by the emitted module's own `arguments`."""
        tensors = {**inputs, self.output_name: output}
        grid, args = module.arguments(**tensors, num_sms=num_sms, **options)
        return grid, args

    # Reference and peers

    @abstractmethod
    def reference(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """The result in float64, before rounding to the output dtype."""

    @abstractmethod
    def eager(self, problem: P, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """The peer: the same operation through torch, written to `out` where torch can."""

    def timed_peer(self, problem: P, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """The call whose time is the peer's: `eager`, unless that waits for the host, which no CUDA graph captures."""
        return self.eager(problem, inputs, out)

    def peer_result(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """The peer's result on a GPU; on a CPU, where `eager` may be more exact, rounded as tensor cores do."""
        return self.eager(problem, inputs)

    def other_libraries(self, problem: P) -> Mapping[str, Callable[[Tensors, torch.Tensor], torch.Tensor]]:
        """Other installed implementations of the problem, by name: functions of inputs and output buffer."""
        return {}

    def side_outputs(self, problem: P, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Expected contents, in float64, of the tensors that the kernel writes beside its output, by name."""
        return {}

    def why_side_output_wrong(self, problem: P, inputs: Tensors, expected: dict[str, torch.Tensor]) -> str | None:
        """Why a side output is wrong after a call, or None."""
        for name, reference in expected.items():
            reason = accuracy.why_far(inputs[name], reference, SIDE_TOLERANCE)
            if reason:
                return f"{name}: {reason}"
        return None


def _dtype(problem: Problem) -> str:
    """The problem's `dtype`, which operators that use the defaults above have."""
    return str(getattr(problem, "dtype"))  # noqa: B009 - no field of the base class


def normal_tensors(device: torch.device | str, seed: int) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """A source of normally distributed tensors; on the `meta` device they have no contents."""
    import torch

    if torch.device(device).type == "meta":
        return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.itemsize == 1:  # torch draws none of 8 bits
            return torch.randn(shape, device=device, generator=generator).to(dtype)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    return drawn


def why_other_tensors(
    tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str | torch.dtype]
) -> str | None:
    """Why a call's tensors have not these names, shapes and dtypes, or None; further tensors are not looked at."""
    for name, shape in shapes.items():
        tensor, dtype = tensors.get(name), dtypes[name]
        if tensor is None:
            return f"{name} is missing"
        if tuple(tensor.shape) != shape or tensor.dtype != (torch_dtype(dtype) if isinstance(dtype, str) else dtype):
            found = f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
            return f"{name} has {found}; the kernel is for {shape} and {dtype}"
    return None


def why_not_contiguous(tensors: Mapping[str, torch.Tensor], alignment: int = 1) -> str | None:
    """Why a tensor is not contiguous, or its address not a multiple of `alignment` bytes; None if all are."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            return f"{name} is not contiguous"
        if tensor.data_ptr() % alignment:
            return f"{name} starts at an address that {alignment} does not divide"
    return None
