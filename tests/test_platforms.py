"""Every platform of docs/platforms.md: which kernel is chosen there, and that it compiles, without any of the GPUs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import stub_launcher
from tests.support.problems import small_problem
from tests.support.stub_hip import LDS
from tlxgen import api, devices, ops, toolchain
from tlxgen.codegen import loader
from tlxgen.codegen.compile import Architecture, compile_kernel
from tlxgen.codegen.emit import emit
from tlxgen.devices import Gpu, target
from tlxgen.functional import dispatch
from tlxgen.ops.attention import flash
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime import selection
from tlxgen.runtime.selection import select
from tlxgen.space import search_space
from tlxgen.space.candidates import vanilla_config
from tlxgen.tuner import on_miss

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


@pytest.fixture(autouse=True)
def _nothing_remembered(no_shipped_configs: None) -> Iterator[None]:
    runtime.forget()
    yield
    runtime.forget()


def card(name: str) -> Gpu:
    """A card of this architecture, as torch would describe it."""
    architecture, sm_count = ARCHITECTURES[name]
    if isinstance(architecture, str):
        return devices._described(properties(name, sm_count), devices.AMD[name], name)
    return replace(H200, slug=name, sm_count=sm_count, capability=architecture)


def properties(architecture: str, sm_count: int = 304) -> Any:
    """Of an AMD GPU, by torch for ROCm; `major` and `minor` are AMD's own numbers."""
    name, flags = f"AMD Instinct of {architecture}", ":sramecc+:xnack-"
    return SimpleNamespace(
        name=name, multi_processor_count=sm_count, L2_cache_size=4 << 20, gcnArchName=architecture + flags, major=9
    )


def rocm(patch: pytest.MonkeyPatch, architecture: str) -> None:
    """A torch for ROCm that sees one such GPU."""
    patch.setattr(torch.version, "hip", "7.0")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: properties(architecture))


def rows() -> dict[str, list[str]]:
    """Architecture → what the table promises with fbtriton, with upstream's triton, without any."""
    cells = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in TABLE.read_text().splitlines()]
    return {row[1]: row[2:] for row in cells if len(row) == 5 and re.fullmatch(r"sm_\d+|gfx\d+", row[1])}


def test_the_table_has_every_architecture() -> None:
    assert set(rows()) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_choice_is_what_the_table_promises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promised, gpu = rows()[name], card(name)
    if name in LDS:
        rocm(monkeypatch, name)
        found_there = devices.present()
        assert found_there is not None
        assert found_there.target == name
        assert devices.detect() is None  # which is for those who tune
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
    limit = LDS.get(name) or search_space._device_values(gpu)["shared_memory_limit"]
    for operator in map(ops.get, ops.NAMES):
        problem = operator.problem(operator.examples[0])
        config = vanilla_config(problem, gpu)
        assert config is not None, operator.name
        module = loader.load(emit(operator, problem, config))
        inputs = operator.inputs(problem, "meta", 0)
        _, args = operator.arguments(module, inputs, operator.output(problem, inputs), num_sms=gpu.sm_count)
        compiled = compile_kernel(module, args, architecture)
        assert 0 <= compiled.metadata.shared <= limit, f"{operator.name}: {config.short}"
        assert compiled.asm["hsaco" if isinstance(architecture, str) else "cubin"]
        warp = 64 if isinstance(architecture, str) else 32
        assert compiled.metadata.target.warp_size == warp
        assert compiled.metadata.num_warps * warp <= 1024


#: Problems of every operator that take much shared memory, or something that not every architecture has.
DEMANDING: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("gemm", (4096, 4096, 4096), {"dtype": "fp32"}),
    ("gemm", (4096, 4096, 4096), {"dtype": "fp16", "layout": "nt", "epilogue": "scale+bias+gelu+residual"}),
    ("gemm", (8, 4096, 4096), {"layout": "nt", "out_dtype": "fp32"}),
    ("grouped_gemm", (8, 4096, 2048, 2048), {"layout": "nt", "epilogue": "swiglu"}),
    ("grouped_gemm", (8, 4096, 2048, 2048), {"form": "2d2d"}),
    ("grouped_gemm", (8, 4096, 2048, 2048), {"dtype": "e4m3"}),
    ("attention", (2, 8, 1000, 128), {"causal": "bottom-right", "window": 100, "lse": True}),
    ("attention", (2, 8, 1000, 256), {}),
    ("attention", (2, 8, 1, 128), {"kv_heads": 2, "kv_len": 4000}),
    ("attention_varlen", (4, 8, 4096, 128), {"causal": "bottom-right", "softcap": 30.0}),
    ("vector_add", (2**20,), {"dtype": "fp32"}),
]


