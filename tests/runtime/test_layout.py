"""Whether tensors lie as others did: every difference that checks or plans could ask for is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tlxgen.runtime import layout
from tlxgen.runtime.layout import TensorLayout


@pytest.fixture(params=["in C++", "in Python"], autouse=True)
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to ask give the same answers."""
    if request.param == "in Python":
        monkeypatch.setattr(layout, "_believed", lambda: False)
    return str(request.param)


class Subclass(Tensor):
    """With more to it than torch knows."""


def expanded(x: Tensor) -> Tensor:
    return torch.zeros(1, x.shape[1]).expand_as(x)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "fewer rows": lambda x: x[:3],
    "a dimension more": lambda x: x[None],
    "another order": lambda x: torch.zeros(x.shape[::-1]).T,
    "another pitch": lambda x: torch.zeros(4, 16)[:, :8],
    "expanded": expanded,
    "another dtype": lambda x: x.half(),
    "another device": lambda x: x.to("meta"),
    "gradients": lambda x: x.clone().requires_grad_(),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a subclass": lambda x: x.as_subclass(Subclass),
    "negated when read": lambda x: torch.zeros(4, 8, dtype=torch.complex64).conj().imag,
    "sparse": lambda x: x.to_sparse(),
    "aligned otherwise": lambda x: torch.zeros(33)[1:].view(4, 8),
    "no tensor": lambda x: x.tolist(),
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("what", OTHERS)
def test_others_are_told_apart_wherever_they_stand(what: str, position: int) -> None:
    x, y = torch.zeros(4, 8), torch.ones(4, 8)
    one = TensorLayout((x, y))
    others: list[Any] = [x.clone(), y.clone()]
    assert one.addresses(others) == [other.data_ptr() for other in others]
    others[position] = OTHERS[what](x)
    assert one.addresses(others) is None
    assert not one.addresses(others[:1])
    assert not one.addresses([*others, x])


def test_offsets_within_a_storage_are_addresses_like_others() -> None:
    parent = torch.zeros(4, 64)
    one = TensorLayout((parent[:, :8],))
    assert one.addresses((parent[:, 8:16],)) == [parent.data_ptr() + 32]
    assert one.addresses((parent[:, 9:17],)) is None
    assert one.same((parent[:, 9:17],))  # but for the alignment


def test_a_tensor_may_stand_twice() -> None:
    x = torch.zeros(4, 8)
    one = TensorLayout((x, x))
    assert one.same((x, x))
    assert one.same((x.clone(), x))
    assert not one.same((x, x[:3]))


def test_gradients_that_are_recorded_are_never_alike() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 8))
    with torch.no_grad():
        one = TensorLayout((weight,))
        assert one.same((weight,))
    assert not one.same((weight,))
    assert one.addresses((weight,)) is None
    with torch.no_grad():
        assert one.same((torch.nn.Parameter(torch.ones(4, 8)),))


def test_inference_mode_is_told_apart_by_its_tensors() -> None:
    x = torch.zeros(4, 8)
    one = TensorLayout((x,))
    with torch.inference_mode():
        assert not one.same((torch.zeros(4, 8),))
        inside = TensorLayout((torch.zeros(4, 8),))
        assert inside.same((torch.ones(4, 8),))
    assert not inside.same((x,))
    assert one.same((x,))


def test_modes_and_autocast_are_told_apart() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.zeros(4, 8)
    one = TensorLayout((x,))
    with torch.autocast("cpu"):
        assert not one.same((x,))
    with FlopCounterMode(display=False):
        assert not one.same((x,))
    assert not torch.func.vmap(lambda row: row + one.same((row,)))(x).any()
    assert one.same((x,))


def test_no_tensor_is_kept_alive() -> None:
    import weakref

    x = torch.zeros(4, 8)
    one, gone = TensorLayout((x,)), weakref.ref(x)
    del x
    assert gone() is None
    assert one.same((torch.zeros(4, 8),))


def test_this_torch_has_the_fast_way(asked: str) -> None:
    """Without it calls are right, and slower in silence."""
    assert layout._believed() == (asked == "in C++")


def test_guards_that_see_too_little_are_not_believed(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    if asked == "in Python":
        pytest.skip("asks no guards")
    monkeypatch.setattr(layout, "_guard", lambda _: lambda *_: True)
    layout._believed.cache_clear()
    try:
        assert not layout._believed()
    finally:
        layout._believed.cache_clear()
