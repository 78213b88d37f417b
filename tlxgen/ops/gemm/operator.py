"""C = epilogue(A·B): matrix product with fused epilogues, bf16, fp16, and fp32 through TF32, accumulated in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tlxgen.config import Config, Value
from tlxgen.devices import Gpu, Hopper
from tlxgen.ops.base import Case, Operator, Resources, Tensors, normal_tensors, why_other_tensors
from tlxgen.ops.gemm import time_model
from tlxgen.ops.gemm.problem import ACTIVATIONS, GemmProblem
from tlxgen.ops.gemm.time_model import LEAST_STEPS
from tlxgen.problem import ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    import torch


#: Shared memory through which threads exchange the state of a piece.
_TOLD_BYTES = 384


class Gemm(Operator[GemmProblem]):
    """The GEMM operator."""

    name = "gemm"
    templates = ("gemm_tma_pingpong", "gemm_tma_cooperative", "gemm_cp_async", "gemm_vanilla")
    peer = "cublas"
    inputs_in_order = ("a", "b")
    output_name = "c"
    problem_type = GemmProblem
    examples = (
        {"M": 4096, "N": 4096, "K": 4096},
        {"M": 1000, "N": 520, "K": 264, "dtype": "fp16", "layout": "nt", "epilogue": "bias+gelu"},
        {"M": 33, "N": 4097, "K": 255, "layout": "tn", "out_dtype": "fp32"},
    )
    by_size = ("tail",)

    def variables(self, problem: GemmProblem) -> dict[str, Value]:
        """See `Operator.variables`. Alignments are those of contiguous operands."""
        rows = {
            "a": problem.M if problem.a_transposed else problem.K,
            "b": problem.K if problem.b_transposed else problem.N,
            "c": problem.N,
        }
        in_bytes, out_bytes = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.out_dtype]
        return {
            **problem.model_dump(exclude={"epilogue"}),
            "in_bytes": in_bytes,
            "out_bytes": out_bytes,
            "a_row_bytes": rows["a"] * in_bytes,
            "b_row_bytes": rows["b"] * in_bytes,
            "c_row_bytes": rows["c"] * out_bytes,
            "a_copies": _copies(problem)[0],
            "b_copies": _copies(problem)[1],
            "both_k_major": problem.layout == "nt",
            "long_epilogue": not {"gelu", "residual"}.isdisjoint(problem.epilogue_parts),
        }

    def resources(self, problem: GemmProblem, config: Config) -> Resources:
        """See `Operator.resources`. Shared memory: ring, staging and barriers, plus the compiler's own state."""
        p = {name: int(value) for name, value in config.params.items() if not isinstance(value, str)}
        if "tma" in config.template:
            return _tma_resources(problem, config, p)
        return _pointer_resources(problem, config, p)

    def template_context(self, problem: GemmProblem, config: Config) -> dict[str, Any]:
        """See `Operator.template_context`."""
        parts = problem.epilogue_parts
        context: dict[str, Any] = {
            "formula": _formula(parts),
            "a_transposed": problem.a_transposed,
            "b_transposed": problem.b_transposed,
            "has_bias": "bias" in parts,
            "has_residual": "residual" in parts,
            "has_scale": "scale" in parts,
            "activation": next((part for part in parts if part in ACTIVATIONS), "none"),
            "in_name": problem.dtype,
            "torch_in": str(torch_dtype(problem.dtype)).removeprefix("torch."),
            "torch_out": str(torch_dtype(problem.out_dtype)).removeprefix("torch."),
            "in_bytes": ITEM_BYTES[problem.dtype],
            "out_bytes": ITEM_BYTES[problem.out_dtype],
            "tma": "tma" in config.template,
            "hopper": config.template != "gemm_vanilla",
        }
        return context | (_tma_context(config) if context["tma"] else _pointer_context(problem, config))

    def small_cases(self, problem: GemmProblem, config: Config) -> Sequence[Case[GemmProblem]]:
        """One tile; fewer K steps than stages; tails; odd, even and unequal numbers of tiles for each CTA."""
        p = config.params
        m, n, k, stages = (int(p[name]) for name in ("block_m", "block_n", "block_k", "num_stages"))
        sizes = [
            ((m, n, k), 1),
            ((m - 16, n - 16, 2 * k), 1),
            ((2 * m + 16, n, (stages + 1) * k + 16), 1),
            ((m + 16, n + 16, stages * k), 1),
            ((4 * m + 16, n, 2 * k - 16), 2),
        ]
        if p.get("tail") == "split":  # among three: one tile, two, and one or two after whole rounds
            deep = 2 * (LEAST_STEPS + 1) * k - 16
            sizes += [
                ((m, n, 13 * k), 3),
                ((m - 32, 2 * n, deep), 3),
                ((m - 48, 4 * n - 16, deep), 3),
                ((5 * m, n, deep), 3),
            ]
        return [Case(_small(problem, shape), num_sms) for shape, num_sms in sizes]

    def flops(self, problem: GemmProblem) -> float:
        """Two operations for each product; the epilogue is not counted."""
        return 2.0 * problem.M * problem.N * problem.K

    def bytes_moved(self, problem: GemmProblem) -> float:
        """A, B and the residual read once, C written once."""
        m, n, k = problem.M, problem.N, problem.K
        outputs = 2 if "residual" in problem.epilogue_parts else 1
        return float((m * k + k * n) * ITEM_BYTES[problem.dtype] + outputs * m * n * ITEM_BYTES[problem.out_dtype])

    def predict_us(self, problem: GemmProblem, config: Config, gpu: Gpu) -> float:
        """See `tlxgen.ops.gemm.time_model.gemm_us`."""
        return time_model.gemm_us(problem, config, gpu, self.bytes_moved(problem))

    def inputs(self, problem: GemmProblem, device: torch.device | str, seed: int) -> Tensors:
        """A and B from a normal distribution, in the problem's layout; bias, residual and scale if it has them."""
        dtype, m, n, k = torch_dtype(problem.dtype), problem.M, problem.N, problem.K
        normal = normal_tensors(device, seed)

        tensors: dict[str, Any] = {
            "a": normal((k, m), dtype).T if problem.a_transposed else normal((m, k), dtype),
            "b": normal((n, k), dtype).T if problem.b_transposed else normal((k, n), dtype),
        }
        parts = problem.epilogue_parts
        if "bias" in parts:
            tensors["bias"] = normal((n,), dtype)
        if "residual" in parts:
            tensors["residual"] = normal((m, n), torch_dtype(problem.out_dtype))
        if "scale" in parts:
            tensors["scale"] = 0.5
        return tensors

    def output_like(self, problem: GemmProblem) -> tuple[tuple[int, ...], torch.dtype]:
        """See `Operator.output_like`."""
        return (problem.M, problem.N), torch_dtype(problem.out_dtype)

    def reference(self, problem: GemmProblem, inputs: Tensors) -> torch.Tensor:
        """The result in float64."""
        return _apply_epilogue(problem.epilogue_parts, inputs["a"].double() @ inputs["b"].double(), inputs)

    def eager(self, problem: GemmProblem, inputs: Tensors, out: torch.Tensor | None = None) -> torch.Tensor:
        """Library product (cuBLAS through `torch.mm`), then torch's own kernels; fp32 uses TF32 if torch is told to."""
        import torch

        same_dtype = problem.dtype == problem.out_dtype
        if not problem.epilogue_parts and same_dtype:
            return torch.mm(inputs["a"], inputs["b"], out=out)
        parts = problem.epilogue_parts
        if parts == ("bias",) and same_dtype:
            return torch.addmm(inputs["bias"], inputs["a"], inputs["b"], out=out)
        if not same_dtype:  # a product rounded to the input's dtype cannot be compared with a wider output
            product = _wide_product(inputs["a"], inputs["b"])
        elif parts[:1] == ("bias",):  # the bias inside the product, as nn.Linear adds it: one rounding less
            product, parts = torch.addmm(inputs["bias"], inputs["a"], inputs["b"]), parts[1:]
        else:
            product = torch.mm(inputs["a"], inputs["b"])
        result = _apply_epilogue(parts, product, inputs).to(torch_dtype(problem.out_dtype))
        return result if out is None else out.copy_(result)

    def peer_result(self, problem: GemmProblem, inputs: Tensors) -> torch.Tensor:
        """See `Operator.peer_result`: fp32 goes through TF32."""
        if problem.dtype == "fp32" and not inputs["a"].is_cuda:
            inputs = {**inputs, "a": _rounded_to_tf32(inputs["a"]), "b": _rounded_to_tf32(inputs["b"])}
        return self.eager(problem, inputs)

    def check_call(self, problem: GemmProblem, tensors: Tensors) -> str | None:
        """See `Operator.check_call`."""
        shapes: dict[str, tuple[int, ...]] = {"a": (problem.M, problem.K), "b": (problem.K, problem.N)}
        dtypes = {"a": problem.dtype, "b": problem.dtype}
        if "bias" in problem.epilogue_parts:
            shapes["bias"], dtypes["bias"] = (problem.N,), problem.dtype
        if "residual" in problem.epilogue_parts:
            shapes["residual"], dtypes["residual"] = (problem.M, problem.N), problem.out_dtype
        reason = why_other_tensors(tensors, shapes, dtypes)
        if reason:
            return reason
        if "scale" in problem.epilogue_parts:
            if not isinstance(tensors.get("scale"), int | float):
                return f"the epilogue {problem.epilogue!r} needs scale, a number"
            shapes["scale"] = ()
        surplus = sorted(set(tensors) - set(shapes))
        return f"{surplus[0]} has no place in the epilogue {problem.epilogue!r}" if surplus else None

    def launchable(self, problem: GemmProblem, config: Config, tensors: Tensors, out: torch.Tensor) -> str | None:
        """See `Operator.launchable`: unit strides as the layout says, and the strides that TMA or cp.async need."""
        operands = {
            "a": (tensors["a"], problem.a_transposed),
            "b": (tensors["b"], problem.b_transposed),
            "c": (out, False),
        }
        if "residual" in tensors:
            operands["residual"] = (tensors["residual"], False)
        bias = tensors.get("bias")
        if bias is not None and not bias.is_contiguous():
            return f"bias has stride {bias.stride(0)}; the kernel reads it contiguous"
        if out.stride(0) < out.shape[1] and out.shape[0] > 1:
            return f"c has rows {out.stride(0)} elements apart, which overlap"
        for name, (tensor, transposed) in operands.items():
            refusal = _layout_refusal(name, tensor, transposed) or (
                _tma_refusal(name, tensor, transposed) if "tma" in config.template else None
            )
            if refusal:
                return refusal
        return _cp_async_refusal(problem, operands) if config.template == "gemm_cp_async" else None


