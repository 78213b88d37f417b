"""The machine itself: second runs, failures in copies, findings in helpers, and what a run leaves behind."""

from __future__ import annotations

import gc
from typing import Any

import greenlet
import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tlxgen.errors import InvalidProblemError
from tlxgen.simulator.findings import Finding
from tlxgen.simulator.language.descriptors import Descriptor
from tlxgen.simulator.machine.machine import POLICIES, Machine, Policy
from tlxgen.simulator.program import Program, load

HEAD = "import triton\nimport triton.language as tl\nimport triton.language.extra.tlx as tlx\n"

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


def run(text: str, *args: Any, policy: Policy = "random") -> list[Finding]:
    machine = Machine(policy=policy)
    load("kernel.py", HEAD + text)["kernel"].launch(machine, (1,), args, {})
    return machine.findings


def test_a_machine_runs_once() -> None:
    program, machine = load("kernel.py", HEAD + FILL), Machine()
    program["kernel"].launch(machine, (1,), (torch.zeros(8), 1.0), {})
    with pytest.raises(RuntimeError, match="one launch"):
        program["kernel"].launch(machine, (1,), (torch.zeros(8), 1.0), {})


def test_a_program_forgets_the_machine_that_it_ran_on() -> None:
    program = load("kernel.py", HEAD + FILL)
    before = dict(program.namespace)
    for value in (1.0, 2.0):
        out = torch.zeros(8)
        program["kernel"].launch(Machine(), (1,), (out, value), {})
        assert out.tolist() == [value] * 8
        assert program.namespace.keys() - {"__builtins__"} == before.keys() - {"__builtins__"}
        assert all(program.namespace[name] is value for name, value in before.items())
    assert program["tl"] is tl


def test_two_programs_of_one_path_do_not_mix() -> None:
    programs: list[Program] = [load("kernel.py", HEAD + FILL.replace("i, value", f"i, value + {n}")) for n in (10, 20)]
    for program, expected in zip(programs, (11, 21), strict=True):
        out = torch.zeros(8)
        program["kernel"].launch(Machine(), (1,), (out, 1.0), {})
        assert out.tolist() == [expected] * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_in_a_copy_is_a_finding_at_the_line_that_started_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such box")

    monkeypatch.setattr(Descriptor, "write", fail)
    out = torch.zeros(16, 64)
    findings = run(STORE, TensorDescriptor(out, [16, 64], [64, 1], [16, 64]), policy=policy)
    assert [(f.kind, f.message) for f in findings] == [("error", "OSError: no such box")]
    assert findings[0].place.role == "kernel"
    assert findings[0].place.line > 0


def test_no_greenlet_outlives_a_run() -> None:
    assert [finding.kind for finding in run(STUCK, torch.zeros(1))] == ["deadlock"]
    gc.collect()
    under_way = [o for o in gc.get_objects() if type(o) is greenlet.greenlet and o]
    assert not [one for one in under_way if one.parent is greenlet.getcurrent()]


def test_a_finding_in_a_helper_names_the_lines_that_call_it() -> None:
    (finding,) = run(HELPERS, torch.zeros(8))
    lines = (HEAD + HELPERS).splitlines()
    inner, outer = lines.index("    put(out, 8)") + 1, lines.index("            put_last(out)") + 1
    assert finding.place.line == lines.index("    tl.store(out + place, 1.0)") + 1
    assert finding.message.endswith(f"0 bytes past the end of out (called from line {inner}, from line {outer})")


def test_a_recursion_without_end_is_a_finding() -> None:
    text = "@triton.jit\ndef deep(n):\n    deep(n)\n\n@triton.jit\ndef kernel(n):\n    deep(n)\n"
    (finding,) = run(text, 1)
    assert finding.kind == "error"
    assert "RecursionError" in finding.message
    assert finding.message.count("from line") <= 2


def test_a_name_that_a_file_lacks_is_explained_by_the_statement_that_fails() -> None:
    program = load("kernel.py", "import no_such_module\n")
    with pytest.raises(InvalidProblemError, match=r"no 'kernel'.*line 1: ModuleNotFoundError"):
        program["kernel"]
