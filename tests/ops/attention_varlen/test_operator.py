"""Attention over packed sequences: problems, the reference, and results next to other sequences in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tlxgen
from tests.support.simulated import launch
from tlxgen import devices, ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.errors import InvalidProblemError, LaunchError
from tlxgen.ops import accuracy
from tlxgen.ops.attention import flash as attention_flash
from tlxgen.ops.attention_varlen import torch_reference
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem, Lengths, drawn_lengths
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.program import load
from tlxgen.space.candidates import candidates

VARLEN = ops.get("attention_varlen")
H200 = devices.target("h200")


def problem(shape: tuple[int, int, int, int], **options: Any) -> AttentionVarlenProblem:
    made = VARLEN.problem(shape, **options)
    assert isinstance(made, AttentionVarlenProblem)
    return made


def ends(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


class TestProblem:
    def test_lengths_default_to_equal_ones(self) -> None:
        made = problem((3, 8, 100, 64))
        assert (made.kv_heads, made.total_kv, made.max_q, made.max_kv) == (8, 100, 34, 34)
        assert problem((3, 8, 100, 64), max_q=60).max_kv == 60
        assert problem((3, 8, 100, 64), total_kv=900).max_kv == 300

    @pytest.mark.parametrize(
        ("shape", "options", "said"),
        [
            ((2, 6, 8, 64), {"kv_heads": 4}, "no multiple of kv_heads = 4"),
            ((2, 8, 8, 60), {}, "D"),
            ((2, 8, 8, 264), {}, "D"),
            ((2, 8, 8, 64), {"window": 5}, "needs causal"),
            ((2, 8, 8, 64), {"causal": "left"}, "causal"),
            ((2, 8, 8, 64), {"dtype": "fp32"}, "dtype"),
            ((2, 0, 8, 64), {}, "H"),
            ((2, 8, -8, 64), {}, "total_q"),
            ((4, 8, 100, 64), {"max_q": 24}, "total_q = 100 exceeds B x max_q = 4 x 24"),
            ((4, 8, 100, 64), {"max_kv": 24}, "total_kv = 100 exceeds B x max_kv = 4 x 24"),
            ((0, 8, 100, 64), {}, "total_q = 100 exceeds"),
            (("2", 8, 100, 64), {}, "B"),
        ],
    )
    def test_invalid_field_is_named(self, shape: tuple[int, int, int, int], options: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidProblemError, match=said):
            problem(shape, **options)

    @given(
        st.integers(1, 50),
        st.integers(1, 8),
        st.integers(0, 5000),
        st.integers(1, 32),
        st.integers(1, 4),
        st.integers(0, 5000),
        st.integers(0, 200),
        st.integers(0, 200),
        st.sampled_from(["none", "bottom-right", "top-left"]),
        st.integers(0, 300),
        st.sampled_from([0.0, 30.0]),
        st.booleans(),
    )
    def test_label_round_trips(
        self,
        b: int,
        kv: int,
        total: int,
        d: int,
        group: int,
        total_kv: int,
        spare_q: int,
        spare_kv: int,
        causal: Any,
        window: int,
        cap: float,
        lse: bool,
    ) -> None:
        made = problem(
            (b, kv * group, total, 8 * d),
            kv_heads=kv,
            total_kv=total_kv,
            max_q=-(-total // b) + spare_q,
            max_kv=-(-total_kv // b) + spare_kv,
            causal=causal,
            window=window if causal != "none" else 0,
            softcap=cap,
            lse=lse,
        )
        assert AttentionVarlenProblem.from_label(made.label) == made


class TestDrawnLengths:
    @given(st.integers(1, 60), st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 300), st.integers(0, 300))
    def test_sum_to_the_totals_and_reach_the_maxima(self, b: int, total: int, keys: int, more: int, spare: int) -> None:
        made = problem((b, 1, total, 8), total_kv=keys, max_q=-(-total // b) + more, max_kv=-(-keys // b) + spare)
        rows, kv = zip(*drawn_lengths(made), strict=True)
        assert (len(rows), sum(rows), sum(kv)) == (b, total, keys)
        assert (max(rows), max(kv)) == (min(made.max_q, total), min(made.max_kv, keys))
        assert min(*rows, *kv, 0) == 0

    def test_are_uneven_and_always_the_same(self) -> None:
        made = problem((16, 1, 16 * 500, 8), max_q=2000)
        drawn = drawn_lengths(made)
        assert drawn == drawn_lengths(problem((16, 1, 16 * 500, 8), max_q=2000))
        assert len({rows for rows, _ in drawn}) > 12
        assert all(rows == keys for rows, keys in drawn)

    def test_are_those_of_the_inputs(self) -> None:
        made = problem((5, 1, 300, 8), total_kv=700, max_q=200)
        inputs = VARLEN.inputs(made, "cpu", 3)
        found = zip(*(inputs[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_kv")), strict=True)
        assert tuple(found) == drawn_lengths(made)

    @settings(max_examples=40)
    @given(st.integers(1, 5), st.integers(0, 60), st.integers(0, 60), st.sampled_from(["bottom-right", "top-left"]))
    def test_make_the_operations_that_are_counted(self, b: int, total: int, keys: int, causal: Any) -> None:
        made = problem((b, 1, total, 8), total_kv=keys, max_q=total, max_kv=keys, causal=causal, window=7)
        seen = 0
        for rows, columns in drawn_lengths(made):
            last = torch.arange(rows)[:, None] + (columns - rows if causal == "bottom-right" else 0)
            places = torch.arange(columns)[None, :]
            seen += int(((places <= last) & (places > last - 7)).sum())
        assert VARLEN.flops(made) == 4.0 * 8 * seen

    @pytest.mark.parametrize("template", VARLEN.templates)
    def test_pin_the_lengths_of_the_small_cases(self, template: str) -> None:
        made = problem((4, 8, 4096, 64), max_q=2048)
        config = candidates(made, H200, (template,))[0]
        tile = int(config.params.get("block_m", 64 * int(config.params.get("consumers", 1))))
        block = int(config.params["block_n"])
        drawn = {length for case in VARLEN.small_cases(made, config) for length in drawn_lengths(case.problem)}
        assert {(tile, block), (1, 1), (0, 3), (tile, 0), (2 * tile, block // 2), (0, 0)} <= drawn
        assert any(rows == tile + 1 for rows, _ in drawn)


class TestReference:
    @pytest.mark.parametrize("causal", ["none", "top-left"])
    def test_reference_equals_torch_for_each_sequence(self, causal: Any) -> None:
        made = problem((3, 4, 60, 16), kv_heads=2, max_q=33, causal=causal)
        inputs = VARLEN.inputs(made, "cpu", 0)
        inputs["cu_seqlens_q"] = inputs["cu_seqlens_kv"] = ends((27, 0, 33))
        expected = []
        for rows in (slice(0, 27), slice(27, 60)):
            q, k, v = (inputs[name][rows].double().transpose(0, 1)[None] for name in ("q", "k", "v"))
            one = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal != "none", enable_gqa=True)
            expected.append(one[0].transpose(0, 1))
        torch.testing.assert_close(VARLEN.reference(made, inputs), torch.cat(expected))

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": "bottom-right", "window": 9, "lse": True},
            {"causal": "top-left", "softcap": 5.0},
            {"softcap": 5.0, "lse": True},
        ],
    )
    def test_reference_and_peer_agree_within_rounding(self, options: dict[str, Any]) -> None:
        made = problem((4, 2, 90, 32), total_kv=70, kv_heads=1, max_q=70, max_kv=50, **options)
        inputs = VARLEN.inputs(made, "cpu", 1)
        inputs["cu_seqlens_q"], inputs["cu_seqlens_kv"] = ends((10, 3, 70, 7)), ends((20, 0, 50, 0))
        assert accuracy.error(VARLEN.eager(made, inputs), VARLEN.reference(made, inputs)).norm < 5e-3
        assert VARLEN.why_side_output_wrong(made, inputs, VARLEN.side_outputs(made, inputs)) is None


@dataclass(frozen=True)
class Call:
    """One call of a kernel in the simulator, with lengths of its own."""

    problem: AttentionVarlenProblem
    config: Config
    inputs: dict[str, Any]

    def run(self, num_sms: int = 2) -> torch.Tensor:
        out = torch.full_like(self.inputs["q"], float("nan"))
        refusal = VARLEN.launchable(self.problem, self.config, self.inputs, out)
        assert refusal is None, refusal
        assert VARLEN.check_call(self.problem, self.inputs) is None
        if self.problem.lse:
            self.inputs["lse"].fill_(float("nan"))
        launch(VARLEN, emit(VARLEN, self.problem, self.config), self.inputs, out, num_sms=num_sms)
        return out

    def check(self) -> torch.Tensor:
        out = self.run()
        beside = VARLEN.side_outputs(self.problem, self.inputs)
        assert VARLEN.why_side_output_wrong(self.problem, self.inputs, beside) is None
        reference = VARLEN.reference(self.problem, self.inputs)
        reason = accuracy.why_wrong(out, reference, VARLEN.eager(self.problem, dict(self.inputs)))
        assert reason is None, reason
        return out


def call(template: str, lengths: Sequence[Lengths], head: int = 64, heads: int = 1, **options: Any) -> Call:
    rows, keys = zip(*lengths, strict=True)
    shape = (len(lengths), heads, sum(rows), head)
    made = problem(shape, total_kv=sum(keys), max_q=max(rows), max_kv=max(keys), **options)
    inputs = dict(VARLEN.inputs(made, "cpu", 0))
    inputs["cu_seqlens_q"], inputs["cu_seqlens_kv"] = ends(rows), ends(keys)
    return Call(made, candidates(made, H200, (template,))[0], inputs)


MASKS: list[dict[str, Any]] = [
    {},
    {"causal": "bottom-right"},
    {"causal": "top-left"},
    {"causal": "bottom-right", "window": 33, "lse": True},
    {"causal": "top-left", "window": 150, "softcap": 10.0},
    {"softcap": 10.0, "lse": True, "dtype": "fp16"},
]


@pytest.mark.parametrize("template", VARLEN.templates)
class TestKernels:
    """In the simulator: the values that lengths or numbers out of the ordinary should give."""

    @pytest.mark.parametrize("options", MASKS, ids=str)
    def test_every_mask_holds_within_each_sequence(self, template: str, options: dict[str, Any]) -> None:
        lengths = [(0, 0), (130, 130), (0, 40), (1, 300), (257, 60), (50, 0), (128, 129), (0, 0)]
        call(template, lengths, heads=2, kv_heads=1, **options).check()

    @pytest.mark.parametrize("options", MASKS, ids=str)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_neighbouring_sequences_have_no_effect(self, template: str, options: dict[str, Any], bad: float) -> None:
        """Every other sequence, and what lies behind the last, holds NaN or infinity in q, k and v."""
        lengths = [(40, 90), (70, 75), (130, 20), (9, 140), (100, 64), (3, 5)]
        one = call(template, lengths, **options)
        clean = one.run()
        for name, column in (("q", 0), ("k", 1), ("v", 1)):
            longer = torch.full((len(one.inputs[name]) + 200, 1, 64), bad, dtype=one.inputs[name].dtype)
            start = 0
            for i, length in enumerate(pair[column] for pair in lengths):
                if i % 2:
                    longer[start : start + length] = one.inputs[name][start : start + length]
                start += length
            one.inputs[name] = longer[:start]
        out, lse = one.run(), one.inputs.get("lse")
        start = 0
        for i, (rows, _) in enumerate(lengths):
            if i % 2:
                assert torch.equal(out[start : start + rows], clean[start : start + rows])
                assert lse is None or not lse[:, start : start + rows].isnan().any()
            start += rows

    def test_nothing_is_written_behind_the_last_sequence(self, template: str) -> None:
        one = call(template, [(70, 70), (3, 3)])
        room = torch.full((73 + 128, 1, 64), 7.0, dtype=torch.bfloat16)
        source = emit(VARLEN, one.problem, one.config)
        program = load(source.file_name, source.text)
        grid, args = program["arguments"](**one.inputs, out=room[:73], num_sms=2)
        machine = Machine(seed=1)
        program["kernel"].launch(machine, grid, args, program["OPTIONS"])
        assert not machine.findings
        assert torch.equal(room[73:], torch.full_like(room[73:], 7.0))
        assert not (room[:73] == 7.0).all(-1).any()

    def test_rows_without_keys_give_zero_and_minus_infinity(self, template: str) -> None:
        one = call(template, [(20, 0), (100, 30), (7, 0)], causal="bottom-right", lse=True)
        out = one.check()
        blind = [*range(90), *range(120, 127)]
        assert torch.equal(out[blind], torch.zeros_like(out[blind]))
        assert one.inputs["lse"][:, blind].isneginf().all()
        assert one.inputs["lse"][:, 90:120].isfinite().all()

    @pytest.mark.parametrize(
        ("options", "unseen"),
        [({"causal": "top-left"}, slice(40, 300)), ({"causal": "bottom-right", "window": 50}, slice(0, 211))],
    )
    def test_keys_that_no_row_sees_are_not_read(self, template: str, options: dict[str, Any], unseen: slice) -> None:
        """Forty rows and 300 keys: NaN among those that nobody sees reaches nobody."""
        one = call(template, [(10, 10), (40, 300), (10, 10)], **options)
        clean = one.run()
        for name in ("k", "v"):
            one.inputs[name][10:310][unseen] = float("nan")
        assert torch.equal(one.run(), clean)

    def test_larger_max_q_changes_nothing(self, template: str) -> None:
        one = call(template, [(70, 70), (3, 3)], causal="bottom-right")
        small = one.run()
        one.inputs["max_q"] = 1000
        assert torch.equal(one.run(), small)

    @pytest.mark.parametrize("scale", [0.5, -0.3, 0.0])
    def test_the_scale_is_any_number(self, template: str, scale: float) -> None:
        one = call(template, [(40, 90), (70, 5)], causal="bottom-right")
        one.inputs["scale"] = scale
        one.check()

    def test_rows_may_have_any_stride(self, template: str) -> None:
        """q, k and v as the three parts of one tensor, as a single projection gives them."""
        one = call(template, [(80, 80), (30, 30)], heads=2)
        packed = torch.stack([one.inputs[name] for name in ("q", "k", "v")], 1)
        one.inputs["q"], one.inputs["k"], one.inputs["v"] = packed.unbind(1)
        one.check()

    @pytest.mark.parametrize("head", [8, 96, 200, 256])
    def test_every_head_dimension_up_to_256_has_a_kernel(self, template: str, head: int) -> None:
        call(template, [(70, 130), (5, 3)], head, causal="bottom-right").check()

    def test_equal_lengths_give_what_attention_gives(self, template: str) -> None:
        one = call(template, [(70, 70)] * 2, causal="bottom-right")
        q, k, v = (one.inputs[name].unflatten(0, (2, 70)).transpose(1, 2) for name in ("q", "k", "v"))
        attention = ops.get("attention")
        expected = attention.reference(one.problem.average, {"q": q, "k": k, "v": v})
        torch.testing.assert_close(VARLEN.reference(one.problem, one.inputs), expected.transpose(1, 2).flatten(0, 1))
        one.check()


class TestWithoutGpu:
    def test_torch_computes_and_the_maximum_need_not_be_given(self) -> None:
        made = problem((2, 2, 30, 16), causal="bottom-right", max_q=20, lse=True)
        inputs = dict(VARLEN.inputs(made, "cpu", 0))
        inputs["lse"].fill_(float("nan"))
        with pytest.warns(tlxgen.FallbackWarning):
            kernel = tlxgen.get_kernel("attention_varlen", made)
        out = kernel(*(inputs[name] for name in VARLEN.inputs_in_order), lse=inputs["lse"])
        assert accuracy.error(out, VARLEN.reference(made, inputs)).norm < 5e-3
        assert VARLEN.why_side_output_wrong(made, inputs, VARLEN.side_outputs(made, inputs)) is None
        with pytest.raises(LaunchError, match="max_q is 7"):
            kernel(*(inputs[name] for name in VARLEN.inputs_in_order), lse=inputs["lse"], max_q=7)

    @pytest.mark.parametrize("options", [{"total_kv": 0}, {}])
    def test_nothing_to_attend_to_gives_zeros(self, options: dict[str, Any]) -> None:
        made = problem((2, 2, 30 if options else 0, 16), lse=True, **options)
        inputs = dict(VARLEN.inputs(made, "cpu", 0))
        with pytest.warns(tlxgen.FallbackWarning):
            kernel = tlxgen.get_kernel("attention_varlen", made)
        out = kernel(*(inputs[name] for name in VARLEN.inputs_in_order), lse=inputs["lse"])
        assert torch.equal(out, torch.zeros_like(inputs["q"]))
        assert inputs["lse"].isneginf().all()


class TestCall:
    def test_check_call_names_the_wrong_argument(self) -> None:
        made = problem((2, 2, 8, 64), lse=True)
        inputs = dict(VARLEN.inputs(made, "cpu", 0))
        assert VARLEN.check_call(made, inputs) is None
        long: Any = {**inputs, "cu_seqlens_q": inputs["cu_seqlens_q"].long()}
        assert "cu_seqlens_q has shape (3,) and dtype torch.int64" in str(VARLEN.check_call(made, long))
        assert "v has shape" in str(VARLEN.check_call(made, {**inputs, "v": inputs["v"][:, :1]}))
        assert "lse is missing" in str(VARLEN.check_call(made, {k: v for k, v in inputs.items() if k != "lse"}))
        number: Any = float("nan")
        assert "finite" in str(VARLEN.check_call(made, {**inputs, "scale": number}))
        few: Any = 2
        assert "max_q is 2" in str(VARLEN.check_call(made, {**inputs, "max_q": few}))
        assert "mask is not a parameter" in str(VARLEN.check_call(made, {**inputs, "mask": inputs["q"]}))

    def test_tensors_unaligned_for_tma_use_plain_triton(self) -> None:
        made = problem((2, 2, 8, 64))
        inputs = VARLEN.inputs(made, "cpu", 0)
        odd = torch.empty(8, 2, 65, dtype=torch.bfloat16)[..., :64]
        tma, vanilla = (candidates(made, H200, (template,))[0] for template in VARLEN.templates)
        out = torch.empty_like(inputs["q"])
        assert "aligned for TMA" in str(VARLEN.launchable(made, tma, {**inputs, "k": odd}, out))
        assert VARLEN.launchable(made, vanilla, {**inputs, "k": odd}, out) is None
        turned = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
        assert "unit strides" in str(VARLEN.launchable(made, vanilla, {**inputs, "q": turned}, out))
        apart = torch.zeros(6, dtype=torch.int32)[::2]
        assert "not contiguous" in str(VARLEN.launchable(made, tma, {**inputs, "cu_seqlens_kv": apart}, out))


@pytest.mark.parametrize(("lengths", "told"), [((1, 1, 1), 1), ((1, 0, 1), 2), ((2, 0, 1), 2)])
def test_flash_attention_keeps_sequences_apart(
    lengths: tuple[int, ...], told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told of one row at most and of grouped heads, it reads one row of each sequence."""
    given: list[Any] = []

    def flash(q: Any, *rest: Any, **_: Any) -> tuple[Any, ...]:
        given.extend(rest[4:6])
        return q, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    sizes = {"total_kv": 9, "max_q": max(lengths), "max_kv": 3, "kv_heads": 1}
    made = problem((3, 2, sum(lengths), 16), **sizes)
    torch_reference.flash(made, VARLEN.inputs(made, "cpu", 0))
    assert given == [told, 3]


