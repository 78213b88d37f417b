"""Tables on stdout."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

#: Columns of numbers, which are right-aligned.
_NUMBERS = {"µs", "count", "ratio", "stored", "margin"}


def empty(*columns: str) -> Table:
    """A table with these columns and no rows."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    return table


def show(table: Table) -> None:
    """Prints a table; into a pipe without folding, so that `grep` finds whole lines."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = max(80, console.measure(table, options=console.options.update(max_width=10_000)).maximum)
    console.print(table)
