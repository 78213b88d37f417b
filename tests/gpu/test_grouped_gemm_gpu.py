"""Kernels of grouped GEMM give the right result on the card: every form, layout and spread; neighbours full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from tests.support import gpu_cases
from tlxgen import devices, functional, ops
from tlxgen.codegen.emit import emit
from tlxgen.codegen.loader import load
from tlxgen.config import Config
from tlxgen.functional import grouped
from tlxgen.ops import accuracy
from tlxgen.ops.grouped_gemm.problem import GroupedGemmProblem, drawn_sizes
from tlxgen.runtime import kernel
from tlxgen.runtime.launch import Launcher, SlimDescriptor
from tlxgen.space.candidates import candidates, favourite
from tlxgen.tuner.process import Child
from tlxgen.tuner.runner import Runner

pytestmark = pytest.mark.gpu

GROUPED = ops.get("grouped_gemm")
H200 = devices.target("h200")
FORMS: tuple[Any, ...] = ("2d3d", "3d2d", "2d2d", "3d3d", "masked")
RAGGED: tuple[Any, ...] = ("2d3d", "3d2d", "2d2d", "masked", "gather")
NAN = float("nan")

#: Tokens of experts, by what is special about them.
SPREADS: dict[str, list[int]] = {
    "first empty": [0, 70, 500],
    "last empty": [700, 5, 0, 0],
    "middle empty": [40, 0, 0, 0, 300],
    "one takes all": [0, 0, 1500, 0],
    "one each": [1] * 40,
    "one expert": [131],
    "misaligned": [128, 130, 65],
    "around a tile": [0, 127, 129, 0, 64, 255, 257, 1],
    "whole tiles": [64] * 8,
    "many": [0] * 500 + [3] * 11 + [300],
}


def spread(sizes: Sequence[int], n: int, k: int, form: Any, **options: Any) -> GroupedGemmProblem:
    """A problem whose experts have so many tokens each."""
    if form != "3d3d":
        options["group_sizes"] = ",".join(map(str, sizes))
    if form == "masked":
        options.setdefault("max_rows", max(1, *sizes) + 8)
    made = GROUPED.problem((len(sizes), sum(sizes), n, k), form=form, **options)
    assert isinstance(made, GroupedGemmProblem)
    return made


PROBLEMS: list[GroupedGemmProblem] = [
    *(GROUPED.problem((8, 4096, 1024, 768), form=form) for form in FORMS),
    *(GROUPED.problem((8, 4096, 1024, 768), form=form, layout="tt", dtype="fp16") for form in ("2d3d", "3d3d")),
    GROUPED.problem((8, 4096, 1024, 768), form="3d2d", layout="nn", epilogue="relu"),
    GROUPED.problem((8, 4096, 1024, 768), form="2d2d", out_dtype="fp32"),
    GROUPED.problem((8, 4096, 1024, 768), form="2d2d", layout="nn"),
    GROUPED.problem((64, 1024, 1536, 512), layout="nt", epilogue="bias+silu", group_sizes="zipf"),
    GROUPED.problem((64, 1024, 1536, 512), layout="nt", form="masked", max_rows=256, epilogue="bias+gelu"),
    GROUPED.problem((16, 2000, 1004, 520), layout="nt", epilogue="bias+relu"),
    GROUPED.problem((8, 4096, 1024, 768), epilogue="swiglu"),
    GROUPED.problem((64, 1024, 1536, 512), layout="nt", epilogue="bias+swiglu", group_sizes="zipf"),
    GROUPED.problem((64, 1024, 1536, 512), layout="nt", form="masked", max_rows=256, epilogue="geglu"),
    GROUPED.problem((16, 2000, 1004, 520), layout="nt", epilogue="bias+geglu"),
    GROUPED.problem((16, 2000, 1040, 520), layout="nt", epilogue="swiglu", out_dtype="fp32"),
    GROUPED.problem((8, 4096, 1024, 768), form="gather"),
    GROUPED.problem((64, 1024, 1536, 512), form="gather", layout="nt", epilogue="bias+swiglu", group_sizes="zipf"),
    GROUPED.problem((16, 2000, 1004, 528), form="gather", layout="nt", epilogue="relu", dtype="fp16"),
    GROUPED.problem((3, 1000, 77, 131), form="gather"),
    GROUPED.problem((8, 4096, 1024, 768), dtype="e4m3"),
    GROUPED.problem((64, 1024, 1536, 512), dtype="e4m3", epilogue="bias+swiglu", group_sizes="zipf"),
    GROUPED.problem((16, 2000, 1004, 528), dtype="e4m3", epilogue="bias+gelu"),
    GROUPED.problem((16, 2000, 1040, 7168), dtype="e4m3", epilogue="swiglu"),
    GROUPED.problem((3, 1000, 77, 131)),
    GROUPED.problem((4, 900, 24576, 64)),
    GROUPED.problem((1, 777, 768, 256)),
]


CASES = [(problem, config) for problem in PROBLEMS for config in gpu_cases.sample(GROUPED, problem)]


@pytest.fixture(scope="session")
def rejected() -> set[tuple[GroupedGemmProblem, Config]]:
    """What the compiler made no good binary of; those are never launched."""
    return gpu_cases.rejected(GROUPED, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[1].short}")
def test_result_is_as_good_as_the_library(
    case: tuple[GroupedGemmProblem, Config], child: Child, rejected: set[tuple[GroupedGemmProblem, Config]]
) -> None:
    """The gate fills the output with NaN, guards what lies around it, and launches several times."""
    if case in rejected:
        pytest.skip("the compiler spills")
    problem, config = case
    card = Runner("grouped_gemm", problem, seed=11, child=child)
    card.setup()
    verdict = card.gate("candidate", emit(GROUPED, problem, config))
    assert verdict.status == "ok", verdict.message


def launcher(
    problem: GroupedGemmProblem, template: str, inputs: dict[str, Any], out: torch.Tensor
) -> Callable[[], None]:
    """What launches the template's favourite as `get_kernel` does."""
    config = candidates(problem, H200, (template,))[0]
    refusal = GROUPED.launchable(problem, config, inputs, out)
    assert refusal is None, refusal
    module = load(emit(GROUPED, problem, config))
    _, args = GROUPED.arguments(module, inputs, out, num_sms=132)
    launch = Launcher(module, args, torch.cuda.get_device_capability())
    slim: dict[str, Any] = {"descriptor": SlimDescriptor} if launch.slim else {}
    grid, args = GROUPED.arguments(module, inputs, out, num_sms=132, **slim)
    return lambda: launch(grid, torch.cuda.current_stream().cuda_stream, args)


