"""Cells that only the staff sees: students do not get them, and a report leaves them out."""

from __future__ import annotations

import json

STAFF = "staff"
"""Tag of these cells, which hold answers."""


def without_answers(text: str) -> str:
    """Returns a notebook without the cells of the staff."""
    notebook = json.loads(text)
    notebook["cells"] = [
        cell for cell in notebook["cells"] if STAFF not in cell["metadata"].get("tags", ())
    ]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
