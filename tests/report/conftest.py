"""An executed notebook of recorded runs and a made-up one, for all that looks at documents."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from common.analysis.runs import recorded_assignment
from common.report.notebooks import execute_notebooks
from common.runtime.paths import project_root

RECORDED, MADE_UP = "assignment1_ddp", "assignment4_made_up"
ROWS = [" | ".join(map(str, range(first, first + 12))) for first in (1, 1001)]
WIDE = f"| {ROWS[0]} |\n|{' ---: |' * 12}\n| {ROWS[1]} |"
"""A table that is wider than a narrow window."""


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the executed notebooks by name. The guard executes all that are recorded."""
    folder, new = tmp_path_factory.mktemp("executed"), nbformat.v4
    made_up = new.new_notebook(metadata={"language_info": {"name": "python"}})
    table = new.new_output("display_data", {"text/markdown": WIDE})
    made_up.cells = [
        new.new_markdown_cell("# Made up\n\nA speedup is $S_n = T_1 / T_n$.\n\n## A wide table"),
        new.new_code_cell("", outputs=[table]),
    ]
    nbformat.write(made_up, folder / f"{MADE_UP}.ipynb")
    notebook = project_root() / "notebooks" / f"{RECORDED}.ipynb"
    parameters = {"run_dir": str(recorded_assignment("assignment1"))}
    [[path], _] = execute_notebooks([notebook], folder, parameters, with_answers=True)
    return {RECORDED: path, MADE_UP: folder / f"{MADE_UP}.ipynb"}
