"""The command line in whole: exit statuses, one-line errors, results on stdout."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded import InstantPool
from tlxgen import __version__, devices, ops, toolchain
from tlxgen.codegen.emit import emit
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import target
from tlxgen.errors import CompileError
from tlxgen.runtime import kernel
from tlxgen.space.candidates import candidates, default_config
from tlxgen.tuner import compile_pool

ROOT = Path(__file__).parents[2]
H200 = target("h200")
GEMM = ops.get("gemm")
PROBLEM = GEMM.problem((512, 512, 512))


Run = Callable[..., Any]
Keep = Callable[..., TunedRecord]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
    """A machine without a GPU."""
    monkeypatch.setattr(devices, "detect", lambda index=None: None)
    kernel.forget()
    yield
    kernel.forget()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(compile_pool, "CompilePool", refuse)


def stored() -> list[TunedRecord]:
    with Store.open() as store:
        return store.records()


class TestBadInput:
    """Exit status 2, one line that names the value, nothing stored or compiled."""

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            ("gemm 0 128 128", "0"),
            ("gemm 128 128 0", "0"),
            ("gemm 128 x 128", "'x'"),
            ("gemm 128 1.5 128", "'1.5'"),
            ("gemm 128 1e3 128", "'1e3'"),
            ("gemm 128 4294967296 128", "4294967296"),
            ("gemm 128 128", "M N K"),
            ("gemm 128 128 128 128", "M N K"),
            ("vector_add 0", "0"),
            ("vector_add 1 2", "sizes n"),
            ("convolution 128 128 128", "'convolution'"),
            ("attention 128 128 128", "B H S D"),
            ("attention 1 8 128 64 --kv-heads 3", "kv_heads = 3"),
            ("attention 1 8 128 60", "D = 60"),
            ("attention 1 8 128 64 --causal left", "causal = 'left'"),
            ("attention 1 8 128 64 --window 7", "window = 7"),
            ("attention 1 8 128 64 --layout nn", "layout"),
            ("attention_varlen 4 8 128", "B H total_q D"),
            ("attention_varlen 4 8 128 64 --max-q 30", "total_q = 128"),
            ("attention_varlen 4 8 128 64 --total-kv 999 --max-kv 200", "total_kv = 999"),
            ("attention_varlen 4 8 128 64 --kv-len 100", "kv_len"),
            ("grouped_gemm 8 128 128", "E ROWS N K"),
            ("grouped_gemm 8 128 128 128 --form 4d", "form = '4d'"),
            ("grouped_gemm 8 128 128 128 --form masked --max-rows 15", "ROWS = 128"),
            ("grouped_gemm 8 128 128 128 --group-sizes 100,28", "128 tokens of 2 experts"),
            ("grouped_gemm 8 128 128 128 --epilogue residual", "residual"),
            ("gemm 128 128 128 --form 2d3d", "form"),
            ("gemm 128 128 128 --kv-heads 4", "kv_heads"),
            ("gemm 128 128 128 --dtype fp8", "fp8"),
            ("gemm 128 128 128 --out-dtype int8", "int8"),
            ("gemm 128 128 128 --layout xx", "xx"),
            ("gemm 128 128 128 --epilogue tanh", "tanh"),
            ("gemm 128 128 128 --epilogue relu+bias", "relu+bias"),
            ("vector_add 128 --layout nn", "'layout'"),
        ],
    )
    @pytest.mark.parametrize("command", ["tune", "show", "emit"])
    def test_in_a_problem(
        self, command: str, words: str, named: str, run: Run, no_compiler: None, tmp_path: Path
    ) -> None:
        done = run(command, *words.split())
        assert done.status == 2
        assert done.out == ""
        assert named in done.err
        assert done.err.startswith("tlxgen: ")
        assert done.err.count("\n") == 1
        assert not (tmp_path / "tuned.db").exists()

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            ("--sampler simulated-annealing", "simulated-annealing"),
            ("--target a100", "a100"),
            ("--template gemm_magic", "gemm_magic"),
            ("--template vector_add_tma", "vector_add_tma"),
        ],
    )
    def test_in_an_option_of_tune(self, words: str, named: str, run: Run, no_compiler: None, tmp_path: Path) -> None:
        done = run("tune", "gemm", 128, 128, 128, *words.split())
        assert done.status == 2
        assert named in done.err
        assert done.err.count("\n") == 1
        assert not (tmp_path / "tuned.db").exists()

    @pytest.mark.parametrize(
        "words",
        [
            "gemm -1 128 128",
            "gemm 8 8 8 --trials 0",
            "gemm 8 8 8 --seconds 0",
            "gemm 8 8 8 --workers 0",
            "gemm 8 8 8 --limit 0.5",
            "gemm 8 8 8 --limit 3601",
            "gemm 8 8 8 --no-such",
            "",
        ],
    )
    def test_for_the_parser(self, words: str, run: Run, no_compiler: None, tmp_path: Path) -> None:
        done = run("tune", *words.split())
        assert done.status == 2
        assert not (tmp_path / "tuned.db").exists()

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            ("--target a100", "a100"),
            ("--template gemm_magic", "gemm_magic"),
            ("-p block_m", "block_m"),
            ("-p block_m=77", "77"),
            ("-p no_such=1", "no_such"),
            ("--template gemm_vanilla -p consumers=2", "consumers"),
        ],
    )
    def test_in_an_option_of_emit(self, words: str, named: str, run: Run) -> None:
        done = run("emit", "gemm", 512, 512, 512, *words.split())
        assert done.status == 2
        assert done.out == ""
        assert named in done.err
        assert done.err.count("\n") == 1

    def test_with_debug_raises(self, run: Run) -> None:
        with pytest.raises(ValueError, match="convolution"):
            run("--debug", "show", "convolution", 1)


class TestTuneWithoutGpu:
    def test_stores_a_predicted_row(self, run: Run) -> None:
        done = run("tune", "gemm", 512, 512, 512, "--compile-only", "--trials", 2, "--json")
        assert done.status == 0, done.err
        assert done.out.count("\n") == 1
        answer = json.loads(done.out)
        assert answer["operator"] == "gemm"
        assert answer["problem"] == PROBLEM.model_dump()
        assert answer["device"] == H200.key.model_dump()
        assert answer["origin"] == "predicted"
        assert (answer["stored"], answer["tried"], answer["failures"], answer["interrupted"]) == (True, 2, {}, False)
        assert answer["legal"] == len(candidates(PROBLEM, H200))
        (row,) = stored()
        assert row.origin == "predicted"
        assert row.key == tuning_key(PROBLEM, H200.key)
        assert row.config.model_dump() == answer["config"]
        assert row.config == candidates(PROBLEM, H200)[0]
        assert row.time_us == answer["time_us"]
        assert row.peer_us is None
        assert row.protocol.startswith("model-")
        assert "nothing is measured" in done.message
        shown = run("show", "gemm", 512, 512, 512, "--target", "h200", "--json")
        assert json.loads(shown.out)["origin"] == "predicted"

    def test_needs_no_option(self, run: Run) -> None:
        done = run("tune", "vector_add", 1 << 20, "--trials", 1, "--target", "h100")
        assert done.status == 0, done.err
        assert done.out.startswith("vector_add 1048576 bf16 on h100: vector_add_")
        assert "not measured" in done.out
        (row,) = stored()
        assert row.key.device == target("h100").key

    def test_displaces_no_measured_row(self, run: Run, keep: Keep) -> None:
        row = keep(PROBLEM, candidates(PROBLEM, H200)[-1])
        done = run("tune", "gemm", 512, 512, 512, "--compile-only", "--trials", 1, "--json")
        assert done.status == 0, done.err
        assert json.loads(done.out)["stored"] is False
        assert stored() == [row]

    def test_uses_the_given_templates(self, run: Run) -> None:
        done = run(
            "tune", "gemm", 512, 512, 512, "--compile-only", "--trials", 1, "--template", "gemm_vanilla", "--json"
        )
        assert done.status == 0, done.err
        assert json.loads(done.out)["config"]["template"] == "gemm_vanilla"

    def test_stores_nothing_if_every_candidate_fails(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        error: BaseException = CompileError("ptxas", "register allocation failed")
        failures = dict.fromkeys(candidates(PROBLEM, H200), error)
        monkeypatch.setattr(compile_pool, "CompilePool", lambda *_, **__: InstantPool(failures))
        done = run("tune", "gemm", 512, 512, 512, "--compile-only", "--trials", 3)
        assert done.status == 1
        assert done.out == ""
        assert "3 ptxas" in done.err
        assert "register allocation failed" in done.err
        assert stored() == []

    def test_refuses_an_unwritable_database_before_it_compiles(
        self, run: Run, no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TLXGEN_CACHE", str(tmp_path / "missing" / "tuned.db"))
        done = run("tune", "gemm", 512, 512, 512, "--compile-only", "--trials", 1)
        assert done.status == 1
        assert done.out == ""
        assert "missing" in done.err
        assert "TLXGEN_CACHE" in done.err

    def test_refuses_to_start_without_tlx(
        self, run: Run, no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        state = toolchain.Triton(None, "", None, {}, damaged=False, has_tlx_files=False)
        monkeypatch.setattr(toolchain, "_inspected", lambda: state)
        done = run("tune", "gemm", 512, 512, 512, "--compile-only")
        assert done.status == 1
        assert "triton" in done.err
        assert not (tmp_path / "tuned.db").exists()


A100 = devices.Gpu("a100-sxm4", 108, (8, 0), 1.4e9, 2e12, 40 << 20, H200.rates)


@pytest.mark.parametrize(("gpu", "words", "named"), [(A100, [], "8.0"), (H200, ["--target", "h20"], "h20")])
def test_tuning_of_other_gpus_is_refused_with_a_remedy(
    gpu: devices.Gpu, words: list[str], named: str, run: Run, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "detect", lambda index=None: gpu)
    done = run("tune", "gemm", 512, 512, 512, *words)
    assert done.status == 2
    assert named in done.err
    assert "--compile-only" in done.err


class TestShow:
    def test_prints_the_kernel_and_the_reasons(self, run: Run) -> None:
        done = run("show", "gemm", 512, 512, 512, "--target", "h200")
        assert done.status == 0
        favourite = default_config(PROBLEM, H200)
        assert favourite is not None
        assert done.out.startswith("gemm 512 512 512 bf16 nn on h200\n")
        assert "no tuned row" in done.out
        assert f"default: {favourite.short}" in done.out

    def test_prints_a_tuned_row(self, run: Run, keep: Keep) -> None:
        row = keep(PROBLEM, candidates(PROBLEM, H200)[-1])
        answer = json.loads(run("show", "gemm", 512, 512, 512, "--target", "h200", "--json").out)
        assert answer == {
            "problem": PROBLEM.model_dump(),
            "origin": "tuned",
            "config": row.config.model_dump(),
            "why": f"tuned: {row.config.short}",
        }

    def test_without_a_gpu_names_torch(self, run: Run) -> None:
        answer = json.loads(run("show", "gemm", 512, 512, 512, "--json").out)
        assert (answer["origin"], answer["config"]) == ("torch", None)
        assert "without a CUDA GPU" in run("show", "gemm", 512, 512, 512).out


class TestEmit:
    def test_writes_the_models_favourite(self, run: Run, tmp_path: Path) -> None:
        favourite = default_config(PROBLEM, H200)
        assert favourite is not None
        expected = emit(GEMM, PROBLEM, favourite).text
        path = tmp_path / "kernel.py"
        done = run("emit", "gemm", 512, 512, 512, "-o", path)
        assert (done.status, done.out) == (0, "")
        assert path.read_text(encoding="utf-8") == expected
        assert run("emit", "gemm", 512, 512, 512).out == expected

    def test_takes_the_tuned_row(self, run: Run, keep: Keep) -> None:
        row = keep(PROBLEM, candidates(PROBLEM, H200)[-1])
        assert run("emit", "gemm", 512, 512, 512, "--target", "h200").out == emit(GEMM, PROBLEM, row.config).text

    def test_takes_a_template_and_parameters(self, run: Run) -> None:
        base = candidates(PROBLEM, H200, ("gemm_tma_cooperative",))[0]
        stages = next(n for n in (4, 5, 6) if n != base.params["num_stages"])
        words = ("--template", "gemm_tma_cooperative", "-p", f"num_stages={stages}")
        done = run("emit", "gemm", 512, 512, 512, *words)
        assert done.status in {0, 2}, "a combination may be illegal, and is refused then"
        if done.status == 0:
            assert f"NUM_STAGES = {stages}" in done.out
        plain = run("emit", "gemm", 512, 512, 512, "--template", "gemm_vanilla")
        assert plain.out == emit(GEMM, PROBLEM, candidates(PROBLEM, H200, ("gemm_vanilla",))[0]).text

    def test_takes_every_field_of_the_problem(self, run: Run) -> None:
        words = ("--dtype", "fp16", "--out-dtype", "fp32", "--layout", "nt", "--epilogue", "bias+gelu")
        text = run("emit", "gemm", 512, 512, 512, *words).out
        assert "gemm 512 512 512 fp16 nt out=fp32 bias+gelu" in (ast.get_docstring(ast.parse(text)) or "")

    def test_into_a_missing_folder_is_one_line(self, run: Run, tmp_path: Path) -> None:
        done = run("emit", "gemm", 512, 512, 512, "-o", tmp_path / "missing" / "kernel.py")
        assert done.status in {1, 2}
        assert "missing" in done.err
        assert done.err.count("\n") == 1


class TestProgram:
    def test_prints_its_version(self, run: Run) -> None:
        done = run("--version")
        assert (done.status, done.out) == (0, f"tlxgen {__version__}\n")

    def test_prints_help(self, run: Run) -> None:
        done = run("--help")
        assert done.status == 0
        for command in ("tune", "show", "emit", "doctor", "cache"):
            assert command in done.out

    def test_starts_as_a_module(self) -> None:
        command = [sys.executable, "-m", "tlxgen", "show", "gemm", "0", "1", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "tlxgen: gemm: size 0 must be at least 1\n"

    def test_imports_no_optuna_if_nothing_is_tuned(self) -> None:
        script = (
            "import sys\n"
            "sys.argv = ['tlxgen', 'show', 'gemm', '8', '8', '8']\n"
            "from tlxgen.cli.app import app\n"
            "app(standalone_mode=False)\n"
            "print('optuna' in sys.modules, file=sys.stderr)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stderr.strip() == "False"


class TestCheck:
    """`tlxgen check`: exit status 0 clean, 1 findings, 2 bad input."""

    @pytest.fixture
    def emitted(self, tmp_path: Path, run: Run) -> Path:
        path = tmp_path / "kernel.py"
        assert run("emit", "gemm", 512, 512, 512, "--template", "gemm_tma_cooperative", "-o", path).status == 0
        return path

    @pytest.fixture
    def hanging(self, emitted: Path) -> Path:
        release = "tlx.barrier_arrive(empty[previous])"
        text = emitted.read_text()
        assert release in text
        emitted.write_text(text.replace(release, "pass"))
        return emitted

    def test_problem_is_clean(self, run: Run) -> None:
        done = run("check", "gemm", 512, 512, 512, "--schedules", 1)
        assert done.status == 0
        assert done.out.startswith("clean: ")

    def test_problem_with_a_config(self, run: Run) -> None:
        config = "gemm_cp_async block_k=64 block_m=64 block_n=64 group_m=8 num_stages=4 num_warps=4"
        done = run("check", "gemm", 512, 512, 512, "--config", config, "--schedules", 3, "--json")
        answer = json.loads(done.out)
        assert done.status == 0
        assert answer["clean"] is True
        assert answer["findings"] == []
        assert answer["runs"] == 3 * len(answer["cases"])

    def test_emitted_file_is_clean(self, emitted: Path, run: Run) -> None:
        assert run("check", emitted, "--schedules", 1).status == 0

    def test_edited_file_is_checked(self, hanging: Path, run: Run) -> None:
        done = run("check", hanging, "--schedules", 1)
        assert done.status == 1
        assert "deadlock at" in done.out
        assert "empty[0]" in done.out
        assert "remedy: " in done.out

    def test_findings_point_at_lines_of_the_file(self, hanging: Path, run: Run) -> None:
        answer = json.loads(run("check", hanging, "--schedules", 1, "--json").out)
        (deadlock,) = (finding for finding in answer["findings"] if finding["kind"] == "deadlock")
        line = hanging.read_text().splitlines()[deadlock["place"]["line"] - 1]
        assert "tlx.barrier_wait(" in line
        assert deadlock["remedy"]

    def test_seed_makes_it_reproducible(self, hanging: Path, run: Run) -> None:
        first, second = (json.loads(run("check", hanging, "--seed", 5, "--json").out) for _ in range(2))
        assert first["findings"] == second["findings"]
        assert first["steps"] == second["steps"]

    def test_timeline_has_work_and_waits_of_each_role(self, emitted: Path, tmp_path: Path, run: Run) -> None:
        trace = tmp_path / "trace.json"
        assert run("check", emitted, "--schedules", 1, "--timeline", trace).status == 0
        events = json.loads(trace.read_text())["traceEvents"]
        assert {"work", "wait", "async"} <= {event.get("cat") for event in events}
        roles = {event["args"]["name"] for event in events if event["ph"] == "M"}
        assert "default" in roles
        assert all(event["dur"] > 0 for event in events if event["ph"] == "X")

    def test_other_file_is_checked_through_its_entry(self, run: Run) -> None:
        example = ROOT / "examples" / "05_check.py"
        assert run("check", example, "--entry", "simulate").status == 0
        done = run("check", example, "--entry", "simulate_without_release")
        assert done.status == 1
        shown = done.out.split("1 finding")[0]
        readme = (ROOT / "README.md").read_text()
        assert "".join(f"    {line}\n" for line in shown.splitlines()) in readme

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["nowhere.py"], "nowhere.py"),
            (["gemm", 0, 1, 1], "at least 1"),
            (["no_such_operator", 1], "no_such_operator"),
            (["gemm", 512, 512, 512, "--config", "gemm_cp_async nonsense"], "nonsense"),
            (["gemm", 512, 512, 512, "--config", "no_such_template block_m=64"], "no_such_template"),
            ([ROOT / "examples" / "05_check.py"], "--entry"),
            ([ROOT / "examples" / "05_check.py", "--entry", "nobody"], "nobody"),
            ([ROOT / "README.md"], "README.md"),
            ([ROOT / "examples" / "05_check.py", 5], "no sizes"),
        ],
    )
    def test_bad_input_is_one_line_and_status_2(self, words: list[object], said: str, run: Run) -> None:
        done = run("check", *words)
        assert done.status == 2
        assert done.out == ""
        assert said in done.err
        assert done.err.count("\n") == 1

    def test_timeline_that_cannot_be_written_is_one_line(self, emitted: Path, tmp_path: Path, run: Run) -> None:
        done = run("check", emitted, "--schedules", 1, "--timeline", tmp_path / "no" / "such" / "folder.json")
        assert done.status == 2
        assert "--timeline" in done.err
