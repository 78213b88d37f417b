"""`get_kernel`: which kernel serves a problem on which machine, and what it says about it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tlxgen
from tlxgen import devices, ops, toolchain
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import Gpu, target
from tlxgen.errors import InvalidProblemError, LaunchError, NoKernelError
from tlxgen.ops.gemm.problem import GemmProblem
from tlxgen.runtime import call_checks, plans, selection
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime.kernel import FallbackWarning, Kernel, select
from tlxgen.space.candidates import candidates, default_config, vanilla_config

ROOT = Path(__file__).parents[2]
GEMM = ops.get("gemm")
H200 = target("h200")
A100 = replace(H200, slug="a100-sxm4", sm_count=108, capability=(8, 0))


@pytest.fixture(autouse=True)
def _nothing_remembered(no_shipped_configs: None) -> Iterator[None]:
    runtime.forget()
    yield
    runtime.forget()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about machines without a GPU, and about GPUs that are made up."""
    monkeypatch.setattr(runtime, "_current_device", lambda: None)


def problem(*shape: int, **options: Any) -> GemmProblem:
    made = GEMM.problem(shape or (1024, 1024, 1024), **options)
    assert isinstance(made, GemmProblem)
    return made


def record(for_problem: GemmProblem, gpu: Gpu = H200, config: Config | None = None, **changes: Any) -> TunedRecord:
    """A row as the tuner would store it; by default of a config that nobody would choose without it."""
    config = config or candidates(for_problem, H200)[-1]
    fields: dict[str, Any] = {
        "key": tuning_key(for_problem, gpu.key),
        "config": config,
        "origin": "measured",
        "source_hash": emit(GEMM, for_problem, config).code_hash,
        "time_us": 10.0,
        "protocol": "graph-2",
    }
    return TunedRecord.model_validate({**fields, **changes})


def keep(*records: TunedRecord) -> None:
    with Store.open(read_only_ok=False) as store:
        for row in records:
            assert store.put(row)


def tensors(for_problem: GemmProblem) -> dict[str, Any]:
    return dict(GEMM.inputs(for_problem, "cpu", 0))


