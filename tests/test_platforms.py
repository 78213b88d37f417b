"""Every platform of docs/platforms.md: which kernel is chosen there, and that it compiles, without any of the GPUs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tlxgen import devices, loader, ops, runtime, selection, space, toolchain
from tlxgen.candidates import vanilla_config
from tlxgen.compile import Architecture, compile_kernel
from tlxgen.devices import Gpu, target
from tlxgen.emit import emit
from tlxgen.selection import select

H200 = target("h200")
TABLE = Path(__file__).parent.parent / "docs" / "platforms.md"

#: As the table names it → what the compiler is told, and the multiprocessors of a typical card.
ARCHITECTURES: dict[str, tuple[Architecture, int]] = {
    "sm_80": ((8, 0), 108),
    "sm_86": ((8, 6), 84),
    "sm_89": ((8, 9), 142),
    "sm_90": ((9, 0), 132),
    "sm_100": ((10, 0), 148),
    "sm_120": ((12, 0), 170),
    "gfx942": ("gfx942", 304),
    "gfx950": ("gfx950", 256),
}

#: Bytes of shared memory that one workgroup of AMD's may have (LDS; CDNA 3 and CDNA 4 ISA documents).
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10}

PROBLEMS: dict[str, dict[str, Any]] = {
    "gemm": {"M": 4096, "N": 4096, "K": 4096},
    "grouped_gemm": {"E": 8, "ROWS": 4096, "N": 2048, "K": 2048},
    "attention": {"B": 4, "H": 32, "S": 4096, "D": 64},
    "attention_varlen": {"B": 4, "H": 32, "total_q": 8192, "D": 64},
    "vector_add": {"n": 2**24},
}


@pytest.fixture(autouse=True)
def _nothing_remembered(no_shipped_configs: None) -> Iterator[None]:
    runtime.forget()
    yield
    runtime.forget()


def card(name: str) -> Gpu:
    """A card of this architecture, as torch would describe it; AMD's as one of NVIDIA's with no more shared memory."""
    architecture, sm_count = ARCHITECTURES[name]
    capability = (7, 5) if isinstance(architecture, str) else architecture
    return replace(H200, slug=name, sm_count=sm_count, capability=capability)


def rows() -> dict[str, list[str]]:
    """Architecture → what the table promises with fbtriton, with upstream's triton, without any."""
    cells = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in TABLE.read_text().splitlines()]
    return {row[1]: row[2:] for row in cells if len(row) == 5 and re.fullmatch(r"sm_\d+|gfx\d+", row[1])}


def test_the_table_has_every_architecture() -> None:
    assert set(rows()) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_choice_is_what_the_table_promises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promised = rows()[name]
    amd = name in LDS
    if amd:
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert devices.detect() is None
        assert runtime._current_device() is None
    gpu = None if amd else card(name)
    problem = ops.get("gemm").problem((4096, 4096, 4096))
    found = []
    for tlx, triton in ((True, True), (False, True), (False, False)):
        monkeypatch.setattr(toolchain, "has_tlx", lambda tlx=tlx: tlx)
        monkeypatch.setattr(selection, "has_triton", lambda triton=triton: triton)
        found.append(select(problem, gpu).origin)
    assert [origin in promise for origin, promise in zip(found, promised, strict=True)] == [True] * 3, found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_triton_of_every_operator_compiles_within_the_architectures_limits(name: str) -> None:
    architecture, _ = ARCHITECTURES[name]
    gpu = card(name)
    limit = LDS.get(name) or space._device_values(gpu)["shared_memory_limit"]
    for operator in map(ops.get, ops.NAMES):
        problem = operator.problem(PROBLEMS[operator.name])
        config = vanilla_config(problem, gpu)
        assert config is not None, operator.name
        module = loader.load(emit(operator, problem, config))
        inputs = operator.inputs(problem, "meta", 0)
        _, args = operator.arguments(module, inputs, operator.output(problem, inputs), num_sms=gpu.sm_count)
        compiled = compile_kernel(module, args, architecture)
        assert 0 <= compiled.metadata.shared <= limit, f"{operator.name}: {config.short}"
        assert compiled.asm["hsaco" if isinstance(architecture, str) else "cubin"]


def test_without_a_gpu_every_operator_computes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.FallbackWarning)
        for operator in map(ops.get, ops.NAMES):
            problem = operator.problem(SMALL[operator.name])
            kernel = runtime.Kernel(problem, select(problem, None), None)
            inputs = operator.inputs(problem, "cpu", 0)
            result, exact = kernel(**inputs).double(), operator.reference(problem, inputs)
            assert kernel.origin == "torch"
            assert (result - exact).norm() <= 2e-2 * exact.norm(), operator.name


SMALL: dict[str, dict[str, Any]] = {
    "gemm": {"M": 32, "N": 48, "K": 64},
    "grouped_gemm": {"E": 4, "ROWS": 64, "N": 32, "K": 48},
    "attention": {"B": 1, "H": 2, "S": 32, "D": 16},
    "attention_varlen": {"B": 2, "H": 2, "total_q": 48, "D": 16},
    "vector_add": {"n": 1000},
}
