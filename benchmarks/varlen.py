"""Packed sequences of different lengths against the same work in one batch of equal sequences, interleaved.

python -m benchmarks.varlen --compile               # any time before, where there may be no GPU: fills Triton's cache
python -m benchmarks.varlen -o benchmarks/results/

What is compared are rates: sequences of lengths l in `attention_varlen`, and as many of the root mean square of l in
`attention`, which is as much to compute but for the rounding. Both are as `get_kernel` serves them, and `origins` says
whether that was tuned. FlashAttention-3 does the packed ones too where it is installed. All results are held against
torch's attention of each sequence in float32 before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ahead import compile_served
from benchmarks.replays import ROUNDS, Call, Samples, samples
from benchmarks.results import write
from tlxgen import api, ops
from tlxgen.devices import target
from tlxgen.ops import accuracy
from tlxgen.ops.attention.peers import FLASH_3_MODULES
from tlxgen.ops.attention.problem import AttentionProblem
from tlxgen.ops.attention_varlen.problem import AttentionVarlenProblem, drawn_lengths
from tlxgen.ops.torch_own import scaled_dot_product_attention
from tlxgen.problem import torch_dtype
from tlxgen.tuner.measure import Setup

DEVICE = "cuda"
VARLEN, FIXED, FLASH_3 = "varlen", "fixed", "fa3"
HEADS = 32
#: Of the speed of the batch, what packed sequences must reach.
AT_LEAST = 0.9

_STEP = 64  # lengths of the batch are multiples of this


def _drawn(count: int, total: int, longest: int) -> tuple[int, ...]:
    problem = ops.get("attention_varlen").problem((count, 1, total, 64), max_q=longest)
    return tuple(rows for rows, _ in drawn_lengths(problem))


#: Lengths of sequences, by how they are spread; of about as much work, a millisecond or two.
SPREADS: Mapping[str, tuple[int, ...]] = {
    "equal": (4096,) * 4,
    "drawn": _drawn(8, 16384, 8192),
    "one long": (8192, *(512,) * 7),
}


@dataclass(frozen=True)
class Work:
    """Packed sequences."""

    spread: str
    lengths: tuple[int, ...]
    head: int
    causal: bool

    @cached_property
    def packed(self) -> AttentionVarlenProblem:
        """As they are."""
        sizes = (len(self.lengths), HEADS, sum(self.lengths), self.head)
        options = {"max_q": max(self.lengths), "causal": "bottom-right" if self.causal else "none"}
        made: AttentionVarlenProblem = ops.get("attention_varlen").problem(sizes, **options)
        return made

    @cached_property
    def batch(self) -> AttentionProblem:
        """As many of one length, and as much work."""
        length = math.sqrt(sum(n * n for n in self.lengths) / len(self.lengths))
        length = max(1, round(length / _STEP)) * _STEP
        return self.packed.alone((length, length), len(self.lengths))

    @cached_property
    def flops(self) -> dict[str, float]:
        """Of both."""
        attention = ops.get("attention")
        packed = sum(attention.flops(self.packed.alone((n, n))) for n in self.lengths)
        return {VARLEN: packed, FIXED: attention.flops(self.batch), FLASH_3: packed}


def works() -> list[Work]:
    """All of them."""
    every = product((64, 128), (False, True), SPREADS.items())
    return [Work(spread, lengths, head, causal) for head, causal, (spread, lengths) in every]


def main() -> None:
    """Compiles, measures, writes the results after each spread and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", choices=SPREADS, help="this spread alone")
    parser.add_argument("--compile", metavar="GPU", nargs="?", const="h200", help="compile the kernels, and no more")
    arguments = parser.parse_args()
    chosen = [work for work in works() if arguments.only in (None, work.spread)]
    problems = [problem for work in chosen for problem in (work.packed, work.batch)]
    if arguments.compile:
        compile_served(problems, target(arguments.compile))
        return
    report = Setup("gemm", ops.get("gemm").problem((128, 128, 128)), seed=1)()
    compile_served(problems, report.gpu)  # all at once: one after the other they would take longer than all the rest
    rows: list[dict[str, Any]] = []
    path = arguments.output
    for work in chosen:
        rows.append(measure(work))
        print(line(rows[-1]), flush=True)
        path = write(arguments.output, "varlen", report, rows, rounds=ROUNDS)
    ratios = [row["ratio"] for row in rows]
    print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f} of {len(ratios)}")
    print(path)
    if min(ratios) < AT_LEAST:
        raise SystemExit(f"{sum(ratio < AT_LEAST for ratio in ratios)} below {AT_LEAST} of the batch's speed")


@dataclass(frozen=True)
class Operands:
    """What both are called with."""

    work: Work
    packed: tuple[Tensor, Tensor, Tensor]  #: (rows of all, heads, D)
    ends: Tensor
    batch: tuple[Tensor, Tensor, Tensor]  #: (B, heads, length, D)


