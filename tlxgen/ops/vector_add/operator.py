"""out = x + y: the smallest operator, and the worked example of how one is added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tlxgen.config import Config
from tlxgen.devices import Gpu, Hopper
from tlxgen.ops.base import Case, Operator, Resources, Tensors, why_not_contiguous
from tlxgen.ops.vector_add import time_model
from tlxgen.ops.vector_add.problem import VectorAddProblem
from tlxgen.problem import ITEM_BYTES, torch_dtype

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
    examples = ({"n": 2**24}, {"n": 12345, "dtype": "fp32"})

    def resources(self, problem: VectorAddProblem, config: Config) -> Resources:
        """See `Operator.resources`: the ring and its barriers; plain Triton needs no shared memory."""
        if config.template == "vector_add_vanilla":
            return Resources(0, 0, 32 * int(config.params["num_warps"]), 0)
        block, stages = int(config.params["block"]), int(config.params["num_stages"])
        ring = 2 * stages * block * ITEM_BYTES[problem.dtype]
        return Resources(ring + 16 * stages + 1024, 2 * stages, 2 * Hopper.WARP_GROUP_THREADS, 0)

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

    def operands(self, problem: VectorAddProblem) -> dict[str, tuple[tuple[int, ...], str]]:
        """See `Operator.operands`."""
        return dict.fromkeys(("x", "y"), ((problem.n,), problem.dtype))

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

    def launchable(self, problem: VectorAddProblem, config: Config, tensors: Tensors, out: torch.Tensor) -> str | None:
        """See `Operator.launchable`."""
        alignment = Hopper.TMA_ALIGNMENT if config.template == "vector_add_tma" else 1
        return why_not_contiguous({**tensors, "out": out}, alignment)


OPERATOR = VectorAdd()
