"""Choices of experts in the order of experts, and the way back. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Routing", "route"]

_WIDE = frozenset({torch.int32, torch.int64})  # ids that can say how many experts there are


@dataclass(frozen=True)
class Routing:
    """T tokens' choices of k experts each, in order: those of expert 0 first, those of no expert here last."""

    ids: Tensor  #: (T, k), int32 or int64: as they were chosen
    keys: Tensor  #: (T k,), in order: the expert, or what is greater than any here
    rows: Tensor  #: (T k,), int32, in order: whose choice it is
    offs: Tensor  #: (E,), int32: where each expert's choices end
    place: Tensor  #: (T k,), int32: where in that order choice j of token t, t k + j, is


def route(topk_ids: Tensor, experts: int) -> Routing:
    """Of ids (T, k), integers; an expert's choices stay in the order of tokens."""
    ids = topk_ids if topk_ids.dtype in _WIDE else topk_ids.long()
    keys, order = _keys(ids, experts).flatten().sort(stable=True)
    every = torch.arange(max(len(order), experts), dtype=torch.int32, device=ids.device)
    offs = torch.searchsorted(keys, every[:experts].to(keys.dtype), right=True, out_int32=True)
    place = torch.empty_like(every[: len(order)]).scatter_(0, order, every[: len(order)])
    rows = torch.floor_divide(order, topk_ids.shape[1], out=torch.empty_like(place))
    return Routing(ids, keys, rows, offs, place)


def _keys(ids: Tensor, experts: int) -> Tensor:
    """Experts, and what is greater for any that is not here; narrow, since a radix sort passes over them bytewise."""
    within = ids.clamp(-1, experts)
    if experts < 255:
        return within.to(torch.uint8)  # -1 is 255 there
    narrow = torch.int16 if experts < 2**15 else torch.int32
    return within.remainder_(experts + 1).to(narrow)
