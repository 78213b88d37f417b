"""`CompilePool`: sources that are refused, crash or hang a compiler fail by class, and the pool goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tlxgen import ops
from tlxgen.codegen.compile import Binary, _classified, _ptxas_log
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.devices import target
from tlxgen.errors import CompileError
from tlxgen.simulator.verdicts import is_known_safe
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool

VECTOR_ADD = ops.get("vector_add")
PROBLEM = VECTOR_ADD.problem((1 << 20,))
CONFIGS = {config.template: config for config in reversed(candidates(PROBLEM, target("h200")))}
GOOD = emit(VECTOR_ADD, PROBLEM, CONFIGS["vector_add_vanilla"])


def changed(source: KernelSource, old: str, new: str) -> KernelSource:
    assert old in source.text
    return KernelSource(source.operator, source.problem, source.config, source.text.replace(old, new))


def importing(statements: str) -> KernelSource:
    """The good source with statements before its imports."""
    return changed(GOOD, "import torch\n", f"{statements}\nimport torch\n")


WRONG_TYPES = changed(GOOD, "offsets < n", "offsets < x_ptr")
UNKNOWN_NAME = changed(GOOD, "offsets < n", "offsets < unknown_name")
ABORTS = importing("import os\nos.abort()")
EXITS = importing("raise SystemExit(7)")
SLEEPS = importing("import time\ntime.sleep(3600)")


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool((9, 0), workers=1) as pool:
        yield pool


def failure(pool: CompilePool, source: KernelSource) -> CompileError:
    with pytest.raises(CompileError) as caught:
        pool.submit(source).result(120)
    assert "\n" not in str(caught.value)
    return caught.value


def test_good_source_becomes_a_binary_with_facts(pool: CompilePool) -> None:
    binary = pool.submit(GOOD).result(120)
    assert isinstance(binary, Binary)
    assert binary.source == GOOD
    assert binary.facts.registers > 0
    assert binary.facts.hgmma == 0
    assert binary.seconds > 0


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (WRONG_TYPES, "compiler_error", ""),
        (UNKNOWN_NAME, "compiler_error", ""),
        (ABORTS, "compiler_crash", ""),
        (EXITS, "compiler_crash", "exit status 7"),
    ],
    ids=["wrong types", "unknown name", "abort", "exit"],
)
def test_bad_source_fails_by_class(source: KernelSource, kind: str, message: str, pool: CompilePool) -> None:
    error = failure(pool, source)
    assert (error.kind, message in str(error)) == (kind, True)
    assert pool.submit(GOOD).result(120).facts.registers > 0


def test_compiler_that_does_not_end_is_a_timeout() -> None:
    with CompilePool((9, 0), workers=1, timeout=3.0) as pool:
        started = time.monotonic()
        assert failure(pool, SLEEPS).kind == "timeout"
        assert 2.5 < time.monotonic() - started < 10


def test_error_of_ptxas_has_its_class() -> None:
    with pytest.raises(CompileError, match="fatal") as caught:
        _ptxas_log("no PTX at all", (9, 0))
    assert caught.value.kind == "ptxas"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("OutOfResources", "out_of_resources"), ("PTXASError", "ptxas"), ("CompilationError", "compiler_error")],
)
def test_errors_of_triton_are_classed_by_name(name: str, kind: str) -> None:
    error = _classified(type(name, (RuntimeError,), {})("much text\nerror: too many registers\nmore text"))
    assert (error.kind, str(error)) == (kind, f"{name}: error: too many registers")


def test_sources_queued_after_a_crash_are_compiled(pool: CompilePool) -> None:
    futures = [pool.submit(source) for source in (ABORTS, GOOD, WRONG_TYPES, GOOD)]
    errors = [future.exception(120) for future in futures]
    assert [error and getattr(error, "kind", error) for error in errors] == [
        "compiler_crash",
        None,
        "compiler_error",
        None,
    ]


def test_close_ends_running_compilations_at_once() -> None:
    pool = CompilePool((9, 0), workers=1, timeout=600.0)
    running, waiting = pool.submit(SLEEPS), pool.submit(GOOD)
    time.sleep(1.0)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    assert running.done()
    assert waiting.cancelled()


def test_compilers_see_no_gpu(pool: CompilePool) -> None:
    """The GPU belongs to the process that measures."""
    looks = importing('import os\nassert os.environ["CUDA_VISIBLE_DEVICES"] == ""')
    assert pool.submit(looks).result(120).facts.registers > 0


def test_with_simulation_a_deadlock_is_unsafe() -> None:
    good = emit(VECTOR_ADD, PROBLEM, CONFIGS["vector_add_tma"])
    hangs = changed(good, "tlx.barrier_arrive(empty[stage])", "pass")
    with CompilePool((9, 0), workers=1, simulate=True) as pool:
        assert pool.submit(good).result(120).source == good
        error = failure(pool, hangs)
    assert (is_known_safe(good), is_known_safe(hangs)) == (True, False)
    assert error.kind == "unsafe"
    assert "simulator: deadlock" in str(error)
    assert "empty[0]" in str(error)
