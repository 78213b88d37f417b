"""Other libraries' attention, for comparison: cuDNN through torch, and FlashAttention-3 if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tlxgen.ops.attention.problem import AttentionProblem
    from tlxgen.ops.base import Tensors

Function = Callable[["Tensors", "torch.Tensor"], "torch.Tensor"]

#: Modules with FlashAttention-3's forward: built from its repository, or the wheel `fa3-fwd`.
FLASH_3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")


def installed(problem: AttentionProblem) -> dict[str, Function]:
    """Functions of the libraries that can be imported and take the problem, by name."""
    if problem.lse or problem.empty:
        return {}
    found: dict[str, Function] = {}
    if not problem.window and not problem.softcap and (problem.causal == "none" or problem.diagonal == 0):
        found["cudnn"] = _cudnn(problem)
    flash = next((name for name in FLASH_3_MODULES if importlib.util.find_spec(name)), None)
    if flash and (problem.causal != "top-left" or problem.kv_len == problem.S):
        module = importlib.import_module(flash)
        if not problem.window or _has_windows(module):
            found["fa3"] = _flash_3(problem, module)
    return found


def _cudnn(problem: AttentionProblem) -> Function:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(inputs: Tensors, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - the library allocates the output
        scale: Any = inputs.get("scale")
        options: dict[str, Any] = {"is_causal": problem.causal != "none", "enable_gqa": problem.kv_heads != problem.H}
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], scale=scale, **options)

    return call


@lru_cache(maxsize=1)
def _has_windows(module: Any) -> bool:
    """Whether it was built with windows, which only a call tells."""
    import torch

    x = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        module.flash_attn_func(x, x, x, causal=True, window_size=(0, 0))
    except RuntimeError:
        return False
    return True


def _flash_3(problem: AttentionProblem, module: Any) -> Function:
    splits = 0 if problem.kv_len > problem.S else 1  # 0: chosen by its heuristics
    window = (problem.window - 1, 0) if problem.window else (-1, -1)

    def call(inputs: Tensors, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - the library allocates the output
        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))  # as (B, S, H, D)
        result = module.flash_attn_func(
            q,
            k,
            v,
            softmax_scale=inputs.get("scale"),
            causal=problem.causal != "none",
            window_size=window,
            softcap=problem.softcap,
            num_splits=splits,
        )
        attended: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return attended.transpose(1, 2)

    return call
