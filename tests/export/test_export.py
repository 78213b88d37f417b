"""Packages of kernels that run without tlxgen."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tlxgen import ops, paths
from tlxgen.cli import app
from tlxgen.codegen.emit import emit
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import target
from tlxgen.errors import InvalidProblemError, OutputError
from tlxgen.export import write_package
from tlxgen.export.manifest import Manifest
from tlxgen.problem import Problem
from tlxgen.runtime import kernel
from tlxgen.space.candidates import candidates

H200 = target("h200")
GEMM, ATTENTION, VECTOR_ADD, GROUPED = (ops.get(name) for name in ("gemm", "attention", "vector_add", "grouped_gemm"))
PROBLEMS: list[Problem] = [
    GEMM.problem((512, 512, 512), layout="nt"),
    GEMM.problem((1024, 512, 512), layout="nt"),
    GEMM.problem((64, 64, 64), epilogue="scale+bias+gelu+residual"),
    GEMM.problem((64, 64, 64), out_dtype="fp32"),
    ATTENTION.problem((1, 4, 64, 64), kv_heads=2, kv_len=128, causal="bottom-right"),
    ATTENTION.problem((1, 2, 64, 64), lse=True),
    VECTOR_ADD.problem((4096,)),
    GROUPED.problem((4, 64, 32, 48), layout="nt", epilogue="bias+swiglu"),
    GROUPED.problem((4, 64, 32, 48), form="3d2d", group_sizes="even"),
    GROUPED.problem((4, 64, 32, 48), form="2d2d", out_dtype="fp32"),
    GROUPED.problem((4, 64, 32, 48), form="3d3d", epilogue="bias+gelu"),
    GROUPED.problem((4, 64, 32, 48), form="gather", layout="nt"),
    GROUPED.problem((4, 64, 32, 48), dtype="e4m3"),
]


@pytest.fixture(autouse=True)
def _nothing_remembered(no_shipped_configs: None) -> Iterator[None]:
    kernel.forget()
    yield
    kernel.forget()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of kernels that nobody tuned; written once, and changed by no test."""
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLXGEN_CACHE", str(folder / "tuned.db"))
        patch.setattr(paths, "SHIPPED_CACHE", folder / "nothing-shipped")
        kernel.forget()
        write_package(folder / "kernels_of_mine", PROBLEMS, H200)
        kernel.forget()
    return folder / "kernels_of_mine"


