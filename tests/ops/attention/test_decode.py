"""`attention_decode`: its search space, its time model, and its results in the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.errors import TuningError
from tlxgen.ops import accuracy
from tlxgen.ops.attention import decode
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.simulator.check import check
from tlxgen.simulator.machine.machine import POLICIES, Machine
from tlxgen.simulator.program import load
from tlxgen.space.candidates import candidates

ATTENTION = ops.get("attention")
H200 = devices.target("h200")
TEMPLATE = "attention_decode"


def problem(shape: tuple[int, int, int, int], **options: Any) -> AttentionProblem:
    made = ATTENTION.problem(shape, **options)
    assert isinstance(made, AttentionProblem)
    return made


def config(splits: int, block_n: int = 64, kv_stages: int = 4) -> Config:
    return Config(template=TEMPLATE, params={"block_n": block_n, "kv_stages": kv_stages, "splits": splits})


@dataclass(frozen=True)
class Call:
    """One call in the simulator."""

    problem: AttentionProblem
    config: Config
    inputs: dict[str, Any]
    out: torch.Tensor

    def arguments(self) -> tuple[Any, tuple[int, int, int], tuple[Any, ...]]:
        """The program, and how its kernel is launched."""
        refusal = ATTENTION.launchable(self.problem, self.config, self.inputs, self.out)
        assert refusal is None, refusal
        source = emit(ATTENTION, self.problem, self.config)
        program = load(source.file_name, source.text)
        module: Any = SimpleNamespace(arguments=program["arguments"])
        grid, args = ATTENTION.arguments(module, self.inputs, self.out, num_sms=1)
        return program, grid, args

    def run(self, seed: int = 1) -> torch.Tensor:
        program, grid, args = self.arguments()
        self.out.fill_(float("nan"))
        machine = Machine(frozenset(), seed=seed, policy=POLICIES[seed % len(POLICIES)])
        program["kernel"].launch(machine, grid, args, program["OPTIONS"])
        assert not machine.findings, machine.findings[0]
        return self.out

    def check(self, seed: int = 1) -> torch.Tensor:
        """Runs it, and holds output and log-sum-exp against float64."""
        reference = ATTENTION.reference(self.problem, self.inputs)
        library = ATTENTION.eager(self.problem, self.inputs)
        lse = ATTENTION.side_outputs(self.problem, self.inputs)
        out = self.run(seed)
        reason = accuracy.why_wrong(out, reference, library)
        reason = reason or ATTENTION.why_side_output_wrong(self.problem, self.inputs, lse)
        assert reason is None, reason
        return out


def call(shape: tuple[int, int, int, int], splits: int, seed: int = 0, **options: Any) -> Call:
    made = problem(shape, **options)
    inputs = dict(ATTENTION.inputs(made, "cpu", seed))
    return Call(made, config(splits), inputs, torch.empty_like(inputs["q"]))


class TestSpace:
    @pytest.mark.parametrize(
        ("shape", "options", "taken"),
        [
            ((1, 32, 1, 128), {"kv_heads": 8, "kv_len": 4096}, True),
            ((1, 64, 1, 128), {"kv_heads": 1, "kv_len": 4096}, True),
            ((1, 8, 64, 128), {"kv_len": 4096}, True),
            ((1, 8, 65, 128), {"kv_len": 4096}, False),
            ((1, 32, 17, 128), {"kv_heads": 8, "kv_len": 4096}, False),
        ],
    )
    def test_at_most_64_rows_share_keys(
        self, shape: tuple[int, int, int, int], options: dict[str, Any], taken: bool
    ) -> None:
        made = problem(shape, **options)
        if taken:
            assert candidates(made, H200, (TEMPLATE,))
        else:
            with pytest.raises(TuningError):
                candidates(made, H200, (TEMPLATE,))
        assert candidates(made, H200, ("attention_tma",))

    @pytest.mark.parametrize("options", [{"kv_len": 300}, {"causal": "bottom-right", "kv_len": 4096, "window": 300}])
    def test_splits_are_at_most_the_blocks_of_keys(self, options: dict[str, Any]) -> None:
        legal = candidates(problem((1, 8, 1, 128), **options), H200, (TEMPLATE,))
        assert max(int(c.params["splits"]) for c in legal if c.params["block_n"] == 64) == 4
        assert max(int(c.params["splits"]) for c in legal if c.params["block_n"] == 128) == 3

    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            ((64, 32, 1, 128), {"kv_heads": 8, "kv_len": 4096}),
            ((1, 32, 1, 128), {"kv_heads": 8, "kv_len": 32768}),
            ((1, 16, 1, 128), {"kv_heads": 1, "kv_len": 32768}),
            ((8, 32, 4, 64), {"kv_heads": 8, "kv_len": 8192, "causal": "bottom-right"}),
            ((4, 16, 1, 256), {"kv_heads": 8, "kv_len": 8192}),
        ],
    )
    def test_model_prefers_decode_with_enough_ctas_to_fill_the_gpu(
        self, shape: tuple[int, int, int, int], options: dict[str, Any]
    ) -> None:
        made = problem(shape, **options)
        best = candidates(made, H200)[0]
        assert best.template == TEMPLATE
        ctas = made.B * made.kv_heads * int(best.params["splits"])
        assert ctas >= 0.48 * H200.sm_count
        assert ctas / (H200.sm_count * -(-ctas // H200.sm_count)) >= 0.48

    @given(
        st.integers(1, 30),
        st.integers(1, 60),
        st.sampled_from(["none", "bottom-right", "top-left"]),
        st.integers(0, 40),
    )
    def test_seen_keys_are_those_that_a_row_sees(self, rows: int, keys: int, causal: Any, window: int) -> None:
        made = problem((1, 1, rows, 8), kv_len=keys, causal=causal, window=window if causal != "none" else 0)
        seen = set()
        for row in range(rows):
            last = keys - 1 if causal == "none" else row + made.diagonal
            first = last + 1 - made.window if made.window else 0
            seen |= set(range(max(0, first), min(keys, last + 1)))
        assert decode.seen_keys(made) == len(seen)


@pytest.mark.parametrize("splits", [1, 4])
class TestValues:
    @pytest.mark.parametrize("keys", [1, 63, 64, 65, 300])
    def test_lengths_around_a_block(self, splits: int, keys: int) -> None:
        for seed in range(3):
            call((2, 4, 1, 64), splits, seed, kv_heads=2, kv_len=keys, lse=True).check(seed)

    @pytest.mark.parametrize("group", [1, 4, 8])
    @pytest.mark.parametrize("rows", [1, 4])
    def test_heads_that_share_keys(self, splits: int, rows: int, group: int) -> None:
        for causal in ("none", "bottom-right"):
            call((1, 2 * group, rows, 64), splits, kv_heads=2, kv_len=290, causal=causal).check()

    def test_all_heads_may_share_keys(self, splits: int) -> None:
        call((2, 64, 1, 64), splits, kv_heads=1, kv_len=290, lse=True).check()

    @pytest.mark.parametrize(
        "options",
        [
            {"causal": "bottom-right"},
            {"causal": "bottom-right", "window": 70},
            {"causal": "bottom-right", "window": 3},
            {"causal": "top-left"},
            {"causal": "top-left", "window": 3},
            {"softcap": 5.0},
            {"causal": "bottom-right", "window": 130, "softcap": 5.0, "dtype": "fp16"},
        ],
    )
    def test_masks_and_caps(self, splits: int, options: dict[str, Any]) -> None:
        for seed in range(3):
            call((1, 8, 7, 64), splits, seed, kv_heads=2, kv_len=290, lse=True, **options).check(seed)

    def test_a_diagonal_across_blocks(self, splits: int) -> None:
        call((1, 1, 64, 64), splits, kv_len=225, causal="bottom-right", lse=True).check()

    def test_rows_without_visible_keys_give_zero_and_minus_infinity(self, splits: int) -> None:
        one = call((1, 4, 16, 64), splits, kv_heads=2, kv_len=5, causal="bottom-right", lse=True)
        out = one.check()
        assert torch.equal(out[:, :, :11], torch.zeros_like(out[:, :, :11]))
        assert torch.isneginf(one.inputs["lse"][:, :, :11]).all()
        assert torch.isfinite(one.inputs["lse"][:, :, 11:]).all()

    def test_rows_without_visible_keys_in_some_splits(self, splits: int) -> None:
        """Of 64 rows, the first sees keys up to 150 alone, the last those from 116 on."""
        call((1, 1, 64, 64), splits, kv_len=214, causal="bottom-right", window=99, lse=True).check()

    def test_memory_behind_the_keys_has_no_effect(self, splits: int) -> None:
        one = call((1, 2, 3, 64), splits, kv_heads=1, kv_len=290)
        for name in ("k", "v"):
            longer = torch.full((1, 1, 400, 64), float("nan"), dtype=one.inputs[name].dtype)
            longer[:, :, :290] = one.inputs[name]
            one.inputs[name] = longer[:, :, :290]
        one.check()

    @pytest.mark.parametrize("scale", [0.5, -0.3, 0.0])
    def test_the_scale_is_any_number(self, splits: int, scale: float) -> None:
        one = call((1, 4, 2, 64), splits, kv_heads=2, kv_len=290, causal="bottom-right")
        one.inputs["scale"] = scale
        one.check()

    def test_q_and_out_may_have_any_strides(self, splits: int) -> None:
        """Rows of 65 elements, and heads between rows."""
        one = call((2, 4, 3, 64), splits, kv_heads=2, kv_len=290)
        odd = torch.empty(2, 4, 3, 65, dtype=torch.bfloat16)[..., :64]
        odd.copy_(one.inputs["q"])
        one.inputs["q"] = odd
        between = torch.empty(2, 3, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
        replace(one, out=between).check()

    @pytest.mark.parametrize("head", [8, 96, 128, 200, 256])
    def test_every_head_dimension_up_to_256(self, splits: int, head: int) -> None:
        made = problem((1, 4, 2, head), kv_heads=2, kv_len=290, causal="bottom-right")
        inputs = dict(ATTENTION.inputs(made, "cpu", 0))
        Call(made, config(splits, kv_stages=2), inputs, torch.empty_like(inputs["q"])).check()

    def test_large_scores_do_not_overflow(self, splits: int) -> None:
        one = call((1, 4, 2, 64), splits, kv_heads=2, kv_len=290, lse=True)
        one.inputs["k"] = one.inputs["k"] * 100
        one.check()

    def test_value_has_the_same_weight_in_every_split(self, splits: int) -> None:
        """Scores that grow or fall by far along the keys: one split alone decides the result."""
        for slope in (torch.linspace(6.0, 0.1, 290), torch.linspace(0.1, 6.0, 290)):
            one = call((1, 4, 1, 64), splits, kv_heads=2, kv_len=290, lse=True)
            one.inputs["k"] = one.inputs["k"] * slope[None, None, :, None].to(torch.bfloat16)
            one.check()


class TestSplits:
    def test_are_no_more_than_blocks(self) -> None:
        one = call((2, 4, 1, 64), 8, kv_heads=2, kv_len=129)
        _, grid, _ = one.arguments()
        assert grid == (2 * 2 * 3, 1, 1)
        one.check()

    def test_take_blocks_evenly(self) -> None:
        """Eleven blocks among four CTAs: three, three, three and two, whatever their order."""
        one = call((1, 1, 1, 64), 4, kv_len=11 * 64)
        one.check()
        blocks = [(split + 1) * 11 // 4 - split * 11 // 4 for split in range(4)]
        assert sorted(blocks) == [2, 3, 3, 3]

    def test_launch_leaves_the_counters_at_zero(self) -> None:
        """The same arguments may be launched again, as a CUDA graph does."""
        one = call((2, 4, 2, 64), 4, kv_heads=2, kv_len=290)
        program, grid, args = one.arguments()
        (arrived,) = (arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)
        results = []
        for seed in range(3):
            one.out.fill_(float("nan"))
            machine = Machine(frozenset(), seed=seed)
            program["kernel"].launch(machine, grid, args, program["OPTIONS"])
            assert not machine.findings, machine.findings[0]
            assert not arrived.any()
            results.append(one.out.clone())
        assert all(torch.equal(result, results[0]) for result in results)

    def test_one_needs_no_workspace(self) -> None:
        _, _, args = call((1, 4, 1, 64), 1, kv_heads=2, kv_len=290).arguments()
        assert sum(isinstance(arg, torch.Tensor) for arg in args) == 2  # q and out

    def test_arguments_can_be_made_without_data(self) -> None:
        made = problem((1, 4, 1, 64), kv_heads=2, kv_len=290)
        inputs = ATTENTION.inputs(made, "meta", 0)
        _, _, args = Call(made, config(4), inputs, ATTENTION.output(made, inputs)).arguments()
        assert all(arg.is_meta for arg in args if isinstance(arg, torch.Tensor))


class TestTensors:
    def test_keys_must_be_aligned_for_tma_and_q_need_not(self) -> None:
        made = problem((1, 2, 8, 64))
        inputs = ATTENTION.inputs(made, "cpu", 0)
        odd = torch.empty(1, 2, 8, 65, dtype=torch.bfloat16)[..., :64]
        out = torch.empty_like(inputs["q"])
        one = config(1)
        assert "v is not aligned for TMA" in str(ATTENTION.launchable(made, one, {**inputs, "v": odd}, out))
        assert ATTENTION.launchable(made, one, {**inputs, "q": odd}, odd) is None
        turned = inputs["q"].transpose(2, 3).contiguous().transpose(2, 3)
        assert "unit strides" in str(ATTENTION.launchable(made, one, {**inputs, "q": turned}, out))


@pytest.mark.parametrize("splits", [1, 4])
def test_wrong_log_sum_exp_is_found_beside_a_right_output(splits: int) -> None:
    made = problem((1, 4, 2, 64), kv_heads=2, kv_len=500, causal="bottom-right", lse=True)
    source = emit(ATTENTION, made, config(splits))
    ln2 = "0.6931471805599453"
    assert check(source, 1).clean
    (finding,) = check(replace(source, text=source.text.replace(ln2, "0.69")), 1).findings
    assert finding.kind == "wrong_result"
    assert "lse: largest error" in finding.message