def _small(problem: GemmProblem, shape: tuple[int, int, int]) -> GemmProblem:
    """The problem in another size, with the same powers of two up to 16 as divisors of each size."""
    sizes = {}
    for name, size in zip(problem.sizes, shape, strict=True):
        divisor = math.gcd(getattr(problem, name), _KNOWN_DIVISOR)
        sizes[name] = size - (3 * divisor if divisor < 8 else _KNOWN_DIVISOR - divisor)
    return problem.model_copy(update=sizes)


def _layout_refusal(name: str, tensor: torch.Tensor, transposed: bool) -> str | None:
    inner = 0 if transposed else 1
    if tensor.stride(inner) != 1 and tensor.shape[inner] > 1:
        return f"{name} has stride {tensor.stride(inner)} along dimension {inner}; the kernel reads unit strides"
    return None


def _tma_refusal(name: str, tensor: torch.Tensor, transposed: bool) -> str | None:
    pitch = tensor.stride(1 if transposed else 0) * tensor.element_size()
    row = tensor.shape[1] * tensor.element_size()
    if tensor.data_ptr() % Hopper.TMA_ALIGNMENT or pitch % Hopper.TMA_ALIGNMENT or pitch <= 0:
        return f"{name} is not aligned for TMA: base address and row pitch ({pitch} bytes) must be multiples of 16"
    if name == "c" and row % Hopper.TMA_ALIGNMENT:
        return f"c has rows of {row} bytes; a TMA store writes whole 16 bytes and would overrun them"
    return None