@pytest.mark.parametrize(
    ("lie", "taken"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), True),
        (lambda x: x[:1].expand(6, 2, 16), True),
        (lambda x: x.repeat(1, 1, 2)[..., :16], True),
        (lambda x: x.repeat(1, 1, 2)[..., ::2], False),
        (lambda x: x.repeat(1, 1, 2)[..., 1:17], False),
        (lambda x: torch.nn.functional.pad(x, (0, 1))[..., :16], False),
    ],
    ids=["dense", "heads between rows", "one for all", "padded", "every other", "late", "an odd pitch"],
)
def test_flash_attention_gets_aligned_operands(lie: Any, taken: bool) -> None:
    """It reads 16 bytes at a time, and does not look whether it may."""
    x = lie(torch.randn(6, 2, 16).bfloat16())
    found = attention_flash.readable(x)
    assert torch.equal(found, x)
    assert (found is x) == taken
    assert found.stride(-1) == 1
    assert found.data_ptr() % 16 == 0


@pytest.mark.parametrize("template", VARLEN.templates)
@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom-right", "window": 5}, {"causal": "top-left", "softcap": 2.0}]
)
def test_the_self_check_covers_all_sequences_and_heads(template: str, options: dict[str, Any]) -> None:
    lengths = (7, 1, 0, 12)
    made = problem((4, 4, 20, 64), kv_heads=2, max_q=12, **options)
    module = loader.load(emit(VARLEN, made, candidates(made, H200, (template,))[0]))

    def launch(*tensors: Any) -> None:
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")
        tensors[6].copy_(VARLEN.reference(made, dict(zip(names, tensors, strict=False))))

    def launch_but_for_one_head(*tensors: Any) -> None:
        launch(*tensors)
        tensors[6][12:, 3] = 0.0

    sizes: dict[str, Any] = {"lengths": lengths, "H": 4, "D": 64, "kv_heads": 2, "device": "cpu"}
    vars(module).update(launch=launch)
    error, error_library = module.check(**sizes)
    assert error <= error_library < 0.01
    vars(module).update(launch=launch_but_for_one_head)
    assert module.check(**sizes)[0] > 0.1
