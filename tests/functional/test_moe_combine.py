"""The way back of a mixture of experts: what the kernel adds up, by Triton's interpreter, and when torch does it.

The interpreter cuts numbers off where it makes bf16 of them, and a GPU rounds: sums are compared in float32.
"""

from __future__ import annotations

import re
import subprocess
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tests.test_platforms import ARCHITECTURES
from tlxgen import toolchain
from tlxgen.codegen.compile import _ptxas_log, compile_kernel
from tlxgen.functional import moe_combine, moe_combine_kernel
from tlxgen.functional.moe_combine import combine
from tlxgen.functional.moe_combine_kernel import Launch
from tlxgen.functional.moe_routing import route
from tlxgen.runtime import checks
from tlxgen.runtime.selection import FallbackWarning

F32 = torch.float32
NAN = float("nan")


def interpret(launch: Launch) -> None:
    InterpretedFunction(moe_combine_kernel.kernel.fn)[(launch.programs,)](*launch.args, **launch.constants)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The kernel, interpreted, for tensors on the CPU; and its launches."""
    launches: list[Launch] = []

    def call(launch: Launch) -> None:
        interpret(launch)
        launches.append(launch)

    monkeypatch.setattr(Launch, "__call__", call)
    monkeypatch.setattr(checks, "DEVICE", "cpu")
    monkeypatch.setattr(moe_combine, "_compiles_for", lambda _: True)
    monkeypatch.setattr(moe_combine, "_is_capturing", lambda: False)
    monkeypatch.setattr(moe_combine, "_LOADED", set())
    monkeypatch.setattr(moe_combine, "_UNABLE", set())
    return launches


def drawn(tokens: int, choices: int, columns: int, experts: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Arguments of `combine`; some experts are not here."""
    generator = torch.Generator().manual_seed(0)
    result = torch.randn(tokens * choices, columns, generator=generator).to(dtype)
    place = torch.randperm(tokens * choices, generator=generator).int()
    weights = torch.rand(tokens, choices, generator=generator)
    ids = torch.randint(-1, experts + 1, (tokens, choices), generator=generator)
    return [result, place, weights, ids, experts, F32]


def on_meta(arguments: list[Any]) -> list[Any]:
    return [one.to("meta") if isinstance(one, Tensor) else one for one in arguments]


def exact(result: Tensor, place: Tensor, weights: Tensor, ids: Tensor, experts: int, *_: Any) -> Tensor:
    """In float64, one choice after the other."""
    total = torch.zeros(len(ids), result.shape[1], dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for nth, expert in enumerate(chosen):
            if 0 <= expert < experts:
                row = result[int(place[token * len(chosen) + nth])]
                total[token] += float(weights[token, nth]) * row.double()
    return total


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choices", [1, 2, 3, 8, 10, 16, 17, 24])
@pytest.mark.parametrize("columns", [1, 16, 77, 1030])
def test_any_number_of_choices_and_columns(choices: int, columns: int, launched: list[Launch]) -> None:
    arguments = drawn(5, choices, columns, 4)
    same(combine(*arguments), exact(*arguments))
    assert len(launched) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, F32, torch.float64])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_any_dtype(dtype: torch.dtype, weights: torch.dtype, ids: torch.dtype, launched: list[Launch]) -> None:
    arguments = drawn(5, 3, 40, 4, dtype)
    arguments[2], arguments[3] = arguments[2].to(weights), arguments[3].to(ids)
    same(combine(*arguments), exact(*arguments))
    assert len(launched) == 1


def test_the_sum_is_rounded_once(launched: list[Launch]) -> None:
    """Each of two halves of a step would be lost if it was rounded by itself."""
    result = torch.tensor([[1.0], [2.0**-11], [2.0**-11]]).half()
    out = combine(result, torch.arange(3), torch.ones(1, 3), torch.zeros(1, 3).int(), 1, torch.float16)
    assert out.item() == 1.0 + 2.0**-10
    assert len(launched) == 1


