"""Other libraries' attention: which problems they get, and with which arguments."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tlxgen import ops
from tlxgen.ops.attention.peers import installed

ATTENTION = ops.get("attention")


class Flash(ModuleType):
    """A stand-in for FlashAttention-3: (B, S, H, D), bottom-right; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("fa3_fwd_interface")
        self.__spec__ = importlib.machinery.ModuleSpec(self.__name__, None)
        self.asked: dict[str, Any] = {}

    def flash_attn_func(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        self.asked = options
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=options["causal"], enable_gqa=True)
        return out.transpose(1, 2)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    module = Flash()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"cudnn", "fa3"}),
        ({"causal": "bottom-right"}, {"cudnn", "fa3"}),
        ({"causal": "top-left"}, {"cudnn", "fa3"}),
        ({"causal": "top-left", "kv_len": 40}, {"cudnn"}),
        ({"causal": "bottom-right", "kv_len": 40}, {"fa3"}),
        ({"causal": "bottom-right", "window": 4}, {"fa3"}),
        ({"softcap": 3.0}, {"fa3"}),
        ({"lse": True}, set()),
        ({"kv_len": 0}, set()),
    ],
)
@pytest.mark.usefixtures("flash")
def test_libraries_are_offered_the_problems_that_they_take(options: dict[str, Any], names: set[str]) -> None:
    assert set(installed(ATTENTION.problem((1, 4, 30, 16), **options))) == names


def test_missing_libraries_are_left_out() -> None:
    assert set(installed(ATTENTION.problem((1, 4, 30, 16)))) == {"cudnn"}


def test_flash_attention_3_gets_bshd(flash: Flash) -> None:
    problem = ATTENTION.problem((2, 4, 30, 16), kv_heads=2, causal="bottom-right", softcap=0.0)
    inputs = ATTENTION.inputs(problem, "cpu", 0)
    found = installed(problem)["fa3"](inputs, ATTENTION.output(problem, inputs))
    torch.testing.assert_close(found, ATTENTION.eager(problem, inputs))
    assert flash.asked["causal"] is True
    assert flash.asked["window_size"] == (-1, -1)
    assert flash.asked["num_splits"] == 1


def test_flash_attention_3_gets_windows_without_the_row_itself(flash: Flash) -> None:
    problem = ATTENTION.problem((1, 1, 1, 16), kv_len=40, causal="bottom-right", window=5)
    inputs = ATTENTION.inputs(problem, "cpu", 0)
    installed(problem)["fa3"](inputs, ATTENTION.output(problem, inputs))
    assert flash.asked["window_size"] == (4, 0)
    assert flash.asked["num_splits"] == 0  # few rows over many keys: as many as it thinks right


def test_flash_attention_3_built_without_windows_is_left_out(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = flash.flash_attn_func

    def without(*tensors: torch.Tensor, window_size: tuple[int, int] = (-1, -1), **options: Any) -> torch.Tensor:
        if window_size != (-1, -1):
            raise RuntimeError("This flash attention build does not support local attention.")
        return whole(*tensors, **options)

    monkeypatch.setattr(flash, "flash_attn_func", without)
    windowed = ATTENTION.problem((1, 4, 30, 16), causal="bottom-right", window=4)
    assert "fa3" not in installed(windowed)
    assert "fa3" in installed(windowed.model_copy(update={"window": 0}))
