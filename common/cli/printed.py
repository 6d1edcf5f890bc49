"""Prints tables of the analysis and lines of text on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from common.analysis.show import Table

GAP = 2
"""Columns of a terminal between two of a table."""


def print_lines(console: Console, lines: Iterable[str], before: str = "") -> None:
    """Prints lines as they are, each after ``before``; the terminal breaks those that are long."""
    for line in lines:
        console.print(f"{before}{line}", highlight=False, markup=False, soft_wrap=True)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Prints what has to be known of the numbers above, as a list."""
    print_lines(console, notes, before="- ")


def console_of(least: int) -> Console:
    """Returns the terminal, taken to have at least so many columns."""
    from rich.console import Console

    return Console(width=max(Console().width, least))


def print_grid(table: Table, least: int = 0) -> None:
    """Prints a table, its first column on the left.

    Args:
        table: a table as notebooks have it.
        least: number of columns that a narrow terminal is taken to have: longer cells are broken
            there; by default no cell is.
    """
    from rich import box
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
    console_of(least or whole).print(grid)