class TestAmd:
    """Plain Triton, as on A100: by the same kernels, through Triton's own launcher for AMD (`test_launch.py`)."""

    @pytest.mark.parametrize("name", LDS)
    @pytest.mark.parametrize(("operator", "sizes", "options"), DEMANDING, ids=str)
    def test_what_is_chosen_fits_into_lds(
        self, name: str, operator: str, sizes: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        gpu, made = card(name), ops.get(operator)
        problem = made.problem(sizes, **options)
        config = vanilla_config(problem, gpu)
        # 8-bit floats of torch's kind are CDNA 4's alone, and a head of 256 does not fit into 64 KiB.
        fits = name == "gfx950" or not (options.get("dtype") == "e4m3" or problem.model_dump().get("D") == 256)
        assert (config is not None) == fits
        if config is None:
            return
        module = loader.load(emit(made, problem, config))
        inputs = made.inputs(problem, "meta", 0)
        _, args = made.arguments(module, inputs, made.output(problem, inputs), num_sms=gpu.sm_count)
        assert compile_kernel(module, args, gpu.target).metadata.shared <= LDS[name]

    @pytest.mark.parametrize("name", LDS)
    def test_it_says_that_nothing_was_ever_launched_there(self, name: str) -> None:
        told = select(ops.get("gemm").problem((4096, 4096, 4096)), card(name)).explain()
        assert told.startswith(f"{name} is AMD's, and TLX kernels are Hopper's; vanilla: gemm_vanilla ")
        assert f"(compiled for {name}, and never launched on such a GPU)" in told

    @pytest.mark.parametrize("name", LDS)
    def test_a_call_is_compiled_for_it_and_goes_to_the_ordinary_launcher(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []

        class Ordinary(stub_launcher.Noting):
            slim = False

            def __init__(self, module: Any, args: Any, architecture: Any) -> None:
                made.append((architecture, compile_kernel(module, args, architecture).metadata.arch))
                super().__init__(module, args, architecture)

        monkeypatch.setattr(Ordinary, "noted", [])
        with stub_launcher.no_card(monkeypatch, Ordinary, "cpu"):
            monkeypatch.setattr(devices, "detect", lambda _=None: None)
            rocm(monkeypatch, name)
            kernel = api.get_kernel("gemm", (64, 64, 64), on_miss="ignore")
            a, b = torch.zeros(64, 64).bfloat16(), torch.zeros(64, 64).bfloat16()
            for _ in range(6):  # nothing is replayed without a dispatcher
                kernel(a, b)
        assert kernel.origin == "vanilla"
        assert (made, len(Ordinary.noted)) == ([(name, name)], 6)

    @pytest.mark.parametrize("name", ["gfx90a", "gfx1100", "gfx1201"])
    def test_others_of_amds_are_torchs_whatever_capability_they_claim(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Torch says 9.0 of gfx90a, which is Hopper's, and 12.0 of gfx1200, which is Blackwell's."""
        rocm(monkeypatch, name)
        assert devices.present() is None
        assert runtime._current_device() is None
        assert dispatch.kernels_here() is False

    def test_nothing_is_tuned_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rocm(monkeypatch, "gfx942")
        assert on_miss._tunable(ops.get("gemm").problem((64, 64, 64))) is None

    def test_torchs_flash_backward_for_it_is_not_given_kernels_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
        q = torch.zeros(1, 2, 16, 64).bfloat16()
        problem: Any = ops.get("attention").problem((1, 2, 16, 64))
        assert flash.takes(problem, q, q, q, None)
        rocm(monkeypatch, "gfx942")
        assert not flash.takes(problem, q, q, q, None)

    def test_a_row_is_never_of_such_a_gpu(self) -> None:
        assert card("gfx942").key.capability == "gfx942"


def test_without_a_gpu_every_operator_computes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.FallbackWarning)
        for operator in map(ops.get, ops.NAMES):
            problem = small_problem(operator)
            kernel = runtime.Kernel(problem, select(problem, None), None)
            inputs = operator.inputs(problem, "cpu", 0)
            result, exact = kernel(**inputs).double(), operator.reference(problem, inputs)
            assert kernel.origin == "torch"
            assert (result - exact).norm() <= 2e-2 * exact.norm(), operator.name