#: The compiler's own shared memory: 90 to 190 bytes beside the barriers (measured), and the parts' alignment to 1 KB.
_COMPILER_STATE = 1024

#: Elements. Triton knows only whether 16 divides an integer argument; otherwise it cannot prove the 4 bytes that
#: cp.async moves at least, and rows go through registers.
_KNOWN_DIVISOR = 16


def _copies(problem: GemmProblem) -> tuple[bool, bool]:
    """Whether cp.async can copy A and B."""
    a = problem.M if problem.a_transposed else problem.K
    b = problem.K if problem.b_transposed else problem.N
    return a % _KNOWN_DIVISOR == 0, b % _KNOWN_DIVISOR == 0


def _tma_resources(problem: GemmProblem, config: Config, p: Mapping[str, int]) -> Resources:
    """Ring, staging, barriers, and the compiler's scratch for the epilogue's operands."""
    pingpong = config.template == "gemm_tma_pingpong"
    consumers = 2 if pingpong else p["consumers"]
    rows = p["block_m"] if pingpong else p["block_m"] // consumers
    columns = p["block_n"] // p["epilogue_subtiles"]
    staging = rows * columns * ITEM_BYTES[problem.out_dtype]
    residual = "residual" in problem.epilogue_parts
    ring = p["num_stages"] * (p["block_m"] + p["block_n"]) * p["block_k"] * ITEM_BYTES[problem.dtype]
    barriers = 2 * p["num_stages"] + (consumers if residual else 0)
    # The residual changes layout on its way into the accumulator, through up to a staging tile of each consumer's own.
    scratch = consumers * staging if residual else 0
    scratch = max(scratch, 4 * columns if "bias" in problem.epilogue_parts else 0)
    scratch += _TOLD_BYTES * consumers if config.params.get("tail") == "split" else 0
    return Resources(
        shared_bytes=ring + consumers * staging + scratch + 8 * barriers + _COMPILER_STATE,
        mbarriers=barriers,
        threads=(1 + consumers) * Hopper.WARP_GROUP_THREADS,
        accumulator_registers=rows * p["block_n"] // Hopper.WARP_GROUP_THREADS,
    )


