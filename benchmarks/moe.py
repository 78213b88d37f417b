"""A mixture-of-experts layer, `fused_moe`, against the same steps in torch, interleaved; and its parts.

python -m benchmarks.moe --compile               # any time before, where there may be no GPU: fills Triton's cache
python -m benchmarks.moe -o benchmarks/results/

In torch tokens are sorted, copied in the order of experts, multiplied (`torch._grouped_mm`), activated, multiplied, and
brought back in one of three ways, which differ by who reads and writes what and in what dtype. The fastest of them is
the peer. Routing is by softmax and top-k of normal logits, some experts being likelier than others. All results are
held against float64 before anything is timed.

Times are of replays of CUDA graphs (`benchmarks.replays`) without a rotation of inputs: what a layer reads is larger
than L2 by far, and what a part reads was just written in the layer, too.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from benchmarks.ahead import compile_served
from benchmarks.replays import ROUNDS, Call, Samples, samples
from benchmarks.results import write
from tlxgen import api, ops
from tlxgen.devices import target
from tlxgen.functional import fused_moe
from tlxgen.functional.grouped import gated_mm, grouped_mm
from tlxgen.functional.moe_combine import combine
from tlxgen.functional.moe_routing import route
from tlxgen.ops import accuracy, torch_own
from tlxgen.problem import Problem
from tlxgen.tuner.measure import DeviceReport, Setup

DEVICE = "cuda"
OURS = "tlxgen"


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and how many tokens come at once."""

    name: str
    experts: int
    choices: int
    k: int
    inner: int
    tokens: int

    def problems(self) -> dict[str, Problem]:
        """Both products."""
        sizes = {"E": self.experts, "ROWS": self.tokens * self.choices}
        first = {"form": "2d3d", **sizes, "N": 2 * self.inner, "K": self.k}
        second = {"form": "2d3d", **sizes, "N": self.k, "K": self.inner}
        make = ops.get("grouped_gemm").problem
        return {"first": make(first, layout="nt", epilogue="swiglu"), "second": make(second, layout="nt")}


LAYERS = (
    Layer("Mixtral 8x7B", experts=8, choices=2, k=4096, inner=14336, tokens=4096),
    Layer("Qwen3-235B", experts=128, choices=8, k=4096, inner=1536, tokens=128),
    Layer("Qwen3-235B", experts=128, choices=8, k=4096, inner=1536, tokens=2048),
    Layer("DeepSeek-V3", experts=256, choices=8, k=7168, inner=2048, tokens=512),
    Layer("DeepSeek-V3", experts=256, choices=8, k=7168, inner=2048, tokens=4096),
    Layer("Qwen3-Next", experts=512, choices=10, k=2048, inner=512, tokens=512),
    Layer("Qwen3-Next", experts=512, choices=10, k=2048, inner=512, tokens=4096),
)


def main() -> None:
    """Measures, writes the results after each layer and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="", help="layers whose name has this in it")
    parser.add_argument("--compile", metavar="GPU", nargs="?", const="h200", help="compile the kernels, and no more")
    arguments = parser.parse_args()
    layers = [layer for layer in LAYERS if arguments.only in layer.name]
    if arguments.compile:
        compile_all(layers, arguments.compile)
        return
    report = Setup("gemm", ops.get("gemm").problem((128, 128, 128)), seed=1)()
    rows: list[dict[str, Any]] = []
    path = arguments.output
    for layer in layers:
        rows.append(measure(layer))
        print(line(rows[-1]), flush=True)
        path = written(arguments.output, report, rows)  # each time: what is measured stays measured
    if rows:
        ratios = [row["ratio"] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean {mean:.3f}, least {min(ratios):.3f} over {len(ratios)} layers")
    print(path)


def written(folder: Path, report: DeviceReport, rows: list[dict[str, Any]]) -> Path:
    """The file of the results so far."""
    return write(folder, "moe", report, rows, rounds=ROUNDS)


def compile_all(layers: list[Layer], gpu_name: str) -> None:
    """The products' kernels, as `get_kernel` would choose them there."""
    compile_served([problem for layer in layers for problem in layer.problems().values()], target(gpu_name))


@dataclass(frozen=True)
class Operands:
    """What a layer is called with."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor


def operands(layer: Layer, seed: int = 1) -> Operands:
    """Results are of the order of one."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=scale, generator=generator)

    likely = normal(layer.experts, scale=0.5, dtype=torch.float32)
    logits = normal(layer.tokens, layer.experts, dtype=torch.float32) + likely
    weights, ids = logits.softmax(1).topk(layer.choices, 1)
    return Operands(
        x=normal(layer.tokens, layer.k),
        w1=normal(layer.experts, 2 * layer.inner, layer.k, scale=layer.k**-0.5),
        w2=normal(layer.experts, layer.k, layer.inner, scale=layer.inner**-0.5),
        weights=weights / weights.sum(1, keepdim=True),
        ids=ids,
    )


def reference(given: Operands) -> Tensor:
    """The layer in float64, expert by expert: a copy of all weights in float64 would not fit."""
    out = torch.zeros(given.x.shape, dtype=torch.float64, device=given.x.device)
    for expert in torch.unique(given.ids).tolist():
        tokens, nth = (given.ids == expert).nonzero(as_tuple=True)
        gate, up = (given.x[tokens].double() @ given.w1[expert].double().T).chunk(2, 1)
        part = (F.silu(gate) * up) @ given.w2[expert].double().T
        out.index_add_(0, tokens, part * given.weights[tokens, nth].double()[:, None])
    return out


# The same steps in torch.


