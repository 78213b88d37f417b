"""What a launch hands to Triton's launchers, what of a process it leaves alone, and the end of the process.

On a driver that computes nothing; launches that compute are in tests/gpu.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from triton import knobs

from tests.support import stub_cuda, stub_hip
from tlxgen.runtime import launch

ROOT = Path(__file__).parents[2]

#: A folder with an upstream triton, as `pip install --no-deps --target FOLDER triton==3.6.0` makes it.
UPSTREAM = os.environ.get("TLXGEN_UPSTREAM_TRITON")

#: Loads a binary as a launcher does, on no GPU: the driver prints what Triton asks of it.
PROGRAM = """
import os
from types import SimpleNamespace
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from tlxgen.runtime import launch, plans

class Compiled(CompiledKernel):
    def __init__(self):
        self.name, self.hash, self.metadata_group, self.function, self.asm = "kernel", "", {}, 1, {}
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


class Upstreams:
    """A compiled kernel of three arguments and two constants, with no more to it than upstream's has."""

    function = 0xF0
    packed_metadata = "packed"
    src = SimpleNamespace(fn=SimpleNamespace(arg_names=["x", "y", "n", "BLOCK", "STAGES"]))
    name = "kernel"
    asm: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.module: Any = None
        self.launched: list[tuple[Any, ...]] = []

    def _init_handles(self) -> None:
        self.module = "loaded"

    def run(self, *given: Any) -> None:
        assert self.module == "loaded"
        self.launched.append(given)


class Forks(Upstreams):
    """The same by fbtriton, whose description leaves out the second argument."""

    asm: ClassVar[dict[str, str]] = {"launch_metadata": json.dumps({"args": [{"index": 0}, {"index": 2}]})}


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a dispatcher, made as fbtriton's, is given."""
    from triton.backends.nvidia import triton_dispatcher_factory

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        triton_dispatcher_factory,
        "make_triton_dispatcher",
        lambda schema, function: lambda *given: calls.append((function, *given)),
    )
    return calls


def launcher(compiled: Any, monkeypatch: pytest.MonkeyPatch, args: Any = ("x", "y", 7)) -> launch.Launcher:
    monkeypatch.setattr(launch, "compile_kernel", lambda *_: compiled)
    return launch.Launcher(SimpleNamespace(), args, (8, 0))  # type: ignore[arg-type]


