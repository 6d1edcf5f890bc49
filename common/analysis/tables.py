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
        lines = [self.columns, ["---:"] * len(self.columns), *self.cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def size_text(size_bytes: float) -> str:
    """A size in the largest binary unit that fits: ``64 KiB``, ``1.5 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:g} B"


def _text(value: object, form: str) -> str:
    return "–" if pd.isna(value) else form.format(value)