def _pointer_resources(problem: GemmProblem, config: Config, p: Mapping[str, int]) -> Resources:
    """The ring, or the staged tile of C if that is larger."""
    item = ITEM_BYTES[problem.dtype]
    tile_a, tile_b = p["block_m"] * p["block_k"] * item, p["block_n"] * p["block_k"] * item
    stages_a = stages_b = p["num_stages"]
    residual = "residual" in problem.epilogue_parts
    scratch = p["block_m"] * p["block_n"] * (4 if residual else ITEM_BYTES[problem.out_dtype])
    if config.template == "gemm_vanilla":
        # Triton's pipeline: operands that cp.async cannot bring have one buffer; TF32 rounding takes A to registers.
        known = problem.dtype == "fp32" or problem.M == problem.N == problem.K == 1  # 4 bytes each; constant strides
        a_copies, b_copies = (known or copied for copied in _copies(problem))
        stages_a = (stages_a - (problem.dtype == "fp32")) if a_copies else 1
        stages_b = stages_b if b_copies else 1
    ring = stages_a * tile_a + stages_b * tile_b
    threads = 32 * p["num_warps"]
    return Resources(max(ring, scratch) + _COMPILER_STATE, 0, threads, p["block_m"] * p["block_n"] // threads)


def _cp_async_refusal(problem: GemmProblem, operands: Mapping[str, tuple[torch.Tensor, bool]]) -> str | None:
    for name, copied in zip(("a", "b"), _copies(problem), strict=True):
        tensor, transposed = operands[name]
        pitch = tensor.stride(1 if transposed else 0)
        if copied and (pitch % _KNOWN_DIVISOR or tensor.data_ptr() % Hopper.TMA_ALIGNMENT):
            return f"{name} has rows {pitch} elements apart; this cp.async kernel wants a multiple of {_KNOWN_DIVISOR}"
    return None


def _formula(parts: Sequence[str]) -> str:
    """The epilogue as a formula, such as `relu(A @ B + bias)`."""
    text = "A @ B"
    for part in parts:
        if part == "scale":
            text = f"scale * ({text})"
        elif part in ACTIVATIONS:
            text = f"{part}({text})"
        else:
            text = f"{text} + {part}"
    return text


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in fp32 as it was accumulated."""
    import torch

    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers with 10 bits of mantissa."""
    import torch

    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _apply_epilogue(parts: Sequence[str], x: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """The epilogue in torch, in the dtype of `x`."""
    import torch.nn.functional as F  # noqa: N812 - torch's own convention

    for part in parts:
        if part == "scale":
            x = x * inputs["scale"]
        elif part in ACTIVATIONS:
            x = getattr(F, part)(x)
        else:
            x = x + inputs[part].to(x.dtype)
    return x


def _tma_context(config: Config) -> dict[str, Any]:
    p = config.params
    pingpong = config.template == "gemm_tma_pingpong"
    consumers = 2 if pingpong else int(p["consumers"])
    block_m, block_n = int(p["block_m"]), int(p["block_n"])
    rows = block_m if pingpong else block_m // consumers
    epilogue_n = block_n // int(p["epilogue_subtiles"])
    return {
        "consumers": consumers,
        "a_parts": block_m // rows,
        "registers": CONSUMER_REGISTERS[consumers],
        "tile_comment": "one consumer's tile of C, and one step along K"
        if pingpong
        else "one CTA's tile of C, and one step along K",
        "split_tail": p.get("tail") == "split",
        "most_pieces": p.get("pieces"),
        "least_steps": LEAST_STEPS,
        "together": max(1, 256 // epilogue_n),  # pieces that are loaded at once: as many as registers hold
        "turn_barriers": (9, 10),  # named barriers 0 to 7 belong to the compiler
    }


#: setmaxnreg of each consumer warp group, by their number: what 64 K registers leave beside a producer warp group that
#: gives its own back. A single consumer already has the maximum.
CONSUMER_REGISTERS: dict[int, int | None] = {1: None, 2: 240, 3: 160}


def _pointer_context(problem: GemmProblem, config: Config) -> dict[str, Any]:
    a_copies, b_copies = _copies(problem)
    vanilla = config.template == "gemm_vanilla"
    return {
        "a_copies": a_copies,
        "b_copies": b_copies,
        "stages_comment": "depth of Triton's own software pipeline"
        if vanilla
        else "depth of the ring of A and B tiles",
    }


OPERATOR = Gemm()
