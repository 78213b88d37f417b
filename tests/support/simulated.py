"""One launch of an emitted kernel in the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tlxgen.codegen.emit import KernelSource
from tlxgen.ops.base import Operator
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.program import load

if TYPE_CHECKING:
    import torch


def launch(
    operator: Operator[Any],
    source: KernelSource,
    inputs: dict[str, Any],
    out: torch.Tensor,
    *,
    num_sms: int,
    seed: int = 1,
) -> tuple[Any, ...]:
    """Launches a kernel, which must give no finding; returns its arguments."""
    program = load(source.file_name, source.text)
    module: Any = SimpleNamespace(arguments=program["arguments"])
    grid, args = operator.arguments(module, inputs, out, num_sms=num_sms)
    machine = Machine(seed=seed)
    program["kernel"].launch(machine, grid, args, program["OPTIONS"])
    assert not machine.findings, machine.findings[0]
    return args
