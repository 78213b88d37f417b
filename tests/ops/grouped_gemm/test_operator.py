"""Grouped GEMM: what may be asked for, the reference, and every way in which tokens may be spread over experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tlxgen
from tests.support.simulated import launch
from tlxgen import devices, ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.errors import InvalidProblemError, LaunchError
from tlxgen.ops import accuracy
from tlxgen.ops.grouped_gemm import torch_reference
from tlxgen.ops.grouped_gemm.problem import EPILOGUES, GroupedGemmProblem, drawn_sizes
from tlxgen.runtime.selection import select
from tlxgen.simulator.check import check
from tlxgen.space import search_space
from tlxgen.space.candidates import candidates

GROUPED = ops.get("grouped_gemm")
H200 = devices.target("h200")
FORMS: tuple[Any, ...] = ("2d3d", "3d2d", "2d2d", "3d3d", "masked")
RAGGED = ("2d3d", "3d2d", "2d2d", "masked")
NAN = float("nan")


def problem(shape: tuple[int, int, int, int], **options: Any) -> GroupedGemmProblem:
    made = GROUPED.problem(shape, **options)
    assert isinstance(made, GroupedGemmProblem)
    return made


def spread(sizes: Sequence[int], n: int, k: int, form: Any = "2d3d", **options: Any) -> GroupedGemmProblem:
    """A problem whose experts have so many tokens each."""
    if form != "3d3d":
        options["group_sizes"] = ",".join(map(str, sizes))
    if form == "masked":
        options.setdefault("max_rows", max(1, *sizes) + 3)
    return problem((len(sizes), sum(sizes), n, k), form=form, **options)


def takes(form: str, epilogue: str) -> bool:
    """Whether the form has the epilogue."""
    gated = epilogue.endswith("glu")
    return form in ("2d3d", "masked") if gated else form != "3d2d" or "bias" not in epilogue


class TestProblem:
    def test_defaults_follow_the_form(self) -> None:
        assert (problem((8, 64, 16, 32)).layout, problem((8, 64, 16, 32)).group_sizes) == ("nn", "dirichlet")
        assert problem((8, 64, 16, 32), form="2d2d").layout == "tn"
        assert problem((8, 64, 16, 32), form="3d2d").layout == "nt"
        assert problem((8, 64, 16, 32), form="3d3d").group_sizes == "even"
        assert problem((8, 64, 16, 32), form="masked").max_rows == 64
        assert problem((8, 64, 16, 32), dtype="fp16").out_dtype == "fp16"

    @pytest.mark.parametrize(
        ("shape", "options", "said"),
        [
            ((8, 64, 16), {}, "E ROWS N K"),
            ((8, -1, 16, 32), {}, "ROWS"),
            ((8, 2**30 + 1, 16, 32), {}, "ROWS"),
            ((8, 64, 16, 32), {"dtype": "fp32"}, "dtype"),
            ((8, 64, 16, 32), {"form": "4d"}, "form"),
            ((8, 64, 16, 32), {"layout": "xx"}, "layout"),
            ((8, 64, 16, 32), {"epilogue": "residual"}, "use one of none, bias"),
            ((8, 64, 16, 32), {"epilogue": "relu+bias"}, "use one of none, bias"),
            ((8, 64, 16, 32), {"epilogue": "bias", "form": "3d2d"}, "takes no bias"),
            ((8, 64, 16, 32), {"epilogue": "swiglu", "form": "3d3d"}, "for forms 2d3d, masked, gather, not 3d3d"),
            ((8, 64, 17, 32), {"epilogue": "bias+geglu"}, "N = 17: .* N must be even"),
            ((8, 64, 16, 32), {"form": "masked", "max_rows": 7}, "ROWS = 64 exceeds E x max_rows = 8 x 7"),
            ((8, 64, 16, 32), {"max_rows": 64}, "max_rows = 64 is for form masked"),
            ((8, 63, 16, 32), {"form": "3d3d"}, "ROWS = 63 is no multiple of E = 8"),
            ((8, 64, 16, 32), {"form": "3d3d", "group_sizes": "zipf"}, "equally many tokens"),
            ((8, 64, 16, 32), {"group_sizes": "normal"}, "use even, dirichlet, zipf"),
            ((8, 64, 16, 32), {"group_sizes": "-8,72"}, "use even, dirichlet, zipf"),
            ((2, 64, 16, 32), {"group_sizes": "32,31"}, "63 tokens of 2 experts, where ROWS = 64"),
            ((2, 64, 16, 32), {"group_sizes": "32,31,1"}, "64 tokens of 3 experts, where ROWS = 64 and E = 2"),
            ((2, 64, 16, 32), {"form": "masked", "max_rows": 33, "group_sizes": "30,34"}, "room for max_rows = 33"),
            (("8", 64, 16, 32), {}, "E"),
        ],
    )
    def test_that_makes_no_sense_is_refused_by_name(self, shape: Any, options: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidProblemError, match=said):
            problem(shape, **options)

    @given(
        st.integers(1, 300),
        st.integers(0, 5000),
        st.integers(0, 9000),
        st.integers(0, 9000),
        st.sampled_from(FORMS),
        st.sampled_from(["nn", "nt", "tn", "tt"]),
        st.sampled_from(["bf16", "fp16"]),
        st.sampled_from([None, "fp32"]),
        st.sampled_from(EPILOGUES),
        st.sampled_from([None, "even", "dirichlet", "zipf", "numbers"]),
        st.integers(0, 100),
    )
    def test_is_known_by_its_label(
        self,
        e: int,
        rows: int,
        n: int,
        k: int,
        form: Any,
        layout: str,
        dtype: str,
        out: Any,
        epilogue: str,
        sizes: Any,
        spare: int,
    ) -> None:
        rows = rows // e * e if form == "3d3d" else rows
        if sizes == "numbers":
            sizes = ",".join(["0"] * (e - 1) + [str(rows)])
        options = {
            "group_sizes": None if form == "3d3d" else sizes,
            "epilogue": epilogue if takes(form, epilogue) and n % 2 == 0 else "none",
            "max_rows": rows + spare if form == "masked" else None,
        }
        made = problem((e, rows, n, k), form=form, layout=layout, dtype=dtype, out_dtype=out, **options)
        assert GroupedGemmProblem.from_label(made.label) == made


class TestDrawnSizes:
    @given(st.integers(1, 300), st.integers(0, 5000), st.sampled_from(["even", "dirichlet", "zipf"]), st.booleans())
    def test_sum_to_the_rows_and_fit(self, e: int, rows: int, how: str, masked: bool) -> None:
        options: dict[str, Any] = {"form": "masked", "max_rows": -(-rows // e) + 1} if masked else {}
        made = problem((e, rows, 16, 16), group_sizes=how, **options)
        sizes = drawn_sizes(made)
        assert (len(sizes), sum(sizes), min(sizes) >= 0) == (e, rows, True)
        assert max(sizes) <= (made.max_rows if masked else rows)

    def test_are_as_the_class_says(self) -> None:
        sizes = {how: drawn_sizes(problem((64, 6400, 8, 8), group_sizes=how)) for how in ("even", "dirichlet", "zipf")}
        assert set(sizes["even"]) == {100}
        assert sizes["dirichlet"].count(0) >= 4
        assert sizes["zipf"].count(0) == 4
        assert max(sizes["zipf"]) > 6400 / 5  # the harmonic number of 60 is 4.68
        assert drawn_sizes(problem((3, 6, 8, 8), group_sizes="4,0,2")) == (4, 0, 2)
        assert sizes["dirichlet"] == drawn_sizes(problem((64, 6400, 512, 8), group_sizes="dirichlet"))

    def test_are_those_of_the_inputs(self) -> None:
        made = problem((7, 300, 8, 8))
        assert GROUPED.inputs(made, "cpu", 3)["offs"].tolist() == list(accumulate(drawn_sizes(made)))
        made = problem((7, 300, 8, 8), form="masked", max_rows=100)
        assert GROUPED.inputs(made, "cpu", 3)["counts"].tolist() == list(drawn_sizes(made))


class TestCounts:
    def test_are_those_of_the_tokens_and_of_the_weights_that_are_read(self) -> None:
        made = spread([3, 0, 7], 5, 11)
        assert GROUPED.flops(made) == 2 * 10 * 5 * 11
        assert GROUPED.bytes_moved(made) == 2 * (10 * 11 + 10 * 5 + 2 * 5 * 11)
        assert GROUPED.bytes_moved(spread([3, 0, 7], 5, 11, out_dtype="fp32")) == 2 * (110 + 110) + 4 * 50
        made = spread([3, 0, 7], 5, 11, "2d2d", out_dtype="fp32")
        assert GROUPED.bytes_moved(made) == 2 * (10 * 11 + 10 * 5) + 4 * 3 * 5 * 11

    def test_of_a_gated_activation_are_those_of_the_whole_product_and_of_half_the_result(self) -> None:
        made = spread([3, 0, 7], 6, 11, epilogue="swiglu")
        assert (made.shapes["b"], made.shapes["c"]) == ((3, 11, 6), (10, 3))
        assert GROUPED.flops(made) == 2 * 10 * 6 * 11
        assert GROUPED.bytes_moved(made) == 2 * (10 * 11 + 10 * 3 + 2 * 6 * 11)


class TestInputs:
    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
    @pytest.mark.parametrize("form", FORMS)
    def test_lie_in_memory_as_the_layout_says(self, form: Any, layout: str) -> None:
        made = problem((3, 12, 24, 40), form=form, layout=layout)
        tensors = GROUPED.inputs(made, "cpu", 0)
        for name, transposed in (("a", layout[0] == "t"), ("b", layout[1] == "t")):
            assert tuple(tensors[name].shape) == made.shapes[name]
            assert tensors[name].stride(-2 if transposed else -1) == 1
            assert tensors[name].mT.is_contiguous() == transposed
        assert GROUPED.check_call(made, tensors) is None

    def test_tell_experts_apart_by_their_norm(self) -> None:
        b = GROUPED.inputs(problem((4, 8, 128, 128)), "cpu", 0)["b"].float()
        norms = [expert.norm().item() for expert in b]
        assert norms == sorted(norms)
        assert norms[3] > 1.5 * norms[0]


class TestReference:
    @pytest.mark.parametrize("form", RAGGED[:3])
    def test_is_torchs_grouped_product(self, form: Any) -> None:
        made = spread([8, 0, 16, 8], 16, 32, form)
        inputs = {name: x.float() if x.is_floating_point() else x for name, x in GROUPED.inputs(made, "cpu", 0).items()}
        expected = torch._grouped_mm(inputs["a"], inputs["b"], offs=inputs["offs"])
        torch.testing.assert_close(GROUPED.reference(made, inputs).float(), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("epilogue", EPILOGUES)
    def test_and_the_peer_agree_within_rounding(self, form: Any, epilogue: str) -> None:
        if not takes(form, epilogue):
            return
        sizes = [20] * 3 if form == "3d3d" else [20, 0, 33, 7]
        made = spread(sizes, 24, 40, form, epilogue=epilogue, dtype="fp16", out_dtype="fp32")
        inputs = GROUPED.inputs(made, "cpu", 1)
        reference = GROUPED.reference(made, inputs)
        assert accuracy.error(GROUPED.eager(made, inputs), reference).norm < 1e-3
        out = torch.full(made.shapes["c"], NAN)
        assert GROUPED.eager(made, inputs, out) is out
        assert accuracy.error(out, reference).norm < 1e-3

    @pytest.mark.parametrize("form", RAGGED[:3])
    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
    @pytest.mark.parametrize("sizes", [(7, 13), (16, 8)])
    def test_the_peer_takes_what_torchs_grouped_kernels_refuse(
        self, form: Any, layout: str, sizes: tuple[int, int]
    ) -> None:
        """Sizes that are no whole 16 bytes, and tokens that lie side by side, whose ends would have to be such."""
        made = spread([5, 0, 9], *sizes, form, layout=layout)
        inputs = GROUPED.inputs(made, "cpu", 1)
        assert accuracy.error(GROUPED.eager(made, inputs), GROUPED.reference(made, inputs)).norm < 5e-3

    @pytest.mark.parametrize("out_dtype", ["fp16", "fp32"])
    @pytest.mark.parametrize("form", FORMS)
    def test_what_is_timed_for_fp16_is_torchs_kernel_for_bf16(
        self, form: Any, out_dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It asks nothing of the host there, and reads and writes as many bytes."""
        made = spread([16] * 2 if form == "3d3d" else [20, 12], 24, 40, form, dtype="fp16", out_dtype=out_dtype)
        inputs = GROUPED.inputs(made, "cpu", 0)
        dtypes = []

        def noted(function: Any) -> Any:
            def call(a: torch.Tensor, b: torch.Tensor, **named: Any) -> Any:
                dtypes.append((a.dtype, b.dtype))
                return function(a, b, **named)

            return call

        for name in ("_grouped_mm", "bmm"):
            monkeypatch.setattr(torch, name, noted(getattr(torch, name)))
        out = GROUPED.output(made, inputs)
        assert GROUPED.timed_peer(made, inputs, out) is out
        assert dtypes == [(torch.bfloat16, torch.bfloat16)]
        assert GROUPED.timed_peer(made, inputs).dtype == out.dtype

    @pytest.mark.parametrize(("epilogue", "activation"), [("bias+swiglu", "silu"), ("bias+geglu", "gelu")])
    def test_of_a_gated_activation_takes_the_first_columns_for_the_gate(self, epilogue: str, activation: str) -> None:
        made = spread([5, 0, 3], 12, 16, epilogue=epilogue)
        inputs = GROUPED.inputs(made, "cpu", 0)
        rows = [0] * 5 + [2] * 3
        gate, up = (
            torch.einsum("rk,rki->ri", inputs["a"].double(), inputs["b"].double()[rows, :, half])
            + inputs["bias"].double()[rows, half]
            for half in (slice(6), slice(6, 12))
        )
        expected = getattr(torch.nn.functional, activation)(gate) * up
        torch.testing.assert_close(GROUPED.reference(made, inputs), expected)

    def test_an_expert_without_tokens_has_a_gradient_of_zero(self) -> None:
        made = spread([5, 0, 9], 8, 16, "2d2d")
        assert torch.equal(GROUPED.reference(made, GROUPED.inputs(made, "cpu", 0))[1], torch.zeros(16, 8).double())

    def test_says_nothing_of_rows_that_nobody_owns(self) -> None:
        made = spread([5, 0, 9], 8, 16, "masked", max_rows=12)
        reference = GROUPED.reference(made, GROUPED.inputs(made, "cpu", 0))
        assert [int(expert[:, 0].isnan().sum()) for expert in reference] == [7, 12, 3]


