"""Cases of the simulator's tests: a kernel written by hand with its inputs and result, and defects planted in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tlxgen.simulator.machine.machine import POLICIES, Limits, Machine, Policy
from tlxgen.simulator.program import Program, load

SCHEDULES: list[tuple[Policy, int]] = [(policy, seed) for policy in POLICIES for seed in range(3)]

HEAD = "import triton\nimport triton.language as tl\nimport triton.language.extra.tlx as tlx\n"
CLUSTER = {"ctas_per_cga": (2, 1, 1)}
ROWS, COLUMNS = 16, 64  # of most tiles

PUT = """
@triton.jit
def put(out, row, values, N: tl.constexpr):
    places = (row + tl.arange(0, values.shape[0]))[:, None] * N + tl.arange(0, values.shape[1])[None, :]
    tl.store(out + places, values)  # put
"""


@functools.cache
def program(text: str) -> Program:
    return load("kernel.py", HEAD + text)


def simulate(
    text: str,
    args: Sequence[Any],
    grid: Sequence[int] = (1,),
    *,
    schedule: tuple[Policy, int] = ("random", 0),
    limits: Limits | None = None,
    **options: Any,
) -> Machine:
    policy, seed = schedule
    machine = Machine(seed=seed, policy=policy, limits=limits or Limits())
    program(text)["kernel"].launch(machine, grid, args, options)
    return machine


@dataclass(frozen=True)
class Case:
    """A kernel with its inputs; the output is the last argument, as a pointer or as `into` makes it."""

    text: str
    inputs: Callable[[], Sequence[Any]] = tuple
    output: tuple[int, ...] = (ROWS, COLUMNS)
    expected: Callable[..., torch.Tensor] | None = None  #: result for the inputs
    grid: tuple[int, ...] = (1,)
    into: Callable[[torch.Tensor], Any] = lambda out: out
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, schedule: tuple[Policy, int] = ("random", 0)) -> tuple[Machine, torch.Tensor, Sequence[Any]]:
        inputs, out = self.inputs(), torch.zeros(self.output)
        args = [*inputs, self.into(out)]
        machine = simulate(self.text, args, self.grid, schedule=schedule, **self.constants, **self.options)
        return machine, out, inputs

    def check(self) -> None:
        """Every schedule gives the exact result and no finding."""
        for schedule in SCHEDULES:
            machine, out, inputs = self.run(schedule)
            assert not machine.findings, (schedule, [str(finding) for finding in machine.findings])
            assert self.expected is not None
            values = (getattr(value, "base", value) for value in inputs)
            torch.testing.assert_close(out, self.expected(*values), rtol=0, atol=0, equal_nan=True)

    def but(self, old: str, new: str = "pass") -> Case:
        """The case with a text replaced that occurs once."""
        assert self.text.count(old) == 1, f"{old!r} occurs {self.text.count(old)} times"
        return replace(self, text=self.text.replace(old, new))

    def instead(self, marker: str, statement: str) -> Case:
        """The case with another statement in a marked line."""
        lines = self.text.splitlines(keepends=True)
        index = self.line(marker) - 1 - HEAD.count("\n")
        lines[index] = f"{lines[index][: -len(lines[index].lstrip())]}{statement}  # {marker}\n"
        return replace(self, text="".join(lines))

    def without(self, marker: str) -> Case:
        """The case without the statement of a marked line."""
        return self.instead(marker, "pass")

    def also(self, **changes: Any) -> Case:
        """The case with other constants."""
        return replace(self, constants=self.constants | changes)

    def line(self, marker: str) -> int:
        """The line with a comment `# marker` at its end."""
        lines = [i for i, line in enumerate((HEAD + self.text).splitlines(), 1) if line.endswith(f"# {marker}")]
        assert len(lines) == 1, f"{len(lines)} lines are marked {marker!r}"
        return lines[0]

    def shows(self, kinds: str, *at: str, role: str = "", saying: str = "") -> Defect:
        """The defect of this case; see `Defect`."""
        return Defect(self, kinds, at, role, saying)


@dataclass(frozen=True)
class Defect:
    """A wrong kernel, and the finding that every schedule must give.

    Attributes:
        kinds: of the finding, one of these, separated by spaces.
        at: marked lines, each of which is one of the finding's two places.
        role: end of the name of the finding's role.
        saying: a part of the message.
    """

    case: Case
    kinds: str
    at: tuple[str, ...] = ()
    role: str = ""
    saying: str = ""

    def check(self) -> list[str]:
        """The messages of the findings, one of each schedule."""
        messages = []
        lines = {self.case.line(marker) for marker in self.at}
        for schedule in SCHEDULES:
            findings = self.case.run(schedule)[0].findings
            right = [
                finding.message
                for finding in findings
                if finding.kind in self.kinds.split()
                and lines <= {finding.place.line, finding.other.line if finding.other else 0}
                and finding.place.role.endswith(self.role)
                and self.saying in finding.message
            ]
            assert right, f"{schedule}: no {self.kinds} at {self.at} among {[str(f) for f in findings]}"
            messages.append(right[0])
        return messages


def each(table: Mapping[str, Case | Defect]) -> pytest.MarkDecorator:
    """Parametrizes a test by the named cases or defects."""
    return pytest.mark.parametrize("case", table.values(), ids=table)


def boxes(tensor: torch.Tensor, *sides: int, padding: str = "zero") -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(sides), padding)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def zeros(*sizes: int) -> Callable[[], list[torch.Tensor]]:
    """Inputs that are counters."""
    return lambda: [torch.zeros(size, dtype=torch.int32) for size in sizes]


def protocol(one: str, other: str, barriers: str = "a = tlx.alloc_barriers(1)\n    b = tlx.alloc_barriers(1)") -> Case:
    """Two roles that only signal each other, and mark their ends in the output."""
    first, second = ["\n".join(" " * 12 + line for line in body.splitlines()) for body in (one, other)]
    text = f"""
@triton.jit
def kernel(out):
    {barriers}
    tile = tlx.local_alloc((64,), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
{first}
            tl.store(out, 1.0)
        with tlx.async_task(num_warps=4):
{second}
            tl.store(out + 1, 1.0)
"""
    return Case(text, output=(2,), expected=lambda: torch.ones(2))