def operands(work: Work, seed: int = 1) -> Operands:
    """Normal, both."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def three(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch_dtype(work.packed.dtype)
        q, k, v = (torch.empty(shape, dtype=dtype, device=DEVICE).normal_(generator=generator) for _ in range(3))
        return q, k, v

    return Operands(
        work,
        packed=three(work.packed.total_q, HEADS, work.head),
        ends=torch.tensor([0, *accumulate(work.lengths)], dtype=torch.int32, device=DEVICE),
        batch=three(work.batch.B, HEADS, work.batch.S, work.head),
    )


def kernels(work: Work) -> dict[str, Any]:
    """Both, as they are served."""
    problems = {VARLEN: ("attention_varlen", work.packed), FIXED: ("attention", work.batch)}
    return {name: api.get_kernel(*of, on_miss="ignore") for name, of in problems.items()}


def calls(given: Operands) -> dict[str, Call]:
    """Everybody."""
    attend = kernels(given.work)
    return {
        VARLEN: lambda: attend[VARLEN](*given.packed, given.ends, given.ends),
        FIXED: lambda: attend[FIXED](*given.batch),
        **flash_3(given),
    }


def flash_3(given: Operands) -> dict[str, Call]:
    """FlashAttention-3's packed sequences, where it is installed."""
    found = next((name for name in FLASH_3_MODULES if importlib.util.find_spec(name)), None)
    if found is None:
        return {}
    attend = importlib.import_module(found).flash_attn_varlen_func
    longest, causal = given.work.packed.max_q, given.work.causal
    options = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": causal}

    def call() -> Tensor:
        result = attend(*given.packed, cu_seqlens_q=given.ends, cu_seqlens_k=given.ends, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return {FLASH_3: call}


# In torch.


def in_torch(given: Operands, name: str, dtype: torch.dtype) -> Tensor:
    """What one of them should give, in this dtype."""
    causal = given.work.causal
    if name == FIXED:
        q, k, v = (one.to(dtype) for one in given.batch)
        return scaled_dot_product_attention(q, k, v, is_causal=causal)
    every = zip(*(torch.split(one.to(dtype), list(given.work.lengths)) for one in given.packed), strict=True)
    return torch.cat([alone(own, causal) for own in every if len(own[0])])


def alone(own: Sequence[Tensor], causal: bool) -> Tensor:
    """One sequence, (rows, heads, D)."""
    q, k, v = (one.transpose(0, 1)[None] for one in own)
    return scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)


# Measuring.


@torch.inference_mode()
def measure(work: Work) -> dict[str, Any]:
    """Results that are right, and their times."""
    given = operands(work)
    everybody = calls(given)
    errors = checked(given, everybody)
    origins = {name: kernel.origin for name, kernel in kernels(work).items()}
    return {**entry(work, samples(everybody)), "errors": errors, "origins": origins}


def checked(given: Operands, everybody: Mapping[str, Call]) -> dict[str, float]:
    """Relative errors as norms; none may be far beyond that of torch in the same dtype."""
    errors = {}
    for name, call in everybody.items():
        result, exact = call(), in_torch(given, name, torch.float32)
        reason = accuracy.why_wrong(result, exact, in_torch(given, name, result.dtype))
        assert reason is None, f"{given.work.packed.label}, {name}: {reason}"
        errors[name] = float(f"{accuracy.error(result, exact).norm:.3e}")
    return errors


def entry(work: Work, times: Samples) -> dict[str, Any]:
    """What samples of microseconds, of the same rounds, come to; ratios are of rates, pair by pair."""

    def rate(name: str) -> list[float]:
        return [work.flops[name] / us * 1e-6 for us in times[name]]

    def ratio(name: str) -> float:
        pairs = zip(rate(VARLEN), rate(name), strict=True)
        return round(statistics.median(ours / theirs for ours, theirs in pairs), 4)

    return {
        "op": "attention_varlen",
        "spread": work.spread,
        "lengths": list(work.lengths),
        "problem": work.packed.model_dump(),
        "batch": work.batch.model_dump(),
        "time_us": {name: round(statistics.median(values), 2) for name, values in times.items()},
        "tflops": {name: round(statistics.median(rate(name)), 1) for name in times},
        "ratio": ratio(FIXED),
        "to_fa3": ratio(FLASH_3) if FLASH_3 in times else None,
    }


def line(row: Mapping[str, Any]) -> str:
    """A work in the table."""
    problem = row["problem"]
    head = f"{row['spread']:8} D {problem['D']:3} {'causal' if problem['causal'] != 'none' else 'full':6}"
    rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
    flash = "" if row["to_fa3"] is None else f"  of fa3 {row['to_fa3']:.3f}"
    return f"{head}  {rates} TFLOP/s  {row['ratio']:.3f}{flash}  {'/'.join(row.get('origins', {}).values())}"


if __name__ == "__main__":
    main()