#: Small tiles, so that few tokens make many of them.
SMALL: dict[str, dict[str, Any]] = {
    "grouped_gemm_tma": {"block_m": 64, "block_n": 128, "block_k": 64, "num_stages": 3, "group": 8, "walk": "after"},
    "grouped_gemm_vanilla": {
        "block_m": 32,
        "block_n": 64,
        "block_k": 32,
        "num_stages": 3,
        "group": 8,
        "num_warps": 4,
    },
}


def config(made: GroupedGemmProblem, template: str, **changes: Any) -> Config:
    params = {**SMALL[template], **changes}
    if template == "grouped_gemm_tma":
        whole = made.form != "3d2d" and made.shapes["c"][-1] * GROUPED.output_like(made)[1].itemsize % 16 == 0
        params.setdefault("store", "tma" if whole else "pointers")
        params.setdefault("epilogue_subtiles", 1 if whole or made.gated else 2)
    return Config(template=template, params=params)


@dataclass(frozen=True)
class Call:
    """One call of a kernel in the simulator."""

    problem: GroupedGemmProblem
    config: Config
    inputs: dict[str, Any]

    def run(self, out: torch.Tensor | None = None, num_sms: int = 3) -> torch.Tensor:
        if out is None:
            out = GROUPED.output(self.problem, self.inputs).fill_(NAN)
        refusal = GROUPED.launchable(self.problem, self.config, self.inputs, out)
        assert refusal is None, refusal
        assert GROUPED.check_call(self.problem, self.inputs) is None
        launch(GROUPED, emit(GROUPED, self.problem, self.config), self.inputs, out, num_sms=num_sms)
        return out

    def check(self) -> torch.Tensor:
        out = self.run()
        reference = GROUPED.reference(self.problem, self.inputs)
        reason = accuracy.why_wrong(out, reference, GROUPED.eager(self.problem, dict(self.inputs)))
        assert reason is None, reason
        return out


