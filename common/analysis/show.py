"""Shows a data frame or a few facts as a table with titles, units and formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import pandas as pd


class Table:
    """A data frame as a notebook's output.

    ``formats`` maps a column to a format string or to a function that returns text; columns of
    ``left`` are set on the left, whatever is in them.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        formats: Mapping[str, str | Callable[[float], str]] | None = None,
        left: Collection[str] = (),
    ) -> None:
        formats = formats or {}
        self.left = left
        self.cells = [
            [_text(v, formats.get(c, "{}")) for c, v in zip(frame.columns, row, strict=True)]
            for row in frame.itertuples(index=False)
        ]
        self.columns = [str(column) for column in frame.columns]

    def _repr_markdown_(self) -> str:
        columns = zip(self.columns, *self.cells, strict=True)
        rules = [_rule(*column, left=column[0] in self.left) for column in columns]
        lines = [self.columns, rules, *self.cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def facts(values: Mapping[str, object]) -> Table:
    """Returns a table of what there is and its value, for the few numbers that a text is about."""
    frame = pd.DataFrame({"": values.keys(), "value": [str(value) for value in values.values()]})
    return Table(frame, left=("", "value"))


def _rule(header: str, *cells: str, left: bool = False) -> str:
    """Returns the line between header and cells, as long as the column is wide.

    Where a table does not fit on a line, pandoc gives its columns these widths. Names stand on the
    left, numbers on the right.

    >>> _rule("worst case", "1.5%", "12.5%"), _rule("", "balanced", "replay")
    ('-------:', ':----------')
    """
    width = max(map(len, (*cells, *header.split())), default=0) + 3  # and what is left around them
    filled = [cell for cell in cells if cell not in ("", "–")]
    names = left or all(cell[:1].isalpha() for cell in filled or cells)
    return f":{'-' * (width - 1)}" if names else f"{'-' * (width - 1)}:"


def _text(value: object, form: str | Callable[[float], str]) -> str:
    if pd.isna(value):
        return "–"
    text = form(value) if callable(form) else form.format(value)
    return re.sub(r"^-(?=0(\.0*)?%?$)", "", text)  # nothing is less than zero by nothing