@pytest.fixture
def imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, in this process."""
    monkeypatch.syspath_prepend(str(package.parent))
    yield importlib.import_module(package.name)
    for name in [name for name in sys.modules if name.split(".")[0] == package.name]:
        del sys.modules[name]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.py*")) if p.suffix != ".pyc"}


class TestWhatIsWritten:
    def test_a_line_of_the_table_for_each_problem_and_a_file_for_each_code(self, package: Path) -> None:
        manifest = Manifest.model_validate_json((package / "manifest.json").read_text())
        assert [entry.label for entry in manifest.entries] == [problem.label for problem in PROBLEMS]
        assert manifest.device == H200.key
        names = {path.stem for path in (package / "kernels").glob("*.py")} - {"__init__"}
        assert names == {entry.module for entry in manifest.entries}
        for entry, problem in zip(manifest.entries, PROBLEMS, strict=True):
            source = emit(ops.get(entry.operator), problem, entry.config)
            assert (entry.code_hash, entry.key) == (source.code_hash, tuning_key(problem, H200.key).id)
            assert entry.needs_tlx == ("import triton.language.extra.tlx" in source.text)

    def test_problems_that_differ_in_size_alone_share_a_file(self, tmp_path: Path) -> None:
        many = [ATTENTION.problem((1, 4, length, 64), causal="bottom-right") for length in (2048, 4096, 8192)]
        manifest = write_package(tmp_path / "many", many, H200)
        assert len({entry.module for entry in manifest.entries}) == 1

    def test_the_same_bytes_each_time(self, package: Path, tmp_path: Path) -> None:
        for _ in range(2):  # the second takes the place of the first
            write_package(tmp_path / "kernels_of_mine", PROBLEMS, H200)
            assert files(tmp_path / "kernels_of_mine") == files(package)

    def test_a_tuned_row_comes_with_its_evidence(self, tmp_path: Path) -> None:
        problem = PROBLEMS[0]
        config = candidates(problem, H200)[-1]
        row = TunedRecord(
            key=tuning_key(problem, H200.key),
            config=config,
            origin="measured",
            source_hash=emit(GEMM, problem, config).code_hash,
            time_us=12.5,
            peer="cublas",
            peer_us=13.0,
            protocol="graph-2",
            versions={"torch": "2.13.0"},
        )
        with Store.open(read_only_ok=False) as store:
            store.put(row)
        (entry,) = write_package(tmp_path / "tuned", [problem], H200).entries
        assert (entry.origin, entry.config) == ("tuned", config)
        assert entry.provenance is not None
        assert (entry.provenance.time_us, entry.provenance.peer_us) == (12.5, 13.0)
        assert entry.provenance.versions == {"torch": "2.13.0"}


class TestRefusals:
    def test_a_directory_with_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("years of work")
        with pytest.raises(OutputError, match="something else"):
            write_package(tmp_path / "mine", PROBLEMS, H200)
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"

    @pytest.mark.parametrize("name", ["two-words", "1st", "a.b"])
    def test_a_name_that_cannot_be_imported(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="cannot be imported"):
            write_package(tmp_path / name, PROBLEMS, H200)

    def test_operators_without_a_dispatcher(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidProblemError, match="attention_varlen cannot be exported"):
            write_package(tmp_path / "x", [ops.get("attention_varlen").problem((2, 2, 64, 64))], H200)

    def test_calls_that_do_not_tell_their_problem(self, tmp_path: Path) -> None:
        masked = GROUPED.problem((4, 64, 32, 48), form="masked", max_rows=32)
        with pytest.raises(InvalidProblemError, match="masked cannot be exported"):
            write_package(tmp_path / "x", [masked], H200)

    def test_nothing_and_sizes_of_zero(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidProblemError, match="nothing to export"):
            write_package(tmp_path / "x", [], H200)
        with pytest.raises(InvalidProblemError, match="zero"):
            write_package(tmp_path / "x", [GEMM.problem((0, 8, 8))], H200)
        assert not (tmp_path / "x").exists()


WITHOUT_TLXGEN = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("tlxgen", "pydantic", "jinja2", "optuna"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocked())
import importlib, pathlib, torch
import kernels_of_mine as mine
a, b = torch.randn(512, 512).bfloat16(), torch.randn(512, 512).bfloat16()
assert torch.equal(mine.gemm(a, b.mT), a @ b.mT)
q, k = torch.randn(1, 4, 64, 64).bfloat16(), torch.randn(1, 2, 128, 64).bfloat16()
assert mine.attention(q, k, k, causal="bottom-right").shape == q.shape
assert torch.equal(mine.vector_add(a[0], b[0]), a[0] + b[0])
assert len(mine.entries()) == 13
for path in sorted(pathlib.Path(mine.__file__).parent.glob("kernels/*_*.py")):
    if path.stem != "__init__":
        module = importlib.import_module(f"kernels_of_mine.kernels.{path.stem}")
        assert callable(module.launch) and callable(module.check)
print("ok", [name for name in sys.modules if name.startswith("tlxgen")])
"""


def test_it_runs_where_tlxgen_is_not_installed(package: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TLXGEN],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok []"), done.stderr


class Mine(torch.Tensor):
    """Says nothing that a tensor does not."""


class Modes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation, and leaves it as it is."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def modes() -> Any:
    return Modes()  # type: ignore[no-untyped-call]


