"""Configs that the user chose: by argument, by block, by environment."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tlxgen
from tlxgen import devices, ops, toolchain
from tlxgen.config import Config
from tlxgen.devices import target
from tlxgen.errors import InvalidConfigError, InvalidProblemError, LaunchError
from tlxgen.functional import attention_call
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime import selection
from tlxgen.runtime.pinning import Pin, as_config, pin, pinned
from tlxgen.space.candidates import candidates
from tlxgen.tuner import on_miss

H200 = target("h200")
A100 = replace(H200, slug="a100-sxm4", sm_count=108, capability=(8, 0))
GEMM = ops.get("gemm")
PROBLEM = GEMM.problem((1024, 1024, 1024))
LAST = candidates(PROBLEM, H200)[-1]  # that nobody would choose
TMA = candidates(PROBLEM, H200, ("gemm_tma_pingpong",))[0]
VANILLA = candidates(PROBLEM, H200, ("gemm_vanilla",))[0]


@pytest.fixture(autouse=True)
def on_h200(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
    monkeypatch.setattr(runtime, "_current_device", lambda: 0)
    monkeypatch.setattr(devices, "detect", lambda _=None: H200)
    runtime.forget()
    yield
    runtime.forget()


def ask(**options: Any) -> runtime.Kernel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.FallbackWarning)
        return tlxgen.get_kernel("gemm", PROBLEM, **options)


@pytest.mark.parametrize(
    "given",
    [LAST, LAST.short, LAST.model_dump()],
    ids=["a config", "a line of `tlxgen show`", "a dictionary"],
)
def test_by_argument(given: Any) -> None:
    kernel = ask(config=given)
    assert (kernel.origin, kernel.config) == ("pinned", LAST)
    assert kernel.explain() == f"pinned: {LAST.short} (by config=)"
    assert ask().origin == "default"


def test_by_block_in_this_thread_alone() -> None:
    with tlxgen.pin("gemm", LAST) as config:
        assert ask().config == config == LAST
        seen: list[runtime.Kernel] = []
        other = threading.Thread(target=lambda: seen.append(ask()))
        other.start()
        other.join()
        assert seen[0].origin == "default"
        with tlxgen.pin("gemm", VANILLA):
            assert ask().config == VANILLA
        assert ask().config == LAST
    assert ask().origin == "default"


def test_a_block_ends_with_an_exception_too() -> None:
    with pytest.raises(ZeroDivisionError), pin("gemm", LAST):
        _ = 1 // 0
    assert pinned("gemm") is None


def test_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLXGEN_PIN_GEMM", LAST.short)
    assert ask().config == LAST
    assert ask().explain().endswith("(by TLXGEN_PIN_GEMM)")
    assert pinned("attention") is None
    with pin("gemm", VANILLA):
        assert ask().config == VANILLA  # the nearer word counts
    assert ask(config=TMA).config == TMA


def test_a_pin_is_as_good_as_a_row_for_strict() -> None:
    assert ask(config=LAST, strict=True).config == LAST


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("no_such_template block_m=64", "no_such_template"),
        ("gemm_vanilla block_m=64", "needs parameter"),
        ("gemm_vanilla block_m", "not name=value"),
        ({"params": {}}, "template"),
        (Config(template="gemm_vanilla", params={**VANILLA.params, "block_m": 77}), "77"),
    ],
    ids=["unknown template", "missing parameter", "no value", "no template", "value outside the space"],
)
def test_what_is_no_config_is_an_error_that_says_so(given: Any, told: str) -> None:
    with pytest.raises(InvalidConfigError, match=told):
        ask(config=given)
    with pytest.raises(InvalidConfigError, match=told), pin("gemm", given):
        pass


def test_a_mistake_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLXGEN_PIN_GEMM", "gemm_vanila block_m=64")
    with pytest.raises(InvalidConfigError, match=r"TLXGEN_PIN_GEMM.*gemm_vanila"):
        ask()


def test_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(InvalidProblemError), pin("gem", LAST):
        pass


class TestWhereAPinIsNotLegal:
    """K = 1023 rows are not aligned for TMA."""

    ODD = GEMM.problem((1024, 1024, 1023))

    def test_the_argument_is_an_error(self) -> None:
        with pytest.raises(InvalidConfigError, match="gemm 1024 1024 1023"):
            tlxgen.get_kernel("gemm", self.ODD, config=TMA)

    def test_the_block_goes_on_and_says_so(self) -> None:
        with pin("gemm", TMA), pytest.warns(runtime.FallbackWarning, match=r"pinned by tlxgen\.pin is not used"):
            kernel = tlxgen.get_kernel("gemm", self.ODD)
        assert kernel.origin == "default"

    def test_it_says_so_even_where_a_row_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        choice = selection.Choice("tuned", VANILLA)
        monkeypatch.setattr(selection, "_on_hopper", lambda *_, **__: choice)
        with pin("gemm", TMA), pytest.warns(runtime.FallbackWarning):
            tlxgen.get_kernel("gemm", self.ODD)

    def test_other_gpus_take_plain_triton_pins_alone(self) -> None:
        assert selection.select(PROBLEM, A100, pin=Pin(VANILLA, "a test")).origin == "pinned"
        choice = selection.select(PROBLEM, A100, pin=Pin(TMA, "a test"))
        assert choice.origin == "vanilla"
        assert "gemm_tma_pingpong needs TLX on Hopper: compute capability 8.0" in choice.passed_over[0]

    def test_neither_does_a_triton_without_tlx(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "has_tlx", lambda: False)
        with pytest.raises(InvalidConfigError, match="no TLX"):
            selection.select(PROBLEM, H200, pin=Pin(TMA, "a test", binding=True))

    def test_without_a_gpu_torch_computes(self) -> None:
        assert selection.select(PROBLEM, None, pin=Pin(LAST, "a test", binding=True)).origin == "torch"


def test_attention_in_place_of_torchs_follows_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it remembers by shape is told apart by the pin."""
    problem = ops.get("attention").problem((1, 2, 64, 64))
    first, second, *_ = candidates(problem, H200)
    monkeypatch.setattr(attention_call, "_choose", lambda problem, _: tlxgen.get_kernel("attention", problem))
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)

    def config() -> Config | None:
        found = attention_call.find(q, q, q, "none", 0, 0.0, gqa=False)
        assert isinstance(found, attention_call.Found)
        return found.kernel(q, lse=False).config

    for chosen in (first, second, first):
        with pin("attention", chosen):
            assert config() == chosen


