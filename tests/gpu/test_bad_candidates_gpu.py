"""A broken candidate costs one trial: it is named for what it does, and the next one runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.space.candidates import candidates
from tlxgen.tuner.runner import Runner

ADD = ops.get("vector_add")
PROBLEM = ADD.problem((2**20,), dtype="bf16")
LEGAL = candidates(PROBLEM, devices.target("h200"))
VANILLA = next(config for config in LEGAL if config.template == "vector_add_vanilla")
TMA = next(config for config in LEGAL if config.template == "vector_add_tma")
LIMIT = 15.0


@pytest.fixture
def card() -> Iterator[Runner]:
    """A card that knows one healthy candidate."""
    card = Runner("vector_add", PROBLEM, seed=5, limit=LIMIT)
    card.setup()
    assert card.gate("healthy", emit(ADD, PROBLEM, VANILLA)).status == "ok"
    yield card
    card.close()


def broken(config: object, old: str, new: str) -> KernelSource:
    """An emitted kernel with one thing wrong."""
    source = emit(ADD, PROBLEM, config)  # type: ignore[arg-type]
    assert old in source.text
    return KernelSource(source.operator, source.problem, source.config, source.text.replace(old, new))


STORE = "tl.store(out_ptr + offsets, total)"


def storing(value: str = "total", mask: str = "offsets < n") -> str:
    """The store of a whole block with another value or mask."""
    return f"tl.store(out_ptr + offsets, {value}, mask={mask})"


PAST_THE_END = "tl.store(out_ptr + n + tl.arange(0, 16), tl.zeros((16,), tl.bfloat16))"
WRONG = {
    "writes the first half": storing(mask="offsets < n // 2"),
    "writes the second half": storing(mask="(offsets < n) & (offsets >= n // 2)"),
    "writes nothing": storing(mask="offsets < 0"),
    "writes NaN": storing('total * float("nan")'),
    "writes one infinity": storing('tl.where(offsets == 77, float("inf"), total)'),
    "writes past the end": f"{STORE}\n        {PAST_THE_END}",
    "changes an input": f"{storing()}\n        tl.store(x_ptr + offsets, total, mask=offsets < n)",
    "misses one element": storing(mask="(offsets < n) & (offsets != 4321)"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_result_is_rejected(fault: str, card: Runner) -> None:
    verdict = card.gate("bad", broken(VANILLA, STORE, WRONG[fault]))
    assert verdict.status == "wrong_result", verdict
    assert card.measure(["healthy"], 2)["healthy"]


def test_an_illegal_access_costs_one_trial(card: Runner) -> None:
    verdict = card.gate("bad", broken(VANILLA, STORE, "tl.store(out_ptr + offsets + (1 << 40), total)"))
    assert verdict.status == "launch_failed"
    assert card.gate("next", emit(ADD, PROBLEM, TMA)).status == "ok"
    assert len(card.measure(["healthy", "next"], 3)["next"]) == 3


def test_a_hang_costs_its_time_limit(card: Runner) -> None:
    started = time.monotonic()
    silent = broken(TMA, "tlx.barrier_expect_bytes(full[stage]", "tlx.barrier_expect_bytes(empty[stage]")
    verdict = card.gate("bad", silent)
    assert verdict.status == "hang", verdict
    assert time.monotonic() - started < LIMIT + 5
    assert card.gate("next", emit(ADD, PROBLEM, TMA)).status == "ok"
    assert len(card.measure(["healthy", "next"], 3)["healthy"]) == 3


def test_a_result_that_moves_is_a_race(card: Runner) -> None:
    noise = "noise = (tl.extra.cuda.globaltimer() % 64).to(tl.float32) * 1e-4"
    store = storing("(total.to(tl.float32) * (1.0 + noise)).to(tl.bfloat16)")
    moving = broken(VANILLA, STORE, f"{noise}\n        {store}")
    assert card.gate("bad", moving).status in ("unstable_result", "wrong_result")


def test_a_kernel_that_raises_in_the_compiler_is_a_failed_launch(card: Runner) -> None:
    verdict = card.gate("bad", broken(VANILLA, "tl.load(x_ptr", "tl.no_such_thing(x_ptr"))
    assert verdict.status == "launch_failed"
    assert card.child.alive
