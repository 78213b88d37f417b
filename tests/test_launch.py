"""Binaries and the end of the process; launches themselves are in tests/gpu."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Loads a binary as a launcher does, on no GPU: the driver prints what Triton asks of it.
PROGRAM = """
import os
from types import SimpleNamespace
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from tlxgen import launch, plans

class Compiled(CompiledKernel):
    def __init__(self):
        self.name, self.hash, self.metadata_group, self.function = "kernel", "", {}, 1
        self._dispatcher = self._dispatch_arg_indices = None
        self.src = SimpleNamespace(fn=SimpleNamespace(arg_names=[]))
    def _init_handles(self):
        self.module = 1

driver.set_active(SimpleNamespace(utils=SimpleNamespace(unload_module=lambda _: os.write(1, b"unloaded"))))
launch.compile_kernel = lambda *_: Compiled()
plans.LAUNCHER = launch.Launcher(None, [], (9, 0))
"""


@pytest.mark.parametrize(
    ("then", "printed"), [("", ""), ("del plans.LAUNCHER", "unloaded")], ids=["at the end", "when it is dropped"]
)
def test_a_binary_is_unloaded_when_it_is_dropped_and_left_alone_at_the_end(then: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + then], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
