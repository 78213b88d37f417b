"""What every emitted file promises, whatever the problem and the config."""

from __future__ import annotations

import ast
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tlxgen import ops, paths
from tlxgen._version import __version__
from tlxgen.codegen import emit as emit_module
from tlxgen.codegen import line_breaks
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.codegen.rendering import template_hash
from tlxgen.config import Config
from tlxgen.devices import target
from tlxgen.problem import Problem
from tlxgen.space.candidates import candidates

H200 = target("h200")
GEMM = ops.get("gemm")
VECTOR_ADD = ops.get("vector_add")
ROOT = Path(__file__).parents[2]
TEMPLATES = (*GEMM.templates, *VECTOR_ADD.templates)


def gemm(*shape: int, **options: Any) -> Problem:
    problem = GEMM.problem(shape or (1024, 1024, 1024), **options)
    assert isinstance(problem, Problem)
    return problem


@cache
def legal(problem: Problem, template: str) -> list[Config]:
    return [config for config in candidates(problem, H200) if config.template == template]


def source(problem: Problem, config: Config) -> KernelSource:
    return emit(ops.get(problem.operator), problem, config)


def first(problem: Problem, template: str, **changes: bool | int | str) -> KernelSource:
    """The template's first config, with parameters changed whether that is legal or not: emission need not care."""
    config = legal(problem, template)[0]
    return source(problem, Config(template=template, params={**config.params, **changes}))


def sample() -> list[KernelSource]:
    problems: list[Problem] = [gemm(dtype=dtype, layout="nt") for dtype in ("bf16", "fp16", "fp32")]
    problems += [gemm(layout=layout) for layout in ("nn", "tn", "tt")]
    problems += [gemm(255, 257, 263, layout=layout) for layout in ("nn", "nt", "tn", "tt")]
    epilogues = ("scale", "bias", "bias+relu", "bias+gelu", "silu", "residual", "scale+bias+gelu+residual")
    problems += [gemm(520, 776, 328, epilogue=epilogue, out_dtype="fp32") for epilogue in epilogues]
    problems += [VECTOR_ADD.problem((1 << 20,), dtype=dtype) for dtype in ("bf16", "fp32")]
    rng = random.Random(0)
    chosen = []
    for problem in problems:
        for template in ops.get(problem.operator).templates:
            configs = legal(problem, template)
            chosen += [source(problem, config) for config in rng.sample(configs, min(2, len(configs)))]
    return chosen


SAMPLE = sample()


def each_source(test: Callable[[Any, KernelSource], None]) -> Callable[[Any, str], None]:
    """The test once for each template, over all of its sources."""

    def run(self: Any, template: str) -> None:
        for emitted in SAMPLE:
            if emitted.config.template == template:
                test(self, emitted)

    marked: Callable[[Any, str], None] = pytest.mark.parametrize("template", TEMPLATES)(run)
    return marked


def test_the_sample_holds_every_template() -> None:
    assert {emitted.config.template for emitted in SAMPLE} == set(TEMPLATES)


class TestDeterminism:
    @each_source
    def test_same_input_gives_same_bytes(self, emitted: KernelSource) -> None:
        again = source(emitted.problem, emitted.config)
        assert again.text == emitted.text
        assert again.file_name == emitted.file_name
        assert again.code_hash == emitted.code_hash

    def test_order_of_parameters_in_a_config_is_not_in_the_code(self) -> None:
        config = legal(gemm(), "gemm_tma_cooperative")[0]
        turned = Config(template=config.template, params=dict(reversed(config.params.items())))
        assert source(gemm(), turned).code_hash == source(gemm(), config).code_hash

    @pytest.mark.parametrize("seed", ["1", "4242"])
    def test_bytes_are_the_same_in_other_processes_whatever_the_hash_seed(self, seed: str) -> None:
        script = (
            "import hashlib, test_emit\n"
            "for s in test_emit.SAMPLE:\n"
            "    print(hashlib.sha256(s.text.encode()).hexdigest(), s.code_hash, s.file_name)\n"
        )
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "codegen")])
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        expected = [f"{hashlib.sha256(s.text.encode()).hexdigest()} {s.code_hash} {s.file_name}" for s in SAMPLE]
        assert done.stdout.splitlines() == expected


