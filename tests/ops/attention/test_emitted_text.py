"""Emitted attention files, packed sequences included, pass `ruff check` and `ruff format` for every structure."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tlxgen import devices, ops
from tlxgen.codegen import line_breaks
from tlxgen.codegen.emit import emit
from tlxgen.space.search_space import legal_configs

H200 = devices.target("h200")
HEADS = (64, 96, 256)
Options = dict[str, Any]
MASKS: tuple[Options, ...] = (
    {},
    {"causal": "bottom-right"},
    {"causal": "bottom-right", "window": 700},
    {"causal": "top-left"},
)
EXTRAS: tuple[Options, ...] = (
    {},
    {"lse": True},
    {"softcap": 20.0},
    {"softcap": 20.0, "lse": True, "dtype": "fp16"},
)


@pytest.mark.parametrize("template", [t for name in ("attention", "attention_varlen") for t in ops.get(name).templates])
def test_passes_ruff(template: str, tmp_path: Path) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    operator = ops.get("attention_varlen" if "varlen" in template else "attention")
    sizes = {"S": 2, "kv_len": 4096, "kv_heads": 8} if template == "attention_decode" else {}
    rng = random.Random(template)
    cases = rng.sample(list(itertools.product(HEADS, MASKS, EXTRAS)), 16)
    for number, (head, mask, extra) in enumerate(cases):
        problem = operator.problem((4, 32, 4096, head), **{**mask, **extra})
        problem = operator.problem({**problem.model_dump(), **sizes})
        legal = legal_configs(operator, problem, H200, (template,))
        for config in rng.sample(legal, min(9, len(legal))):
            (tmp_path / f"k{number}_{config.id}.py").write_text(emit(operator, problem, config).text)
    width = ["--isolated", f"--line-length={line_breaks.WIDTH}", str(tmp_path)]
    for command in (["check", "--quiet", "--select=E,F,I,W"], ["format", "--quiet", "--diff"]):
        done = subprocess.run([ruff, *command, *width], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
