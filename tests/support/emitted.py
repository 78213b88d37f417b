"""Emitted kernels that the simulator's tests make slips in: one of each template that synchronises by hand."""

from __future__ import annotations

from tlxgen import devices, ops
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.config import Config, Value
from tlxgen.problem import Problem
from tlxgen.simulator.machine.machine import Limits
from tlxgen.space.candidates import candidates

H200 = devices.target("h200")
GEMM, ATTENTION, VECTOR_ADD = ops.get("gemm"), ops.get("attention"), ops.get("vector_add")
ATTENTION_VARLEN = ops.get("attention_varlen")
GROUPED_GEMM = ops.get("grouped_gemm")

#: Wrong kernels may run long; right ones take a hundredth of this.
LIMITS = Limits(steps=20_000, seconds=20)


def config(problem: Problem, template: str, **changes: int) -> Config:
    """The model's favourite of a template, with other values."""
    favourite = candidates(problem, H200, (template,))[0]
    return Config(template=template, params={**favourite.params, **changes})


PROBLEM = GEMM.problem((4096, 4096, 4096))
PINGPONG = emit(GEMM, PROBLEM, config(PROBLEM, "gemm_tma_pingpong", block_m=64, block_n=128, num_stages=6))
COOPERATIVE = emit(
    GEMM,
    PROBLEM,
    config(PROBLEM, "gemm_tma_cooperative", block_m=128, block_n=128, consumers=2, num_stages=4, epilogue_subtiles=2),
)
COOPERATIVE_SPLIT_PROBLEM = GEMM.problem((16, 1280, 8192), layout="nt")
COOPERATIVE_SPLIT = emit(
    GEMM,
    COOPERATIVE_SPLIT_PROBLEM,
    Config(
        template="gemm_tma_cooperative",
        params={
            **COOPERATIVE.config.params,
            "block_m": 64,
            "block_n": 64,
            "consumers": 1,
            "num_stages": 4,
            "epilogue_subtiles": 1,
            "pdl": "off",
            "tail": "split",
            "pieces": 8,
        },
    ),
)
CP_ASYNC = emit(GEMM, PROBLEM, config(PROBLEM, "gemm_cp_async", block_m=64, block_n=64, num_stages=4))
RESIDUAL_PROBLEM = GEMM.problem((4096, 4096, 4096), epilogue="residual")
RESIDUAL = emit(
    GEMM,
    RESIDUAL_PROBLEM,
    config(
        RESIDUAL_PROBLEM,
        "gemm_tma_cooperative",
        block_m=128,
        block_n=128,
        consumers=2,
        num_stages=3,
        epilogue_subtiles=1,
    ),
)
VECTOR_PROBLEM = VECTOR_ADD.problem((2**20,))
VECTOR = emit(VECTOR_ADD, VECTOR_PROBLEM, config(VECTOR_PROBLEM, "vector_add_tma", block=1024, num_stages=2))

ATTENTION_PROBLEM = ATTENTION.problem((4, 8, 4096, 64), kv_heads=4, causal="bottom-right")
FLASH = emit(
    ATTENTION,
    ATTENTION_PROBLEM,
    Config(
        template="attention_tma",
        params={
            "block_n": 64,
            "carry": "wide",
            "consumers": 2,
            "kv_stages": 2,
            "pingpong": "values",
            "q_stages": 2,
            "staging": "own",
            "sums": "rows",
            "rescale": "exact",
            "overlap": "softmax",
            "schedule": "static",
            "head_group": 4,
            "first_load": "q",
            "ranges": "tile",
            "tail": "whole",
            "order": "long_first",
        },
    ),
)

FLASH_DYNAMIC = emit(
    ATTENTION,
    ATTENTION_PROBLEM,
    Config(
        template="attention_tma",
        params={
            "block_n": 64,
            "carry": "pairs",
            "consumers": 2,
            "kv_stages": 2,
            "pingpong": "off",
            "q_stages": 2,
            "staging": "own",
            "sums": "lanes",
            "rescale": "lazy",
            "overlap": "softmax",
            "schedule": "dynamic",
            "head_group": 4,
            "first_load": "q",
            "ranges": "own",
            "tail": "whole",
            "order": "long_first",
        },
    ),
)

FLASH_SPLIT_PROBLEM = ATTENTION.problem((4, 8, 4096, 64), kv_heads=4)
FLASH_SPLIT = emit(
    ATTENTION,
    FLASH_SPLIT_PROBLEM,
    Config(
        template="attention_tma",
        params={**FLASH.config.params, "pingpong": "off", "sums": "lanes", "tail": "split"},
    ),
)

VARLEN_PROBLEM = ATTENTION_VARLEN.problem((8, 8, 8 * 1024, 64), kv_heads=4, max_q=2048, causal="bottom-right", lse=True)
VARLEN = emit(
    ATTENTION_VARLEN,
    VARLEN_PROBLEM,
    Config(
        template="attention_varlen",
        params={
            "block_n": 64,
            "carry": "wide",
            "consumers": 2,
            "kv_stages": 2,
            "pingpong": "scores",
            "q_stages": 1,
            "staging": "q",
            "sums": "lanes",
            "rescale": "exact",
            "overlap": "softmax",
            "head_group": 4,
            "first_load": "q",
            "ranges": "tile",
        },
    ),
)

DECODE_PROBLEM = ATTENTION.problem((16, 32, 2, 64), kv_heads=8, kv_len=8192, causal="bottom-right", lse=True)
DECODE = emit(
    ATTENTION,
    DECODE_PROBLEM,
    Config(template="attention_decode", params={"block_n": 64, "kv_stages": 2, "splits": 3}),
)

GROUPED_PROBLEM = GROUPED_GEMM.problem((8, 8192, 4096, 4096), epilogue="bias")
GROUPED_PARAMS: dict[str, Value] = {
    "walk": "after",
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "num_stages": 3,
    "group": 8,
    "epilogue_subtiles": 1,
}
GROUPED = emit(
    GROUPED_GEMM, GROUPED_PROBLEM, Config(template="grouped_gemm_tma", params={**GROUPED_PARAMS, "store": "tma"})
)
WEIGHT_GRADIENT_PROBLEM = GROUPED_GEMM.problem((8, 8192, 4096, 4096), form="2d2d")
WEIGHT_GRADIENT = emit(
    GROUPED_GEMM,
    WEIGHT_GRADIENT_PROBLEM,
    Config(template="grouped_gemm_tma", params={**GROUPED_PARAMS, "block_m": 64, "store": "tma"}),
)

SOURCES = [
    *(PINGPONG, COOPERATIVE, COOPERATIVE_SPLIT, CP_ASYNC, RESIDUAL),
    *(GROUPED, WEIGHT_GRADIENT),
    *(FLASH, FLASH_DYNAMIC, FLASH_SPLIT, DECODE, VARLEN, VECTOR),
]


#: Parameters by which kernels of one template differ here.
_TOLD = (("schedule", "dynamic"), ("tail", "split"))


def identify(source: KernelSource) -> str:
    """For test ids."""
    epilogue = getattr(source.problem, "epilogue", "none")
    form = getattr(source.problem, "form", "none")
    words = [source.config.template, *(word for word in (form, epilogue) if word != "none")]
    words += [str(value) for name, value in source.config.params.items() if (name, value) in _TOLD]
    return "+".join(words)
