"""Speed of a mixture-of-experts layer, `fused_moe`, and of its parts, against the same steps in torch.

    python -m benchmarks.moe
    python -m benchmarks.moe --only Qwen3

Seven layers of published models. In torch, tokens are sorted, gathered by expert, multiplied (`torch._grouped_mm`),
activated, multiplied and combined in one of three ways; the fastest of these is the peer. Routing is softmax and top-k
of normal logits, with some experts more likely than others. All results are checked against float64 before timing.
Times are of CUDA graphs (`benchmarks.replays`). Takes a few minutes on one GPU, whose memory must hold 23 GB of weights
beside activations, and writes `<date>-moe-<gpu>.json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from benchmarks.harness import Results, Row, device_report, mean_and_least, options, spaced
from benchmarks.replays import ROUNDS, Call, samples
from tlxgen import api, ops
from tlxgen.functional import fused_moe
from tlxgen.functional.grouped import gated_mm, grouped_mm
from tlxgen.functional.moe_combine import combine
from tlxgen.functional.moe_routing import route
from tlxgen.ops import accuracy, torch_functions
from tlxgen.problem import Problem

DEVICE = "cuda"
OURS, TORCH = "tlxgen", ("index_add", "sum", "product")


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the number of tokens."""

    name: str
    experts: int
    choices: int
    k: int
    inner: int
    tokens: int

    def problems(self) -> dict[str, Problem]:
        """Both grouped GEMMs."""
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
    """Measures layer by layer."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="only layers whose name contains this")
    arguments = parser.parse_args()
    results = Results(arguments.output, "moe", device_report(), {"rounds": ROUNDS})
    for layer in LAYERS:
        if arguments.only in layer.name:
            row = measure(layer)
            results.add(row, line(row))
    print(mean_and_least(row["ratio"] for row in results.rows), results.path, sep="\n")


class Operands(NamedTuple):
    """Arguments of `fused_moe`."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor


def operands(layer: Layer, seed: int = 1) -> Operands:
    """Random operands, scaled so that results are about one."""
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
    """The layer in float64, expert by expert: all weights in float64 would not fit into memory."""
    out = torch.zeros(given.x.shape, dtype=torch.float64, device=given.x.device)
    for expert in torch.unique(given.ids).tolist():
        tokens, nth = (given.ids == expert).nonzero(as_tuple=True)
        gate, up = (given.x[tokens].double() @ given.w1[expert].double().T).chunk(2, 1)
        part = (F.silu(gate) * up) @ given.w2[expert].double().T
        out.index_add_(0, tokens, part * given.weights[tokens, nth].double()[:, None])
    return out


# The layer in torch.


def in_torch(given: Operands) -> tuple[Tensor, Tensor]:
    """Results sorted by expert, and the order of the sort."""
    experts, choices = given.w1.shape[0], given.ids.shape[1]
    keys, order = given.ids.flatten().sort()
    every = torch.arange(experts, dtype=keys.dtype, device=keys.device)
    offs = torch.searchsorted(keys, every, right=True, out_int32=True)
    gate, up = torch_functions.grouped_mm(given.x[order // choices], given.w1.mT, offs=offs).chunk(2, 1)
    return torch_functions.grouped_mm(F.silu(gate) * up, given.w2.mT, offs=offs), order


def by_index_add(given: Operands) -> Tensor:
    """Combined by atomics in float32."""
    result, order = in_torch(given)
    weighted = result * given.weights.flatten()[order, None]
    total = torch.zeros(given.x.shape, dtype=torch.float32, device=result.device)
    return total.index_add_(0, order // given.ids.shape[1], weighted).to(result.dtype)


def by_token(given: Operands) -> tuple[Tensor, Tensor]:
    """Results by token, (T, choices, K), and the weights in their dtype, (T, choices)."""
    result, order = in_torch(given)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return result[place].view(*given.ids.shape, -1), given.weights.to(result.dtype)


def by_sum(given: Operands) -> Tensor:
    """Combined by a gather and a weighted sum of rounded terms."""
    results, weights = by_token(given)
    return (results * weights[..., None]).sum(1)


def by_product(given: Operands) -> Tensor:
    """Combined by a gather and a product with rounded weights."""
    results, weights = by_token(given)
    return torch.bmm(weights[:, None], results)[:, 0]


def wholes(given: Operands) -> dict[str, Call]:
    """The layer in each way."""
    return {
        OURS: lambda: fused_moe(*given),
        "index_add": lambda: by_index_add(given),
        "sum": lambda: by_sum(given),
        "product": lambda: by_product(given),
    }


def parts(given: Operands) -> dict[str, Call]:
    """The steps of `fused_moe`, each on the results of those before it."""
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
def measure(layer: Layer) -> Row:
    """Checks the results and times them."""
    given = operands(layer)
    calls = wholes(given)
    errors = checked(layer, calls, reference(given))
    kernels = {name: api.get_kernel("grouped_gemm", one, on_miss="ignore") for name, one in layer.problems().items()}
    origins = {name: kernel.origin for name, kernel in kernels.items()}
    return {**ratios(layer, samples({**calls, **parts(given)})), "errors": errors, "origins": origins}


def checked(layer: Layer, calls: Mapping[str, Call], expected: Tensor) -> dict[str, float]:
    """Relative norms of the errors; ours must be close to the least error of torch's ways, all below 2 %."""
    results = {name: call() for name, call in calls.items()}
    errors = {name: accuracy.error(result, expected).norm for name, result in results.items()}
    best = min((name for name in errors if name != OURS), key=lambda name: errors[name])
    reason = accuracy.why_wrong(results[OURS], expected, results[best])
    assert reason is None, f"{layer.name}, {layer.tokens} tokens: {reason}"
    for name, error in errors.items():
        assert error < 2e-2, f"{layer.name}, {layer.tokens} tokens: {name} has a relative error of {error:.1e}"
    return {name: float(f"{error:.3e}") for name, error in errors.items()}


def ratios(layer: Layer, times: Mapping[str, list[float]]) -> Row:
    """Medians in microseconds; `ratio` is that of the fastest way in torch to ours, in the same rounds."""
    medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
    peer = min(TORCH, key=lambda name: medians[name])
    pairs = zip(times[peer], times[OURS], strict=True)
    return {
        "op": "fused_moe",
        "layer": asdict(layer),
        "time_us": medians[OURS],
        "peer": peer,
        "peer_us": medians[peer],
        "ratio": round(statistics.median(theirs / ours for theirs, ours in pairs), 4),
        "torch_us": {name: medians[name] for name in TORCH},
        "parts_us": {name: us for name, us in medians.items() if name not in {*TORCH, OURS}},
    }


def line(row: Mapping[str, Any]) -> str:
    """A line of the printed table."""
    layer = row["layer"]
    sizes = f"{layer['name']:14} T {layer['tokens']:5} E {layer['experts']:3} k {layer['choices']:2}"
    times = f"{row['time_us']:9.1f} us  {row['peer']} {row['peer_us']:9.1f} us  {row['ratio']:.3f}"
    return f"{sizes} {times}  {spaced(row['parts_us'], '.0f')}  {'/'.join(row.get('origins', {}).values())}"


if __name__ == "__main__":
    main()
