"""vector_add gives exactly torch's sums for whole blocks, tails, and vectors shorter than a block."""

from __future__ import annotations

import pytest

from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.space.candidates import candidates
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner

ADD = ops.get("vector_add")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("n", [1, 1023, 1024, 4097, 2**20, 2**20 + 1])
def test_every_length_is_written_in_full(n: int, dtype: str, child: Child) -> None:
    problem = ADD.problem((n,), dtype=dtype)
    card = Runner("vector_add", problem, seed=3, child=child)
    card.setup()
    legal = candidates(problem, devices.target("h200"))
    for template in ADD.templates:
        config = next(config for config in legal if config.template == template)
        verdict = card.gate(config.id, emit(ADD, problem, config))
        assert verdict.status == "ok", f"{config.short}: {verdict.message}"
        assert verdict.error is not None
