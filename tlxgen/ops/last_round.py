"""The last round of tiles, split along their loops among all programs: what templates with `tail=split` do on the host.

Tiles of equal work come in rounds of as many as there are programs. Those of a last round that is not full are cut
into pieces of neighbouring blocks of the loop, evenly among the programs, of which one may work on the end of one tile
and the beginning of the next; whoever is the last of a tile's puts its pieces together.
"""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """What becomes of the last round."""

    tiles: int  #: that are split; 0 where little could be won
    sharers: int  #: programs that they are split among

    @property
    def rounds(self) -> float:
        """How much of a round that takes; the tiles left whole take another."""
        return self.tiles / self.sharers if self.sharers else 0.0


def split(
    tiles: int, blocks: int, programs: int, most_pieces: int, least_blocks: int = 1, *, even: bool = False
) -> Split:
    """What is split, as the templates' `arguments` has it.

    Args:
        tiles: all of them.
        blocks: of one tile's loop.
        programs: that run at a time.
        most_pieces: of one tile.
        least_blocks: that are worth a piece, on average.
        even: with as many programs for each tile where that leaves few idle, so that each has one piece.
    """
    left = tiles % programs
    sharers = min(programs, (most_pieces - 1) * left, blocks * left // least_blocks)
    if even and left and 10 * (sharers % left) <= sharers:
        sharers -= sharers % left
    return Split(left, sharers) if 10 * left <= 9 * sharers else Split(0, 0)
