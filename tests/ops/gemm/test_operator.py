"""GEMM on the host: counts, the references on the CPU, and which tensors a kernel may be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tlxgen import ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.devices import target
from tlxgen.ops.gemm.problem import ACTIVATIONS, GemmProblem
from tlxgen.space.candidates import candidates

GEMM = ops.get("gemm")
H200 = target("h200")

EPILOGUES = [
    "+".join(part for part in (scale, bias, activation, residual) if part) or "none"
    for scale in ("", "scale")
    for bias in ("", "bias")
    for activation in ("", *ACTIVATIONS)
    for residual in ("", "residual")
]
LAYOUTS = ("nn", "nt", "tn", "tt")


def gemm(*shape: int, **options: Any) -> GemmProblem:
    problem = GEMM.problem(shape or (64, 128, 256), **options)
    assert isinstance(problem, GemmProblem)
    return problem


def config_of(template: str, problem: GemmProblem | None = None) -> Config:
    return next(c for c in candidates(problem or gemm(1024, 1024, 1024), H200) if c.template == template)


def product(problem: GemmProblem, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    """What torch makes of the problem's own inputs."""
    operator: Any = GEMM
    result = operator.eager(problem, GEMM.inputs(problem, "cpu", 0) if inputs is None else inputs)
    assert isinstance(result, torch.Tensor)
    return result


TMA = config_of("gemm_tma_cooperative")
PINGPONG = config_of("gemm_tma_pingpong")
CP_ASYNC = config_of("gemm_cp_async")
VANILLA = config_of("gemm_vanilla")


class TestCounts:
    def test_flops_are_two_a_product(self) -> None:
        assert gemm_flops(3, 5, 7) == 2 * 3 * 5 * 7

    def test_bytes_count_every_operand_once(self) -> None:
        assert GEMM.bytes_moved(gemm(3, 5, 7)) == 2 * (3 * 7 + 7 * 5 + 3 * 5)
        assert GEMM.bytes_moved(gemm(3, 5, 7, dtype="fp32")) == 4 * (3 * 7 + 7 * 5 + 3 * 5)
        assert GEMM.bytes_moved(gemm(3, 5, 7, out_dtype="fp32")) == 2 * (3 * 7 + 7 * 5) + 4 * 3 * 5
        assert GEMM.bytes_moved(gemm(3, 5, 7, epilogue="residual")) == 2 * (3 * 7 + 7 * 5 + 2 * 3 * 5)

    def test_sizes_beyond_32_bits_are_no_trouble(self) -> None:
        assert gemm_flops(*3 * (2**31 - 1024,)) == pytest.approx(2 * 2.0**93, rel=1e-5)


def gemm_flops(*shape: int) -> float:
    return GEMM.flops(gemm(*shape))


class TestInputs:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_lie_in_memory_as_the_layout_says(self, layout: str) -> None:
        tensors = GEMM.inputs(gemm(4, 6, 8, layout=layout), "cpu", 0)
        assert tensors["a"].shape == (4, 8)
        assert tensors["b"].shape == (8, 6)
        assert (tensors["a"].stride(0) == 1) == (layout[0] == "t")
        assert (tensors["b"].stride(0) == 1) == (layout[1] == "t")

    def test_depend_on_the_seed_alone(self) -> None:
        one, again, other = (GEMM.inputs(gemm(), "cpu", seed)["a"] for seed in (1, 1, 2))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)

    def test_leave_the_callers_random_numbers_alone(self) -> None:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        GEMM.inputs(gemm(), "cpu", 0)
        assert torch.equal(torch.rand(3), expected)

    def test_hold_what_the_epilogue_reads(self) -> None:
        assert set(GEMM.inputs(gemm(), "cpu", 0)) == {"a", "b"}
        full = GEMM.inputs(gemm(4, 6, 8, epilogue="scale+bias+gelu+residual", out_dtype="fp32"), "cpu", 0)
        assert set(full) == {"a", "b", "bias", "residual", "scale"}
        assert full["bias"].shape == (6,)
        assert full["bias"].dtype == torch.bfloat16
        assert full["residual"].shape == (4, 6)
        assert full["residual"].dtype == torch.float32


