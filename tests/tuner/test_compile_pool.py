"""The pool of compilers: a candidate that breaks, crashes or hangs one is a class of failure, and the pool goes on."""

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
CONFIG = next(c for c in candidates(PROBLEM, target("h200")) if c.template == "vector_add_vanilla")
GOOD = emit(VECTOR_ADD, PROBLEM, CONFIG)


def broken(old: str, new: str) -> KernelSource:
    assert old in GOOD.text
    return KernelSource(GOOD.operator, GOOD.problem, GOOD.config, GOOD.text.replace(old, new))


FIRST_IMPORT = "import torch\n"
WRONG_TYPES = broken("offsets < n", "offsets < x_ptr")
UNKNOWN_NAME = broken("offsets < n", "offsets < nobody_knows_this")
ABORTS = broken(FIRST_IMPORT, f"import os\nos.abort()\n{FIRST_IMPORT}")
EXITS = broken(FIRST_IMPORT, f"raise SystemExit(7)\n{FIRST_IMPORT}")
SLEEPS = broken(FIRST_IMPORT, f"import time\ntime.sleep(3600)\n{FIRST_IMPORT}")


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool((9, 0), workers=1) as pool:
        yield pool


def failure(pool: CompilePool, source: KernelSource) -> CompileError:
    with pytest.raises(CompileError) as caught:
        pool.submit(source).result(120)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_good_source_becomes_a_binary_with_its_facts(pool: CompilePool) -> None:
    binary = pool.submit(GOOD).result(120)
    assert isinstance(binary, Binary)
    assert binary.source == GOOD
    assert binary.facts.registers > 0
    assert binary.facts.hgmma == 0
    assert binary.seconds > 0


@pytest.mark.parametrize("source", [WRONG_TYPES, UNKNOWN_NAME], ids=["types", "name"])
def test_what_the_compiler_refuses_is_a_compiler_error(source: KernelSource, pool: CompilePool) -> None:
    error = failure(pool, source)
    assert error.kind == "compiler_error"
    assert pool.submit(GOOD).result(120).facts.registers > 0


def test_a_compiler_that_aborts_is_a_crash(pool: CompilePool) -> None:
    assert failure(pool, ABORTS).kind == "compiler_crash"
    assert pool.submit(GOOD).result(120).facts.registers > 0


def test_a_compiler_that_exits_is_a_crash_too(pool: CompilePool) -> None:
    error = failure(pool, EXITS)
    assert error.kind == "compiler_crash"
    assert "exit status 7" in str(error)


def test_a_compiler_that_does_not_end_is_a_timeout() -> None:
    with CompilePool((9, 0), workers=1, timeout=3.0) as pool:
        started = time.monotonic()
        error = failure(pool, SLEEPS)
        assert error.kind == "timeout"
        assert 2.5 < time.monotonic() - started < 10
    with CompilePool((9, 0), workers=1, timeout=60.0) as pool:
        assert pool.submit(GOOD).result(120).facts.registers > 0


def test_what_ptxas_refuses_is_a_failure_of_ptxas() -> None:
    with pytest.raises(CompileError, match="fatal") as caught:
        _ptxas_log("no PTX at all", (9, 0))
    assert caught.value.kind == "ptxas"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("OutOfResources", "out_of_resources"), ("PTXASError", "ptxas"), ("CompilationError", "compiler_error")],
)
def test_tritons_errors_are_classed_by_name(name: str, kind: str) -> None:
    error = _classified(type(name, (RuntimeError,), {})("much text\nerror: too many registers\nmore text"))
    assert (error.kind, str(error)) == (kind, f"{name}: error: too many registers")


def test_what_follows_a_crash_in_the_queue_is_compiled(pool: CompilePool) -> None:
    futures = [pool.submit(source) for source in (ABORTS, GOOD, WRONG_TYPES, GOOD)]
    kinds = []
    for future in futures:
        error = future.exception(120)
        kinds.append(error.kind if isinstance(error, CompileError) else error)
    assert kinds == ["compiler_crash", None, "compiler_error", None]


def test_closing_ends_what_is_under_way_at_once() -> None:
    pool = CompilePool((9, 0), workers=1, timeout=600.0)
    running, waiting = pool.submit(SLEEPS), pool.submit(GOOD)
    time.sleep(1.0)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 10
    assert running.done()
    assert waiting.cancelled()


def test_compilers_see_no_gpu(pool: CompilePool) -> None:
    """The card belongs to the process that measures."""
    looks = broken(FIRST_IMPORT, 'import os\nassert os.environ["CUDA_VISIBLE_DEVICES"] == ""\n' + FIRST_IMPORT)
    assert pool.submit(looks).result(120).facts.registers > 0


def test_with_simulation_a_kernel_that_would_hang_is_unsafe() -> None:
    config = next(c for c in candidates(PROBLEM, target("h200")) if c.template == "vector_add_tma")
    good = emit(VECTOR_ADD, PROBLEM, config)
    release = "tlx.barrier_arrive(empty[stage])"
    assert release in good.text
    hangs = KernelSource(good.operator, good.problem, good.config, good.text.replace(release, "pass"))
    with CompilePool((9, 0), workers=1, simulate=True) as pool:
        assert pool.submit(good).result(120).source == good
        error = failure(pool, hangs)
    assert (is_known_safe(good), is_known_safe(hangs)) == (True, False)
    assert error.kind == "unsafe"
    assert "simulator: deadlock" in str(error)
    assert "empty[0]" in str(error)
