"""What an operator is: a Problem, a reference, a roofline and a list of templates.

Adding one takes a module in this package with a subclass of `Operator`, its templates and their search spaces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from tlxgen.config import Config, Value
from tlxgen.ops import accuracy
from tlxgen.problem import Problem, torch_dtype

if TYPE_CHECKING:
    import torch

P = TypeVar("P", bound=Problem)

#: Of float32 numbers that approximate instructions had a part in: some hundred times their error.
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
    """A small problem that a config's kernel is simulated on, and how many multiprocessors share it."""

    problem: P
    num_sms: int


class Operator(ABC, Generic[P]):
    """One operation that tlxgen has templates for."""

    name: ClassVar[str]
    #: Templates that compete, best first for people to read; the last is vanilla Triton.
    templates: ClassVar[tuple[str, ...]]
    #: The library that computes the same, timed beside every candidate.
    peer: ClassVar[str]
    #: The inputs that a call takes by position.
    inputs_in_order: ClassVar[tuple[str, ...]]
    #: Tensors that a call brings by name and the kernel writes to.
    also_written: ClassVar[tuple[str, ...]] = ()
    #: Name of the output among the parameters of the emitted `arguments` and `launch`.
    output_name: ClassVar[str]
    problem_type: type[P]
    #: Parameters that pay or do not from size to size: how full the last round of tiles is, no class of sizes tells.
    by_size: ClassVar[tuple[str, ...]] = ()
    #: Registers that a kernel may keep in memory, in bytes a thread; more is not worth timing.
    allowed_spill_bytes: ClassVar[int] = 0

    def arguments(
        self, module: ModuleType, inputs: Tensors, output: torch.Tensor, *, num_sms: int, **options: Any
    ) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        """Grid and kernel arguments of one call, made by the emitted module itself: no second copy can drift."""
        tensors = {**inputs, self.output_name: output}
        grid, args = module.arguments(**tensors, num_sms=num_sms, **options)
        return grid, args

    @abstractmethod
    def problem(self, shape: P | Sequence[int] | Mapping[str, Any], **options: Any) -> P:
        """The Problem that a shape and options mean.

        Raises:
            InvalidProblemError: naming the argument, its value and what is allowed.
        """

    @abstractmethod
    def variables(self, problem: P) -> dict[str, Value]:
        """Names that search-space constraints may use beside a config's parameters."""

    @abstractmethod
    def resources(self, problem: P, config: Config) -> Resources:
        """Shared memory, barriers, threads and accumulator registers of one CTA."""

    @abstractmethod
    def template_context(self, problem: P, config: Config) -> dict[str, Any]:
        """Everything the template needs that Python can settle before rendering."""

    @abstractmethod
    def small_cases(self, problem: P, config: Config) -> Sequence[Case[P]]:
        """Problems of a few tiles that take the config's kernel through its corners.

        They differ from `problem` in size alone, and keep what of its sizes the emitted code depends on.
        """

    @abstractmethod
    def flops(self, problem: P) -> float:
        """Floating-point operations of one call."""

    @abstractmethod
    def bytes_moved(self, problem: P) -> float:
        """Bytes of one call if every operand crosses device memory once."""

    @abstractmethod
    def predict_us(self, problem: P, config: Config, gpu: Any) -> float:
        """Analytic time of a config on a GPU, in microseconds: good for ranking, never stored as measured."""

    def twins(self, problem: P) -> Sequence[P]:
        """Problems that a call of this one may be as well: what tells them apart, only the device knows.

        One row serves them all, so a winner has to be fast on each.
        """
        return ()

    @abstractmethod
    def inputs(self, problem: P, device: torch.device | str, seed: int) -> Tensors:
        """Fresh random inputs (meta tensors for device `meta`), without the output."""

    def call_defaults(self, problem: P) -> dict[str, Any]:
        """What a call may leave out of the emitted `arguments`, since the problem says it; `inputs` has it too."""
        return {}

    @abstractmethod
    def output_like(self, problem: P) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the result."""

    def output(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """An uninitialised output tensor on the inputs' device."""
        shape, dtype = self.output_like(problem)
        return inputs[self.inputs_in_order[0]].new_empty(shape, dtype=dtype)

    @abstractmethod
    def reference(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """The result in float64, before rounding to the output dtype."""

    @abstractmethod
    def eager(self, problem: P, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """The peer: the same operation through torch, written to `out` where torch can."""

    def timed_peer(self, problem: P, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """What the peer's time is taken of: `eager`, unless that asks the host, which a CUDA graph cannot capture."""
        return self.eager(problem, inputs, out)

    def other_libraries(self, problem: P) -> Mapping[str, Callable[[Tensors, torch.Tensor], torch.Tensor]]:
        """Other implementations that are installed and take the problem, by name: of inputs and room for the output."""
        return {}

    def side_outputs(self, problem: P, inputs: Tensors) -> dict[str, torch.Tensor]:
        """What the kernel writes into tensors that the call brings, in float64, by the tensors' names."""
        return {}

    def why_side_output_wrong(self, problem: P, inputs: Tensors, expected: dict[str, torch.Tensor]) -> str | None:
        """Why one of them is wrong after a call, or None."""
        for name, reference in expected.items():
            reason = accuracy.why_far(inputs[name], reference, SIDE_TOLERANCE)
            if reason:
                return f"{name}: {reason}"
        return None

    def peer_result(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """What the peer would give on a GPU; on a CPU, where `eager` may be more exact, rounded as tensor cores do."""
        return self.eager(problem, inputs)

    @abstractmethod
    def check_call(self, problem: P, tensors: Tensors) -> str | None:
        """Why these inputs are not the problem's (shape, dtype, a missing operand), or None if they are."""

    @abstractmethod
    def launchable(self, problem: P, config: Config, tensors: Tensors, out: torch.Tensor) -> str | None:
        """Why these very tensors cannot go through the config's template (strides, alignment), or None if they can."""


def normal_tensors(device: torch.device | str, seed: int) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """A source of tensors from a normal distribution; on the `meta` device they have no contents."""
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
    """Why a call's tensors are not those of these names, shapes and dtypes, or None; there may be others beside."""
    for name, shape in shapes.items():
        tensor, dtype = tensors.get(name), dtypes[name]
        if tensor is None:
            return f"{name} is missing"
        if tuple(tensor.shape) != shape or tensor.dtype != (torch_dtype(dtype) if isinstance(dtype, str) else dtype):
            found = f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
            return f"{name} has {found}; the kernel is for {shape} and {dtype}"
    return None