def test_weights_and_ids_may_lie_anyhow(launched: list[Launch]) -> None:
    arguments = drawn(5, 4, 24, 4)
    expected = exact(*arguments)
    result, _, weights, ids = arguments[:4]
    arguments[2] = weights.t().contiguous().t()
    arguments[3] = ids.repeat_interleave(2, 1)[:, ::2]
    arguments[0] = torch.full((20, 32), NAN).bfloat16()[:, :24].copy_(result)  # rows that are padded, as the products'
    same(combine(*arguments), expected)
    arguments[2] = torch.tensor(0.5).expand(5, 4)
    arguments[0] = result.t().contiguous().t()
    same(combine(*arguments), exact(*arguments))
    assert [launch.constants["VECTOR"] for launch in launched] == [8, 8]


def test_what_counts_nothing_is_not_read(launched: list[Launch]) -> None:
    """Its row is NaN, and so is its weight; both ways."""
    arguments = drawn(6, 4, 24, 4)
    result, place, weights, ids = arguments[:4]
    unknown = (ids < 0) | (ids >= 4)
    assert unknown.any()
    expected = exact(*arguments)
    result[place[unknown.flatten()].long()] = NAN
    weights[unknown] = NAN
    same(combine(*arguments), expected)
    same(moe_combine._by_torch(*arguments), expected)
    ids.fill_(-1)
    assert torch.equal(combine(*arguments), torch.zeros(6, 24))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_routing_is_a_permutation_in_the_experts_order(data: st.DataObject) -> None:
    experts = data.draw(st.sampled_from([0, 1, 3, 254, 255, 256, 300, 40_000]))
    tokens, choices = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4))
    integer = data.draw(st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]))
    limits = torch.iinfo(integer)
    near = [
        value for value in (-5, -1, 0, 1, 2, experts - 1, experts, experts + 1) if limits.min <= value <= limits.max
    ]
    one = st.sampled_from([*near, limits.min, limits.max])
    given = data.draw(st.lists(one, min_size=tokens * choices, max_size=tokens * choices))
    routing = route(torch.tensor(given, dtype=torch.int64).to(integer).view(tokens, choices), experts)
    here = [i for i, expert in enumerate(given) if 0 <= expert < experts]
    order = sorted(range(len(given)), key=routing.place.tolist().__getitem__)
    assert order[: len(here)] == sorted(here, key=given.__getitem__)
    assert sorted(routing.place.tolist()) == list(range(len(given)))
    assert routing.rows.tolist() == [i // choices for i in order]
    assert routing.offs.tolist() == [sum(given[i] <= expert for i in here) for expert in range(experts)]
    assert (routing.keys < experts).tolist() == [i in here for i in order]
    assert {tensor.dtype for tensor in (routing.place, routing.rows, routing.offs)} == {torch.int32}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Experts repeated, all tokens of one expert, experts that are elsewhere, weights of zero."""
    experts, tokens, choices = 3, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    size = tokens * choices
    chosen = data.draw(st.lists(st.sampled_from([0, 1, 2, -1, 3, -(2**40), 2**40]), min_size=size, max_size=size))
    weighed = data.draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 1e-8, 3.0]), min_size=size, max_size=size))
    ids, weights = torch.tensor(chosen).view(tokens, choices), torch.tensor(weighed).view(tokens, choices)
    routing = route(ids, experts)
    result = torch.randn(size, 9, generator=torch.Generator().manual_seed(size))
    result[int(routing.offs[-1]) :] = NAN  # not written by the products
    out = torch.full((tokens, 9), NAN)
    interpret(moe_combine_kernel.launch(result, routing.place, weights, routing.ids, out, experts))
    expected = exact(result, routing.place, weights, ids, experts)
    same(out, expected)
    same(moe_combine._by_torch(result, routing.place, weights, routing.ids, experts, F32), expected)


@pytest.mark.parametrize(("tokens", "choices", "columns"), [(0, 2, 8), (3, 0, 8), (3, 2, 0), (0, 0, 0)])
def test_sizes_of_zero(tokens: int, choices: int, columns: int, launched: list[Launch]) -> None:
    out = combine(*drawn(tokens, choices, columns, 4))
    assert torch.equal(out, torch.zeros(tokens, columns))
    assert len(launched) == (tokens * columns > 0)


def test_torch_does_it_where_gradients_are_wanted_or_operations_are_watched(launched: list[Launch]) -> None:
    arguments = drawn(5, 3, 16, 4)
    arguments[0].requires_grad_()
    assert combine(*arguments).requires_grad
    with torch.no_grad():
        combine(*arguments)
    with torch.inference_mode():
        combine(*arguments)
    assert len(launched) == 2
    arguments[0] = arguments[0].detach()
    torch.compile(combine, backend="eager", fullgraph=True)(*arguments)
    result, place, weights, ids, experts, dtype = arguments
    torch.func.vmap(lambda shares: combine(result, place, shares, ids, experts, dtype))(torch.stack([weights] * 2))
    combine(*on_meta(arguments))
    assert len(launched) == 2


@pytest.mark.parametrize("change", [{5: torch.float64}, {3: torch.int16}, {2: torch.float8_e4m3fn}, {0: torch.float64}])
def test_torch_does_it_in_other_dtypes(change: dict[int, torch.dtype], launched: list[Launch]) -> None:
    arguments = drawn(5, 3, 16, 4, F32)
    for i, dtype in change.items():
        arguments[i] = arguments[i].to(dtype) if isinstance(arguments[i], Tensor) else dtype
    torch.testing.assert_close(combine(*arguments).double(), exact(*arguments), rtol=1e-5, atol=1e-5)
    assert not launched


def test_nothing_is_loaded_while_a_graph_is_captured(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does it then; what a call before has loaded is launched, for any number of tokens."""
    monkeypatch.setattr(moe_combine, "_is_capturing", lambda: True)
    combine(*drawn(5, 3, 16, 4))
    assert not launched
    monkeypatch.setattr(moe_combine, "_is_capturing", lambda: False)
    combine(*drawn(5, 3, 16, 4))
    monkeypatch.setattr(moe_combine, "_is_capturing", lambda: True)
    combine(*drawn(7, 3, 16, 4))
    combine(*drawn(5, 2, 16, 4))  # another binary
    assert len(launched) == 2


def test_a_machine_that_cannot_compile_is_told_once_and_served_by_torch(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(_: Launch) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(Launch, "__call__", call)
    arguments = drawn(5, 3, 16, 4)
    with pytest.warns(FallbackWarning, match="no C compiler"):
        same(combine(*arguments), exact(*arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(combine(*arguments), exact(*arguments))


def compiled(architecture: Any, choices: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The binary for operands that begin at multiples of 16 bytes."""
    result, place, weights, ids, experts, _ = on_meta(drawn(2, choices, columns, 4, dtype))
    launch = moe_combine_kernel.launch(result, place, weights, ids, result.new_empty(2, columns), experts)
    module = ModuleType("combine")
    module.kernel, module.OPTIONS = moe_combine_kernel.kernel, launch.options  # type: ignore[attr-defined]
    return compile_kernel(module, launch.args, architecture)


@pytest.mark.parametrize("choices", [1, 2, 6, 8, 10, 16, 24])
@pytest.mark.parametrize("columns", [4096, 7176])
def test_all_rows_are_asked_for_16_bytes_a_thread_before_one_is_added(
    choices: int, columns: int, tmp_path: Path
) -> None:
    """In the machine code for sm_90a, without spills."""
    binary = compiled((9, 0), choices, columns)
    assert "0 bytes spill stores, 0 bytes spill loads" in _ptxas_log(binary.asm["ptx"], (9, 0))
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    command = [str(toolchain.binary("nvdisasm")), "-c", str(path)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    steps = re.findall(r"\b(LDG\.E\.128|LDG|STG\.E\.128|STG|FFMA)\b", code)
    rows = choices if choices <= 16 else 8
    loads = steps.count("LDG.E.128")
    assert loads == (2 * rows if choices <= 2 else rows)
    assert "STG" not in steps
    last = len(steps) - 1 - steps[::-1].index("LDG.E.128")
    assert "FFMA" not in steps[:last]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32])
def test_compiles_for_every_architecture(name: str, dtype: torch.dtype) -> None:
    architecture, _ = ARCHITECTURES[name]
    binary = compiled(architecture, 8, 7168, dtype)
    assert binary.asm["hsaco" if isinstance(architecture, str) else "cubin"]


def test_offsets_have_64_bits() -> None:
    """Of a token in weights, ids, places and output, and of each of its rows."""
    text = compiled((9, 0), 8, 7168).asm["ttir"]
    places = re.findall(r"(%\S+) = arith\.extsi %source\S* : i32 to i64", text)
    assert len(places) == 8
    assert len(re.findall(r"arith\.muli %(?:token|source)\S*, %\S+ : i64", text)) >= 4 + 8