class TestText:
    @each_source
    def test_parses_as_python(self, emitted: KernelSource) -> None:
        ast.parse(emitted.text)

    @each_source
    def test_has_no_trailing_white_space_and_no_tabs(self, emitted: KernelSource) -> None:
        assert [line for line in emitted.text.split("\n") if line != line.rstrip() or "\t" in line] == []

    @each_source
    def test_has_blank_lines_as_pep_8_wants_them(self, emitted: KernelSource) -> None:
        lines = emitted.text.split("\n")
        assert "\n\n\n\n" not in emitted.text  # three blank lines in a row
        for before, line in pairwise(lines):
            if re.match(r" +\S", line):  # inside a function, one blank line at most
                assert "\n\n\n" + line not in emitted.text, line
            assert not (before.rstrip().endswith(":") and not line), f"a blank line after {before!r}"
        for node in ast.parse(emitted.text).body:
            if isinstance(node, ast.FunctionDef):
                start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
                while lines[start - 1].startswith("#"):
                    start -= 1
                assert lines[start - 2 : start] == ["", ""], f"two blank lines before {node.name}"

    @each_source
    def test_ends_with_one_newline(self, emitted: KernelSource) -> None:
        assert emitted.text.endswith("\n")
        assert not emitted.text.endswith("\n\n")

    @each_source
    def test_has_no_overlong_lines(self, emitted: KernelSource) -> None:
        assert [line for line in emitted.text.splitlines() if len(line) > line_breaks.WIDTH] == []

    @each_source
    def test_imports_torch_triton_and_tlx_only(self, emitted: KernelSource) -> None:
        imported = set()
        for node in ast.walk(ast.parse(emitted.text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
        tlx = {"triton.language.extra.tlx"}
        assert imported <= {"torch", "triton", "triton.language", "triton.tools.tensor_descriptor"} | tlx
        assert bool(imported & tlx) == (not emitted.config.template.endswith("_vanilla"))

    @each_source
    def test_passes_ruff_check_and_ruff_format(self, emitted: KernelSource) -> None:
        ruff = shutil.which(
            "ruff", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        )
        if ruff is None:
            pytest.skip("ruff is not installed")
        width = ["--isolated", f"--line-length={line_breaks.WIDTH}", "--stdin-filename=kernel.py", "-"]
        for command in (["check", "--quiet", "--select=E,F,I,W"], ["format", "--diff"]):
            words = [ruff, *command, *width]
            done = subprocess.run(words, input=emitted.text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

    @each_source
    def test_every_wait_on_a_barrier_says_who_arrives(self, emitted: KernelSource) -> None:
        names = set(re.findall(r"barrier_wait\((\w+)", emitted.text)) - {"my_turn"}
        comments = "\n".join(line for line in emitted.text.splitlines() if "#" in line)
        declared = set(re.findall(r"(\w+) = tlx.alloc_barriers", emitted.text))
        for name in names & declared:
            assert re.search(rf"\b{name}\[", comments), f"no comment explains {name}"


class TestHeader:
    @each_source
    def test_has_as_many_lines_for_every_problem_of_a_config(self, emitted: KernelSource) -> None:
        """Triton's cache key holds the line on which a kernel starts."""
        lines = emitted.text.splitlines()
        assert lines[0].startswith('"""')
        config_lines = len(lines[3 : next(n for n, line in enumerate(lines) if line.startswith("    template "))])
        assert lines[7 + config_lines] == '"""'
        assert lines[8 + config_lines : 10 + config_lines] == ["", "import torch"]

    @each_source
    def test_names_problem_config_template_and_version(self, emitted: KernelSource) -> None:
        header = ast.get_docstring(ast.parse(emitted.text)) or ""
        assert emitted.problem.label in header
        for name, value in emitted.config.params.items():
            assert f"{name}={value}" in header
        assert f"{emitted.config.template} {template_hash(emitted.config.template)}" in header
        assert f"tlxgen {__version__}" in header

    @pytest.mark.parametrize("template", GEMM.templates)
    @pytest.mark.parametrize("epilogue", ["none", "scale+bias+gelu+residual"])
    def test_the_kernel_starts_on_one_line_for_all_problems_of_one_structure(
        self, template: str, epilogue: str
    ) -> None:
        small, large = gemm(epilogue=epilogue), gemm(2048, 8192, 12288, epilogue=epilogue)
        config = legal(small, template)[0]
        texts = [source(problem, config).text for problem in (small, large)]
        first_lines = [text.splitlines().index("def kernel(") for text in texts]
        assert first_lines[0] == first_lines[1]
        kernels = [text[text.index("import torch") : text.index("def check")] for text in texts]
        assert kernels[0] == kernels[1]


class TestCodeHash:
    @pytest.mark.parametrize("template", GEMM.templates)
    def test_ignores_sizes(self, template: str) -> None:
        config = legal(gemm(), template)[0]
        hashes = {source(gemm(*shape), config).code_hash for shape in ((1024, 1024, 1024), (16, 4096, 12288))}
        assert len(hashes) == 1

    @pytest.mark.parametrize("template", VECTOR_ADD.templates)
    def test_ignores_the_length_of_vectors(self, template: str) -> None:
        config = legal(VECTOR_ADD.problem((1 << 20,)), template)[0]
        hashes = {source(VECTOR_ADD.problem((n,)), config).code_hash for n in (1 << 20, 12345)}
        assert len(hashes) == 1

    @each_source
    def test_ignores_comments_docstrings_and_the_self_check(self, emitted: KernelSource) -> None:
        text = emitted.text.replace('    """', '    """Edited: ', 1).replace('"""', '"""Edited: ', 1)
        text = text.replace("import torch\n", "import torch  # edited\n# edited\n", 1)
        text = text.replace('device="cuda"):', 'device="cuda:1"):', 1)
        text = text.replace("__main__", "__edited__")
        assert text != emitted.text
        edited = KernelSource(emitted.operator, emitted.problem, emitted.config, text)
        assert edited.code_hash == emitted.code_hash

    @each_source
    def test_sees_every_change_of_the_kernel(self, emitted: KernelSource) -> None:
        text = emitted.text.replace("tl.program_id(0)", "tl.program_id(1)", 1)
        assert text != emitted.text
        assert KernelSource(emitted.operator, emitted.problem, emitted.config, text).code_hash != emitted.code_hash

    @pytest.mark.parametrize("template", TEMPLATES)
    def test_changes_with_every_parameter(self, template: str) -> None:
        from tlxgen.space import search_space

        problem = gemm() if template in GEMM.templates else VECTOR_ADD.problem((1 << 20,))
        base = first(problem, template)
        for name, parameter in search_space.load(template).parameters.items():
            for value in parameter.choices:
                if value == base.config.params[name]:
                    continue
                if name == "pieces" and base.config.params["tail"] == "whole":
                    continue  # there are none
                if name == "consumers" and int(base.config.params["block_m"]) % (64 * int(value)):
                    continue  # rows that do not divide among the consumers
                assert first(problem, template, **{name: value}).code_hash != base.code_hash, f"{name} = {value}"

    @pytest.mark.parametrize("template", GEMM.templates)
    def test_changes_with_output_dtype_layout_and_epilogue(self, template: str) -> None:
        config = legal(gemm(), template)[0]
        problems = [
            gemm(),
            gemm(out_dtype="fp32"),
            gemm(out_dtype="fp16"),
            *(gemm(layout=layout) for layout in ("nt", "tn", "tt")),
            *(gemm(epilogue=epilogue) for epilogue in ("scale", "bias", "bias+relu", "bias+gelu", "silu", "residual")),
        ]
        hashes = [source(problem, config).code_hash for problem in problems]
        assert len(set(hashes)) == len(problems)

    @pytest.mark.parametrize("template", TEMPLATES)
    def test_changes_with_the_dtype_of_the_operands(self, template: str) -> None:
        """Two sources with one hash compile to one kernel, so two dtypes need two hashes."""
        if template in GEMM.templates:
            problems = [gemm(dtype=dtype, out_dtype="bf16") for dtype in ("bf16", "fp16")]
        else:
            problems = [VECTOR_ADD.problem((1 << 20,), dtype=dtype) for dtype in ("bf16", "fp16")]
        config = legal(problems[0], template)[0]
        assert len({source(problem, config).code_hash for problem in problems}) == len(problems)

    def test_agrees_between_configs_that_differ_in_nothing_but_their_header(self) -> None:
        one = first(gemm(), "gemm_tma_pingpong")
        text = one.text.replace(template_hash("gemm_tma_pingpong"), "0" * 12)
        assert KernelSource(one.operator, one.problem, one.config, text).code_hash == one.code_hash


class TestTemplates:
    @pytest.fixture
    def copies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Templates that a test may edit, and that `emit` reads."""
        folder = tmp_path / "templates"
        shutil.copytree(paths.TEMPLATES, folder)
        monkeypatch.setattr(paths, "TEMPLATES", folder)
        return folder

    def test_copies_emit_the_same(self, copies: Path) -> None:
        assert source(SAMPLE[0].problem, SAMPLE[0].config).text == SAMPLE[0].text

    def test_undefined_variables_are_errors(self, copies: Path) -> None:
        path = copies / "gemm" / "gemm_vanilla.py.j2"
        path.write_text(path.read_text() + "# {{ nobody_defines_this }}\n")
        with pytest.raises(jinja2.UndefinedError, match="nobody_defines_this"):
            first(gemm(), "gemm_vanilla")

    def test_undefined_variables_in_conditions_are_errors_too(self, copies: Path) -> None:
        path = copies / "gemm" / "gemm_vanilla.py.j2"
        path.write_text(path.read_text() + "{% if nobody_defines_this %}{% endif %}\n")
        with pytest.raises(jinja2.UndefinedError, match="nobody_defines_this"):
            first(gemm(), "gemm_vanilla")

    @pytest.mark.parametrize("template", TEMPLATES)
    def test_hash_covers_the_template_and_every_macro_that_it_reaches(self, template: str, copies: Path) -> None:
        reached = set()
        before = template_hash(template, copies)
        assert before == template_hash(template)
        for path in sorted(copies.rglob("*.j2")):
            text = path.read_text()
            path.write_text(text + "{# edited #}\n")
            if template_hash(template, copies) != before:
                reached.add(path.relative_to(copies).as_posix())
            path.write_text(text)
        assert template_hash(template, copies) == before
        operator = "gemm" if template in GEMM.templates else "vector_add"
        own = f"{operator}/{template}.py.j2"
        assert own in reached
        assert "macros/module.j2" in reached
        assert not any(name.endswith(".py.j2") for name in reached - {own})
        if operator == "gemm":
            assert {"gemm/macros/host.j2", "gemm/macros/device.j2"} <= reached

    def test_hash_covers_macros_that_macros_include(self, copies: Path) -> None:
        before = template_hash("gemm_vanilla", copies)
        inner = copies / "macros" / "inner.j2"
        inner.write_text("{# one #}")
        host = copies / "gemm" / "macros" / "host.j2"
        host.write_text(host.read_text() + "{% include 'macros/inner.j2' %}")
        between = template_hash("gemm_vanilla", copies)
        inner.write_text("{# two #}")
        assert len({before, between, template_hash("gemm_vanilla", copies)}) == 3

    def test_an_edited_macro_changes_the_code_hash_as_far_as_it_reaches(self, copies: Path) -> None:
        pingpong, vanilla = (first(gemm(), name) for name in ("gemm_tma_pingpong", "gemm_vanilla"))
        path = copies / "gemm" / "macros" / "tma.j2"
        path.write_text(path.read_text().replace("async_dot_wait(1, acc)", "async_dot_wait(0, acc)"))
        os.utime(path, (path.stat().st_atime + 10, path.stat().st_mtime + 10))
        assert source(gemm(), pingpong.config).code_hash != pingpong.code_hash
        assert source(gemm(), vanilla.config).code_hash == vanilla.code_hash

    def test_names_of_files_differ_wherever_texts_do(self) -> None:
        assert len({emitted.file_name for emitted in SAMPLE}) == len({emitted.text for emitted in SAMPLE})


def test_code_hash_changes_when_a_statement_leaves_its_loop() -> None:
    """The same words in another block are another kernel: here, one that never refills its ring."""
    operator = ops.get("gemm")
    problem = operator.problem((512, 512, 512))
    config = next(c for c in candidates(problem, target("h200")) if c.template == "gemm_tma_pingpong")
    source = emit(operator, problem, config)
    lines = (
        "tlx.barrier_arrive(empty[previous])",
        "previous = stage",
        "stage, phase = next_stage(stage, phase, NUM_STAGES)",
    )
    inside, outside = ("".join(f"{indent}{line}\n" for line in lines) for indent in (" " * 20, " " * 16))
    assert source.text.count(inside) == 1
    moved = source.text.replace(inside, outside)
    assert KernelSource("gemm", problem, config, moved).code_hash != source.code_hash


def test_formatted_strings_hash_alike_in_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on they are read in parts, one within the other."""
    text = 'one = f"a{f"{b}" + c}d" + "e"\n'
    opens, middle, closes = 1001, 1002, 1003  # types that no token has
    monkeypatch.setattr(emit_module, "_OPENS", {opens})
    monkeypatch.setattr(emit_module, "_CLOSES", {closes})

    def token(kind: int, string: str, column: int) -> tokenize.TokenInfo:
        return tokenize.TokenInfo(kind, string, (1, column), (1, column + len(string)), text)

    later = [
        *(token(tokenize.NAME, "one", 0), token(tokenize.OP, "=", 4)),
        *(token(opens, 'f"', 6), token(middle, "a", 8), token(tokenize.OP, "{", 9)),
        *(token(opens, 'f"', 10), token(tokenize.OP, "{", 12), token(tokenize.NAME, "b", 13)),
        *(token(tokenize.OP, "}", 14), token(closes, '"', 15)),
        *(token(tokenize.OP, "+", 17), token(tokenize.NAME, "c", 19), token(tokenize.OP, "}", 20)),
        *(token(middle, "d", 21), token(closes, '"', 22)),
        *(token(tokenize.OP, "+", 24), token(tokenize.STRING, '"e"', 26)),
    ]
    found = emit_module._formatted_strings_whole(text, later)
    assert [t.string for t in found] == ["one", "=", 'f"a{f"{b}" + c}d"', "+", '"e"']
