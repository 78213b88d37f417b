"""out = x + y: the smallest operator, and the worked example of how one is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tlxgen.config import Config, Value
from tlxgen.devices import Gpu, Hopper
from tlxgen.ops.base import Case, Operator, Resources, Tensors, normal_tensors, why_other_tensors
from tlxgen.ops.vector_add import time_model
from tlxgen.ops.vector_add.problem import VectorAddProblem
from tlxgen.problem import ITEM_BYTES, parse_problem, torch_dtype

if TYPE_CHECKING:
    import torch


class VectorAdd(Operator[VectorAddProblem]):
    """The vector_add operator."""

    name = "vector_add"
    templates = ("vector_add_tma", "vector_add_vanilla")
    peer = "torch"
    inputs_in_order = ("x", "y")
    output_name = "out"
    problem_type = VectorAddProblem

    def problem(self, shape: VectorAddProblem | Sequence[int] | Mapping[str, Any], **options: Any) -> VectorAddProblem:
        """See `Operator.problem`."""
        return parse_problem(VectorAddProblem, shape, options)

    def variables(self, problem: VectorAddProblem) -> dict[str, Value]:
        """See `Operator.variables`."""
        return {**problem.model_dump(), "item_bytes": ITEM_BYTES[problem.dtype]}

    def resources(self, problem: VectorAddProblem, config: Config) -> Resources:
        """See `Operator.resources`: the ring and its barriers; plain Triton needs no shared memory."""
        if config.template == "vector_add_vanilla":
            return Resources(0, 0, 32 * int(config.params["num_warps"]), 0)
        block, stages = int(config.params["block"]), int(config.params["num_stages"])
        ring = 2 * stages * block * ITEM_BYTES[problem.dtype]
        return Resources(ring + 16 * stages + 1024, 2 * stages, 2 * Hopper.WARP_GROUP_THREADS, 0)

    def template_context(self, problem: VectorAddProblem, config: Config) -> dict[str, Any]:
        """See `Operator.template_context`."""
        name = str(torch_dtype(problem.dtype)).removeprefix("torch.")
        return {
            "torch_dtype": name,
            "tl_dtype": f"tl.{name}",
            "item_bytes": ITEM_BYTES[problem.dtype],
            "hopper": config.template != "vector_add_vanilla",
        }

    def small_cases(self, problem: VectorAddProblem, config: Config) -> Sequence[Case[VectorAddProblem]]:
        """Less than a block, whole blocks, fewer and more than stages, and a tail."""
        p = config.params
        block, stages, ctas = (int(p.get(name, 1)) for name in ("block", "num_stages", "ctas_per_sm"))
        several = (2 * stages + 1) * ctas  # blocks: every ring wraps twice
        sizes = [(block - 1, 1), (block, 1), (several * block + 5, 1), ((2 * several - 1) * block, 2)]
        return [Case(problem.model_copy(update={"n": n}), num_sms) for n, num_sms in sizes]

    def flops(self, problem: VectorAddProblem) -> float:
        """One addition an element."""
        return float(problem.n)

    def bytes_moved(self, problem: VectorAddProblem) -> float:
        """Two reads and a write."""
        return 3.0 * problem.n * ITEM_BYTES[problem.dtype]

    def predict_us(self, problem: VectorAddProblem, config: Config, gpu: Gpu) -> float:
        """See `tlxgen.ops.vector_add.time_model.stream_us`."""
        return time_model.stream_us(self.bytes_moved(problem), self.resources(problem, config), config, gpu)

    def inputs(self, problem: VectorAddProblem, device: torch.device | str, seed: int) -> Tensors:
        """Two vectors from a normal distribution."""
        normal, dtype = normal_tensors(device, seed), torch_dtype(problem.dtype)
        return {name: normal((problem.n,), dtype) for name in ("x", "y")}

    def output_like(self, problem: VectorAddProblem) -> tuple[tuple[int, ...], torch.dtype]:
        """See `Operator.output_like`."""
        return (problem.n,), torch_dtype(problem.dtype)

    def reference(self, problem: VectorAddProblem, inputs: Tensors) -> torch.Tensor:
        """The sum in float64."""
        return inputs["x"].double() + inputs["y"].double()

    def eager(self, problem: VectorAddProblem, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """`torch.add`."""
        import torch

        return torch.add(inputs["x"], inputs["y"], out=out)

    def check_call(self, problem: VectorAddProblem, tensors: Tensors) -> str | None:
        """See `Operator.check_call`."""
        shapes = dict.fromkeys(("x", "y"), (problem.n,))
        reason = why_other_tensors(tensors, shapes, dict.fromkeys(shapes, problem.dtype))
        if reason:
            return reason
        surplus = sorted(set(tensors) - {"x", "y"})
        return f"{surplus[0]} is not a parameter" if surplus else None

    def launchable(self, problem: VectorAddProblem, config: Config, tensors: Tensors, out: torch.Tensor) -> str | None:
        """See `Operator.launchable`."""
        for name, tensor in (*tensors.items(), ("out", out)):
            if not tensor.is_contiguous():
                return f"{name} is not contiguous"
            if config.template == "vector_add_tma" and tensor.data_ptr() % Hopper.TMA_ALIGNMENT:
                return f"{name} starts at an address that 16 does not divide"
        return None


OPERATOR = VectorAdd()