def traced(function: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.jit.trace(function, (a, b), check_trace=False)(b, a)  # type: ignore[no-untyped-call]


def within(block: Any, function: Callable[..., Any], *args: Any) -> Any:
    with block:
        return function(*args)


def tangent(function: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, b)  # type: ignore[no-untyped-call]
        return forward_ad.unpack_dual(function(dual, b)).tangent  # type: ignore[no-untyped-call]


class TestDispatch:
    """Calls of the package, and what of them reaches a kernel."""

    @pytest.fixture
    def launched(self, imported: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """A package on a card that there is not, whose kernels note what they were given."""
        calls: list[dict[str, Any]] = []
        monkeypatch.setattr(imported.dispatch, "_why_not", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())

        def launch(**tensors: Any) -> str:
            calls.append(tensors)
            return "the kernel's"

        def load(entry: dict[str, Any]) -> SimpleNamespace:
            calls.append(entry)
            return SimpleNamespace(launch=launch)

        monkeypatch.setattr(imported.dispatch, "_load", load)
        return calls

    @pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
    def test_a_call_of_each_problem_reaches_its_kernel(
        self, problem: Problem, imported: Any, launched: list[dict[str, Any]]
    ) -> None:
        operator = ops.get(problem.operator)
        inputs = operator.inputs(problem, "cpu", 0)
        assert call(imported, problem, inputs) == "the kernel's"
        entry, tensors = launched
        assert entry["label"] == problem.label
        assert {name: value for name, value in tensors.items() if value is not None} == {
            name: value for name, value in inputs.items() if name != "lse"
        }
        module = load(Path(imported.__file__).parent / "kernels" / f"{entry['module']}.py")
        assert set(tensors) <= set(module.launch.__code__.co_varnames[: module.launch.__code__.co_argcount])

    @pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)
    def test_torch_computes_the_same(self, problem: Problem, imported: Any) -> None:
        operator = ops.get(problem.operator)
        inputs = operator.inputs(problem, "cpu", 0)
        result = call(imported, problem, inputs)
        out, lse = result if isinstance(result, tuple) else (result, None)
        exact = operator.reference(problem, inputs)
        assert (out.double() - exact).norm() <= 2e-2 * exact.norm()
        if lse is not None:
            assert_close(lse.double(), operator.side_outputs(problem, inputs)["lse"], rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize(
        "view",
        [
            lambda: torch.randn(512, 513).bfloat16()[:, :512],
            lambda: torch.randn(512 * 512 + 1).bfloat16()[1:].view(512, 512),
            lambda: torch.randn(1024, 512).bfloat16()[::2],
            lambda: torch.randn(1, 512).bfloat16().expand(512, 512),
        ],
        ids=["odd pitch", "offset by one", "every other row", "one row for all"],
    )
    def test_tensors_that_lie_otherwise_go_to_torch(
        self, view: Callable[[], Any], imported: Any, launched: list[dict[str, Any]]
    ) -> None:
        a, b = view(), torch.randn(512, 512).bfloat16().mT
        assert_close(imported.gemm(a, b), a @ b)
        assert launched == []

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda gemm, a, b: gemm(torch._neg_view(a), b), id="negated view"),
            pytest.param(lambda gemm, a, b: gemm(a, torch._neg_view(b)), id="second operand negated"),
            pytest.param(lambda gemm, a, b: gemm(a.as_subclass(Mine), b).as_subclass(torch.Tensor), id="subclass"),
            pytest.param(lambda gemm, a, b: gemm(a.clone().requires_grad_(), b).detach(), id="gradients"),
            pytest.param(lambda gemm, a, b: torch.vmap(gemm, (0, None))(torch.stack([a, b]), b), id="vmap"),
            pytest.param(lambda gemm, a, b: torch.func.jvp(lambda x: gemm(x, b), (a,), (b,))[1], id="functional jvp"),
            pytest.param(lambda gemm, a, b: torch.func.grad(lambda x: gemm(x, b).sum())(a), id="functional grad"),
            pytest.param(tangent, id="dual numbers"),
            pytest.param(traced, id="trace"),
            pytest.param(
                lambda gemm, a, b: within(torch.autocast("cpu", torch.float16), gemm, a, b).to(a.dtype), id="autocast"
            ),
            pytest.param(lambda gemm, a, b: within(modes(), gemm, a, b), id="dispatch mode"),
        ],
    )
    def test_what_a_launch_would_not_learn_of_goes_to_torch_as_torch_computes_it(
        self, call: Callable[..., Any], imported: Any, launched: list[dict[str, Any]]
    ) -> None:
        a, b = torch.randn(64, 64), torch.randn(64, 64)
        a, b = a.bfloat16(), b.bfloat16()
        bias, residual = torch.zeros(64).bfloat16(), torch.zeros(64, 64).bfloat16()

        def packages(x: Any, y: Any) -> Any:
            return imported.gemm(x, y, scale=1.0, bias=bias, activation="gelu", residual=residual)

        def torchs(x: Any, y: Any) -> Any:
            return torch.nn.functional.gelu(x @ y)

        assert packages(a, b) == "the kernel's"
        launched.clear()
        assert_close(call(packages, a, b), call(torchs, a, b), rtol=2e-2, atol=1e-2)
        assert launched == []

    def test_autocast_to_the_operands_own_dtype_changes_nothing(
        self, imported: Any, launched: list[dict[str, Any]]
    ) -> None:
        x = torch.randn(4096).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            assert imported.vector_add(x, x) == "the kernel's"
        with torch.autocast("cpu", torch.float16):
            assert_close(imported.vector_add(x, x), x + x)
            assert imported.explain("vector_add", {"n": 4096, "dtype": "bf16"}, [x]) == (
                "torch: autocast converts the operands"
            )

    def test_autocast_knows_nothing_of_eight_bits(self, imported: Any, launched: list[dict[str, Any]]) -> None:
        problem = next(problem for problem in PROBLEMS if "e4m3" in problem.label)
        with torch.autocast("cpu", torch.bfloat16):
            assert call(imported, problem, GROUPED.inputs(problem, "cpu", 0)) == "the kernel's"

    def test_gradients_that_nobody_records_are_no_reason(self, imported: Any, launched: list[dict[str, Any]]) -> None:
        x = torch.randn(4096).bfloat16().requires_grad_()
        with torch.no_grad():
            assert imported.vector_add(x, x) == "the kernel's"
        with torch.inference_mode():
            assert imported.vector_add(torch.nn.Parameter(x.clone()), x) == "the kernel's"

    def test_other_problems_go_to_torch(self, imported: Any, launched: list[dict[str, Any]]) -> None:
        a, b = torch.randn(8, 16), torch.randn(16, 4)
        assert torch.equal(imported.gemm(a, b, activation="relu"), torch.relu(a @ b))
        x = torch.randn(3, 4)
        assert torch.equal(imported.vector_add(x, x), x + x)
        with pytest.raises(RuntimeError):
            imported.gemm(a, a)
        assert launched == []

    def test_a_kernel_that_fails_is_told_once_and_torch_computes(
        self, imported: Any, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(**_: Any) -> None:
            raise RuntimeError("ptxas fatal")

        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        why_not = imported.dispatch._why_not
        monkeypatch.setattr(imported.dispatch, "_load", lambda _: SimpleNamespace(launch=fail))
        monkeypatch.setattr(
            imported.dispatch,
            "_why_not",
            lambda entry, tensors: why_not(entry, tensors) if entry["module"] in imported.dispatch._BROKEN else None,
        )
        x = torch.randn(4096).bfloat16()
        with pytest.warns(UserWarning, match="vector_add 4096 bf16: torch computes, since RuntimeError: ptxas fatal"):
            assert torch.equal(imported.vector_add(x, x), x + x)
        assert torch.equal(imported.vector_add(x, x), x + x)
        assert imported.explain("vector_add", {"n": 4096, "dtype": "bf16"}) == "torch: RuntimeError: ptxas fatal"

    def test_explain_names_the_reason(self, imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = {"n": 4096, "dtype": "bf16"}
        x = torch.zeros(4096, dtype=torch.bfloat16)
        assert imported.explain("vector_add", {**asked, "n": 5}).startswith("torch: no kernel of this package")
        assert imported.explain("vector_add", asked, [x]) == "torch: tensors are on cpu"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        assert imported.explain("vector_add", asked) == "torch: the kernels are for another compute capability"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert imported.explain("vector_add", asked).startswith("kernels/vector_add_")

    @pytest.mark.parametrize(
        "options",
        [{"causal": "left"}, {"window": 8}, {"causal": "top-left"}],
        ids=["no such mask", "a window without a diagonal", "heads that do not divide"],
    )
    def test_bad_calls_of_attention_are_errors(self, options: dict[str, Any], imported: Any) -> None:
        q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 3, 8, 16)
        with pytest.raises(ValueError, match=r"causal|window|heads"):
            imported.attention(q, k, k, **options)

    def test_attention_of_no_batches_is_not_asked_of_torchs(
        self, imported: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: None)  # as cuDNN
        q, k = torch.randn(0, 4, 8, 16), torch.randn(0, 2, 9, 16)
        assert imported.attention(q, k, k).shape == q.shape
        out, lse = imported.attention(q, k, k, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])

    def test_bad_calls_of_grouped_gemm_are_errors(self, imported: Any) -> None:
        a, b, offs = torch.randn(8, 16), torch.randn(2, 16, 4), torch.tensor([3, 8], dtype=torch.int32)
        for bad in ({"offs": None}, {"offs": offs[:1]}, {"offs": offs, "activation": "tanh"}):
            with pytest.raises(ValueError, match=r"see|activation"):
                imported.grouped_gemm(a, b, **bad)
        assert imported.grouped_gemm(a, b, offs=offs).shape == (8, 4)


