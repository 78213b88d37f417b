"""Speed of the simulator on one core: kernels that tlxgen emits, and fbtriton's installed attention tutorial.

    python -m benchmarks.simulator

Launches of a small GEMM and of attention with heads of 64 and 128, and whole checks of the default config of each
template of GEMM and vector_add. Needs no GPU, takes a few seconds and writes `<date>-simulator.json`.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy and torch are imported

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from triton.language.extra import tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.harness import Results, Row, options
from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.simulator.check import check
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.program import Program, load
from tlxgen.space.candidates import candidates

REPETITIONS = 9
ATTENTION = Path(tlx.__file__).parent / "tutorials" / "hopper_fa_ws.py"


def main() -> None:
    """Measures case by case."""
    arguments = options(__doc__).parse_args()
    results = Results(arguments.output, "simulator")
    for row in (gemm(), attention(64), attention(128), *checks()):
        results.more["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        results.add(row, "  ".join(f"{name} {value}" for name, value in row.items()))
    print(results.path)


def gemm() -> Row:
    """A launch of 256 cubed with tiles of 128 by 128 by 64 and three stages."""
    operator = ops.get("gemm")
    problem = operator.problem((256, 256, 256))
    favourite = candidates(operator.problem((4096,) * 3), devices.target("h200"), ("gemm_tma_cooperative",))[0]
    tile = {"block_m": 128, "block_n": 128, "block_k": 64, "consumers": 2, "num_stages": 3, "epilogue_subtiles": 1}
    source = emit(operator, problem, Config(template=favourite.template, params={**favourite.params, **tile}))
    started = time.perf_counter()
    program = load(source.file_name, source.text)
    loading = time.perf_counter() - started
    inputs = operator.inputs(problem, "cpu", 0)
    output = operator.output(problem, inputs)
    grid, args = program["arguments"](*inputs.values(), output, num_sms=2)
    found = _times(program, "kernel", grid, args, program["OPTIONS"])
    return {"what": "gemm 256 256 256, 128x128x64, 3 stages", "load_ms": round(loading * 1e3, 1), **found}


def attention(head: int) -> Row:
    """A launch with 256 queries and keys of one head."""
    program = load(ATTENTION)
    q, k, v, out = (torch.randn(256, head, dtype=torch.float16) for _ in range(4))
    block_n = min(128, head)
    values = {
        "sm_scale": 0.5,
        "M": torch.empty(256),
        "Z": 1,
        "H": 1,
        "desc_q": TensorDescriptor.from_tensor(q, [64, head]),
        "desc_k": TensorDescriptor.from_tensor(k, [block_n, head]),
        "desc_v": TensorDescriptor.from_tensor(v, [block_n, head]),
        "desc_o": TensorDescriptor.from_tensor(out, [64, head]),
        "N_CTX": 256,
        "HEAD_DIM": head,
        "BLOCK_M": 128,
        "BLOCK_N": block_n,
        "FP8_OUTPUT": False,
        "NUM_BUFFERS": 2,
        "NUM_MMA_WARPS": 8,
        "NUM_MMA_GROUPS": 2,
    }
    found = _times(program, "_attn_fwd_ws", (2, 1, 1), (), {**values, "num_warps": 4})
    return {"what": f"attention 256x256, head {head} (fbtriton's hopper_fa_ws.py)", **found}


def checks() -> list[Row]:
    """Whole checks, as before a config is launched: small problems, a schedule of each policy."""
    rows = []
    for name, shape in (("gemm", (4096, 4096, 4096)), ("vector_add", (2**20,))):
        operator = ops.get(name)
        problem = operator.problem(shape)
        for template in operator.templates:
            source = emit(operator, problem, candidates(problem, devices.target("h200"), (template,))[0])
            report = check(source, 3)
            assert report.clean
            rows.append({"what": f"check {template}", "runs": report.runs, "ms": round(report.seconds * 1e3, 1)})
    return rows


def _times(program: Program, kernel: str, grid: Any, args: Any, kwargs: Row) -> Row:
    times = []
    for seed in range(REPETITIONS):
        machine = Machine(frozenset(), seed=seed)
        started = time.perf_counter()
        program[kernel].launch(machine, grid, args, kwargs)
        times.append(time.perf_counter() - started)
        assert not machine.findings, machine.findings[0]
    return {"ms": round(statistics.median(times) * 1e3, 1), "least_ms": round(min(times) * 1e3, 1)}


if __name__ == "__main__":
    main()