class TestReferences:
    @pytest.mark.parametrize("epilogue", EPILOGUES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_float64_and_torchs_own_agree(self, layout: str, epilogue: str) -> None:
        problem = gemm(17, 24, 40, dtype="fp32", layout=layout, epilogue=epilogue)
        inputs = GEMM.inputs(problem, "cpu", 3)
        exact = GEMM.reference(problem, inputs)
        assert exact.dtype == torch.float64
        torch.testing.assert_close(product(problem, inputs).double(), exact, rtol=1e-4, atol=1e-4)
        out = torch.full((17, 24), float("nan"))
        assert GEMM.eager(problem, inputs, out) is out
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp32"])
    @pytest.mark.parametrize("epilogue", ["none", "bias", "scale+bias+gelu+residual"])
    def test_agree_within_the_rounding_of_short_dtypes(self, dtype: str, out_dtype: str, epilogue: str) -> None:
        problem = gemm(17, 24, 40, dtype=dtype, out_dtype=out_dtype, epilogue=epilogue)
        inputs = GEMM.inputs(problem, "cpu", 3)
        result, exact = product(problem, inputs), GEMM.reference(problem, inputs)
        assert (
            str(result.dtype) == {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[out_dtype]
        )
        assert ((result.double() - exact).norm() / exact.norm()).item() < 2**-7

    def test_the_epilogue_is_what_its_name_says(self) -> None:
        problem = gemm(4, 6, 8, dtype="fp32", epilogue="scale+bias+relu+residual")
        t = {
            name: value.double() if hasattr(value, "double") else value
            for name, value in GEMM.inputs(problem, "cpu", 0).items()
        }
        expected = torch.relu(t["scale"] * (t["a"] @ t["b"]) + t["bias"]) + t["residual"]
        torch.testing.assert_close(GEMM.reference(problem, GEMM.inputs(problem, "cpu", 0)), expected)

    def test_gelu_is_the_exact_form(self) -> None:
        problem = gemm(4, 6, 8, dtype="fp32", epilogue="gelu")
        inputs = GEMM.inputs(problem, "cpu", 0)
        x = inputs["a"].double() @ inputs["b"].double()
        expected = 0.5 * x * (1 + torch.erf(x / 2**0.5))
        torch.testing.assert_close(GEMM.reference(problem, inputs), expected)

    def test_a_product_over_nothing_is_zero(self) -> None:
        problem = gemm(4, 6, 0)
        assert torch.equal(product(problem), torch.zeros(4, 6, dtype=torch.bfloat16))


class TestCheckCall:
    """Tensors that are not the problem's are refused before anything is launched."""

    @pytest.fixture
    def problem(self) -> GemmProblem:
        return gemm(4, 6, 8, epilogue="scale+bias+residual", out_dtype="fp32")

    @pytest.fixture
    def tensors(self, problem: GemmProblem) -> dict[str, Any]:
        return dict(GEMM.inputs(problem, "cpu", 0))

    def test_the_problems_own_tensors_pass(self, problem: GemmProblem, tensors: dict[str, Any]) -> None:
        assert GEMM.check_call(problem, tensors) is None

    @pytest.mark.parametrize("name", ["a", "b", "bias", "residual", "scale"])
    def test_a_missing_operand_is_named(self, name: str, problem: GemmProblem, tensors: dict[str, Any]) -> None:
        del tensors[name]
        assert name in str(GEMM.check_call(problem, tensors))

    @pytest.mark.parametrize("name", ["a", "b"])
    def test_a_missing_factor_is_not_blamed_on_the_epilogue(self, name: str) -> None:
        tensors = GEMM.inputs(gemm(4, 6, 8), "cpu", 0)
        del tensors[name]
        message = str(GEMM.check_call(gemm(4, 6, 8), tensors))
        assert name in message
        assert "epilogue" not in message

    @pytest.mark.parametrize("name", ["a", "b", "bias", "residual"])
    def test_another_shape_is_named(self, name: str, problem: GemmProblem, tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].new_zeros(tuple(size + 1 for size in tensors[name].shape))
        message = str(GEMM.check_call(problem, tensors))
        assert message.startswith(name)
        assert str(tuple(tensors[name].shape)) in message

    @pytest.mark.parametrize("name", ["a", "b", "bias", "residual"])
    def test_another_dtype_is_named(self, name: str, problem: GemmProblem, tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].to(torch.float64)
        message = str(GEMM.check_call(problem, tensors))
        assert message.startswith(name)
        assert "float64" in message

    def test_an_operand_that_the_epilogue_does_not_read_is_named(self) -> None:
        """Left out in silence, it would be a wrong result."""
        tensors = dict(GEMM.inputs(gemm(4, 6, 8), "cpu", 0))
        tensors["bias"] = torch.zeros(6, dtype=torch.bfloat16)
        assert "bias" in str(GEMM.check_call(gemm(4, 6, 8), tensors))


def why_not(config: Config, problem: GemmProblem, **replaced: torch.Tensor) -> str | None:
    """What `launchable` says of the problem's own tensors, some replaced."""
    tensors = {**GEMM.inputs(problem, "cpu", 0)}
    out = replaced.pop("c", GEMM.output(problem, tensors))
    return GEMM.launchable(problem, config, {**tensors, **replaced}, out)


def padded(rows: int, columns: int, pad: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A (rows, columns) view of a tensor whose rows are longer."""
    return torch.zeros(rows, columns + pad, dtype=dtype)[:, :columns]


def offset(rows: int, columns: int, elements: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A contiguous (rows, columns) view that starts `elements` after an aligned address."""
    return torch.zeros(rows * columns + 64, dtype=dtype)[elements : elements + rows * columns].view(rows, columns)


class TestLaunchable:
    """Which tensors a template can take as they lie; what it cannot goes elsewhere, never to wrong numbers."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("config", [TMA, PINGPONG, CP_ASYNC, VANILLA], ids=lambda config: config.template)
    def test_contiguous_tensors(self, config: Config, layout: str) -> None:
        assert why_not(config, gemm(layout=layout)) is None

    @pytest.mark.parametrize("config", [TMA, PINGPONG, CP_ASYNC, VANILLA], ids=lambda config: config.template)
    def test_the_other_layout_never(self, config: Config) -> None:
        assert "a has stride" in str(why_not(config, gemm(), a=torch.zeros(256, 64, dtype=torch.bfloat16).T))
        assert "b has stride" in str(why_not(config, gemm(), b=torch.zeros(128, 256, dtype=torch.bfloat16).T))
        nt = gemm(layout="nt")
        assert "b has stride" in str(why_not(config, nt, b=torch.zeros(256, 128, dtype=torch.bfloat16)))

    @pytest.mark.parametrize("config", [TMA, PINGPONG, CP_ASYNC, VANILLA], ids=lambda config: config.template)
    def test_every_second_column_never(self, config: Config) -> None:
        assert "a has stride 2" in str(why_not(config, gemm(), a=torch.zeros(64, 512, dtype=torch.bfloat16)[:, ::2]))
        assert "c has stride 2" in str(why_not(config, gemm(), c=torch.zeros(64, 256, dtype=torch.bfloat16)[:, ::2]))

    @pytest.mark.parametrize("config", [TMA, PINGPONG, CP_ASYNC, VANILLA], ids=lambda config: config.template)
    def test_a_strided_bias_never_since_the_kernel_reads_it_as_contiguous(self, config: Config) -> None:
        problem = gemm(epilogue="bias")
        assert why_not(config, problem) is None
        assert "bias" in str(why_not(config, problem, bias=torch.zeros(256, dtype=torch.bfloat16)[::2]))
        expanded = torch.zeros(1, dtype=torch.bfloat16).expand(128)
        assert "bias" in str(why_not(config, problem, bias=expanded))

    @pytest.mark.parametrize("config", [TMA, PINGPONG, VANILLA], ids=lambda config: config.template)
    def test_rows_padded_to_16_bytes(self, config: Config) -> None:
        assert why_not(config, gemm(), a=padded(64, 256, 8), b=padded(256, 128, 8), c=padded(64, 128, 8)) is None

    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_rows_padded_otherwise_not_through_tma(self, name: str) -> None:
        shape = {"a": (64, 256), "b": (256, 128), "c": (64, 128)}[name]
        message = str(why_not(TMA, gemm(), **{name: padded(*shape, 3)}))
        assert message.startswith(name)
        assert "16" in message
        assert why_not(VANILLA, gemm(), **{name: padded(*shape, 3)}) is None

    @pytest.mark.parametrize("name", ["a", "b"])
    def test_rows_padded_otherwise_not_through_cp_async_either(self, name: str) -> None:
        shape = {"a": (64, 256), "b": (256, 128)}[name]
        assert str(why_not(CP_ASYNC, gemm(), **{name: padded(*shape, 3)})).startswith(name)

    @pytest.mark.parametrize("name", ["a", "b", "c"])
    def test_addresses_between_16_bytes_not_through_tma(self, name: str) -> None:
        shape = {"a": (64, 256), "b": (256, 128), "c": (64, 128)}[name]
        message = str(why_not(TMA, gemm(), **{name: offset(*shape, 1)}))
        assert message.startswith(name)
        assert why_not(TMA, gemm(), **{name: offset(*shape, 8)}) is None
        assert why_not(VANILLA, gemm(), **{name: offset(*shape, 1)}) is None

    def test_a_residual_that_is_not_aligned_not_through_tma(self) -> None:
        problem = gemm(epilogue="residual")
        assert why_not(TMA, problem) is None
        assert str(why_not(TMA, problem, residual=padded(64, 128, 3))).startswith("residual")
        assert str(why_not(TMA, problem, residual=offset(64, 128, 1))).startswith("residual")
        assert why_not(VANILLA, problem, residual=padded(64, 128, 3)) is None

    def test_rows_of_c_that_a_tma_store_would_overrun(self) -> None:
        """TMA stores whole 16 bytes: a slice of a wider tensor would lose what lies beside it."""
        problem = gemm(64, 130, 256)
        wide = torch.zeros(64, 136, dtype=torch.bfloat16)[:, :130]
        b = torch.zeros(256, 136, dtype=torch.bfloat16)[:, :130]
        message = str(why_not(TMA, problem, b=b, c=wide))
        assert message.startswith("c has rows of 260 bytes")
        assert why_not(VANILLA, problem, b=b, c=wide) is None
        longer = gemm(64, 132, 256, out_dtype="fp32")  # 528 bytes
        assert why_not(TMA, longer, b=torch.zeros(256, 136, dtype=torch.bfloat16)[:, :132]) is None

    @pytest.mark.parametrize("config", [TMA, PINGPONG], ids=lambda config: config.template)
    def test_repeated_rows_not_through_tma(self, config: Config) -> None:
        repeated = torch.zeros(1, 256, dtype=torch.bfloat16).expand(64, 256)
        assert str(why_not(config, gemm(), a=repeated)).startswith("a is not aligned")
        assert why_not(VANILLA, gemm(), a=repeated) is None

    def test_a_repeated_output_never(self) -> None:
        """All rows in one place: the rows would overwrite each other."""
        c = torch.zeros(1, 128, dtype=torch.bfloat16).expand(64, 128)
        assert str(why_not(VANILLA, gemm(), c=c)).startswith("c")

    def test_strides_of_dimensions_of_size_one_do_not_matter_along_the_row(self) -> None:
        problem = gemm(64, 128, 1)
        column = torch.zeros(64, 16, dtype=torch.bfloat16)[:, :1]
        assert column.stride() == (16, 1)
        assert why_not(VANILLA, problem, a=column) is None
        a = torch.zeros(16, 64, dtype=torch.bfloat16).T[:, ::16]  # (64, 1) with strides (1, 1024)
        assert a.shape == (64, 1)
        assert why_not(VANILLA, gemm(64, 128, 1, layout="tn"), a=a) is None

    def test_one_row_with_an_odd_stride(self) -> None:
        row = torch.zeros(3, 257, dtype=torch.bfloat16)[:1, :256]
        assert row.stride() == (257, 1)
        problem = gemm(1, 128, 256)
        assert why_not(VANILLA, problem, a=row) is None
        assert str(why_not(TMA, problem, a=row)).startswith("a is not aligned")


@pytest.mark.parametrize("template", GEMM.templates)
def test_a_whole_number_as_scale_does_not_become_a_constant_of_the_kernel(template: str) -> None:
    """Triton would compile the integer 1 into the binary, and serve it for every other scale."""
    problem = GEMM.problem((128, 128, 128), epilogue="scale")
    config = candidates(problem, H200, (template,))[0]
    module = loader.load(emit(GEMM, problem, config))
    inputs: dict[str, Any] = {**GEMM.inputs(problem, "meta", 0), "scale": 1}
    _, args = GEMM.arguments(module, inputs, GEMM.output(problem, inputs), num_sms=1)
    assert [type(arg) for arg in args].count(float) == 1
