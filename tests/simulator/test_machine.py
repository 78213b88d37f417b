"""Runs of a machine: second runs, limits, errors in copies, lines of findings, inline assembly, leftovers."""

from __future__ import annotations

import gc
from typing import Any

import greenlet
import numpy as np
import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.simulator.cases import HEAD, SCHEDULES, Case, simulate, zeros
from tlxgen.errors import InvalidProblemError
from tlxgen.simulator.language import assembly
from tlxgen.simulator.language.descriptors import Descriptor
from tlxgen.simulator.machine.machine import POLICIES, Limits, Machine, Policy
from tlxgen.simulator.program import Program, load

FILL = """
@triton.jit
def kernel(out, value):
    i = 0
    while i < 8:
        tl.store(out + i, value)
        i += 1
"""

STORE = """
@triton.jit
def kernel(out):
    tile = tlx.local_alloc((16, 64), tl.float32, 1)
    tlx.local_store(tile[0], tl.zeros((16, 64), tl.float32))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(out, tile[0], [0, 0])
    for _ in range(500):
        tlx.cluster_barrier()
    tlx.async_descriptor_store_wait(0)
"""

STUCK = """
@triton.jit
def kernel(out):
    done = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(done[0], 0)
        with tlx.async_task(num_warps=4, replicate=2):
            tlx.barrier_wait(done[1], 0)
"""

HELPERS = """
@triton.jit
def put(out, place):
    tl.store(out + place, 1.0)


@triton.jit
def put_last(out):
    put(out, 8)


@triton.jit
def kernel(out):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            put_last(out)
"""


ENDLESS = "@triton.jit\ndef kernel(count, out):\n    while tl.atomic_add(count, 0) < 1:  # spin\n        pass\n"
IDLE = "@triton.jit\ndef kernel(count, out):\n    i = 0\n    while i < 1:  # spin\n        i *= 2\n"

EX2 = "ex2.approx.ftz.f32 $0, $1;"
ASSEMBLY = Case(
    f"""
@triton.jit
def kernel(out):
    x = tl.arange(0, 64).to(tl.float32)
    y = tl.inline_asm_elementwise("{EX2}", "=f,f", [x], tl.float32, is_pure=True, pack=1)  # asm
    tl.store(out + tl.arange(0, 64), y)
""",
    output=(64,),
    expected=lambda: torch.exp2(torch.arange(64.0)),
)


def test_second_run_of_a_machine_is_refused() -> None:
    program, machine = load("kernel.py", HEAD + FILL), Machine()
    program["kernel"].launch(machine, (1,), (torch.zeros(8), 1.0), {})
    with pytest.raises(RuntimeError, match="one launch"):
        program["kernel"].launch(machine, (1,), (torch.zeros(8), 1.0), {})


def test_run_leaves_the_names_of_the_program_unchanged() -> None:
    program = load("kernel.py", HEAD + FILL)
    before = dict(program.namespace)
    for value in (1.0, 2.0):
        out = torch.zeros(8)
        program["kernel"].launch(Machine(), (1,), (out, value), {})
        assert out.tolist() == [value] * 8
        assert program.namespace.keys() - {"__builtins__"} == before.keys() - {"__builtins__"}
        assert all(program.namespace[name] is value for name, value in before.items())
    assert program["tl"] is tl


def test_two_programs_of_one_path_are_independent() -> None:
    programs: list[Program] = [load("kernel.py", HEAD + FILL.replace("i, value", f"i, value + {n}")) for n in (10, 20)]
    for program, expected in zip(programs, (11, 21), strict=True):
        out = torch.zeros(8)
        program["kernel"].launch(Machine(), (1,), (out, 1.0), {})
        assert out.tolist() == [expected] * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_exception_in_a_copy_is_a_finding_at_the_line_that_started_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such box")

    monkeypatch.setattr(Descriptor, "write", fail)
    out = torch.zeros(16, 64)
    findings = simulate(STORE, [TensorDescriptor(out, [16, 64], [64, 1], [16, 64])], schedule=(policy, 0)).findings
    assert [(f.kind, f.message) for f in findings] == [("error", "OSError: no such box")]
    assert findings[0].place.role == "kernel"
    assert findings[0].place.line > 0


def test_run_leaves_no_greenlet() -> None:
    assert [finding.kind for finding in simulate(STUCK, [torch.zeros(1)]).findings] == ["deadlock"]
    gc.collect()
    running = [o for o in gc.get_objects() if type(o) is greenlet.greenlet and o]
    assert not [one for one in running if one.parent is greenlet.getcurrent()]


def test_finding_in_a_helper_names_the_calling_lines() -> None:
    (finding,) = simulate(HELPERS, [torch.zeros(8)]).findings
    lines = (HEAD + HELPERS).splitlines()
    inner, outer = lines.index("    put(out, 8)") + 1, lines.index("            put_last(out)") + 1
    assert finding.place.line == lines.index("    tl.store(out + place, 1.0)") + 1
    assert finding.message.endswith(f"0 bytes past the end of out (called from line {inner}, from line {outer})")


def test_endless_recursion_is_a_finding() -> None:
    text = "@triton.jit\ndef deep(n):\n    deep(n)\n\n@triton.jit\ndef kernel(n):\n    deep(n)\n"
    (finding,) = simulate(text, [1]).findings
    assert finding.kind == "error"
    assert "RecursionError" in finding.message
    assert finding.message.count("from line") <= 2


def test_error_for_a_missing_name_shows_the_statement_that_failed() -> None:
    program = load("kernel.py", "import no_such_module\n")
    with pytest.raises(InvalidProblemError, match=r"no 'kernel'.*line 1: ModuleNotFoundError"):
        program["kernel"]


@pytest.mark.parametrize("text", [ENDLESS, IDLE])
@pytest.mark.parametrize("schedule", SCHEDULES[::3])
def test_step_limit_stops_an_endless_loop(text: str, schedule: tuple[Policy, int]) -> None:
    args = [*zeros(1)(), torch.zeros(1)]
    machine = simulate(text, args, (2,), schedule=schedule, limits=Limits(steps=500))
    assert [finding.kind for finding in machine.findings] == ["limit"]
    assert machine.findings[0].place.line in range(5, 9)
    assert "stopped after 501 steps" in machine.findings[0].message


def test_time_limit_stops_an_endless_loop() -> None:
    machine = simulate(ENDLESS, [*zeros(1)(), torch.zeros(1)], limits=Limits(seconds=0.1))
    assert [finding.kind for finding in machine.findings] == ["limit"]
    assert machine.steps < 1_000_000


def test_assembly_computes_its_registered_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(assembly._MEANINGS, EX2, np.exp2)
    ASSEMBLY.check()


def test_assembly_without_a_meaning_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(assembly._MEANINGS, EX2, raising=False)
    ASSEMBLY.shows("unknown_instruction", "asm", saying=EX2).check()