class TestOnMiss:
    def untuned(self) -> int:
        return len(selection.store().untuned())

    def test_record_is_the_default_and_ignore_leaves_no_note(self) -> None:
        ask(on_miss="ignore")
        assert self.untuned() == 0
        ask()
        assert self.untuned() == 1

    def test_tune_tunes_once_and_serves_the_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tuned: list[Any] = []

        def tune(problem: Any, _gpu: Any) -> None:
            tuned.append(problem)
            monkeypatch.setattr(selection, "_on_hopper", lambda *_, **__: selection.Choice("tuned", LAST))
            runtime._kernel.cache_clear()

        monkeypatch.setattr(on_miss, "tune_once", tune)
        for _ in range(2):
            kernel = ask(on_miss="tune")
            assert (kernel.origin, kernel.config) == ("tuned", LAST)
        assert tuned == [PROBLEM]

    @pytest.mark.parametrize("gpu", [None, A100], ids=["no GPU", "a100"])
    def test_tune_does_nothing_where_nothing_can_be_tuned(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "detect", lambda _=None: gpu)
        monkeypatch.setattr(on_miss, "tune_once", lambda *_: pytest.fail("tuned"))
        assert ask(on_miss="tune").origin in ("torch", "vanilla")

    def test_tuning_is_refused_while_a_graph_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tlxgen.runtime import plans

        monkeypatch.setattr(plans, "is_capturing", lambda: True)
        with pytest.raises(LaunchError, match="tune before capturing"):
            ask(on_miss="tune")

    def test_anything_else_is_an_error(self) -> None:
        with pytest.raises(InvalidConfigError, match="on_miss is 'fail'; use one of record, ignore, tune"):
            ask(on_miss="fail")


def test_one_that_is_older_than_a_parameter_is_completed() -> None:
    today = candidates(ops.get("attention").problem((1, 8, 4096, 64)), H200, ("attention_tma",))[0]
    whole = Config(template=today.template, params={**today.params, "tail": "whole"})
    assert as_config("attention", whole.short.replace(" tail=whole", "")) == whole


def test_as_config_is_the_identity_of_configs() -> None:
    assert as_config("gemm", LAST) == as_config("gemm", LAST.short) == LAST
