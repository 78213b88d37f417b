"""How evenly tiles of attention come to programs where tiles differ in work, as they do under a causal mask.

A tile's work is counted in blocks of keys that it walks over, and a constant; the program that has the most ends last.
Of 116 kernels with many tiles for each program on an H200, half come out within 2 % of what was measured beside drawn
tiles, the worst at 11 % (benchmarks/results/2026-11-30-attention-orders-h200.json).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tlxgen.config import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tlxgen.ops.attention.problem import AttentionProblem

    Numbers = NDArray[np.int64]
    Shares = NDArray[np.float64]

#: Blocks of keys that loading and storing a tile takes as long as.
TILE_BLOCKS = 1.5

#: More tiles than this are not counted out: their heads repeat.
_MOST_TILES = 1 << 18


class Rows(NamedTuple):
    """The row tiles of one head, and what each walks over."""

    S: int
    kv_len: int
    diagonal: int  #: row i sees keys up to i + this
    window: int
    tile_rows: int
    block_n: int

    @property
    def tiles(self) -> int:
        """How many there are."""
        return -(-self.S // self.tile_rows)

    def work(self, tile: Numbers) -> Shares:
        """What tiles take, by number, in blocks of keys."""
        import numpy as np

        row = tile * self.tile_rows
        last = np.minimum(self.kv_len, row + self.diagonal + self.tile_rows)
        first = np.maximum(0, row + self.diagonal + 1 - self.window) // self.block_n if self.window else 0
        walked: Shares = np.maximum(1, -(-last // self.block_n) - first) + TILE_BLOCKS
        return walked


class Walk(NamedTuple):
    """In which order programs get tiles."""

    order: str
    head_group: int
    coprime: bool

    def programs(self, row_tiles: int, tiles: int, sms: int) -> int:
        """How many there are, as the template's `arguments` has it."""
        most = min(sms, tiles)
        return next(n for n in range(most, 0, -1) if math.gcd(n, row_tiles) == 1) if self.coprime else most

    def row_tile(self, index: Numbers, tiles: int, row_tiles: int) -> Numbers:
        """Which tile of its head tile `index` of all is, as the template's `tile_at` has it."""
        import numpy as np

        place, head = index % row_tiles, index // row_tiles
        if self.order == "affine":
            return place * stride(row_tiles) % row_tiles
        if self.order == "alternating":
            return np.where(head % 2 == 0, row_tiles - 1 - place, place)
        first = index // (self.head_group * row_tiles) * self.head_group
        width = np.minimum(self.head_group, tiles // row_tiles - first)
        return row_tiles - 1 - (index - first * row_tiles) // width


def stride(row_tiles: int) -> int:
    """Between row tiles that follow each other in affine order, as the template's `arguments` has it."""
    return next(n for n in range(round(0.618 * row_tiles), 2 * row_tiles + 2) if math.gcd(n, row_tiles) == 1)


def waste(problem: AttentionProblem, config: Config, tile_rows: int, sms: int) -> float:
    """Time until the last program ends, over that of even shares; 1 at the least.

    Args:
        problem: with a causal mask.
        config: of `attention_tma`, or of plain Triton, whose programs come as they are free.
        tile_rows: rows of q of a tile.
        sms: programs that run at a time.
    """
    p = config.params
    block_n = int(p["block_n"])
    rows = Rows(problem.S, problem.kv_len, problem.diagonal, problem.window, tile_rows, block_n)
    heads = min(problem.B * problem.H, max(1, _MOST_TILES // rows.tiles))
    if rows.tiles > _MOST_TILES:
        return 1.0
    if p.get("schedule") == "static":
        return _dealt(rows, Walk(str(p["order"]), int(p["head_group"]), p["programs"] == "coprime"), heads, sms)
    return _drawn(rows, heads, sms)


@lru_cache(maxsize=1024)
def _dealt(rows: Rows, walk: Walk, heads: int, sms: int) -> float:
    """Tiles come at a fixed stride."""
    import numpy as np

    tiles = rows.tiles * heads
    programs = walk.programs(rows.tiles, tiles, sms)
    index = np.arange(tiles)
    work = rows.work(walk.row_tile(index, tiles, rows.tiles))
    return float(np.bincount(index % programs, work).max() * sms / work.sum())


@lru_cache(maxsize=1024)
def _drawn(rows: Rows, heads: int, sms: int) -> float:
    """Tiles come to whoever is free, long ones first: in the end half a short one is waited for; none is divided."""
    import numpy as np

    work = rows.work(np.arange(rows.tiles))
    share = work.sum() * heads / sms
    return float(max(1.0 + 0.5 * work.min() / share, work.max() / share))
