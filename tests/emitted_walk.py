"""Functions of an emitted kernel that say who works on what, as plain Python."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

_FUNCTIONS = ("cut", "turns", "work_at", "pieces_of")


class Walk:
    """Of a kernel whose last round is split. Set `programs` to the size of the grid."""

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
        """Tile, and blocks of its loop from where to where, of each turn."""
        self.program = program
        return [self.names["work_at"](turn, *sizes) for turn in range(self.names["turns"](*sizes))]

    def pieces(self, tile: int, *sizes: int) -> range:
        """The numbers of a split tile's pieces."""
        first, count = self.names["pieces_of"](tile, *sizes)
        return range(first, first + count)