class TestImports:
    def test_of_tlxgen_bring_none_of_the_heavy_packages(self) -> None:
        """A run-time user pays only for what it calls."""
        script = (
            "import sys, tlxgen\n"
            "heavy = {'torch', 'triton', 'optuna', 'sqlalchemy', 'numpy', 'scipy', 'jinja2', 'pydantic', 'yaml'}\n"
            "print(*sorted(heavy & set(sys.modules)))\n"
        )
        assert self.run(script) == ""

    def test_of_get_kernel_bring_no_tuner(self) -> None:
        script = (
            "import sys, warnings, tlxgen\n"
            "warnings.simplefilter('ignore')\n"
            "tlxgen.get_kernel('gemm', (8, 8, 8))\n"
            "tuner = {'optuna', 'sqlalchemy', 'tlxgen.tuner.tune', 'tlxgen.tuner.search', 'typer', 'rich'}\n"
            "print(*sorted(tuner & set(sys.modules)))\n"
        )
        assert self.run(script) == ""

    def test_of_a_choice_bring_nothing_that_only_writers_need(self) -> None:
        script = (
            "import sys\n"
            "from tlxgen import ops\n"
            "from tlxgen.devices import target\n"
            "from tlxgen.runtime.selection import select\n"
            "assert select(ops.get('gemm').problem((4096, 4096, 4096)), target('h200')).config is not None\n"
            "print(*sorted({'optuna', 'sqlite_utils', 'typer', 'rich', 'triton'} & set(sys.modules)))\n"
        )
        self.run(script)  # takes the shipped rows into a new database
        assert self.run(script) == ""

    def test_of_public_names_work(self) -> None:
        for name in tlxgen.__all__:
            assert getattr(tlxgen, name) is not None
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = tlxgen.no_such_name

    def run(self, script: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()


class TestWithoutGpu:
    def test_torch_computes(self) -> None:
        with pytest.warns(FallbackWarning):
            mm = tlxgen.get_kernel("gemm", (8, 16, 32), dtype=torch.bfloat16)
        assert mm.origin == "torch"
        assert mm.config is None
        assert mm.source is None
        inputs = tensors(problem(8, 16, 32))
        torch.testing.assert_close(mm(inputs["a"], inputs["b"]), inputs["a"] @ inputs["b"])

    @pytest.mark.parametrize("epilogue", ["bias", "scale+bias+gelu+residual"])
    def test_torch_computes_epilogues(self, epilogue: str) -> None:
        asked = problem(8, 16, 32, epilogue=epilogue, dtype="fp32")
        with pytest.warns(FallbackWarning):
            kernel = tlxgen.get_kernel("gemm", asked)
        inputs = tensors(asked)
        torch.testing.assert_close(kernel(**inputs).double(), GEMM.reference(asked, inputs), rtol=1e-4, atol=1e-4)

    def test_torch_computes_vectors(self) -> None:
        with pytest.warns(FallbackWarning):
            add = tlxgen.get_kernel("vector_add", (100,))
        x, y = (torch.randn(100).bfloat16() for _ in range(2))
        assert torch.equal(add(x, y), x + y)

    @pytest.mark.parametrize("epilogue", ["none", "gelu"])
    def test_results_go_where_the_caller_wants_them(self, epilogue: str) -> None:
        asked = problem(8, 16, 32, epilogue=epilogue)
        with pytest.warns(FallbackWarning):
            kernel = tlxgen.get_kernel("gemm", asked)
        out = torch.full((8, 16), float("nan"), dtype=torch.bfloat16)
        inputs = tensors(asked)
        assert kernel(**inputs, out=out) is out
        assert torch.equal(out, kernel(**inputs))

    def test_inputs_are_left_as_they_were(self) -> None:
        asked = problem(8, 16, 32, epilogue="scale+bias+gelu+residual")
        with pytest.warns(FallbackWarning):
            kernel = tlxgen.get_kernel("gemm", asked)
        inputs = tensors(asked)
        before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        kernel(**inputs)
        for name, value in before.items():
            assert torch.equal(torch.as_tensor(inputs[name]), torch.as_tensor(value)), name

    def test_it_says_why(self) -> None:
        with pytest.warns(FallbackWarning, match="no CUDA GPU") as caught:
            kernel = tlxgen.get_kernel("gemm", (8, 16, 32))
        assert "gemm 8 16 32 bf16 nn" in str(caught[0].message)
        assert kernel.explain() == "no CUDA GPU here: torch computes"

    def test_it_warns_once_for_each_problem_at_the_callers_line(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                tlxgen.get_kernel("gemm", (8, 16, 32))
                tlxgen.get_kernel("gemm", (8, 16, 64))
        assert [warning.category for warning in caught] == [FallbackWarning] * 2
        assert {warning.filename for warning in caught} == {__file__}

    def test_strict_raises_and_names_the_problem(self) -> None:
        with pytest.raises(NoKernelError, match="gemm 8 16 32 bf16 nn: no CUDA GPU"):
            tlxgen.get_kernel("gemm", (8, 16, 32), strict=True)

    def test_equal_problems_share_one_kernel(self) -> None:
        with pytest.warns(FallbackWarning):
            one = tlxgen.get_kernel("gemm", (8, 16, 32))
        assert tlxgen.get_kernel("gemm", {"M": 8, "N": 16, "K": 32}, dtype="bfloat16") is one

    def test_sixteen_threads_may_ask_and_call_at_once(self) -> None:
        asked = [problem(8, 16, 8 * (i % 4 + 1)) for i in range(16)]
        failures: list[BaseException] = []
        barrier = threading.Barrier(16)

        def ask(one: GemmProblem) -> None:
            try:
                barrier.wait()
                inputs = tensors(one)
                assert torch.equal(tlxgen.get_kernel("gemm", one)(**inputs), inputs["a"] @ inputs["b"])
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            threads = [threading.Thread(target=ask, args=(one,)) for one in asked]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failures == []


class TestBadCalls:
    @pytest.fixture
    def mm(self) -> Kernel:
        with pytest.warns(FallbackWarning):
            return tlxgen.get_kernel("gemm", (8, 16, 32))

    @pytest.fixture
    def ab(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = tensors(problem(8, 16, 32))
        return inputs["a"], inputs["b"]

    def test_of_another_shape_name_tensor_shapes_and_problem(self, mm: Kernel, ab: Any) -> None:
        with pytest.raises(LaunchError, match=r"gemm 8 16 32 bf16 nn: b has shape \(8, 32\)"):
            mm(ab[0], ab[0])

    def test_of_another_dtype(self, mm: Kernel, ab: Any) -> None:
        with pytest.raises(LaunchError, match=r"a has .* torch\.float16"):
            mm(ab[0].half(), ab[1])

    def test_without_an_operand(self, mm: Kernel, ab: Any) -> None:
        with pytest.raises(LaunchError, match="b"):
            mm(ab[0])

    def test_with_an_operand_too_many(self, mm: Kernel, ab: Any) -> None:
        with pytest.raises((LaunchError, TypeError)):
            mm(*ab, ab[0])

    def test_with_an_operand_that_nobody_reads(self, mm: Kernel, ab: Any) -> None:
        """A bias left out in silence would be a wrong result."""
        with pytest.raises((LaunchError, TypeError), match="bias"):
            mm(*ab, bias=torch.zeros(16, dtype=torch.bfloat16))

    def test_with_an_output_of_another_shape(self, mm: Kernel, ab: Any) -> None:
        """A kernel would write beyond its end."""
        with pytest.raises(LaunchError, match=r"\(16, 8\)"):
            mm(*ab, out=torch.zeros(16, 8, dtype=torch.bfloat16))

    def test_with_an_output_of_another_dtype(self, mm: Kernel, ab: Any) -> None:
        with pytest.raises(LaunchError, match="float32"):
            mm(*ab, out=torch.zeros(8, 16))

    def test_of_vectors_name_what_is_wrong(self) -> None:
        with pytest.warns(FallbackWarning):
            add = tlxgen.get_kernel("vector_add", (100,), dtype="bf16")
        x = torch.zeros(100, dtype=torch.bfloat16)
        with pytest.raises(LaunchError, match=r"y has shape \(99,\)"):
            add(x, x[:99])
        with pytest.raises(LaunchError, match="y"):
            add(x)

    def test_of_vectors_of_another_dtype(self) -> None:
        with pytest.warns(FallbackWarning):
            add = tlxgen.get_kernel("vector_add", (100,), dtype="bf16")
        with pytest.raises(LaunchError, match="float32"):
            add(torch.zeros(100), torch.zeros(100))

    def test_for_problems_that_are_none(self) -> None:
        with pytest.raises(InvalidProblemError):
            tlxgen.get_kernel("attention", (1, 2, 3))
        with pytest.raises(InvalidProblemError):
            tlxgen.get_kernel("gemm", (-1, 2, 3))
        with pytest.raises(InvalidProblemError):
            tlxgen.get_kernel("gemm", (1, 2, 3), mode="fast")


class TestZeroSizes:
    @pytest.mark.parametrize("gpu", [None, H200], ids=["no GPU", "h200"])
    @pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
    def test_give_what_torch_gives(self, shape: tuple[int, int, int], gpu: Gpu | None) -> None:
        asked = problem(*shape)
        kernel = Kernel(asked, select(asked, gpu), gpu)
        assert kernel.origin == "torch"
        inputs = tensors(asked)
        expected = inputs["a"] @ inputs["b"]
        assert torch.equal(kernel(**inputs), expected)
        out = torch.full(expected.shape, float("nan"), dtype=torch.bfloat16)
        assert torch.equal(kernel(**inputs, out=out), expected)

    def test_of_vectors(self) -> None:
        asked = ops.get("vector_add").problem((0,))
        empty = torch.zeros(0, dtype=torch.bfloat16)
        assert Kernel(asked, select(asked, H200), H200)(empty, empty).shape == (0,)

    def test_ask_nothing_of_the_database(self) -> None:
        select(problem(0, 8, 8), H200)
        with Store.open() as store:
            assert store.untuned() == []


class TestSelection:
    """From the tuned row down to torch; `explain` tells what was passed over."""

    def test_a_measured_row_of_this_gpu_is_tuned(self) -> None:
        row = record(problem())
        keep(row)
        choice = select(problem(), H200)
        assert (choice.origin, choice.config, choice.passed_over) == ("tuned", row.config, ())
        kernel = Kernel(problem(), choice, H200)
        assert kernel.explain() == f"tuned: {row.config.short}"
        assert kernel.source == emit(GEMM, problem(), row.config).text

    @pytest.mark.parametrize(
        ("measured", "slower"),
        [
            ({}, False),
            ({"peer_us": 7.0}, True),
            ({"peer_us": 9.4}, True),
            ({"peer_us": 9.6}, False),
            ({"peer_us": 7.0, "spread_us": 2.0}, True),
            ({"peer_us": 7.0, "spread_us": 3.0}, False),  # rounds differed by more than the lead
        ],
    )
    def test_what_was_measured_to_be_slower_than_the_library_is_told(
        self, measured: dict[str, Any], slower: bool
    ) -> None:
        """`get_kernel` serves it all the same: whoever asks for a kernel gets one."""
        keep(record(problem(), **measured))
        kernel = Kernel(problem(), select(problem(), H200), H200)
        assert (kernel.origin, kernel.slower) == ("tuned", slower)
        told = f"the library was measured to be {10.0 / measured.get('peer_us', 1.0):.2f} times as fast)"
        assert (told in kernel.explain()) is slower

    @pytest.mark.parametrize(
        ("shape", "slower"),
        [
            ((1536, 1024, 1024), True),
            ((1024, 1024, 1088), False),  # other weights: the library may do otherwise there
            ((1024, 1088, 1024), False),
            ((2176, 1024, 1024), False),  # far
        ],
    )
    def test_so_is_a_neighbour_s_with_the_same_weights(self, shape: tuple[int, int, int], slower: bool) -> None:
        keep(record(problem(), config=default_config(problem(*shape), H200), peer_us=7.0))
        kernel = Kernel(problem(*shape), select(problem(*shape), H200), H200)
        assert (kernel.origin, kernel.slower) == ("nearest", slower), kernel.explain()
        assert ("the library was measured to be 1.43 times as fast there)" in kernel.explain()) is slower

    def test_a_predicted_row_says_so(self) -> None:
        keep(record(problem(), origin="predicted", protocol="model-1"))
        assert select(problem(), H200).origin == "predicted"

    def test_strict_takes_measured_rows_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runtime, "_current_device", lambda: 0)
        monkeypatch.setattr(devices, "detect", lambda index=None: H200)
        keep(record(problem()), record(problem(2048, 2048, 2048), origin="predicted", protocol="model-1"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tlxgen.get_kernel("gemm", problem(), strict=True).origin == "tuned"
            assert tlxgen.get_kernel("gemm", problem(2048, 2048, 2048)).origin == "predicted"
        with pytest.raises(NoKernelError, match="2048"):
            tlxgen.get_kernel("gemm", problem(2048, 2048, 2048), strict=True)

    @pytest.mark.parametrize("near", [True, False], ids=["beside a neighbour", "beside the default"])
    def test_a_row_of_this_very_problem_for_another_gpu_is_told(self, near: bool) -> None:
        """Whoever sees another config served has to learn that there is one, and why it is not this one."""
        neighbours = [record(problem(1024, 1024, 1152), config=default_config(problem(), H200))] if near else []
        keep(record(problem(), gpu=target("h100")), *neighbours)
        choice = select(problem(), H200)
        assert choice.origin == ("nearest" if near else "default")
        told = "it was tuned for gpu h100 (132 SMs), and a row serves its own GPU model and toolchain alone"
        assert choice.passed_over[1] == told
        assert told in choice.explain()

    def test_without_a_row_the_models_favourite_runs_and_the_miss_is_noted(self) -> None:
        choice = select(problem(), H200)
        assert choice.origin == "default"
        assert choice.config == default_config(problem(), H200)
        missed, nothing_near = choice.passed_over
        assert "no tuned row for gemm 1024 1024 1024 bf16 nn on h200 (132 SMs)" in missed
        assert nothing_near == "no measured row of gemm for this GPU and toolchain"
        with Store.open() as store:
            assert store.untuned() == [(tuning_key(problem(), H200.key), 1)]

    @pytest.mark.parametrize(
        "other",
        [
            target("h100"),
            target("h200-nvl"),
            replace(H200, sm_count=114),
        ],
        ids=["another GPU", "another card of the family", "another SM count"],
    )
    def test_rows_of_other_gpus_are_not_served(self, other: Gpu) -> None:
        keep(record(problem(), other))
        choice = select(problem(), H200)
        assert choice.origin == "default"
        assert "no tuned row" in choice.passed_over[0]
        assert select(problem(), other).origin == "tuned"

    def test_rows_of_other_toolchains_are_not_served(self) -> None:
        row = record(problem())
        old = row.key.model_copy(update={"toolchain": "fbtriton 3.6.0, ptxas 12.8.93"})
        keep(row.model_copy(update={"key": old}))
        assert select(problem(), H200).origin == "default"

    @pytest.mark.parametrize(
        "config",
        [
            Config(template="no_such_template", params={}),
            Config(template="gemm_tma_pingpong", params={"block_m": 128}),
            candidates(problem(), H200)[0].model_copy(
                update={"params": {**candidates(problem(), H200)[0].params, "num_stages": 99}}
            ),
            Config(
                template="gemm_tma_cooperative",
                params={
                    "block_m": 256,
                    "block_n": 128,
                    "block_k": 64,
                    "num_stages": 8,
                    "consumers": 2,
                    "group_m": 8,
                    "epilogue_subtiles": 2,
                    "pdl": "off",
                },
            ),
        ],
        ids=["unknown template", "missing knob", "value outside the space", "too much shared memory"],
    )
    def test_a_row_that_is_not_legal_is_marked_bad_and_not_tried_again(self, config: Config) -> None:
        row = record(problem(), config=candidates(problem(), H200)[0]).model_copy(update={"config": config})
        keep(row)
        choice = select(problem(), H200)
        assert choice.origin == "default"
        assert "the tuned row cannot be served" in choice.passed_over[0]
        with Store.open() as store:
            assert set(store.defective()) == {row.key.id}
            assert store.get(row.key) is None
        runtime.forget()
        again = select(problem(), H200)
        assert again.origin == "default"
        assert "cannot be served" not in again.passed_over[0]

    def test_a_row_whose_kernel_has_changed_since_is_not_served(self) -> None:
        keep(record(problem(), source_hash="0" * 32))
        choice = select(problem(), H200)
        assert choice.origin == "default"
        assert "emits other code" in choice.passed_over[0]

    def test_a_damaged_row_is_a_miss(self, tmp_path: Path) -> None:
        import sqlite3

        keep(record(problem()))
        with sqlite3.connect(tmp_path / "tuned.db") as db:
            db.execute("UPDATE tuned SET config = '{'")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert select(problem(), H200).origin == "default"

    def test_a_new_measurement_replaces_a_bad_row(self) -> None:
        keep(record(problem(), source_hash="0" * 32))
        assert select(problem(), H200).origin == "default"
        keep(record(problem()))
        assert select(problem(), H200).origin == "tuned"

    def test_other_gpus_get_plain_triton(self) -> None:
        choice = select(problem(), A100)
        assert choice.origin == "vanilla"
        assert choice.config == vanilla_config(problem(), A100)
        assert choice.config is not None
        assert choice.config.template == "gemm_vanilla"
        assert choice.passed_over == ("compute capability 8.0 is not Hopper's 9.0",)

    def test_a_triton_without_tlx_gives_plain_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "has_tlx", lambda: False)
        choice = select(problem(), H200)
        assert choice.origin == "vanilla"
        assert "no TLX" in choice.passed_over[0]
        assert "doctor" in choice.passed_over[0]

    def test_no_triton_at_all_gives_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "has_tlx", lambda: False)
        monkeypatch.setattr(selection, "has_triton", lambda: False)
        assert select(problem(), H200).origin == "torch"
        assert select(problem(), A100).origin == "torch"

    def test_an_unaligned_problem_gets_a_kernel_that_can(self) -> None:
        choice = select(problem(255, 257, 263), H200)
        assert choice.origin == "default"
        assert choice.config is not None
        assert "tma" not in choice.config.template

    def test_a_database_that_cannot_be_read_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "tuned.db").write_bytes(b"this is no database" * 100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert select(problem(), H200).origin == "default"


class TestLaunches:
    def test_of_tensors_that_are_not_on_the_gpu_name_the_tensor(self) -> None:
        kernel = Kernel(problem(8, 16, 32), select(problem(8, 16, 32), H200), H200)
        with pytest.raises(LaunchError, match="a is on cpu"):
            kernel(**tensors(problem(8, 16, 32)))


class TestCalls:
    """On the CPU, where torch computes: the checks of a call come before any kernel."""

    def test_an_operand_cannot_be_the_output(self) -> None:
        with pytest.warns(FallbackWarning):
            mm = tlxgen.get_kernel("gemm", (16, 16, 16))
        a, b = (torch.randn(16, 16, dtype=torch.bfloat16) for _ in range(2))
        with pytest.raises(LaunchError, match="out is one of the operands"):
            mm(a, b, out=a)

    def test_a_wider_output_is_not_rounded_on_the_way(self) -> None:
        with pytest.warns(FallbackWarning):
            mm = tlxgen.get_kernel("gemm", (64, 64, 512), out_dtype="fp32")
        a, b = torch.randn(64, 512, dtype=torch.bfloat16), torch.randn(512, 64, dtype=torch.bfloat16)
        exact = a.double() @ b.double()
        assert (mm(a, b).double() - exact).norm() / exact.norm() < 1e-6

    def test_keywords_may_come_in_any_order(self) -> None:
        with pytest.warns(FallbackWarning):
            mm = tlxgen.get_kernel("gemm", (16, 8, 32))
        a, b = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(32, 8, dtype=torch.bfloat16)
        assert torch.equal(mm(b=b, a=a), mm(a, b))


def test_a_fallback_for_badly_lying_tensors_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuned TMA config cannot take an odd pitch: the favourite of another template does, and a warning says so."""
    problem = ops.get("gemm").problem((64, 64, 64))
    gpu = devices.target("h200")
    config = next(c for c in candidates(problem, gpu) if c.template == "gemm_tma_pingpong")
    kernel = runtime.Kernel(problem, runtime.Choice("tuned", config), gpu)
    ran: list[str] = []
    monkeypatch.setattr(call_checks, "refuse_other_devices", lambda *_: None)
    monkeypatch.setattr(plans, "is_capturing", lambda: False)

    def plan(_operator: object, source: KernelSource, *_: object) -> SimpleNamespace:
        ran.append(source.config.template)
        return SimpleNamespace(launch=lambda *_: None)

    monkeypatch.setattr(plans, "kernel_plan", plan)
    a, b = torch.randn(64, 65, dtype=torch.bfloat16)[:, :64], torch.randn(64, 64, dtype=torch.bfloat16)
    with pytest.warns(
        FallbackWarning, match=r"gemm_tma_pingpong: a is not aligned for TMA.*these tensors go to gemm_vanilla"
    ):
        kernel(a, b)
    assert ran == ["gemm_vanilla"]