def run(problem: GroupedGemmProblem, template: str, inputs: dict[str, Any]) -> torch.Tensor:
    """The result, written over NaN."""
    out = GROUPED.output(problem, inputs).fill_(NAN)
    launcher(problem, template, inputs, out)()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize("form", RAGGED)
@pytest.mark.parametrize("sizes", SPREADS.values(), ids=SPREADS)
def test_tokens_are_the_right_experts_however_they_are_spread(template: str, form: Any, sizes: list[int]) -> None:
    problem = spread(sizes, 768, 512, form)
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    reason = accuracy.why_wrong(
        run(problem, template, inputs), GROUPED.reference(problem, inputs), GROUPED.eager(problem, inputs)
    )
    assert reason is None, reason


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize("sizes", SPREADS.values(), ids=SPREADS)
def test_scales_are_the_right_ones_however_tokens_are_spread(template: str, sizes: list[int]) -> None:
    problem = spread(sizes, 768, 512, "2d3d", dtype="e4m3")
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    reason = accuracy.why_wrong(
        run(problem, template, inputs), GROUPED.reference(problem, inputs), GROUPED.eager(problem, inputs)
    )
    assert reason is None, reason


def test_the_drop_in_of_8_bit_floats_agrees_with_torch() -> None:
    problem = spread([300, 0, 129, 3, 80], 768, 512, "2d3d", dtype="e4m3")
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    a, b, scale_a, scale_b, offs = (inputs[name] for name in ("a", "b", "scale_a", "scale_b", "offs"))
    exact = GROUPED.reference(problem, inputs)
    library = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16)
    for out in (
        functional.scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs),
        functional.scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, use_fast_accum=False),
    ):
        assert accuracy.error(out, exact).norm <= 1.2 * accuracy.error(library, exact).norm


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize("form", FORMS)
def test_an_expert_never_feels_its_neighbours(template: str, form: Any) -> None:
    """Every other expert is NaN, in tokens and weights, and so is what lies behind the last token."""
    sizes = [200] * 4 if form == "3d3d" else [300, 129, 3, 77]
    problem = spread(sizes, 768, 512, form)
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    clean = run(problem, template, inputs)
    ends = [0, *accumulate(sizes)]
    for name, dimension in (("a", 1 if form == "2d2d" else 0), ("b", 1 if form == "3d2d" else 0)):
        x = inputs[name]
        if x.dim() == 3:
            x[0], x[2] = NAN, NAN
            continue
        rows = x.movedim(dimension, 0)
        longer = torch.full((len(rows) + 300, rows.shape[1]), NAN, dtype=x.dtype, device="cuda")
        for expert in (1, 3):
            own = slice(ends[expert], ends[expert + 1])
            longer[own] = rows[own]
        inputs[name] = longer[: len(rows)].movedim(0, dimension)
    if form == "masked":
        for expert, size in enumerate(sizes):
            inputs["a"][expert, size:] = NAN
    out = run(problem, template, inputs)
    for expert in (1, 3):
        tokens = slice(ends[expert], ends[expert + 1])
        places: dict[str, Any] = {
            "2d3d": tokens,
            "3d2d": (slice(None), tokens),
            "masked": (expert, slice(sizes[expert])),
        }
        here = places.get(form, expert)
        assert torch.equal(out[here], clean[here])
        assert clean[here].isfinite().all()


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize("form", RAGGED)
def test_other_counts_need_no_other_kernel_and_no_host(template: str, form: Any) -> None:
    """A captured graph is replayed with counts that it has never seen."""
    problem = spread([100, 0, 200, 84], 256, 320, form)
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    out = GROUPED.output(problem, inputs)
    launch = launcher(problem, template, inputs, out)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    ends = "counts" if form == "masked" else "offs"
    for sizes in ([0, 0, 0, 0], [1, 2, 3, 4], [0, 200, 0, 184], [96, 96, 96, 96]):
        counts = torch.tensor(sizes, dtype=torch.int32, device="cuda")
        inputs[ends].copy_(counts if form == "masked" else counts.cumsum(0, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        reference = GROUPED.reference(problem, inputs)
        assert torch.equal(out.isnan(), reference.isnan())
        if reference.nan_to_num().norm() > 0:
            assert accuracy.error(out, reference).norm < 5e-3
        else:
            assert not out.nan_to_num().any()


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize("form", ["2d3d", "masked"])
@pytest.mark.parametrize("n", [74, 528, 1004])
def test_a_gated_activation_never_takes_up_for_gate(template: str, form: Any, n: int) -> None:
    """Where a tile passes the gate's last column, up's first come next in memory."""
    problem = spread([300, 0, 129, 3, 77], n, 512, form, layout="nt", epilogue="swiglu")
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    clean = run(problem, template, inputs)
    reason = accuracy.why_wrong(clean, GROUPED.reference(problem, inputs), GROUPED.eager(problem, inputs))
    assert reason is None, reason
    inputs["b"][:, :, n // 2 - 1] = NAN  # the gate's last
    out = run(problem, template, inputs)
    assert out[..., -1].isnan().all()
    torch.testing.assert_close(out[..., :-1], clean[..., :-1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("template", GROUPED.templates)
def test_nobody_feels_rows_that_it_did_not_ask_for(template: str) -> None:
    """Rows repeat; those of the other experts are NaN, and so is the first, which stands in past an expert's last."""
    problem = spread([300, 129, 3, 77], 768, 512, "gather")
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 200, (509,), generator=generator, dtype=torch.int32).cuda()
    own = rows[300:429]
    a = torch.full((200, 512), NAN, dtype=torch.bfloat16, device="cuda")
    a[own] = torch.randn(129, 512, device="cuda").bfloat16()
    inputs |= {"a": a, "rows": rows}
    out = run(problem, template, inputs)[300:429]
    exact = a[own].double() @ inputs["b"][1].double()
    assert out.isfinite().all()
    assert accuracy.error(out, exact).norm < 5e-3


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_around_the_result_is_written(template: str, form: Any) -> None:
    problem = spread([96] * 3 if form == "3d3d" else [100, 0, 37], 264, 320, form)
    inputs: dict[str, Any] = dict(GROUPED.inputs(problem, "cuda", 0))
    expected = run(problem, template, inputs)
    shape = problem.shapes["c"]
    room = torch.full((*(size + 2 for size in shape[:-1]), shape[-1] + 16), 7.0, dtype=torch.bfloat16, device="cuda")
    inside = (*(slice(1, 1 + size) for size in shape[:-1]), slice(8, 8 + shape[-1]))
    room[inside] = NAN
    launcher(problem, template, inputs, room[inside])()
    torch.cuda.synchronize()
    torch.testing.assert_close(room[inside], expected, rtol=0, atol=0, equal_nan=True)
    room[inside] = 7.0
    assert torch.equal(room, torch.full_like(room, 7.0))


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize("form", FORMS[:4])
def test_the_drop_in_and_its_gradients(template: str, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three products is a kernel's, and as near to float64 as torch's own."""
    asked = []

    def kernel_for(problem: GroupedGemmProblem) -> kernel.Kernel:
        asked.append(problem.form)
        gpu = devices.detect()
        assert gpu is not None
        # Not every gradient's layout is for TMA.
        config = [*favourite(problem, gpu, template), *favourite(problem, gpu, GROUPED.templates[-1])][0]
        return kernel.Kernel(problem, kernel.Choice("default", config), gpu)

    monkeypatch.setattr(grouped, "kernel_for", kernel_for)
    kernel.forget()
    problem = spread([128] * 3 if form == "3d3d" else [200, 0, 184], 256, 320, form)
    inputs = GROUPED.inputs(problem, "cuda", 0)
    a, b = (inputs[name].requires_grad_() for name in ("a", "b"))
    weights = torch.randn(problem.shapes["c"], device="cuda").bfloat16()
    out = functional.grouped_mm(a, b, offs=inputs.get("offs"))
    found = (out, *torch.autograd.grad(out, (a, b), weights))
    kernel.forget()
    a, b = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    starts = [0, *accumulate(drawn_sizes(problem))]
    exact = torch.zeros(problem.shapes["c"], dtype=torch.float64, device="cuda")
    for expert in range(problem.E):
        own = slice(starts[expert], starts[expert + 1])
        if form == "2d3d":
            exact[own] = a[own] @ b[expert]
        elif form == "3d2d":
            exact[:, own] = a[expert] @ b[:, own]
        else:
            exact[expert] = a[:, own] @ b[own] if form == "2d2d" else a[expert] @ b[expert]
    expected = (exact, *torch.autograd.grad(exact, (a, b), weights.double()))
    for one, other in zip(found, expected, strict=True):
        assert accuracy.error(one, other.detach()).norm < 5e-3
    assert len(asked) == 3


@pytest.mark.parametrize("template", GROUPED.templates)
@pytest.mark.parametrize(("activation", "epilogue"), [("silu", "swiglu"), ("gelu", "geglu")])
def test_a_layer_is_two_kernels(template: str, activation: Any, epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product has the activation in it; the layer is float64's, token by token."""
    asked = []

    def kernel_for(problem: GroupedGemmProblem) -> kernel.Kernel:
        asked.append((problem.form, problem.epilogue))
        gpu = devices.detect()
        assert gpu is not None
        return kernel.Kernel(problem, kernel.Choice("default", favourite(problem, gpu, template)[0]), gpu)

    monkeypatch.setattr(grouped, "kernel_for", kernel_for)
    kernel.forget()
    experts, tokens, k, inner = 8, 333, 512, 264
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    w1 = (torch.randn(experts, 2 * inner, k, device="cuda") / k**0.5).bfloat16()
    w2 = (torch.randn(experts, k, inner, device="cuda") / inner**0.5).bfloat16()
    weights, ids = torch.randn(tokens, experts, device="cuda").softmax(1).topk(3, 1)
    out = functional.fused_moe(x, w1, w2, weights, ids, activation=activation)
    kernel.forget()
    product = torch.einsum("tk,eik->tei", x.double(), w1.double())
    gate, up = product.chunk(2, 2)
    hidden = getattr(torch.nn.functional, activation)(gate) * up
    every = torch.einsum("tei,eki->tek", hidden, w2.double())
    share = torch.zeros(tokens, experts, dtype=torch.float64, device="cuda").scatter_(1, ids, weights.double())
    exact = (every * share[..., None]).sum(1)
    assert accuracy.error(out, exact).norm < 1e-2
    assert asked == [("2d3d", epilogue), ("2d3d", "none")]


def chosen(tokens: int, choices: int, columns: int, experts: int = 5, seed: int = 0) -> dict[str, Any]:
    """Tokens' choices, some of which are not here, and rows for all in the order of experts; NaN for nobody's."""
    from tlxgen.functional.moe_routing import route

    generator = torch.Generator("cuda").manual_seed(seed)
    size = (tokens, choices)
    ids = torch.randint(-1, experts + 1, size, generator=generator, device="cuda")
    weights = torch.rand(size, generator=generator, device="cuda")
    result = torch.randn(tokens * choices, columns, generator=generator, device="cuda").bfloat16()
    routing = route(ids, experts)
    unknown = (ids < 0) | (ids >= experts)
    result[routing.place[unknown.flatten()].long()] = NAN
    weights[unknown] = NAN
    return {"result": result, "place": routing.place, "weights": weights, "ids": ids}


def added_up(
    result: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int = 5
) -> torch.Tensor:
    """In float64, without those of nobody."""
    unknown = (ids < 0) | (ids >= experts)
    parts = result.double()[place.long()].view(*ids.shape, -1).masked_fill(unknown[..., None], 0.0)
    return torch.einsum("tk,tkc->tc", weights.double().masked_fill(unknown, 0.0), parts)


@pytest.fixture
def combine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Of five experts, in float32 unless a dtype is asked for; never by torch."""
    from tlxgen.functional import moe_combine

    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("torch does it")

    monkeypatch.setattr(moe_combine, "_by_torch", refuse)

    def call(dtype: torch.dtype = torch.float32, **tensors: torch.Tensor) -> torch.Tensor:
        return moe_combine.combine(**tensors, experts=5, dtype=dtype)

    return call


@pytest.mark.parametrize("choices", [1, 2, 3, 8, 10, 16, 17, 24])
@pytest.mark.parametrize("columns", [1, 77, 1030, 4096, 7168, 7176])
def test_tokens_come_back_weighted(choices: int, columns: int, combine: Callable[..., torch.Tensor]) -> None:
    given = chosen(61, choices, columns)
    exact = added_up(**given)
    out = combine(**given)
    assert out.shape == (61, columns)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    rounded = combine(torch.bfloat16, **given)
    assert torch.equal(rounded, out.bfloat16())
    for _ in range(20):
        assert torch.equal(combine(torch.bfloat16, **given), rounded)


def test_weights_and_ids_may_lie_anyhow(combine: Callable[..., torch.Tensor]) -> None:
    given = chosen(61, 6, 264)
    exact = added_up(**given)
    lie: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "columns": lambda tensor: tensor.t().contiguous().t(),
        "every other": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
        "misaligned": lambda tensor: torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape),
    }
    padded = torch.full((366, 272), NAN, device="cuda").bfloat16()[:, :264].copy_(given["result"])
    for name, change in lie.items():
        found = combine(result=padded, place=given["place"], weights=change(given["weights"]), ids=change(given["ids"]))
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5, msg=name)
    for weights in (torch.bfloat16, torch.float16, torch.float64):
        for ids in (torch.int32, torch.int64):
            other = given | {"weights": given["weights"].to(weights), "ids": given["ids"].to(ids)}
            torch.testing.assert_close(combine(**other).double(), added_up(**other), rtol=1e-5, atol=1e-5)


def test_a_graph_brings_tokens_back_from_wherever_they_are(combine: Callable[..., torch.Tensor]) -> None:
    """Captured once, with the sort, and replayed for other choices; on a side stream, in inference mode."""
    from tlxgen.functional.moe_routing import route

    def step() -> torch.Tensor:
        return combine(result=rows, place=route(ids, 5).place, weights=weights, ids=ids)

    given = chosen(700, 8, 1024)
    rows = torch.randn(5600, 1024, device="cuda").bfloat16()
    ids, weights = given["ids"].clone(), given["weights"].clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step()
        for seed in range(3):
            other = chosen(700, 8, 1024, seed=seed)
            ids.copy_(other["ids"])
            weights.copy_(other["weights"])
            graph.replay()
            torch.cuda.synchronize()
            exact = added_up(rows, other["place"], weights, ids)
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_graph_before_any_call_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded while it is captured."""
    from tlxgen.functional import moe_combine

    monkeypatch.setattr(moe_combine, "_LOADED", set())
    given = chosen(61, 4, 104)
    arguments: dict[str, Any] = {**given, "experts": 5, "dtype": torch.float32}
    moe_combine._by_torch(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_combine.combine(**arguments)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out.double(), added_up(**given), rtol=1e-5, atol=1e-5)
    assert not moe_combine._LOADED


def test_more_elements_than_32_bits_can_count(combine: Callable[..., torch.Tensor]) -> None:
    """First in what is read, then in what is written."""
    columns, many = 7168, 2**31 // 7168 + 2
    rows = torch.empty(many, columns, dtype=torch.bfloat16, device="cuda")
    rows[-1], rows[-2] = 1.0, 2.0
    ids = torch.zeros(1, 2, dtype=torch.int64, device="cuda")
    place = torch.tensor([many - 1, many - 2], dtype=torch.int32, device="cuda")
    out = combine(result=rows, place=place, weights=torch.tensor([[4.0, 1.0]], device="cuda"), ids=ids)
    assert torch.equal(out, torch.full_like(out, 6.0))
    del rows
    few = torch.arange(2, device="cuda").bfloat16()[:, None].expand(2, columns).contiguous()
    ids, place = ids.new_zeros(many, 1), (torch.arange(many, device="cuda") % 2).int()
    written = combine(torch.bfloat16, result=few, place=place, weights=torch.ones(many, 1, device="cuda"), ids=ids)
    assert torch.equal(written[::2], few[:1].expand(-(-many // 2), columns))
    assert torch.equal(written[1::2], few[1:].expand(many // 2, columns))


@pytest.mark.parametrize("experts", [3, 255, 256, 40_000])
@pytest.mark.parametrize("tokens", [0, 1, 500, 5000])
def test_choices_in_the_order_of_experts(experts: int, tokens: int) -> None:
    """With keys of one, two and four bytes, and both of torch's sorts: the same as on the CPU."""
    from tlxgen.functional.moe_routing import route

    ids = torch.randint(-1, experts + 1, (tokens, 3), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.int64, torch.int32, torch.int16):
        given = ids.clamp(max=torch.iinfo(dtype).max).to(dtype)
        here, there = route(given, experts), route(given.cuda(), experts)
        for name in ("ids", "keys", "rows", "offs", "place"):
            assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name
