"""Two notebooks of recorded runs, executed once for all that looks at notebooks and documents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.analysis.runs import recorded_assignment
from common.report.notebooks import execute_notebooks
from common.runtime.paths import project_root

EXECUTED = ("assignment1_ddp", "assignment4_text_scaling")


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the executed notebooks by name. The guard executes all of them, on the same data."""
    folder = tmp_path_factory.mktemp("executed")

    def execute(name: str) -> Path:
        run_dir = recorded_assignment(name.split("_")[0])
        notebook = project_root() / "notebooks" / f"{name}.ipynb"
        parameters = {"run_dir": str(run_dir)}
        [[path], _] = execute_notebooks([notebook], folder, parameters, with_answers=True)
        return path

    before = Path.cwd()
    with ThreadPoolExecutor(2) as pool:
        paths = dict(zip(EXECUTED, pool.map(execute, EXECUTED), strict=True))
    assert Path.cwd() == before  # a notebook's folder is its kernel's alone
    return paths
