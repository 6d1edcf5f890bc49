"""Prints a table of the analysis on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.analysis.show import Table

GAP = 2
"""Columns of a terminal between two of a table."""


def print_grid(table: Table, least: int = 0) -> None:
    """Prints a table, its first column on the left.

    Args:
        table: a table as notebooks have it.
        least: number of columns that a narrow terminal is taken to have: longer cells are broken
            there; by default no cell is.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for number, title in enumerate(table.columns):
        is_text = not number or any(row[number][:1].isalpha() for row in table.cells)
        grid.add_column(title, justify="left" if is_text else "right", no_wrap=not least)
    for row in table.cells:
        grid.add_row(*map(Text, row))
    columns = zip(table.columns, *table.cells, strict=True)
    whole = sum(max(map(len, column)) + GAP for column in columns) + GAP
    console = Console()
    Console(width=max(console.width, least or whole)).print(grid)
