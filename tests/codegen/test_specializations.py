"""Noted specializations are Triton's own: two arguments of one form are one to the compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlxgen.codegen.specializations import Noted, form

pytest.importorskip("triton")

TARGET = "GPUTarget(backend='cuda', arch=90, warp_size=32)"
FLAGS = [
    (constant, special, aligned) for constant in (False, True) for special in (False, True) for aligned in (False, True)
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tlxgen" / "specializations"


def native(argument: Any, *flags: bool) -> Any:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return native_specialize_impl(make_backend(GPUTarget("cuda", 90, 32)), argument, *flags)


def descriptors() -> list[Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    bases = [torch.empty(64, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    made = [TensorDescriptor.from_tensor(base, block) for base in bases for block in ([64, 32], [32, 64], [64, 64])]
    rows = TensorDescriptor.from_tensor(torch.empty(256, 64, dtype=torch.bfloat16), [64, 32])
    rounded = TensorDescriptor.from_tensor(bases[2], [64, 32], round_f32_to_tf32=True)
    padded = TensorDescriptor.from_tensor(bases[0], [64, 32], padding="nan")
    return [*made, rows, rounded, padded, TensorDescriptor(torch.empty(64), [64], [1], [16])]


def tensors() -> list[torch.Tensor]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn)
    made = [torch.empty(64, dtype=dtype) for dtype in dtypes]
    shifted = [tensor[offset:] for tensor in made for offset in (1, 8)]
    return [*made, *shifted, torch.empty(3, 5, device="meta"), torch.empty(0)]


ARGUMENTS = [*tensors(), *descriptors(), True, False, None, 0.0, 1.0, -1e300, float("nan")]
EDGES = [sign * (2**power) + step for power in (0, 4, 31, 32, 63) for sign in (1, -1) for step in (-16, -1, 0, 1, 16)]


@pytest.mark.parametrize("flags", FLAGS)
def test_one_form_is_one_specialization(flags: tuple[bool, bool, bool]) -> None:
    made: dict[str, Any] = {}
    for argument in [*ARGUMENTS, *(edge for edge in EDGES if -(2**63) <= edge < 2**64)]:
        seen = form(argument)
        assert seen is not None
        assert made.setdefault(seen, native(argument, *flags)) == native(argument, *flags), argument


@given(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**64 - 1), st.sampled_from(FLAGS))
def test_integers_of_one_form_are_one_to_the_compiler(one: int, other: int, flags: tuple[bool, bool, bool]) -> None:
    for a, b in ((one, other), (one, one + 16 if one + 16 < 2**64 else one - 16)):
        assert form(a) != form(b) or native(a, *flags) == native(b, *flags)


@pytest.mark.parametrize("argument", [2**64, -(2**63) - 1, "text", (1, 2), torch.nn.Parameter(torch.empty(4)), 1j])
def test_what_has_no_form_is_asked_for_each_time(argument: Any, cache: Path) -> None:
    asked: list[Any] = []

    def ask(*given: Any) -> Any:
        asked.append(given)
        return "i32", ""

    noted = Noted(ask, TARGET)
    assert form(argument) is None
    for _ in range(2):
        assert noted(None, argument, False, True, True) == ("i32", "")
    assert len(asked) == 2
    assert not cache.exists()


def test_another_process_does_not_ask(cache: Path) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError

    first = Noted(lambda _, *given: native(*given), TARGET)
    made = [[first(None, argument, *flags) for flags in FLAGS] for argument in ARGUMENTS]
    second = Noted(refuse, TARGET)
    assert [[second(None, argument, *flags) for flags in FLAGS] for argument in ARGUMENTS] == made
    assert [type(value) for row in made for pair in row for value in pair] == [
        type(value) for argument in ARGUMENTS for flags in FLAGS for value in second(None, argument, *flags)
    ]
    with pytest.raises(AssertionError):
        Noted(refuse, TARGET.replace("90", "80"))(None, 16, False, True, True)


@pytest.mark.parametrize("content", ["{", "[]", '{"i32 False True (False, True, True)": "D"}', '{"i32": [[], 1]}'])
def test_a_damaged_note_is_asked_anew(content: str, cache: Path) -> None:
    Noted(lambda _, *given: native(*given), TARGET)(None, 16, False, True, True)
    (note,) = cache.iterdir()
    note.write_text(content)
    assert Noted(lambda _, *given: native(*given), TARGET)(None, 16, False, True, True) == ("i32", "D")


def test_notes_have_an_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlxgen.codegen.specializations._MOST", 3)
    noted = Noted(lambda _, *given: native(*given), TARGET)
    for argument in ARGUMENTS:
        assert noted(None, argument, False, True, True) == native(argument, False, True, True)
    (note,) = cache.iterdir()
    content = json.loads(note.read_text())["content"]
    assert len(content) == 3