def in_torch(given: Operands) -> tuple[Tensor, Tensor]:
    """What the experts give, in their order, and that order."""
    experts, choices = given.w1.shape[0], given.ids.shape[1]
    keys, order = given.ids.flatten().sort()
    every = torch.arange(experts, dtype=keys.dtype, device=keys.device)
    offs = torch.searchsorted(keys, every, right=True, out_int32=True)
    gate, up = torch_own.grouped_mm(given.x[order // choices], given.w1.mT, offs=offs).chunk(2, 1)
    return torch_own.grouped_mm(F.silu(gate) * up, given.w2.mT, offs=offs), order


def by_index_add(given: Operands) -> Tensor:
    """Back by atomics, in float32."""
    result, order = in_torch(given)
    weighted = result * given.weights.flatten()[order, None]
    total = torch.zeros(given.x.shape, dtype=torch.float32, device=result.device)
    return total.index_add_(0, order // given.ids.shape[1], weighted).to(result.dtype)


def in_order_of_tokens(given: Operands) -> Tensor:
    """What the experts give to each token, (T, k, K)."""
    result, order = in_torch(given)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return result[place].view(*given.ids.shape, -1)


def by_sum(given: Operands) -> Tensor:
    """Back by a gather and a weighted sum, whose terms are rounded."""
    parts = in_order_of_tokens(given)
    return (parts * given.weights.to(parts.dtype)[..., None]).sum(1)


def by_product(given: Operands) -> Tensor:
    """Back by a gather and a product with weights that are rounded."""
    parts = in_order_of_tokens(given)
    return torch.bmm(given.weights.to(parts.dtype)[:, None], parts)[:, 0]


def wholes(given: Operands) -> dict[str, Call]:
    """The layer, by everybody."""
    return {
        OURS: lambda: fused_moe(given.x, given.w1, given.w2, given.weights, given.ids),
        "index_add": lambda: by_index_add(given),
        "sum": lambda: by_sum(given),
        "product": lambda: by_product(given),
    }


def parts(given: Operands) -> dict[str, Call]:
    """What `fused_moe` consists of, each on what those before it have given."""
    experts = given.w1.shape[0]
    routing = route(given.ids, experts)
    tokens = given.x[routing.rows]
    hidden = gated_mm(tokens, given.w1.mT, offs=routing.offs, activation="silu")
    result = grouped_mm(hidden, given.w2.mT, offs=routing.offs)
    return {
        "routing": lambda: route(given.ids, experts).offs,
        "gather": lambda: given.x[routing.rows],
        "first": lambda: gated_mm(tokens, given.w1.mT, offs=routing.offs, activation="silu"),
        "second": lambda: grouped_mm(hidden, given.w2.mT, offs=routing.offs),
        "combine": lambda: combine(result, routing.place, given.weights, routing.ids, experts, given.x.dtype),
    }


# Measuring.


@torch.inference_mode()
def measure(layer: Layer) -> dict[str, Any]:
    """Results that are right, and their times."""
    given = operands(layer)
    everybody = wholes(given)
    errors = checked(layer, everybody, reference(given))
    return {**entry(layer, samples({**everybody, **parts(given)})), "errors": errors, "origins": origins(layer)}


def checked(layer: Layer, everybody: Mapping[str, Call], expected: Tensor) -> dict[str, float]:
    """Relative errors as norms; none may be far beyond the least that torch makes."""
    results = {name: call() for name, call in everybody.items()}
    errors = {name: accuracy.error(result, expected).norm for name, result in results.items()}
    theirs = [name for name in errors if name != OURS]
    best = min(theirs, key=lambda name: errors[name])
    for name, result in results.items():
        reason = accuracy.why_wrong(result, expected, results[best])
        assert reason is None or name in theirs, f"{layer.name}, {layer.tokens} tokens: {reason}"
        assert errors[name] < 2e-2, f"{layer.name}, {layer.tokens} tokens: {name} is off by {errors[name]:.1e}"
    return {name: float(f"{error:.3e}") for name, error in errors.items()}


def origins(layer: Layer) -> dict[str, str]:
    """Who computes the products of ours."""
    problems = layer.problems().items()
    return {name: api.get_kernel("grouped_gemm", problem, on_miss="ignore").origin for name, problem in problems}


def entry(layer: Layer, times: Samples) -> dict[str, Any]:
    """What samples of microseconds, of the same rounds, come to; `ratio` is to the fastest way in torch."""
    medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
    names = ("index_add", "sum", "product")
    peer = min(names, key=lambda name: medians[name])
    pairs = zip(times[peer], times[OURS], strict=True)
    return {
        "op": "fused_moe",
        "layer": asdict(layer),
        "time_us": medians[OURS],
        "peer": peer,
        "peer_us": medians[peer],
        "ratio": round(statistics.median(theirs / ours for theirs, ours in pairs), 4),
        "torch_us": {name: medians[name] for name in names},
        "parts_us": {name: us for name, us in medians.items() if name not in {*names, OURS}},
    }


def line(row: Mapping[str, Any]) -> str:
    """A layer in the table."""
    layer = row["layer"]
    shown = "  ".join(f"{name} {us:.0f}" for name, us in row["parts_us"].items())
    sizes = f"{layer['name']:14} T {layer['tokens']:5} E {layer['experts']:3} k {layer['choices']:2}"
    times = f"{row['time_us']:9.1f} us  {row['peer']} {row['peer_us']:9.1f} us  {row['ratio']:.3f}"
    return f"{sizes} {times}  {shown}  {'/'.join(row.get('origins', {}).values())}"


if __name__ == "__main__":
    main()
