"""How fast the simulator is, on one core: kernels that tlxgen emits, and fbtriton's attention tutorial as installed.

python -m benchmarks.simulator -o benchmarks/results/
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy and torch are imported

import torch
from triton.language.extra import tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from tlxgen import devices, ops
from tlxgen._version import __version__
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.simulator.check import check
from tlxgen.simulator.machine.machine import Machine
from tlxgen.simulator.program import Program, load
from tlxgen.space.candidates import candidates
from tlxgen.toolchain import toolchain

REPETITIONS = 9
ATTENTION = Path(tlx.__file__).parent / "tutorials" / "hopper_fa_ws.py"


def main() -> None:
    """Measures, writes the results and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rows = [gemm(), attention(64), attention(128), *structural()]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    date = datetime.now(timezone.utc).date().isoformat()
    content = {
        "date": date,
        "machine": {"processor": _processor(), "python": platform.python_version()},
        "versions": {"tlxgen": __version__, "toolchain": toolchain(), "torch": torch.__version__},
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rows": rows,
    }
    path = arguments.output / f"{date}-simulator.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(path)


def gemm() -> dict[str, Any]:
    """256 cubed, with tiles of 128 by 128 by 64 and three stages."""
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


def attention(head: int) -> dict[str, Any]:
    """256 queries and keys, one head."""
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


def structural() -> list[dict[str, Any]]:
    """A whole check, as before a config is launched: small problems and a schedule of each policy."""
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


def _times(program: Program, kernel: str, grid: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    times = []
    for seed in range(REPETITIONS):
        machine = Machine(frozenset(), seed=seed)
        started = time.perf_counter()
        program[kernel].launch(machine, grid, args, kwargs)
        times.append(time.perf_counter() - started)
        assert not machine.findings, machine.findings[0]
    return {"ms": round(statistics.median(times) * 1e3, 1), "least_ms": round(min(times) * 1e3, 1)}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
