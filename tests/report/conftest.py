"""A notebook of recorded runs and a made-up one, executed for all that looks at documents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from common.analysis.runs import recorded_assignment
from common.report.notebooks import execute_notebooks
from common.runtime.paths import project_root

RECORDED, MADE_UP = "assignment1_ddp", "assignment4_made_up"
WIDE = r"""
from IPython.display import Markdown

lines = [" | ".join(map(str, range(first, first + 12))) for first in (1, 1001)]
Markdown(f"| {lines[0]} |\n|{' ---: |' * 12}\n| {lines[1]} |")
"""
"""Shows a table that is wider than a narrow window."""


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the executed notebooks by name. The guard executes all that are recorded."""
    folder, made = tmp_path_factory.mktemp("executed"), tmp_path_factory.mktemp("made")
    new = nbformat.v4
    made_up = new.new_notebook(metadata={"language_info": {"name": "python"}})
    made_up.cells = [
        new.new_markdown_cell("# Made up\n\nA speedup is $S_n = T_1 / T_n$.\n\n## A wide table"),
        new.new_code_cell("run_dir = ''", metadata={"tags": ["parameters"]}),
        new.new_code_cell(WIDE),
    ]
    nbformat.write(made_up, made / f"{MADE_UP}.ipynb")
    notebooks = [project_root() / "notebooks" / f"{RECORDED}.ipynb", made / f"{MADE_UP}.ipynb"]
    parameters = {"run_dir": str(recorded_assignment("assignment1"))}

    def execute(notebook: Path) -> Path:
        [[path], _] = execute_notebooks([notebook], folder, parameters, with_answers=True)
        return path

    before = Path.cwd()
    with ThreadPoolExecutor(2) as pool:
        paths = dict(zip((RECORDED, MADE_UP), pool.map(execute, notebooks), strict=True))
    assert Path.cwd() == before  # a notebook's folder is its kernel's alone
    return paths
