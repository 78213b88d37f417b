"""Grouped GEMM of 8-bit floats: every row of A and column of B has a scale, and a wrong one shows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.ops.grouped_gemm.test_operator import SPREADS, Call, call, config, spread
from tlxgen import devices, ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.errors import InvalidProblemError, TuningError
from tlxgen.ops import accuracy
from tlxgen.ops.grouped_gemm.problem import GroupedGemmProblem
from tlxgen.ops.grouped_gemm.torch_reference import scaled_operands
from tlxgen.simulator.check import check
from tlxgen.space.candidates import candidates

GROUPED = ops.get("grouped_gemm")
H200 = devices.target("h200")
NAN = float("nan")

both = pytest.mark.parametrize("template", GROUPED.templates)


def eight(
    sizes: Any, n: int, k: int, template: str = "grouped_gemm_tma", epilogue: str = "none", **changes: Any
) -> Call:
    changes = {"block_k": 128, **changes} if template == "grouped_gemm_tma" else {}
    return call(spread(sizes, n, k, dtype="e4m3", epilogue=epilogue), template, **changes)


class TestProblem:
    def test_defaults_and_label(self) -> None:
        made = GROUPED.problem((8, 64, 32, 48), dtype=torch.float8_e4m3fn)
        assert (made.dtype, made.layout, made.out_dtype, made.bias_dtype) == ("e4m3", "nt", "bf16", "bf16")
        assert made.label == "grouped_gemm 8 64 32 48 e4m3 nt"
        assert GroupedGemmProblem.from_label(made.label) == made

    @pytest.mark.parametrize(
        "options", [{"layout": "nn"}, {"form": "masked"}, {"form": "gather"}, {"form": "2d2d"}, {"out_dtype": "fp16"}]
    )
    def test_tensor_cores_and_torch_have_one_form(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidProblemError, match="e4m3 is for form 2d3d, layout nt and out_dtype bf16"):
            GROUPED.problem((8, 64, 32, 48), dtype="e4m3", **options)

    def test_an_element_is_a_byte(self) -> None:
        made, wide = GROUPED.problem((2, 64, 32, 48), dtype="e4m3"), GROUPED.problem((2, 64, 32, 48), layout="nt")
        assert wide.dtype == "bf16"
        assert GROUPED.bytes_moved(made) + 64 * 48 + 2 * 32 * 48 == GROUPED.bytes_moved(wide)

    def test_scales_are_part_of_a_call(self) -> None:
        made = spread([3, 7], 16, 32, dtype="e4m3")
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        assert inputs["a"].dtype == inputs["b"].dtype == torch.float8_e4m3fn
        assert GROUPED.check_call(made, inputs) is None
        without = {name: x for name, x in inputs.items() if name != "scale_b"}
        assert GROUPED.check_call(made, without) == "scale_b is missing"
        assert "scale_a has shape (9,)" in str(GROUPED.check_call(made, {**inputs, "scale_a": inputs["scale_a"][:9]}))
        half = {**inputs, "scale_a": inputs["scale_a"].half()}
        assert "dtype torch.float16" in str(GROUPED.check_call(made, half))
        apart = {**inputs, "scale_a": torch.ones(20)[::2]}
        out = GROUPED.output(made, inputs)
        assert GROUPED.launchable(made, config(made, "grouped_gemm_vanilla"), apart, out) == "scale_a is not contiguous"
        assert "scale_a has no place" in str(
            GROUPED.check_call(
                spread([3, 7], 16, 32),
                {**GROUPED.inputs(spread([3, 7], 16, 32), "cpu", 0), "scale_a": inputs["scale_a"]},
            )
        )

    @pytest.mark.parametrize("epilogue", ["none", "bias+silu", "bias+swiglu"])
    def test_the_reference_is_the_product_of_what_was_scaled(self, epilogue: str) -> None:
        made = spread([5, 0, 9], 16, 32, dtype="e4m3", epilogue=epilogue)
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        plain = spread([5, 0, 9], 16, 32, layout="nt", epilogue=epilogue)
        scaled = {
            **{name: x for name, x in inputs.items() if name in ("offs", "bias")},
            "a": inputs["a"].double() * inputs["scale_a"][:, None].double(),
            "b": inputs["b"].double() * inputs["scale_b"][:, None].double(),
        }
        exact = GROUPED.reference(plain, scaled)
        torch.testing.assert_close(GROUPED.reference(made, inputs), exact)
        assert accuracy.error(GROUPED.eager(made, inputs), exact).norm < 5e-3

    @pytest.mark.parametrize(("n", "k"), [(32, 48), (20, 48), (32, 40), (7, 5)])
    def test_torch_gets_operands_that_it_takes(self, n: int, k: int) -> None:
        inputs = GROUPED.inputs(spread([5, 0, 9], n, k, dtype="e4m3"), "cpu", 0)
        a, b, scale_a, scale_b = scaled_operands(inputs)
        assert (a.shape[1], b.shape[1], b.shape[2]) == (-(-k // 16) * 16, -(-k // 16) * 16, -(-n // 16) * 16)
        assert (a.stride(1), b.stride(1)) == (1, 1)
        assert scale_b.shape == b.shape[::2]
        assert torch.equal(b[:, :k, :n].float(), inputs["b"].float())
        assert torch.equal(a[:, :k].float(), inputs["a"].float())
        assert not any(x.float().any() for x in (a[:, k:], b[:, k:], b[:, :, n:], scale_b[:, n:]))
        assert torch.equal(scale_a, inputs["scale_a"])

    def test_torch_gets_columns_of_b_that_are_contiguous_however_it_lies(self) -> None:
        inputs = GROUPED.inputs(spread([5, 0, 9], 32, 48, dtype="e4m3"), "cpu", 0)
        across = inputs["b"].contiguous()
        assert across.stride() != inputs["b"].stride()
        for b in (inputs["b"], across):
            found = scaled_operands({**inputs, "b": b})[1]
            assert found.stride(1) == 1
            assert torch.equal(found.float(), b.float())


class TestSpace:
    def test_a_step_is_128_bytes(self) -> None:
        made = GROUPED.problem((64, 8192, 2048, 7168), dtype="e4m3")
        assert {config.params["block_k"] for config in candidates(made, H200, ("grouped_gemm_tma",))} == {128}
        wide = GROUPED.problem((64, 8192, 2048, 7168), layout="nt")
        assert {config.params["block_k"] for config in candidates(wide, H200, ("grouped_gemm_tma",))} == {64}

    def test_gpus_before_ada_have_none(self) -> None:
        made = GROUPED.problem((64, 8192, 2048, 7168), dtype="e4m3")
        a100 = devices.Gpu("a100", 108, (8, 0), 1.4e9, 2e12, 40 << 20, {"bf16": 312e12, "fp16": 312e12, "e4m3": 1.0})
        with pytest.raises(TuningError):
            candidates(made, a100)

    def test_a_sample_is_clean_under_several_schedules(self) -> None:
        for options in ({}, {"epilogue": "bias+swiglu"}):
            made = GROUPED.problem((64, 8192, 2048, 7168), dtype="e4m3", **options)
            for one in random.Random(0).sample(candidates(made, H200, ("grouped_gemm_tma",)), 2):
                report = check(emit(GROUPED, made, one), 3)
                assert report.clean, "\n".join(map(str, report.findings))


@both
class TestKernels:
    """In the simulator."""

    @pytest.mark.parametrize("sizes", SPREADS.values(), ids=SPREADS)
    def test_scales_are_the_right_ones_however_tokens_are_spread(self, template: str, sizes: list[int]) -> None:
        eight(sizes, 144, 272, template).check()

    @pytest.mark.parametrize(
        ("n", "k", "epilogue", "changes"),
        [
            (776, 144, "bias+gelu", {"block_m": 128, "block_n": 256, "epilogue_subtiles": 2, "walk": "during"}),
            (100, 400, "relu", {"walk": "during"}),  # C by pointers
            (77, 16, "bias", {}),
            (272, 400, "swiglu", {"block_m": 128, "block_n": 256, "walk": "during"}),
            (264, 272, "bias+geglu", {"block_n": 256}),
            (74, 144, "bias+swiglu", {"walk": "during"}),
        ],
    )
    def test_other_shapes_knobs_and_epilogues(
        self, template: str, n: int, k: int, epilogue: str, changes: dict[str, Any]
    ) -> None:
        eight([130, 0, 31, 1, 257], n, k, template, epilogue, **changes).check()

    def test_a_neighbours_scales_are_not_felt(self, template: str) -> None:
        one = eight([40, 90, 3, 130], 144, 144, template)
        clean = one.run()
        for own in (slice(0, 40), slice(130, 133)):
            one.inputs["scale_a"][own] = NAN
        one.inputs["scale_b"][0] = one.inputs["scale_b"][2] = float("inf")
        out = one.run()
        for own in (slice(40, 130), slice(133, 263)):
            assert torch.equal(out[own], clean[own])
            assert clean[own].isfinite().all()

    @pytest.mark.parametrize("epilogue", ["none", "bias+swiglu"])
    def test_the_emitted_file_checks_itself(
        self, template: str, epilogue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With torch in place of the kernel: the check is right, and sees a scale that is missed."""
        sizes = (0, 9, 1, 0, 30)
        made = spread(sizes, 32, 48, dtype="e4m3", epilogue=epilogue)
        changes = {"block_k": 128} if template == "grouped_gemm_tma" else {}
        source = emit(GROUPED, made, config(made, template, **changes))
        assert [line for line in source.text.splitlines() if len(line) > 140] == []
        module = loader.load(source)
        names = ["offs", "scale_a", "scale_b", *(["bias"] if "bias" in epilogue else [])]
        forgets = False

        def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor, c: torch.Tensor) -> None:
            inputs = {"a": a, "b": b, **dict(zip(names, rest, strict=True))}
            assert GROUPED.check_call(made, inputs) is None
            assert GROUPED.launchable(made, Config(template=GROUPED.templates[1], params={}), inputs, c) is None
            if forgets:
                inputs["scale_a"] = torch.ones_like(inputs["scale_a"])
            c.copy_(GROUPED.reference(made, inputs))

        monkeypatch.setattr(module, "launch", launch)
        error, library = module.check(sizes, 32, 48, device="cpu")
        assert 0 < error <= library < 8e-3
        forgets = True
        assert module.check(sizes, 32, 48, device="cpu")[0] > 0.1
