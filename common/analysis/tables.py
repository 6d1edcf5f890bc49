"""Tables for notebooks: shown as HTML in JupyterLab and as Markdown in the report."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd


class Table:
    """A data frame as a notebook's output; ``formats`` maps a column to a format string."""

    def __init__(self, frame: pd.DataFrame, formats: Mapping[str, str] | None = None) -> None:
        formats = formats or {}
        self.cells = [
            [_text(v, formats.get(c, "{}")) for c, v in zip(frame.columns, row, strict=True)]
            for row in frame.itertuples(index=False)
        ]
        self.columns = [str(column) for column in frame.columns]

    def _repr_markdown_(self) -> str:
        columns = zip(self.columns, *self.cells, strict=True)
        lines = [self.columns, [_rule(*column) for column in columns], *self.cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _rule(header: str, *cells: str) -> str:
    """The line between header and cells, as long as the column is wide: where a table does not fit
    on a line, pandoc gives its columns these widths. Names stand on the left, numbers on the right.

    >>> _rule("worst case", "1.5%", "12.5%"), _rule("", "balanced", "replay")
    ('-------:', ':----------')
    """
    width = max(map(len, (*cells, *header.split())), default=0) + 3  # and what is left around them
    names = all(cell[:1].isalpha() for cell in cells)
    return f":{'-' * (width - 1)}" if names else f"{'-' * (width - 1)}:"


def size_text(size_bytes: float) -> str:
    """A size in the largest binary unit that fits: ``64 KiB``, ``1.5 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:g} B"


def _text(value: object, form: str) -> str:
    return "–" if pd.isna(value) else form.format(value)
