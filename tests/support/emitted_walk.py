"""The work distribution of an emitted kernel, as plain Python functions."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

_FUNCTIONS = ("cut", "turns", "work_at", "pieces_of")


class Walk:
    """The distribution of a kernel that splits its last round; `programs` is the size of the grid."""

    def __init__(self, text: str) -> None:
        self.program, self.programs = 0, 1
        tl = SimpleNamespace(
            program_id=lambda _: self.program,
            num_programs=lambda _: self.programs,
            where=lambda condition, one, other: one if condition else other,
            cdiv=lambda a, b: -(-a // b),
        )
        self.names: dict[str, Any] = {"tl": tl}
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
                node.decorator_list = []
                exec(compile(ast.Module([node], []), "emitted", "exec"), self.names)

    def work(self, program: int, *sizes: int) -> list[tuple[int, int, int]]:
        """Tile, first block and end of each turn of a program."""
        self.program = program
        return [self.names["work_at"](turn, *sizes) for turn in range(self.names["turns"](*sizes))]

    def pieces(self, tile: int, *sizes: int) -> range:
        """The numbers of a split tile's pieces."""
        first, count = self.names["pieces_of"](tile, *sizes)
        return range(first, first + count)

    def pieces_by_tile(
        self, programs: int, tiles: int, whole_tiles: int, sharers: int, blocks: int, most: int
    ) -> dict[int, list[int]]:
        """The numbers of each split tile's pieces; asserts that every block of every tile is done exactly once."""
        self.programs, sizes = programs, (tiles, whole_tiles, sharers, blocks)
        done: dict[int, list[tuple[int, int]]] = {}
        numbers: dict[int, list[int]] = {}
        for program in range(programs):
            for index, first, end in self.work(program, *sizes):
                done.setdefault(index, []).append((first, end))
                if index >= whole_tiles:
                    numbers.setdefault(index - whole_tiles, []).append(program + index - whole_tiles)
        assert sorted(done) == list(range(tiles))
        for index, pieces in done.items():
            assert [0, *(end for _, end in pieces)] == [*(first for first, _ in pieces), blocks], "gaps or overlaps"
            assert all(first < end for first, end in pieces), "empty piece"
            assert len(pieces) == 1 or index >= whole_tiles

        assert len(numbers) == tiles - whole_tiles
        for tile, found in numbers.items():
            assert found == list(self.pieces(tile, tiles - whole_tiles, sharers, blocks))
            assert len(found) <= most
        each = [number for found in numbers.values() for number in found]
        assert len(set(each)) == len(each), "two pieces with one number"
        return numbers