def call(package: Any, problem: Problem, inputs: dict[str, Any]) -> Any:
    """The package's function on the problem's tensors."""
    if problem.operator == "vector_add":
        return package.vector_add(inputs["x"], inputs["y"])
    fields = problem.model_dump()
    if problem.operator == "attention":
        options = {name: fields[name] for name in ("causal", "window", "softcap")}
        return package.attention(inputs["q"], inputs["k"], inputs["v"], return_lse=fields["lse"], **options)
    out_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[fields["out_dtype"]]
    if problem.operator == "grouped_gemm":
        tensors = {name: value for name, value in inputs.items() if name not in ("a", "b")}
        activation = fields["epilogue"].removeprefix("bias").removeprefix("+").removeprefix("none") or None
        asked = {"activation": activation, "out_dtype": out_dtype, "group_sizes": fields["group_sizes"]}
        return package.grouped_gemm(inputs["a"], inputs["b"], **tensors, **asked)
    options = {name: inputs[name] for name in ("bias", "residual", "scale") if name in inputs}
    activation = next((part for part in fields["epilogue"].split("+") if part in ("relu", "gelu", "silu")), None)
    return package.gemm(inputs["a"], inputs["b"], activation=activation, out_dtype=out_dtype, **options)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class TestCommandLine:
    @pytest.fixture
    def tlxgen(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
        monkeypatch.setattr("tlxgen.devices.detect", lambda _=None: None)

        def run(*words: object) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["tlxgen", "export", *map(str, words)])
            status = 0
            try:
                app.main()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(bool(end.code))
            captured = capsys.readouterr()
            return status, captured.out, captured.err

        return run

    def test_problems_and_suites(self, tlxgen: Callable[..., Any], tmp_path: Path) -> None:
        suite = tmp_path / "own.yaml"
        suite.write_text("operator: gemm\noptions: {layout: nt}\nshapes:\n  - {sizes: [256, 256, 256]}\n")
        status, out, _ = tlxgen(tmp_path / "made", "--suite", suite, "--problem", "vector_add 4096 bf16", "--json")
        assert status == 0
        labels = [entry["label"] for entry in json.loads(out)["entries"]]
        assert labels == ["gemm 256 256 256 bf16 nt", "vector_add 4096 bf16"]
        assert (tmp_path / "made" / "__init__.py").is_file()

    def test_of_a_suite_what_cannot_be_exported_is_left_out_and_told(
        self, tlxgen: Callable[..., Any], tmp_path: Path
    ) -> None:
        suite = tmp_path / "own.yaml"
        suite.write_text(
            "operator: grouped_gemm\noptions: {layout: nt}\nshapes:\n  - {sizes: [4, 64, 32, 48]}\n"
            "  - {sizes: [4, 64, 32, 48], options: {form: masked, max_rows: 32}}\n"
        )
        status, out, told = tlxgen(tmp_path / "made", "--suite", suite, "--json")
        assert (status, len(json.loads(out)["entries"])) == (0, 1)
        assert "left out: grouped_gemm 4 64 32 48 bf16 nt form=masked max_rows=32: form masked" in told

    def test_a_suite_of_the_project_by_name(self, tlxgen: Callable[..., Any], tmp_path: Path) -> None:
        assert (paths.SUITES / "vector_add.yaml").is_file()
        status, out, _ = tlxgen(tmp_path / "made", "--suite", "vector_add")
        assert (status, "problems" in out, "for h200" in out) == (0, True, True)

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("--suite", "no_such_suite"), "no_such_suite"),
            (("--problem", "gemm 8 8"), "M N K"),
            (("--problem", "convolution 8"), "convolution"),
            (("--operator", "gemm"), "nothing to export"),
            ((), "nothing to export"),
        ],
        ids=["no such suite", "no such problem", "no such operator", "nothing tuned", "nothing named"],
    )
    def test_bad_input_is_one_line_and_status_2(
        self, words: tuple[str, ...], named: str, tlxgen: Callable[..., Any], tmp_path: Path
    ) -> None:
        status, out, err = tlxgen(tmp_path / "made", *words)
        assert (status, out) == (2, "")
        assert named in err
        assert not (tmp_path / "made").exists()
