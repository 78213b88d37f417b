"""Estimates how evenly attention's tiles are shared out among programs where tiles differ in work, as under a mask.

A tile's work is counted in blocks of keys that it walks over, plus a constant; the program with the most work ends
last. Measured against drawn tiles on an H200, of 35 kernels with many tiles for each program, half come out within
2 %, the worst at 9 % (benchmarks/results/2026-11-30-attention-orders-h200.json).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tlxgen.config import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tlxgen.ops.attention.problem import AttentionProblem

    Numbers = NDArray[np.int64]
    Shares = NDArray[np.float64]

#: Time to load and store a tile, in blocks of keys.
TILE_BLOCKS = 1.5

#: Tiles that are counted at most; the order of rows repeats from head to head.
_MOST_TILES = 1 << 18


class Rows(NamedTuple):
    """The row tiles of one head, and which keys they see."""

    S: int
    kv_len: int
    diagonal: int  #: row i sees keys up to i + this
    window: int
    tile_rows: int
    block_n: int

    @property
    def tiles(self) -> int:
        """Number of row tiles."""
        return -(-self.S // self.tile_rows)

    def work(self, tile: Numbers) -> Shares:
        """Work of row tiles, in blocks of keys."""
        import numpy as np

        row = tile * self.tile_rows
        last = np.minimum(self.kv_len, row + self.diagonal + self.tile_rows)
        first = np.maximum(0, row + self.diagonal + 1 - self.window) // self.block_n if self.window else 0
        walked: Shares = np.maximum(1, -(-last // self.block_n) - first) + TILE_BLOCKS
        return walked


class Walk(NamedTuple):
    """The order of tiles, as the template's `tile_at` has it."""

    order: str
    head_group: int

    def row_tile(self, index: Numbers, tiles: int, row_tiles: int) -> Numbers:
        """The row tile of tile `index`."""
        import numpy as np

        if self.order == "alternating":
            place, head = index % row_tiles, index // row_tiles
            return np.where(head % 2 == 0, row_tiles - 1 - place, place)
        first = index // (self.head_group * row_tiles) * self.head_group
        width = np.minimum(self.head_group, tiles // row_tiles - first)
        return row_tiles - 1 - (index - first * row_tiles) // width


def waste(problem: AttentionProblem, config: Config, tile_rows: int, sms: int) -> float:
    """Time until the last program ends, over the time with equal shares; at least 1.

    Args:
        problem: with a causal mask.
        config: of `attention_tma`, or of another template, whose programs take tiles as they become free.
        tile_rows: rows of q of a tile.
        sms: programs that run at a time.
    """
    p = config.params
    rows = Rows(problem.S, problem.kv_len, problem.diagonal, problem.window, tile_rows, int(p["block_n"]))
    if rows.tiles > _MOST_TILES:
        return 1.0
    heads = min(problem.B * problem.H, max(1, _MOST_TILES // rows.tiles))
    if p.get("schedule") == "static":
        return _static(rows, Walk(str(p["order"]), int(p["head_group"])), heads, sms)
    return _drawn(rows, heads, sms)


@lru_cache(maxsize=1024)
def _static(rows: Rows, walk: Walk, heads: int, sms: int) -> float:
    """`waste` of tiles at a fixed stride."""
    import numpy as np

    tiles = rows.tiles * heads
    index = np.arange(tiles)
    work = rows.work(walk.row_tile(index, tiles, rows.tiles))
    return float(np.bincount(index % min(sms, tiles), work).max() * sms / work.sum())


@lru_cache(maxsize=1024)
def _drawn(rows: Rows, heads: int, sms: int) -> float:
    """`waste` of drawn tiles, long ones first: half a short tile's time at the end, or one long tile."""
    import numpy as np

    work = rows.work(np.arange(rows.tiles))
    share = work.sum() * heads / sms
    return float(max(1.0 + 0.5 * work.min() / share, work.max() / share))
