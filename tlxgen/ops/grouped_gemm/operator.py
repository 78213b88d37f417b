"""One GEMM for each expert of a mixture, in one launch; only the device reads the numbers of tokens.

Forms, tensors and rules: `tlxgen.ops.grouped_gemm.problem.GroupedGemmProblem`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tlxgen.config import Config, Value
from tlxgen.devices import Gpu, Hopper
from tlxgen.ops.base import Case, Operator, Resources, Tensors, normal_tensors, why_other_tensors
from tlxgen.ops.gemm.operator import CONSUMER_REGISTERS
from tlxgen.ops.gemm.problem import ACTIVATIONS
from tlxgen.ops.grouped_gemm import time_model, torch_reference
from tlxgen.ops.grouped_gemm.problem import CLASSES, GATED, SPREAD, GroupedGemmProblem, drawn_sizes
from tlxgen.problem import ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    import torch

#: Shared memory beside tiles and barriers, as in `tlxgen.ops.gemm.operator`: the compiler's own, and alignment to 1 KB.
_COMPILER_STATE = 1024

#: Triton only knows of an integer argument whether 16 divides it.
_KNOWN_DIVISOR = 16

#: Sizes that a kernel takes as arguments; those of the others are on the device or in its descriptors.
_SIZES = {"2d3d": ("N", "K"), "3d2d": ("M", "K"), "2d2d": ("M", "N")}

#: The same with a gated activation, INNER = N / 2.
_GATED_SIZES = {"2d3d": ("INNER", "K"), "masked": ("M", "INNER", "K")}

#: Registers of a thread of two consumer warp groups whose producer computes addresses with 72.
_REGISTERS_BESIDE_GATHER = 216

#: Operands that have a matrix for each expert, by form; those of the others hold the tokens of all experts.
_OF_EXPERTS = {"2d3d": "b", "3d2d": "a", "2d2d": "c"}


class GroupedGemm(Operator[GroupedGemmProblem]):
    """The grouped GEMM operator."""

    name = "grouped_gemm"
    templates = ("grouped_gemm_tma", "grouped_gemm_vanilla")
    peer = "grouped_mm"
    inputs_in_order = ("a", "b")
    output_name = "c"
    problem_type = GroupedGemmProblem
    examples = (
        {"E": 8, "ROWS": 4096, "N": 2048, "K": 2048},
        {"E": 3, "ROWS": 500, "N": 520, "K": 264, "layout": "nt", "epilogue": "bias+swiglu"},
        {"E": 4, "ROWS": 64, "N": 256, "K": 512, "form": "masked", "max_rows": 64},
    )

    def variables(self, problem: GroupedGemmProblem) -> dict[str, Value]:
        """See `Operator.variables`. Alignments are those of contiguous operands, sizes those of an average product."""
        shapes, item = problem.shapes, ITEM_BYTES[problem.dtype]
        rows, columns, _ = problem.product(-(-problem.ROWS // max(1, problem.E)))
        return {
            "E": problem.E,
            "ROWS": problem.ROWS,
            "form": problem.form,
            "layout": problem.layout,
            "gated": problem.gated,
            "in_bytes": item,
            "out_bytes": ITEM_BYTES[problem.out_dtype],
            "a_row_bytes": shapes["a"][-2 if problem.a_transposed else -1] * item,
            "b_row_bytes": shapes["b"][-2 if problem.b_transposed else -1] * item,
            "c_row_bytes": shapes["c"][-1] * ITEM_BYTES[problem.out_dtype],
            "tile_rows": rows,
            "tile_columns": columns,
            "depth": problem.ROWS if problem.form == "2d2d" else problem.K,
        }

    def resources(self, problem: GroupedGemmProblem, config: Config) -> Resources:
        """See `Operator.resources`: ring, staging, barriers."""
        p = _numbers(config)
        item, out_item = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
        ring = p["num_stages"] * (p["block_m"] + p["block_n"]) * p["block_k"] * item
        if config.template == "grouped_gemm_vanilla":
            threads = 32 * p["num_warps"]
            shared = max(ring, p["block_m"] * _columns(problem, p) * out_item)
            return Resources(shared + _COMPILER_STATE, 0, threads, p["block_m"] * p["block_n"] // threads)
        consumers = _consumers(p)
        rows, columns = p["block_m"] // consumers, _columns(problem, p) // p["epilogue_subtiles"]
        bias = 4 * columns if "bias" in problem.epilogue_parts or problem.scaled else 0
        staging = consumers * rows * columns * out_item  # with pointers, where a tile changes its layout
        barriers = 2 * p["num_stages"]
        return Resources(
            shared_bytes=ring + staging + bias + 8 * barriers + _COMPILER_STATE,
            mbarriers=barriers,
            threads=(1 + consumers) * Hopper.WARP_GROUP_THREADS,
            accumulator_registers=rows * p["block_n"] // Hopper.WARP_GROUP_THREADS,
        )

    def template_context(self, problem: GroupedGemmProblem, config: Config) -> dict[str, Any]:
        """See `Operator.template_context`."""
        form, parts = problem.gathered, problem.epilogue_parts
        activation = next((GATED.get(part, part) for part in parts if part in (*ACTIVATIONS, *GATED)), "none")
        product = "A[rows][e] @ B[e]" if problem.form == "gather" else "A[e] @ B[e]"
        product = f"scales[e] * ({product})" if problem.scaled else product
        product += " + bias[e]" if "bias" in parts else ""
        formula = f"{activation}(gate) * up, gate and up the halves of {product}," if problem.gated else product
        if activation != "none" and not problem.gated:
            formula = f"{activation}({product})"
        of_experts = _OF_EXPERTS.get(form, "abc")
        context = {
            "form": form,
            "shapes": _shape_names(problem),
            "formula": formula,
            "gated": problem.gated,
            "gather": problem.form == "gather",
            "has_bias": "bias" in parts,
            "has_scale": False,
            "scaled": problem.scaled,
            "has_residual": False,
            "activation": activation,
            "a_transposed": problem.a_transposed,
            "b_transposed": problem.b_transposed,
            **{f"{name}_experts": name in of_experts for name in "abc"},
            "ends": {"3d3d": "", "masked": "counts"}.get(form, "offs"),
            "packed": form in ("2d3d", "3d2d"),  # an expert's tokens begin where those of the one before end
            # Experts have different numbers of tiles, unless there is a program for each that there may be.
            "scanned": form in ("2d3d", "3d2d") or (form == "masked" and config.template == "grouped_gemm_tma"),
            "sizes": _GATED_SIZES[form] if problem.gated else _SIZES.get(form, ("M", "N", "K")),
            "torch_in": str(torch_dtype(problem.dtype)).removeprefix("torch."),
            "torch_out": str(torch_dtype(problem.out_dtype)).removeprefix("torch."),
            "hopper": config.template == "grouped_gemm_tma",
        }
        return context | _tma_context(problem, config) if context["hopper"] else context

    def small_cases(self, problem: GroupedGemmProblem, config: Config) -> Sequence[Case[GroupedGemmProblem]]:
        """A tile; a token more and fewer; no tokens first, last and between; many steps; several CTAs."""
        p = _numbers(config)
        m, n, k, stages = (p[name] for name in ("block_m", "block_n", "block_k", "num_stages"))
        sizes: list[tuple[tuple[int, ...], int, int, int]]
        if problem.form == "3d3d":
            sizes = [((m,), n, k, 1), ((m - 16,) * 3, n + 16, (stages + 1) * k + 16, 2), ((1,) * 5, n, 2 * k, 1)]
        elif problem.form == "2d2d":  # where tokens are the steps
            sizes = [
                ((k,), n, m, 1),
                ((0, (stages + 1) * k + 3, 0, 1), n - 16, m + 16, 1),
                ((2 * k, 0, k - 1, 0), n + 16, m, 2),
                ((1,) * 5, n, m - 16, 2),
            ]
        else:
            block, fixed = (n, m) if problem.form == "3d2d" else (m, n)
            sizes = [
                ((block,), fixed, k, 1),
                ((0, block + 1, 0, 1, block - 1, 0), fixed - 16, 2 * k, 1),
                ((3, 2 * block + 5), fixed, (stages + 1) * k + 16, 2),
                ((0, 0, 4 * block + 9, 0), fixed + 16, stages * k, 2),
                ((1,) * 5, fixed, 2 * k - 16, 1),
            ]
        return [Case(_small(problem, tokens, n, k), num_sms) for tokens, n, k, num_sms in sizes]

    def why_not_exported(self, problem: GroupedGemmProblem) -> str | None:
        """See `Operator.why_not_exported`."""
        return "form masked cannot be exported, since calls do not tell ROWS" if problem.form == "masked" else None

    def flops(self, problem: GroupedGemmProblem) -> float:
        """Two operations for each product; the epilogue is not counted."""
        return 2.0 * problem.ROWS * problem.N * problem.K

    def bytes_moved(self, problem: GroupedGemmProblem) -> float:
        """Tokens once, in and out, and weights of the experts that have tokens, or of all if they are the result."""
        columns = problem.N // 2 if problem.gated else problem.N  # of the result
        weights = problem.E if problem.form == "2d2d" else sum(size > 0 for size in drawn_sizes(problem))
        item, out_item = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
        tokens_out, weights_item = (item, out_item) if problem.form == "2d2d" else (out_item, item)
        tokens = problem.ROWS * (problem.K * item + columns * tokens_out)
        tokens += 4 * problem.ROWS if problem.form == "gather" else 0  # which rows they are
        return float(tokens + weights * problem.K * problem.N * weights_item)

    def predict_us(self, problem: GroupedGemmProblem, config: Config, gpu: Gpu) -> float:
        """See `tlxgen.ops.grouped_gemm.time_model.grouped_gemm_us`: with tuning's distribution of tokens."""
        products = [problem.product(size) for size in drawn_sizes(problem)]
        out_item = ITEM_BYTES[problem.out_dtype] // (2 if problem.gated else 1)
        return time_model.grouped_gemm_us(products, problem.dtype, out_item, config, gpu, self.bytes_moved(problem))

    def twins(self, problem: GroupedGemmProblem) -> Sequence[GroupedGemmProblem]:
        """See `Operator.twins`: for a problem without a distribution of tokens, the problems with each."""
        if problem.group_sizes != SPREAD or problem.form == "3d3d":
            return ()
        return [problem.model_copy(update={"group_sizes": name}) for name in CLASSES if name != SPREAD]

    def inputs(self, problem: GroupedGemmProblem, device: torch.device | str, seed: int) -> Tensors:
        """Random A and B, in the problem's layout, tokens distributed by `group_sizes`, and a bias if it has one.

        Weights grow with their expert's number, up to twice, so that a wrong expert's weights have another norm.
        """
        import torch

        normal, dtype, shapes = normal_tensors(device, seed), torch_dtype(problem.dtype), problem.shapes
        tensors: Tensors = {}
        for name, transposed in (("a", problem.a_transposed), ("b", problem.b_transposed)):
            *lead, rows, columns = shapes[name]
            tensors[name] = normal((*lead, columns, rows), dtype).mT if transposed else normal(shapes[name], dtype)
        if problem.scaled:
            for name, shape in (("scale_a", (problem.ROWS,)), ("scale_b", (problem.E, problem.N))):
                tensors[name] = normal(shape, torch.float32).abs_().add_(0.5)
        if problem.form != "2d2d" and torch.device(device).type != "meta":
            scales = 1.0 + torch.arange(problem.E, device=device) / max(1, problem.E)
            if problem.scaled:
                tensors["scale_b"].mul_(scales[:, None])
            else:
                tensors["a" if problem.form == "3d2d" else "b"].mul_(scales.to(dtype)[:, None, None])
        if "bias" in problem.epilogue_parts:
            tensors["bias"] = normal((problem.E, problem.N), torch_dtype(problem.bias_dtype))
        if problem.form == "gather":  # each row once, in any order: the most that there may be to read
            order = torch.randperm(problem.ROWS, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
            tensors["rows"] = order.to(device)
        if problem.form == "masked":
            tensors["counts"] = torch.tensor(drawn_sizes(problem), dtype=torch.int32, device=device)
        elif problem.form != "3d3d":
            ends = list(accumulate(drawn_sizes(problem)))
            tensors["offs"] = torch.tensor(ends, dtype=torch.int32, device=device)
        return tensors

    def output_like(self, problem: GroupedGemmProblem) -> tuple[tuple[int, ...], torch.dtype]:
        """See `Operator.output_like`."""
        return problem.shapes["c"], torch_dtype(problem.out_dtype)

    def reference(self, problem: GroupedGemmProblem, inputs: Tensors) -> torch.Tensor:
        """The result in float64; NaN for rows that are not written."""
        return torch_reference.reference(problem, inputs)

    def eager(self, problem: GroupedGemmProblem, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `tlxgen.ops.grouped_gemm.torch_reference.eager`."""
        result = torch_reference.eager(problem, inputs)
        return result if out is None else out.copy_(result)

    def timed_peer(self, problem: GroupedGemmProblem, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Operator.timed_peer`: torch's kernel takes bf16 only; fp16 has the same size and time."""
        if problem.dtype != "fp16":
            return self.eager(problem, inputs, out)
        import torch

        taken = {name: x.view(torch.bfloat16) if x.dtype == torch.float16 else x for name, x in inputs.items()}
        same = problem.out_dtype == problem.dtype
        stand_in = problem.model_copy(update={"dtype": "bf16", **({"out_dtype": "bf16"} if same else {})})
        result = torch_reference.eager(stand_in, taken)
        result = result.view(torch.float16) if same else result
        return result if out is None else out.copy_(result)

    def check_call(self, problem: GroupedGemmProblem, tensors: Tensors) -> str | None:
        """See `Operator.check_call`; the numbers of tokens are not checked, which would wait for the GPU."""
        import torch

        shapes = {name: problem.shapes[name] for name in ("a", "b")}
        dtypes: dict[str, str | torch.dtype] = dict.fromkeys(shapes, problem.dtype)
        if problem.form != "3d3d":
            ends = "counts" if problem.form == "masked" else "offs"
            shapes[ends], dtypes[ends] = (problem.E,), torch.int32
        if problem.form == "gather":
            shapes["rows"], dtypes["rows"] = (problem.ROWS,), torch.int32
            if "a" in tensors and tensors["a"].dim():  # with any number of rows
                shapes["a"] = (tensors["a"].shape[0], problem.K)
        if "bias" in problem.epilogue_parts:
            shapes["bias"], dtypes["bias"] = (problem.E, problem.N), problem.bias_dtype
        if problem.scaled:
            shapes["scale_a"], shapes["scale_b"] = (problem.ROWS,), (problem.E, problem.N)
            dtypes["scale_a"] = dtypes["scale_b"] = torch.float32
        reason = why_other_tensors(tensors, shapes, dtypes)
        if reason:
            return reason
        surplus = sorted(set(tensors) - set(shapes))
        told = f"form {problem.form}, epilogue {problem.epilogue!r}"
        return f"{surplus[0]} has no place in {told}" if surplus else None

    def launchable(
        self, problem: GroupedGemmProblem, config: Config, tensors: Tensors, out: torch.Tensor
    ) -> str | None:
        """See `Operator.launchable`: unit strides as the layout says, and the strides that TMA needs."""
        for name in ("rows", "offs", "counts", "bias", "scale_a", "scale_b"):
            if name in tensors and not tensors[name].is_contiguous():
                return f"{name} is not contiguous"
        if out.shape[-2] > 1 and out.stride(-2) < out.shape[-1]:
            return f"c has rows {out.stride(-2)} elements apart, which overlap"
        if out.dim() > 2 and out.shape[0] > 1 and out.stride(0) < out.shape[1] * out.stride(1):
            return f"c has matrices {out.stride(0)} elements apart, which overlap"
        through_tma = "ab" if config.params.get("store") == "pointers" else "abc"
        for name, tensor, transposed in (
            ("a", tensors["a"], problem.a_transposed),
            ("b", tensors["b"], problem.b_transposed),
            ("c", out, False),
        ):
            inner = -2 if transposed else -1
            if tensor.stride(inner) != 1 and tensor.shape[inner] > 1:
                found = f"{name} has stride {tensor.stride(inner)} along dimension {inner}"
                return f"{found}; the kernel reads unit strides"
            if config.template == "grouped_gemm_tma" and name in through_tma:
                gathered = problem.form == "gather" and name == "a"
                reason = _tma_refusal(name, tensor, inner) or (_cp_async_refusal(tensor) if gathered else None)
                if reason:
                    return reason
        return None


def _tma_refusal(name: str, tensor: torch.Tensor, inner: int) -> str | None:
    pitches = [stride * tensor.element_size() for i, stride in enumerate(tensor.stride()) if i - tensor.dim() != inner]
    row = tensor.shape[inner] * tensor.element_size()
    if tensor.data_ptr() % Hopper.TMA_ALIGNMENT or any(p % Hopper.TMA_ALIGNMENT or p <= 0 for p in pitches):
        return f"{name} is not aligned for TMA: base address and strides {pitches} (bytes) must be multiples of 16"
    if name == "c" and row % Hopper.TMA_ALIGNMENT:
        return f"c has rows of {row} bytes; a TMA store writes whole 16 bytes and would overrun them"
    return None


def _cp_async_refusal(a: torch.Tensor) -> str | None:
    """Why Triton cannot copy rows of A 16 bytes at a time, or None."""
    apart = a.stride(0)
    told = f"a has rows {apart} elements apart; the kernel gathers them where that is a multiple of {_KNOWN_DIVISOR}"
    return told if apart % _KNOWN_DIVISOR else None


def _numbers(config: Config) -> dict[str, int]:
    return {name: int(value) for name, value in config.params.items() if not isinstance(value, str)}


def _columns(problem: GroupedGemmProblem, p: Mapping[str, int]) -> int:
    """Columns of C in one tile."""
    return p["block_n"] // 2 if problem.gated else p["block_n"]


def _consumers(p: Mapping[str, int]) -> int:
    """Consumer warp groups: each has 64 rows, or 128 for tiles of 256."""
    return 1 if p["block_m"] == 64 else 2


def _small(problem: GroupedGemmProblem, tokens: Sequence[int], n: int, k: int) -> GroupedGemmProblem:
    """The problem in another size, with the same powers of two up to 16 as divisors of N and K.

    If tokens are contiguous, one more expert makes their number a multiple that TMA needs.
    """
    n, k = (size - _KNOWN_DIVISOR + math.gcd(known, _KNOWN_DIVISOR) for size, known in ((n, problem.N), (k, problem.K)))
    if _tokens_side_by_side(problem):
        tokens = [*tokens, -sum(tokens) % _KNOWN_DIVISOR]
    update: dict[str, Any] = {"E": len(tokens), "ROWS": sum(tokens), "N": n, "K": k}
    update["group_sizes"] = "even" if problem.form == "3d3d" else ",".join(map(str, tokens))
    if problem.form == "masked":
        room = max(1, *tokens) + 5
        update["max_rows"] = room + (-room % _KNOWN_DIVISOR if problem.a_transposed else 0)
    return problem.model_copy(update=update)


def _tokens_side_by_side(problem: GroupedGemmProblem) -> bool:
    """Whether an operand has all tokens in each of its rows in memory."""
    in_a = (problem.form == "2d3d" and problem.a_transposed) or (problem.form == "2d2d" and not problem.a_transposed)
    in_b = (problem.form == "3d2d" and not problem.b_transposed) or (problem.form == "2d2d" and problem.b_transposed)
    return in_a or in_b


def _shape_names(problem: GroupedGemmProblem) -> dict[str, str]:
    """Shapes by the names in the emitted file's docstring."""
    n, columns = ("2 INNER", "INNER") if problem.gated else ("N", "N")
    if problem.gathered == "2d3d":
        rows = "T" if problem.form == "gather" else "tokens"
        return {"a": f"({rows}, K)", "b": f"(E, K, {n})", "c": f"(tokens, {columns})"}
    if problem.form == "3d2d":
        return {"a": "(E, M, K)", "b": "(K, tokens)", "c": "(M, tokens)"}
    if problem.form == "2d2d":
        return {"a": "(M, tokens)", "b": "(tokens, N)", "c": "(E, M, N)"}
    rows = "max_rows" if problem.form == "masked" else "M"
    return {"a": f"(E, {rows}, K)", "b": f"(E, K, {n})", "c": f"(E, {rows}, {columns})"}


def _tma_context(problem: GroupedGemmProblem, config: Config) -> dict[str, Any]:
    p, form, item = _numbers(config), problem.gathered, ITEM_BYTES[problem.dtype]
    consumers = _consumers(p)
    of_experts = _OF_EXPERTS.get(form, "abc")
    ragged_store = config.params["store"] == "tma" and form in ("2d3d", "masked")
    c_lead = (1 if "c" in of_experts else 0) + (2 if ragged_store else 0)
    gather = problem.form == "gather"
    registers = CONSUMER_REGISTERS[consumers]
    return {
        "consumers": consumers,
        "registers": registers and (_REGISTERS_BESIDE_GATHER if gather else registers),
        "in_bytes": item,
        # Dimensions of TMA's boxes before rows and columns: one for the expert, or two that end its tokens.
        "a_lead": 2 if form == "2d2d" else int("a" in of_experts),
        "b_lead": 2 if form == "2d2d" else int("b" in of_experts),
        "c_box": "1, " * c_lead + "WG_M, EPILOGUE_N",
        "ragged_store": ragged_store,
        "ragged": ragged_store or form == "2d2d",
    }


OPERATOR = GroupedGemm()