class TestWhatALauncherIsGiven:
    def test_upstreams_ordinary_launcher_gets_hooks_and_room_for_constants(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiled = Upstreams()
        made = launcher(compiled, monkeypatch)
        made((1, 2, 3), 0x57, ("x", "y", 7))
        hooks, constants = (None, None, None), (None, None)
        assert compiled.launched == [(1, 2, 3, 0x57, 0xF0, "packed", *hooks, "x", "y", 7, *constants)]
        assert not made.slim

    def test_fbtritons_dispatcher_gets_the_arguments_that_it_describes(
        self, monkeypatch: pytest.MonkeyPatch, dispatched: list[tuple[Any, ...]]
    ) -> None:
        compiled = Forks()
        made = launcher(compiled, monkeypatch)
        made((1, 2, 3), 0x57, ("x", "y", 7))
        assert (dispatched, compiled.launched) == ([(0xF0, 1, 2, 3, 0x57, "x", 7)], [])
        assert made.slim

    def test_descriptors_that_round_go_to_the_ordinary_launcher(
        self, monkeypatch: pytest.MonkeyPatch, dispatched: list[tuple[Any, ...]]
    ) -> None:
        rounding = launch.SlimDescriptor("x", (1,), (1,), (1,), round_f32_to_tf32=True)
        compiled = Forks()
        made = launcher(compiled, monkeypatch, (rounding, "y", 7))
        made((1, 1, 1), 0, (rounding, "y", 7))
        assert (dispatched, len(compiled.launched), made.slim) == ([], 1, False)

    def test_without_the_dispatcher_that_was_promised_the_ordinary_launcher_serves_and_it_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from triton.backends.nvidia import triton_dispatcher_factory

        def refuse(*_: Any) -> None:
            raise RuntimeError("no such type")

        monkeypatch.setattr(triton_dispatcher_factory, "make_triton_dispatcher", refuse)
        with pytest.warns(UserWarning, match="kernel: launches take longer.*no such type"):
            assert not launcher(Forks(), monkeypatch).slim


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, which Triton's launchers need as well")
class TestTheDriver:
    """Triton's own launchers as they are, down to `cuLaunchKernelEx`."""

    def test_the_dispatchers_launch(self, tmp_path: Path) -> None:
        assert reached("gemm", tmp_path)["dispatched"]

    def test_the_ordinary_launchers_launch(self, tmp_path: Path) -> None:
        assert not reached("gemm", tmp_path, "ordinary")["dispatched"]

    @pytest.mark.skipif(UPSTREAM is None, reason="TLXGEN_UPSTREAM_TRITON names no folder with an upstream triton")
    @pytest.mark.parametrize("operator", stub_cuda.PROBLEMS)
    def test_upstreams_launch_of_plain_triton(self, operator: str, tmp_path: Path) -> None:
        assert not reached(operator, tmp_path, triton=UPSTREAM)["dispatched"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, which Triton's launchers need as well")
@pytest.mark.parametrize("triton", [None, *([UPSTREAM] if UPSTREAM else [])], ids=lambda path: path or "installed")
@pytest.mark.parametrize(
    ("operator", "architecture"), [*((operator, "gfx942") for operator in stub_cuda.PROBLEMS), ("gemm", "gfx950")]
)
def test_amds_driver_gets_plain_triton_by_tritons_own_launcher(
    operator: str, architecture: str, triton: str | None, tmp_path: Path
) -> None:
    """Down to `hipModuleLaunchKernel`: grid, threads in warps of 64, shared memory and each argument."""
    launched, found = printed("stub_hip.py", tmp_path, operator, str(tmp_path), architecture, triton=triton)
    _, x, y, z, threads, shared, stream, function, *params = launched
    assert [int(x), int(y), int(z)] == found["grid"]
    assert (int(threads), int(shared)) == (found["threads"], found["shared"])
    assert (int(stream, 16), int(function, 16)) == (stub_cuda.STREAM, stub_hip.FUNCTION)
    assert not found["dispatched"]
    check_parameters(params, found)


def reached(operator: str, folder: Path, *words: str, triton: str | None = None) -> dict[str, Any]:
    """Launches in a process of its own, and holds what reached the driver against what was given."""
    launched, found = printed("stub_cuda.py", folder, operator, str(folder), *words, triton=triton)
    _, x, y, z, stream, function, *params = launched
    assert [int(x), int(y), int(z)] == found["grid"]
    assert (int(stream, 16), int(function, 16)) == (stub_cuda.STREAM, stub_cuda.FUNCTION)
    check_parameters(params, found)
    return found


def printed(script: str, folder: Path, *words: str, triton: str | None = None) -> tuple[list[str], dict[str, Any]]:
    """What a driver that computes nothing was given, in words, and what the script says that it gave."""
    path = os.pathsep.join([*([triton] if triton else []), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / script), *words],
        env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "triton")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    launched, told = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(told)
    return launched.split(), found


def check_parameters(params: list[str], found: dict[str, Any]) -> None:
    """Whether the kernel's parameters are the arguments that were given."""
    values = [stub_cuda.value(kind, raw) for (kind, _), raw in zip(found["given"], params, strict=True)]
    assert values == pytest.approx([given for _, given in found["given"]], rel=1e-6, abs=0)


class TestTheUsersSetting:
    @pytest.mark.parametrize("before", [None, "0", "1"])
    def test_a_launch_leaves_environment_and_knob_as_they_were(
        self, before: str | None, monkeypatch: pytest.MonkeyPatch, dispatched: list[tuple[Any, ...]]
    ) -> None:
        monkeypatch.delenv("TRITON_USE_C_DISPATCHER", raising=False)
        if before is not None:
            monkeypatch.setenv("TRITON_USE_C_DISPATCHER", before)
        environment, own = dict(os.environ), dict(vars(knobs.nvidia))
        launcher(Forks(), monkeypatch)((1, 1, 1), 0, ("x", "y", 7))
        assert len(dispatched) == 1
        assert (dict(os.environ), vars(knobs.nvidia)) == (environment, own)
        monkeypatch.setenv("TRITON_USE_C_DISPATCHER", "1")  # what the user says later holds
        assert knobs.nvidia.use_triton_dispatcher

    def test_it_is_the_users_while_a_binary_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch, dispatched: list[tuple[Any, ...]]
    ) -> None:
        seen: list[Any] = []

        class Asking(Forks):
            def _init_handles(self) -> None:
                super()._init_handles()
                seen.append((knobs.nvidia.use_triton_dispatcher, os.environ.get("TRITON_USE_C_DISPATCHER")))

        monkeypatch.delenv("TRITON_USE_C_DISPATCHER", raising=False)
        assert launcher(Asking(), monkeypatch).slim
        assert seen == [(False, None)]


def test_the_end_may_come_while_other_threads_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compile_kernel", lambda *_: Upstreams())
    monkeypatch.setattr(launch, "_LAUNCHERS", type(launch._LAUNCHERS)())
    kept: list[launch.Launcher] = []
    done = threading.Event()

    def load() -> None:
        while not done.is_set() and len(kept) < 20_000:
            kept.append(launch.Launcher(SimpleNamespace(), ("x", "y", 7), (8, 0)))  # type: ignore[arg-type]

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            launch._leave_loaded()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    launch._leave_loaded()
    assert all(made.compiled.module is None for made in kept)
