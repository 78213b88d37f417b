"""Attention: problems, the reference, and the kernels' results for special values in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tlxgen
from tests.support.simulated import launch
from tlxgen import devices, ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config
from tlxgen.errors import InvalidProblemError
from tlxgen.ops import accuracy
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.runtime import kernel as runtime
from tlxgen.simulator.check import check
from tlxgen.space.candidates import candidates

ATTENTION = ops.get("attention")
H200 = devices.target("h200")

#: Those that take any number of rows; `tests/ops/attention/test_decode.py` has the other.
TEMPLATES = [template for template in ATTENTION.templates if template != "attention_decode"]


def problem(shape: tuple[int, int, int, int], **options: Any) -> AttentionProblem:
    made = ATTENTION.problem(shape, **options)
    assert isinstance(made, AttentionProblem)
    return made


class TestProblem:
    def test_keys_default_to_as_many_as_queries(self) -> None:
        made = problem((2, 8, 100, 64))
        assert (made.kv_heads, made.kv_len) == (8, 100)

    @pytest.mark.parametrize(
        ("shape", "options", "said"),
        [
            ((1, 6, 8, 64), {"kv_heads": 4}, "no multiple of kv_heads = 4"),
            ((1, 8, 8, 60), {}, "D"),
            ((1, 8, 8, 264), {}, "D"),
            ((1, 8, 8, 0), {}, "D"),
            ((1, 8, 8, 64), {"window": 5}, "needs causal"),
            ((1, 8, 8, 64), {"causal": "left"}, "causal"),
            ((1, 8, 8, 64), {"dtype": "fp32"}, "dtype"),
            ((1, 8, 8, 64), {"softcap": -1.0}, "softcap"),
            ((1, 8, 8, 64), {"softcap": 1e5}, "softcap"),
            ((1, 8, 8, 64), {"causal": "top-left", "window": 8.0}, "window"),
            ((1, 0, 8, 64), {}, "H"),
        ],
    )
    def test_invalid_field_is_named(self, shape: tuple[int, int, int, int], options: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidProblemError, match=said):
            problem(shape, **options)

    @pytest.mark.parametrize("window", [300, 2**31 - 1, 2**64])
    def test_window_that_hides_no_key_becomes_0(self, window: int) -> None:
        made = problem((1, 1, 400, 64), kv_len=300, causal="bottom-right", window=window)
        assert made == problem((1, 1, 400, 64), kv_len=300, causal="bottom-right")
        assert problem((1, 1, 400, 64), kv_len=300, causal="bottom-right", window=299).window == 299
        assert problem((1, 1, 400, 64), kv_len=300, causal="top-left", window=350).window == 350

    @given(
        st.integers(1, 4),
        st.integers(1, 8),
        st.integers(1, 5000),
        st.integers(1, 32),
        st.integers(1, 4),
        st.integers(1, 5000),
        st.sampled_from(["none", "bottom-right", "top-left"]),
        st.integers(0, 300),
        st.sampled_from([0.0, 30.0]),
        st.fixed_dictionaries({"lse": st.booleans(), "exact": st.booleans()}),
    )
    def test_label_round_trips(
        self, b: int, kv: int, s: int, d: int, group: int, kv_len: int, causal: Any, window: int, cap: float, flags: Any
    ) -> None:
        window = window if causal != "none" else 0
        made = problem(
            (b, kv * group, s, 8 * d), kv_heads=kv, kv_len=kv_len, causal=causal, window=window, softcap=cap, **flags
        )
        assert AttentionProblem.from_label(made.label) == made

    @settings(max_examples=60)
    @given(
        st.integers(1, 40),
        st.integers(1, 40),
        st.sampled_from(["none", "bottom-right", "top-left"]),
        st.integers(0, 50),
    )
    def test_flops_count_visible_pairs(self, rows: int, keys: int, causal: Any, window: int) -> None:
        made = problem((1, 1, rows, 8), kv_len=keys, causal=causal, window=window if causal != "none" else 0)
        inputs = {"q": torch.zeros(1, 1, rows, 8), "k": torch.zeros(1, 1, keys, 8), "v": torch.eye(keys, 8)[None, None]}
        # With equal scores a row that sees n keys gives each of them 1 / n.
        identity = made.model_copy(update={"D": 8})
        seen = 0
        for first in range(0, keys, 8):
            values = torch.zeros(1, 1, keys, 8)
            for i in range(first, min(first + 8, keys)):
                values[0, 0, i, i - first] = 1.0
            seen += int((ATTENTION.reference(identity, {**inputs, "v": values}) > 0).sum())
        assert ATTENTION.flops(made) == 4.0 * 8 * seen


class TestReference:
    @pytest.mark.parametrize("causal", ["none", "top-left"])
    def test_reference_equals_torch(self, causal: Any) -> None:
        made = problem((2, 4, 33, 16), kv_heads=2, kv_len=33, causal=causal)
        inputs = ATTENTION.inputs(made, "cpu", 0)
        q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal != "none", enable_gqa=True
        )
        torch.testing.assert_close(ATTENTION.reference(made, inputs), expected)

    @pytest.mark.parametrize("options", [{}, {"causal": "bottom-right", "window": 9}, {"softcap": 5.0}])
    def test_reference_and_peer_agree_within_rounding(self, options: dict[str, Any]) -> None:
        made = problem((1, 2, 40, 32), kv_len=25, **options)
        inputs = ATTENTION.inputs(made, "cpu", 1)
        assert accuracy.error(ATTENTION.eager(made, inputs), ATTENTION.reference(made, inputs)).norm < 5e-3


@dataclass(frozen=True)
class Call:
    """One call of a kernel in the simulator."""

    problem: AttentionProblem
    config: Config
    inputs: dict[str, Any]

    def run(self, num_sms: int = 2) -> torch.Tensor:
        out = torch.full_like(self.inputs["q"], float("nan"))
        refusal = ATTENTION.launchable(self.problem, self.config, self.inputs, out)
        assert refusal is None, refusal
        assert ATTENTION.check_call(self.problem, self.inputs) is None
        launch(ATTENTION, emit(ATTENTION, self.problem, self.config), self.inputs, out, num_sms=num_sms)
        return out

    def check(self) -> torch.Tensor:
        out = self.run()
        reference = ATTENTION.reference(self.problem, self.inputs)
        reason = accuracy.why_wrong(out, reference, ATTENTION.eager(self.problem, self.inputs))
        assert reason is None, reason
        return out


def call(template: str, shape: tuple[int, int, int, int], seed: int = 0, **options: Any) -> Call:
    made = problem(shape, **options)
    return Call(made, candidates(made, H200, (template,))[0], dict(ATTENTION.inputs(made, "cpu", seed)))


@pytest.mark.parametrize("template", TEMPLATES)
class TestKernels:
    """In the simulator: the values that a shape or a number out of the ordinary should give."""

    def test_lengths_next_to_a_tile_are_as_exact_as_others(self, template: str) -> None:
        for length in (127, 128, 129):
            call(template, (1, 1, length, 64), causal="bottom-right").check()

    def test_rows_without_visible_keys_give_zero_and_minus_infinity(self, template: str) -> None:
        one = call(template, (1, 1, 200, 64), kv_len=70, causal="bottom-right", lse=True)
        out = one.check()
        assert torch.equal(out[0, 0, :130], torch.zeros(130, 64, dtype=out.dtype))
        assert torch.isneginf(one.inputs["lse"][0, 0, :130]).all()
        assert torch.isfinite(one.inputs["lse"][0, 0, 130:]).all()

    @pytest.mark.parametrize("options", [{}, {"causal": "top-left", "window": 33}, {"softcap": 10.0}])
    def test_the_log_sum_exp_is_that_of_the_scores(self, template: str, options: dict[str, Any]) -> None:
        one = call(template, (1, 2, 70, 64), kv_heads=1, lse=True, **options)
        one.run()
        q, k = one.inputs["q"].double(), one.inputs["k"].double().repeat_interleave(2, 1)
        scores = q @ k.transpose(2, 3) / 8.0
        if one.problem.softcap:
            scores = one.problem.softcap * torch.tanh(scores / one.problem.softcap)
        rows, keys = torch.arange(70)[:, None], torch.arange(70)[None, :]
        if one.problem.causal != "none":
            scores = scores.masked_fill((keys > rows) | (keys <= rows - 33), float("-inf"))
        expected = torch.logsumexp(scores, 3).float()
        torch.testing.assert_close(one.inputs["lse"], expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("scale", [0.5, -0.3, 0.0])
    def test_the_scale_is_any_number(self, template: str, scale: float) -> None:
        one = call(template, (1, 1, 70, 64), kv_len=90, causal="bottom-right")
        one.inputs["scale"] = scale
        one.check()

    def test_memory_behind_the_keys_has_no_effect(self, template: str) -> None:
        """A longer buffer of keys and values whose rest is NaN: the kernel is given the part in use."""
        one = call(template, (1, 2, 40, 64), kv_heads=1, kv_len=75)
        for name in ("k", "v"):
            longer = torch.full((1, 1, 160, 64), float("nan"), dtype=one.inputs[name].dtype)
            longer[:, :, :75] = one.inputs[name]
            one.inputs[name] = longer[:, :, :75]
        one.check()

    def test_layout_may_be_bshd(self, template: str) -> None:
        """(B, S, H, D) in memory, seen as (B, H, S, D)."""
        one = call(template, (2, 3, 80, 64), causal="bottom-right")
        for name in ("q", "k", "v"):
            one.inputs[name] = one.inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
        one.check()

    @pytest.mark.parametrize("head", [8, 96, 200, 256])
    def test_every_head_dimension_up_to_256_has_a_kernel(self, template: str, head: int) -> None:
        call(template, (1, 1, 70, head), kv_len=130, causal="bottom-right").check()

    def test_large_scores_do_not_overflow(self, template: str) -> None:
        one = call(template, (1, 1, 70, 64), kv_len=200)
        one.inputs["k"] = one.inputs["k"] * 100
        one.check()

    def test_growing_scores_keep_their_weights(self, template: str) -> None:
        one = call(template, (1, 1, 70, 64), kv_len=400)
        one.inputs["k"] = one.inputs["k"] * torch.linspace(6.0, 0.1, 400)[None, None, :, None].to(torch.bfloat16)
        one.check()


def _one_loud_key(keys: int) -> torch.Tensor:
    volume = torch.ones(keys)
    volume[keys // 3] = 100.0
    return volume


#: How loud each of many keys is; kernels walk from the last to the first.
HARD = {
    "rising": lambda keys: torch.linspace(12.0, 0.1, keys),
    "falling": lambda keys: torch.linspace(0.1, 12.0, keys),
    "alternating": lambda keys: torch.where(torch.arange(keys) // 64 % 2 == 0, 8.0, 0.1),
    "one huge": _one_loud_key,
    "just below the threshold": lambda keys: 1.0 + 0.9 * (torch.arange(keys) < keys // 2),
}


@pytest.mark.parametrize("hard", HARD.values(), ids=HARD.keys())
@pytest.mark.parametrize("rescale", ["exact", "lazy"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_hard_scores_are_as_exact_as_in_the_library(
    hard: Callable[[int], torch.Tensor], rescale: str, dtype: str
) -> None:
    one = call("attention_tma", (1, 1, 128, 64), 3, kv_len=700, dtype=dtype, causal="bottom-right")
    one = replace(one, config=Config(template="attention_tma", params={**one.config.params, "rescale": rescale}))
    one.inputs["k"] = one.inputs["k"] * hard(700)[None, None, :, None].to(one.inputs["k"].dtype)
    reference = ATTENTION.reference(one.problem, one.inputs)
    library = accuracy.error(ATTENTION.eager(one.problem, one.inputs), reference).norm
    assert accuracy.error(one.check(), reference).norm <= 1.2 * library


class TestOutputInHalves:
    """Heads too large for a staging tile of their own: the output goes through half of one, twice."""

    def source(self) -> KernelSource:
        made = problem((1, 2, 300, 200), causal="bottom-right", lse=True)
        legal = candidates(made, H200, ("attention_tma",))
        return emit(ATTENTION, made, next(c for c in legal if c.params["staging"] == "half"))

    def test_is_whole(self) -> None:
        report = check(self.source(), 6)
        assert report.clean, report.findings[0]

    @pytest.mark.parametrize(
        ("old", "new", "kind"),
        [
            (
                "row, 0])\n                tlx.async_descriptor_store_wait(0)\n",
                "row, 0])\n",
                "early_release",
            ),
            ("row, HEAD // 2])", "row, 0])", "wrong_result"),
            ("left_half, right_half = tl.split", "right_half, left_half = tl.split", "wrong_result"),
        ],
    )
    def test_with_a_slip_is_found(self, old: str, new: str, kind: str) -> None:
        source = self.source()
        assert source.text.count(old) == 1
        report = check(replace(source, text=source.text.replace(old, new)), 2)
        assert kind in {finding.kind for finding in report.findings}


def test_a_problem_may_forbid_lazy_rescaling() -> None:
    legal = candidates(problem((4, 8, 4096, 128), causal="bottom-right", exact=True), H200, ("attention_tma",))
    assert {config.params["rescale"] for config in legal} == {"exact"}


@pytest.mark.parametrize("template", ATTENTION.templates)
@pytest.mark.parametrize(
    ("kv_len", "options", "unseen"),
    [
        (100, {"causal": "top-left"}, slice(6, None)),
        (100, {"causal": "top-left", "window": 3}, slice(6, None)),
        (200, {"causal": "bottom-right", "window": 20}, slice(0, 175)),
        (200, {"causal": "bottom-right", "window": 1}, slice(0, 194)),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_that_no_row_sees_have_no_effect(
    template: str, kv_len: int, options: dict[str, Any], unseen: slice, value: float
) -> None:
    one = call(template, (1, 4, 6, 64), kv_heads=2, kv_len=kv_len, lse=True, **options)
    expected = ATTENTION.reference(one.problem, one.inputs)
    library = ATTENTION.eager(one.problem, one.inputs)
    lse = ATTENTION.side_outputs(one.problem, one.inputs)
    for name in ("k", "v"):
        one.inputs[name][:, :, unseen] = value
    reason = accuracy.why_wrong(one.run(), expected, library)
    assert reason is None, reason
    assert ATTENTION.why_side_output_wrong(one.problem, one.inputs, lse) is None


@pytest.mark.parametrize("template", ATTENTION.templates)
@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom-right", "window": 5}, {"causal": "top-left", "softcap": 2.0}]
)
def test_the_self_check_covers_all_batches_and_heads(template: str, options: dict[str, Any]) -> None:
    made = problem((2, 4, 6, 64), kv_heads=2, kv_len=20, **options)
    module = loader.load(emit(ATTENTION, made, candidates(made, H200, (template,))[0]))

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(ATTENTION.reference(made, {"q": q, "k": k, "v": v}))

    def launch_but_for_one_head(*tensors: torch.Tensor) -> None:
        launch(*tensors)
        tensors[3][1, 3] = 0.0

    sizes = {"B": 2, "H": 4, "S": 6, "D": 64, "kv_heads": 2, "kv_len": 20}
    vars(module).update(launch=launch)
    error, error_library = module.check(**sizes, device="cpu")
    assert error <= error_library < 0.01
    vars(module).update(launch=launch_but_for_one_head)
    assert module.check(**sizes, device="cpu")[0] > 0.1


def test_negative_scale_has_another_placement_than_a_positive_one() -> None:
    """`arguments` puts the sign into a copy of q, which is better aligned than q itself."""
    assert runtime._placement(-0.5) != runtime._placement(0.5)  # what plans are kept by


@pytest.mark.parametrize("template", ATTENTION.templates)
def test_log_sum_exp_of_a_nan_row_is_nan(template: str) -> None:
    one = call(template, (1, 1, 40, 64), kv_len=30, causal="bottom-right", lse=True)
    one.inputs["q"][0, 0, 20, 5] = float("nan")
    out = one.run()
    assert out[0, 0, 20].isnan().all()
    assert one.inputs["lse"][0, 0, 20].isnan()
    assert torch.isneginf(one.inputs["lse"][0, 0, :10]).all()


def test_plain_triton_takes_more_heads_than_a_grid_has_rows() -> None:
    made = problem((4096, 32, 49, 32))
    module = loader.load(emit(ATTENTION, made, candidates(made, H200, ("attention_vanilla",))[0]))
    inputs = ATTENTION.inputs(made, "meta", 0)
    grid, _ = ATTENTION.arguments(module, inputs, ATTENTION.output(made, inputs), num_sms=132)
    assert grid[0] >= 4096 * 32
    assert grid[1:] == (1, 1)  # CUDA has 65,535 at most along these


class TestWithoutGpu:
    @pytest.mark.parametrize("scale", [-0.3, 0.0])
    def test_scales_without_a_sign_keep_the_mask(self, scale: float) -> None:
        made = problem((1, 2, 30, 16), causal="bottom-right")
        inputs: dict[str, Any] = {**ATTENTION.inputs(made, "cpu", 0), "scale": scale}
        reference = ATTENTION.reference(made, inputs)
        assert accuracy.error(ATTENTION.eager(made, inputs), reference).norm < 1e-2
        assert ATTENTION.eager(made, inputs).isfinite().all()

    def test_torch_gives_the_log_sum_exp_too(self) -> None:
        made = problem((1, 2, 30, 16), kv_len=20, causal="bottom-right", lse=True)
        inputs = dict(ATTENTION.inputs(made, "cpu", 0))
        inputs["lse"].fill_(float("nan"))
        with pytest.warns(tlxgen.FallbackWarning):
            kernel = tlxgen.get_kernel("attention", made)
        out = kernel(inputs["q"], inputs["k"], inputs["v"], lse=inputs["lse"])
        scores = inputs["q"].double() @ inputs["k"].double().transpose(2, 3) / 4.0
        seen = torch.ones(30, 20, dtype=torch.bool).tril(-10)
        expected = torch.logsumexp(scores.masked_fill(~seen, float("-inf")), 3).float()
        torch.testing.assert_close(inputs["lse"], expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(out[:, :, :10], torch.zeros_like(out[:, :, :10]))

    def test_the_scale_may_be_given(self) -> None:
        made = problem((1, 1, 9, 16))
        q, k, v = (ATTENTION.inputs(made, "cpu", 0)[name] for name in ("q", "k", "v"))
        with pytest.warns(tlxgen.FallbackWarning):
            kernel = tlxgen.get_kernel("attention", made)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=2.0)
        torch.testing.assert_close(kernel(q, k, v, scale=2.0), expected)


class TestCall:
    def test_check_call_names_the_wrong_argument(self) -> None:
        made = problem((1, 2, 8, 64), lse=True)
        inputs = ATTENTION.inputs(made, "cpu", 0)
        assert ATTENTION.check_call(made, inputs) is None
        assert "v has shape" in str(ATTENTION.check_call(made, {**inputs, "v": inputs["v"][:, :1]}))
        assert "lse is missing" in str(ATTENTION.check_call(made, {k: v for k, v in inputs.items() if k != "lse"}))
        number: Any = float("nan")
        assert "finite" in str(ATTENTION.check_call(made, {**inputs, "scale": number}))
        assert "mask is not a parameter" in str(ATTENTION.check_call(made, {**inputs, "mask": inputs["q"]}))

    def test_tensors_unaligned_for_tma_use_plain_triton(self) -> None:
        made = problem((1, 2, 8, 64))
        inputs = ATTENTION.inputs(made, "cpu", 0)
        odd = torch.empty(1, 2, 8, 65, dtype=torch.bfloat16)[..., :64]
        tma, vanilla = (candidates(made, H200, (template,))[0] for template in TEMPLATES)
        out = torch.empty_like(inputs["q"])
        assert "aligned for TMA" in str(ATTENTION.launchable(made, tma, {**inputs, "k": odd}, out))
        assert ATTENTION.launchable(made, vanilla, {**inputs, "k": odd}, out) is None
        turned = inputs["q"].transpose(2, 3).contiguous().transpose(2, 3)
        assert "unit strides" in str(ATTENTION.launchable(made, vanilla, {**inputs, "q": turned}, out))


@pytest.mark.parametrize("template", TEMPLATES)
def test_wrong_log_sum_exp_is_found_beside_a_right_output(template: str) -> None:
    made = problem((1, 2, 500, 64), causal="bottom-right", lse=True)
    source = emit(ATTENTION, made, candidates(made, H200, (template,))[0])
    ln2 = "0.6931471805599453"
    assert ln2 in source.text
    assert check(source, 1).clean
    (finding,) = check(replace(source, text=source.text.replace(ln2, "0.69")), 1).findings
    assert finding.kind == "wrong_result"
    assert "lse: largest error" in finding.message
