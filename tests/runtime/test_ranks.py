"""Several processes of one job: they choose one kernel, and compile it side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CHOOSE = """
import sys, time
time.sleep(float(sys.argv[1]))
from tlxgen import devices, ops
from tlxgen.runtime.selection import select
for operator, shape in (("gemm", (3000, 4096, 4096)), ("attention", (2, 32, 3000, 128)), ("gemm", (4096, 4096, 4096))):
    choice = select(ops.get(operator).problem(shape), devices.target("h200"))
    print(choice.origin, choice.config.short)
"""

COMPILE = """
from tlxgen import devices, ops
from tlxgen.space.candidates import default_config
from tlxgen.codegen.compile import compile_candidate
from tlxgen.codegen.emit import emit
gemm = ops.get("gemm")
problem = gemm.problem((4096, 4096, 4096))
binary = compile_candidate(emit(gemm, problem, default_config(problem, devices.target("h200"))), (9, 0))
print(binary.facts.registers)
"""


def processes(code: str, folders: list[Path], database: Path, *arguments: list[str]) -> list[str]:
    """What each process prints; one for each Triton cache, all started at once."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TLXGEN_CACHE": str(database),
        "XDG_CACHE_HOME": str(database.parent),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, *more],
            env={**environment, "TRITON_CACHE_DIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for folder, more in zip(folders, arguments or [[]] * len(folders), strict=True)
    ]
    found = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), [errors for _, errors in found]
    return [output for output, _ in found]


def test_ranks_choose_the_same_kernels_though_one_is_late(tmp_path: Path) -> None:
    """A collective of ranks with other kernels may hang; the choice is of rows and a model, never of a clock."""
    folders = [tmp_path / "triton"] * 3
    outputs = processes(CHOOSE, folders, tmp_path / "tuned.db", ["0"], ["0"], ["1.5"])
    assert len(set(outputs)) == 1
    assert len(outputs[0].splitlines()) == 3


def test_ranks_compile_one_kernel_into_one_cache(tmp_path: Path) -> None:
    """At the same time, from nothing, some of them through a link."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "triton")
    folders = [tmp_path / "triton", tmp_path / "link"] * 2
    assert len(set(processes(COMPILE, folders, tmp_path / "tuned.db"))) == 1
