"""torch's flash kernel beside `scaled_dot_product_attention`: when it is used, and with which arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlxgen import ops
from tlxgen.ops.attention import flash as attention_flash

ATTENTION = ops.get("attention")
SQUARE = ATTENTION.problem((1, 4, 30, 16), causal="bottom-right")
WINDOWED = ATTENTION.problem((1, 4, 30, 16), causal="bottom-right", window=5)
RECTANGULAR = ATTENTION.problem((1, 4, 30, 16), kv_len=40, causal="bottom-right")


class Flash:
    """A stand-in for torch's function, which takes and gives (B, S, H, D)."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.strides: tuple[int, ...] = ()

    def __call__(self, q: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        self.asked, self.strides = [tuple(q.shape), *arguments[2:], options], q.stride()
        return (q * 2, *[torch.empty(0)] * 4)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    """It takes every problem, and tensors pass for those of a GPU."""
    found = Flash()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(_flash_attention_forward=found))
    monkeypatch.setattr(attention_flash, "takes", lambda *_: True)
    return found


@pytest.mark.parametrize(("problem", "window"), [(WINDOWED, (4, 0)), (RECTANGULAR, (None, None))])
def test_windows_and_non_square_problems_use_the_flash_kernel(flash: Flash, problem: Any, window: Any) -> None:
    inputs = ATTENTION.inputs(problem, "cpu", 0)
    out = ATTENTION.eager(problem, inputs)
    assert torch.equal(out, inputs["q"] * 2)  # heads and rows have changed places twice
    options = {"scale": 0.25, "window_size_left": window[0], "window_size_right": window[1]}
    assert flash.asked == [(1, 30, 4, 16), None, None, 30, problem.kv_len, 0.0, True, False, options]


@pytest.mark.parametrize("lies", ["every other element", "rows and columns swapped", "one element in"])
def test_unaligned_operands_are_copied(flash: Flash, lies: str) -> None:
    inputs = ATTENTION.inputs(WINDOWED, "cpu", 0)
    shape = inputs["q"].shape
    q = {
        "every other element": torch.empty(*shape[:3], 2 * shape[3], dtype=torch.bfloat16)[..., ::2],
        "rows and columns swapped": torch.empty(*shape[:2], shape[3], shape[2], dtype=torch.bfloat16).mT,
        "one element in": torch.empty(inputs["q"].numel() + 1, dtype=torch.bfloat16)[1:].view(shape),
    }[lies].copy_(inputs["q"])
    assert torch.equal(ATTENTION.eager(WINDOWED, {**inputs, "q": q}), inputs["q"] * 2)
    assert flash.strides == inputs["q"].transpose(1, 2).stride()


def test_square_problems_use_scaled_dot_product_attention(flash: Flash) -> None:
    ATTENTION.eager(SQUARE, ATTENTION.inputs(SQUARE, "cpu", 0))
    assert not flash.asked


@pytest.mark.parametrize("problem", [WINDOWED, RECTANGULAR])
def test_without_a_gpu_the_flash_kernel_is_not_used(problem: Any) -> None:
    inputs = ATTENTION.inputs(problem, "cpu", 0)
    assert attention_flash.attention(problem, inputs["q"], inputs["k"], inputs["v"], 1.0) is None
    exact = ATTENTION.reference(problem, inputs)
    assert (ATTENTION.eager(problem, inputs) - exact).norm() < 3e-3 * exact.norm()


def test_torch_has_the_flash_function_with_these_parameters() -> None:
    names = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    positional = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert names[:10] == [*positional, "return_debug_mask"]
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)
