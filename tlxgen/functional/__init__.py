"""Drop-in replacements for torch functions: a kernel where one takes the call, else torch; with gradients.

    >>> from tlxgen import functional as F
    >>> out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # doctest: +SKIP

Kernels come from `tlxgen.get_kernel`. In a graph of `torch.compile` each call is an operator of `torch.library`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tlxgen.functional.grouped import grouped_mm
from tlxgen.functional.moe import fused_moe
from tlxgen.functional.products import linear, matmul
from tlxgen.functional.scaled import scaled_grouped_mm
from tlxgen.functional.sdpa import attention, scaled_dot_product_attention
from tlxgen.functional.sums import add

if TYPE_CHECKING:
    from tlxgen.functional.varlen import varlen_attn

__all__ = [
    "add",
    "attention",
    "fused_moe",
    "grouped_mm",
    "linear",
    "matmul",
    "scaled_dot_product_attention",
    "scaled_grouped_mm",
    "varlen_attn",
]


def __getattr__(name: str) -> Any:
    """`varlen_attn`, imported when it is first asked for: torch's own version imports torch's compiler (PEP 562)."""
    if name != "varlen_attn":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tlxgen.functional.varlen import varlen_attn

    globals()[name] = varlen_attn
    return varlen_attn
