"""docs/adding_an_operator.md, followed literally in a copy of the tree."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding_an_operator.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the page's files and its line of the registry."""
    folder = tmp_path_factory.mktemp("tree")
    for part in ("tlxgen", "templates", "search_spaces", "cache", "tests", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, text in FILES.items():
        assert not (folder / name).exists(), f"{name} is there already: adding an operator changes no file"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (line,) = re.findall(r"^NAMES: .*$", PAGE, re.MULTILINE)
    registry = folder / "tlxgen" / "ops" / "__init__.py"
    text, count = re.subn(r"^NAMES: .*$", line, registry.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert count == 1
    registry.write_text(text, encoding="utf-8")
    return folder


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    for name in [name for name in environment if name.startswith("PYTEST_")]:  # of the run that this test is part of
        del environment[name]
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def commands() -> list[list[str]]:
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [shlex.split(line[2:]) for line in block.splitlines()]


@pytest.mark.slow
def test_every_command_of_the_page_succeeds(tree: Path) -> None:
    for words in commands():
        options = ["-q", "-p", "no:cacheprovider"] if words[0] == "pytest" else []
        done = run(tree, *words, *options)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "torch.float16" in (tree / "kernel.py").read_text(encoding="utf-8")


def test_its_files_are_formatted(tree: Path) -> None:
    sources = [name for name in FILES if name.endswith(".py")]
    assert run(tree, "ruff", "format", "--check", *sources).returncode == 0
    done = run(tree, "ruff", "check", *sources)
    assert done.returncode == 0, done.stdout


def test_the_registry_line_keeps_what_is_registered(tree: Path) -> None:
    from tlxgen import ops

    (line,) = re.findall(r"^NAMES: .*$", PAGE, re.MULTILINE)
    listed = re.findall(r'"(\w+)"', line)
    assert listed == [*ops.NAMES, "silu_mul"]
