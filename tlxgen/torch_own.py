"""Torch's functions as they are before a program puts tlxgen's in their place.

    torch.nn.functional.scaled_dot_product_attention = tlxgen.functional.scaled_dot_product_attention

is how drop-ins are used. What they pass on must not come back to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

__all__ = ["add", "grouped_mm", "linear", "matmul", "scaled_dot_product_attention"]

add = torch.add
matmul = torch.matmul
#: Public since torch 2.10; None before torch 2.8, which has none.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
