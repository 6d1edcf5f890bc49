"""The explorer's notebook in JupyterLab, where figures are made before a page asks for them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser_support import open_page
from command_line import ROOT

from common.explore.server import HOST, port_to_use

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TOKEN = "lab"
POINTS = """() => {
    const figures = Array.from(document.querySelectorAll(".ddplab-caps .js-plotly-plot"));
    return figures.some((one) => one.data.some((trace) => trace.x.length > 10));
}"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.xdist_group("explore")]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """Starts JupyterLab on a copy of the notebook; yields the notebook's address."""
    notebook = tmp_path / "explore.ipynb"
    notebook.write_bytes((ROOT / "notebooks" / "explore.ipynb").read_bytes())
    port = port_to_use(0)
    flags = [f"--ServerApp.token={TOKEN}", f"--ServerApp.root_dir={tmp_path}", "--allow-root"]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if "is running at" in line:
            break
    yield f"http://{HOST}:{port}/lab/tree/explore.ipynb?token={TOKEN}"
    process.terminate()
    process.communicate(timeout=60)


def test_figures_show_the_system_that_it_starts_from(lab: str, chromium: Browser) -> None:
    from playwright.sync_api import expect

    with open_page(chromium, lab, width=1500, height=1100) as (page, _):
        page.set_default_timeout(90_000)
        page.wait_for_selector(".jp-Notebook")
        page.wait_for_selector("text=Python 3")
        # A kernel that is still starting may be asked for cells that it then never runs.
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']")
        page.get_by_role("menuitem", name="Run", exact=True).first.click()
        page.get_by_text("Run All Cells", exact=True).first.click()
        page.wait_for_function(POINTS)
        expect(page.get_by_role("textbox", name="as a command")).to_have_value(
            re.compile("predict")
        )