def call(made: GroupedGemmProblem, template: str, **changes: Any) -> Call:
    return Call(made, config(made, template, **changes), dict(GROUPED.inputs(made, "cpu", 0)))


#: Tokens of experts, by what is special about them.
SPREADS: dict[str, list[int]] = {
    "first empty": [0, 70, 5],
    "last empty": [70, 5, 0, 0],
    "middle empty": [40, 0, 0, 0, 30],
    "one takes all": [0, 0, 150, 0],
    "one each": [1] * 6,
    "one expert": [131],
    "beyond a tile by one": [65, 129, 64, 63],
    "misaligned": [128, 130, 65],
    "around": [0, 127, 129, 0, 64],
    "whole tiles": [64] * 4,
}


@pytest.mark.parametrize("template", GROUPED.templates)
class TestKernels:
    """In the simulator."""

    @pytest.mark.parametrize("sizes", SPREADS.values(), ids=SPREADS)
    @pytest.mark.parametrize("form", RAGGED)
    def test_tokens_are_the_right_experts_however_they_are_spread(
        self, template: str, form: Any, sizes: list[int]
    ) -> None:
        """The layouts are those in which tokens need not be a multiple of anything."""
        call(spread(sizes, 72, 96, form), template).check()

    @pytest.mark.parametrize("form", RAGGED)
    def test_many_experts(self, template: str, form: Any) -> None:
        sizes = [0] * 512
        sizes[3] = sizes[500] = 1
        sizes[100], sizes[511] = 70, 9
        if template.endswith("vanilla") or form == "2d2d":  # whose programs or tiles are many
            sizes = sizes[:4] + sizes[100:101] + sizes[470:]
        call(spread(sizes, 8, 16, form), template).check()

    @pytest.mark.parametrize("form", RAGGED)
    def test_no_tokens_at_all_write_nothing_but_gradients_of_zero(self, template: str, form: Any) -> None:
        one = call(spread([40, 30], 72, 64, form), template)
        ends = "counts" if form == "masked" else "offs"
        one.inputs[ends] = torch.zeros(2, dtype=torch.int32)
        out = one.run()
        assert torch.equal(out, torch.zeros_like(out)) if form == "2d2d" else out.isnan().all()

    @pytest.mark.parametrize("form", ["2d3d", "3d2d"])
    def test_tokens_past_the_last_end_are_nobodys(self, template: str, form: Any) -> None:
        one = call(spread([40, 30, 20], 72, 64, form), template)
        whole = one.run()
        one.inputs["offs"] = torch.tensor([40, 70, 75], dtype=torch.int32)
        out = one.run()
        if form == "3d2d":
            whole, out = whole.T, out.T
        assert torch.equal(out[:75], whole[:75])
        assert out[75:].isnan().all()

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
    def test_every_layout(self, template: str, form: Any, layout: str) -> None:
        made = spread([80] * 3 if form == "3d3d" else [40, 0, 88], 136, 72, form, layout=layout, max_rows=_room(form))
        side_by_side = {"2d3d": layout[0] == "t", "3d2d": layout[1] == "n", "2d2d": layout != "tn"}.get(form, False)
        if template == "grouped_gemm_tma" and side_by_side:  # tokens of all experts
            illegal = search_space.why_illegal(GROUPED, made, config(made, template), H200)
            assert illegal is not None
            assert "layout" in str(illegal)
            return
        call(made, template).check()

    @pytest.mark.parametrize("form", FORMS)
    def test_n_of_768_and_other_knobs(self, template: str, form: Any) -> None:
        changes: dict[str, Any] = {"group": 64}
        if template == "grouped_gemm_tma":
            changes |= {"block_m": 128, "block_n": 256, "epilogue_subtiles": 4 if form == "3d2d" else 2}
            changes |= {"walk": "during"} if form in ("2d3d", "3d2d", "masked") else {}
        made = spread([130] * 2 if form == "3d3d" else [130, 0, 31], 768, 64, form)
        call(made, template, **changes).check()

    @pytest.mark.parametrize("n", [1, 77, 100])
    def test_odd_rows_of_the_result_are_stored_by_pointers(self, template: str, n: int) -> None:
        call(spread([70, 0, 3], n, 64, layout="nt", epilogue="bias+relu"), template).check()

    @pytest.mark.parametrize(
        ("form", "epilogue", "n", "changes"),
        [
            ("2d3d", "swiglu", 144, {}),  # half of a second tile, and C by TMA
            ("2d3d", "bias+geglu", 136, {}),  # four columns past a tile, and C by pointers
            ("2d3d", "bias+swiglu", 74, {"walk": "during"}),  # fewer columns than a tile, at odd places
            ("masked", "bias+swiglu", 272, {"block_m": 128, "block_n": 256, "walk": "during"}),
            ("masked", "geglu", 528, {"block_m": 256, "epilogue_subtiles": 2}),
            ("2d3d", "swiglu", 2, {}),
        ],
    )
    def test_a_gated_activation_never_takes_up_for_gate(
        self, template: str, form: Any, epilogue: str, n: int, changes: dict[str, Any]
    ) -> None:
        """Where a tile passes the gate's last column, up's first come next in memory."""
        changes = changes if template == "grouped_gemm_tma" else {}
        one = call(spread([70, 0, 3, 129], n, 96, form, layout="nt", epilogue=epilogue), template, **changes)
        out = one.check()
        # Columns of the gate alone are NaN, so C's are, and no others.
        one.inputs["b"][:, :, n // 2 - 1] = NAN
        spoiled = one.run()
        assert spoiled[..., -1].isnan().all()
        torch.testing.assert_close(spoiled[..., :-1], out[..., :-1], rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
    @pytest.mark.parametrize("form", ["2d3d", "masked"])
    def test_a_gated_activation_in_other_layouts(self, template: str, form: Any, layout: str) -> None:
        made = spread([40, 0, 88], 144, 72, form, layout=layout, max_rows=_room(form), epilogue="swiglu")
        if template == "grouped_gemm_tma" and (form, layout) != ("masked", "tt"):
            assert "layout" in str(search_space.why_illegal(GROUPED, made, config(made, template), H200))
            return
        call(made, template).check()

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("bad", [NAN, float("inf")])
    def test_an_expert_never_feels_its_neighbours(self, template: str, form: Any, bad: float) -> None:
        """Every other expert's tokens and weights, and what lies behind the tokens, are NaN or infinite."""
        sizes = [70] * 4 if form == "3d3d" else [40, 90, 3, 130]
        made = spread(sizes, 72, 96, form)
        one = call(made, template)
        clean = one.run()
        ends = [0, *accumulate(sizes)]
        spoiled = [slice(ends[0], ends[1]), slice(ends[2], ends[3]), slice(ends[4], ends[4] + 100)]
        for name, dimension in (("a", 1 if form == "2d2d" else 0), ("b", 1 if form == "3d2d" else 0)):
            x = one.inputs[name]
            if x.dim() == 3:
                x[0], x[2] = bad, bad
                continue
            # The same layout, with room behind the last token.
            longer = x.movedim(dimension, 0)
            longer = torch.cat([longer, longer.new_zeros(100, longer.shape[1])])
            for tokens in spoiled:
                longer[tokens] = bad
            one.inputs[name] = longer[: ends[4]].movedim(0, dimension)
        if form == "masked":
            for expert, size in enumerate(sizes):
                one.inputs["a"][expert, size:] = bad
        out = one.run()
        for expert in (1, 3):
            here = _own(form, expert, ends, sizes)
            assert torch.equal(out[here], clean[here])
            assert clean[here].isfinite().all()

    @pytest.mark.parametrize("form", FORMS)
    def test_nothing_around_the_result_is_written(self, template: str, form: Any) -> None:
        made = spread([70] * 2 if form == "3d3d" else [40, 33], 72, 96, form)
        one = call(made, template)
        shape = made.shapes["c"]
        room = torch.full((*(size + 2 for size in shape[:-1]), shape[-1] + 16), 7.0, dtype=torch.bfloat16)
        inside = (*(slice(1, 1 + size) for size in shape[:-1]), slice(8, 8 + shape[-1]))
        expected = one.run()
        room[inside] = NAN
        one.run(room[inside])
        torch.testing.assert_close(room[inside], expected, rtol=0, atol=0, equal_nan=True)
        room[inside] = 7.0
        assert torch.equal(room, torch.full_like(room, 7.0))

    @pytest.mark.parametrize("form", FORMS)
    def test_operands_may_lie_apart(self, template: str, form: Any) -> None:
        one = call(spread([72] * 2 if form == "3d3d" else [40, 33], 72, 96, form), template)
        expected = one.run()
        for name in ("a", "b"):
            x = one.inputs[name]
            inner = -1 if x.stride(-1) == 1 else -2
            wide = torch.full([size + (8 if i == x.dim() + inner else 0) for i, size in enumerate(x.shape)], NAN)
            wide = wide.to(x.dtype) if inner == -1 else wide.to(x.dtype).mT.contiguous().mT
            one.inputs[name] = wide.narrow(inner, 0, x.shape[inner]).copy_(x)
            assert not one.inputs[name].is_contiguous()
        torch.testing.assert_close(one.run(), expected, rtol=0, atol=0, equal_nan=True)

    def test_masked_counts_beyond_the_room_are_taken_for_all_of_it(self, template: str) -> None:
        one = call(spread([9, 9], 72, 64, "masked", max_rows=9), template)
        expected = one.run()
        one.inputs["counts"] = torch.tensor([9, 1000], dtype=torch.int32)
        assert torch.equal(one.run(), expected)


def _room(form: str) -> int | None:
    """Rows that TMA can take columns of."""
    return 96 if form == "masked" else None


def _own(form: str, expert: int, ends: Sequence[int], sizes: Sequence[int]) -> Any:
    """Where an expert's part of the result is."""
    tokens = slice(ends[expert], ends[expert + 1])
    places = {"2d3d": tokens, "3d2d": (slice(None), tokens), "masked": (expert, slice(sizes[expert]))}
    return places.get(form, expert)


class TestEmittedFile:
    @pytest.mark.parametrize("template", GROUPED.templates)
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("epilogue", ["none", "bias+silu", "bias+swiglu"])
    def test_checks_itself_against_torch(
        self, template: str, form: Any, epilogue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With torch in place of the kernel, which only a GPU runs: the check is right, and sees a wrong expert."""
        epilogue = epilogue if takes(form, epilogue) else epilogue.removeprefix("bias+").replace("swiglu", "silu")
        sizes = (9,) * 4 if form == "3d3d" else (0, 9, 1, 0, 30)
        layout = "nt" if "glu" in epilogue else None
        made = spread(sizes, 24, 40, form, layout=layout, epilogue=epilogue, max_rows=30 if form == "masked" else None)
        source = emit(GROUPED, made, config(made, template))
        assert [line for line in source.text.splitlines() if len(line) > 140] == []
        module = loader.load(source)
        ends = {"3d3d": [], "masked": ["counts"]}.get(form, ["offs"])
        names = [*ends, *(["bias"] if "bias" in epilogue else [])]
        shift = 0

        def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor, c: torch.Tensor) -> None:
            inputs = {"a": a, "b": b, **dict(zip(names, rest, strict=True))}
            assert GROUPED.check_call(made, inputs) is None
            assert GROUPED.launchable(made, Config(template=GROUPED.templates[1], params={}), inputs, c) is None
            c.copy_(GROUPED.reference(made, inputs).roll(shift, -1))

        monkeypatch.setattr(module, "launch", launch)
        error, library = module.check(sizes, 24, 40, device="cpu")
        assert 0 < error <= library < 5e-3
        shift = 1
        assert module.check(sizes, 24, 40, device="cpu")[0] > 0.5


def test_a_favourite_of_each_form_is_clean() -> None:
    """As `tlxgen check` would: under several schedules, on the small cases."""
    for form, options in [*((form, {}) for form in FORMS), ("2d3d", {"layout": "nt", "epilogue": "bias+swiglu"})]:
        made = problem((64, 8192, 2048, 7168), form=form, **options)
        source = emit(GROUPED, made, candidates(made, H200)[0])
        report = check(source, 3)
        assert report.clean, "\n".join(map(str, report.findings))
        assert len(report.cases) == len(GROUPED.small_cases(made, source.config))


class TestWithoutGpu:
    @pytest.mark.parametrize("form", FORMS)
    def test_torch_computes(self, form: Any) -> None:
        made = problem((3, 30, 16, 24), form=form, epilogue="relu")
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        with pytest.warns(tlxgen.FallbackWarning):
            kernel = tlxgen.get_kernel("grouped_gemm", made)
        a, b = inputs.pop("a"), inputs.pop("b")
        out = kernel(a, b, **inputs)
        assert accuracy.error(out, GROUPED.reference(made, {"a": a, "b": b, **inputs})).norm < 5e-3
        if form != "3d3d":
            with pytest.raises(LaunchError, match="is missing"):
                kernel(a, b)

    @pytest.mark.parametrize("form", RAGGED)
    def test_no_tokens_give_an_empty_result_or_gradients_of_zero(self, form: Any) -> None:
        made = problem((3, 0, 16, 24), form=form, max_rows=2 if form == "masked" else None)
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        with pytest.warns(tlxgen.FallbackWarning):
            kernel = tlxgen.get_kernel("grouped_gemm", made)
        out = kernel(inputs.pop("a"), inputs.pop("b"), **inputs)
        assert tuple(out.shape) == made.shapes["c"]
        assert form != "2d2d" or torch.equal(out, torch.zeros_like(out))


class TestCall:
    def test_names_what_does_not_fit(self) -> None:
        made = problem((3, 30, 16, 24), epilogue="bias")
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        assert GROUPED.check_call(made, inputs) is None
        assert "offs has shape (3,) and dtype torch.int64" in str(
            GROUPED.check_call(made, {**inputs, "offs": inputs["offs"].long()})
        )
        assert "b has shape" in str(GROUPED.check_call(made, {**inputs, "b": inputs["b"][:2]}))
        assert "bias is missing" in str(GROUPED.check_call(made, {k: v for k, v in inputs.items() if k != "bias"}))
        assert "counts has no place in form 2d3d" in str(GROUPED.check_call(made, {**inputs, "counts": inputs["offs"]}))

    def test_tensors_that_tma_cannot_take_are_for_plain_triton(self) -> None:
        made = problem((3, 30, 16, 24))
        inputs = GROUPED.inputs(made, "cpu", 0)
        out = GROUPED.output(made, inputs)
        tma, vanilla = (config(made, template) for template in GROUPED.templates)
        odd = torch.empty(30, 25, dtype=torch.bfloat16)[:, :24]
        assert "aligned for TMA" in str(GROUPED.launchable(made, tma, {**inputs, "a": odd}, out))
        assert GROUPED.launchable(made, vanilla, {**inputs, "a": odd}, out) is None
        experts_apart = torch.empty(3 * 385, dtype=torch.bfloat16).as_strided((3, 24, 16), (385, 16, 1))
        assert "aligned for TMA" in str(GROUPED.launchable(made, tma, {**inputs, "b": experts_apart}, out))
        turned = inputs["b"].mT.contiguous().mT
        assert "unit strides" in str(GROUPED.launchable(made, vanilla, {**inputs, "b": turned}, out))
        assert "overlap" in str(GROUPED.launchable(made, vanilla, inputs, out[:1].expand(30, 16)))
        apart = torch.zeros(6, dtype=torch.int32)[::2]
        assert "not contiguous" in str(GROUPED.launchable(made, tma, {**inputs, "offs": apart}, out))


class TestChoice:
    @pytest.mark.parametrize("options", [{}, {"form": "gather"}, {"epilogue": "swiglu"}])
    def test_a_shape_that_nobody_tuned_has_a_kernel(self, options: dict[str, Any]) -> None:
        choice = select(problem((48, 8192, 2048, 4096), layout="nt", **options), H200, note_miss=False)
        assert choice.origin in ("nearest", "default")
        assert choice.config is not None
        assert choice.config.template == "grouped_gemm_tma"


class TestTorchsOwn:
    """It reads ends as if they were contiguous, and matrices 16 bytes at a time, without a look."""

    def test_ends_that_have_holes_are_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = GROUPED.problem((3, 40, 24, 16))
        inputs = GROUPED.inputs(made, "cpu", 0)
        apart = torch.zeros(6, dtype=torch.int32)
        apart[::2] = inputs["offs"]
        given: list[torch.Tensor] = []

        def theirs(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
            given.append(offs)
            return a @ b[0]

        monkeypatch.setattr(torch, "_grouped_mm", theirs, raising=False)
        GROUPED.eager(made, {**inputs, "offs": apart[::2]})
        assert given[0].is_contiguous()
        assert torch.equal(given[0], inputs["offs"])

    def test_matrices_that_lie_oddly_far_apart_are_copied(self) -> None:
        memory = torch.randn(3 * (16 * 24 + 3)).bfloat16()
        oddly = memory.as_strided((3, 16, 24), (16 * 24 + 3, 24, 1))
        found = torch_reference._taken(oddly)
        assert torch.equal(found, oddly)
        assert found.stride(0) % 8 == 0
        whole = oddly.contiguous()
        assert torch_reference._taken(whole) is whole
