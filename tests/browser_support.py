"""Pages in Debian's Chromium, for tests of what a reader sees.

The fixture ``chromium`` (``conftest.py``) is one browser a process; every page is a window of its
own, without the cookies, storage and sizes of others. Tests with them are skipped where Chromium or
playwright is missing, and what axe-core checks is skipped without axe-core.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = "DDPLAB_AXE"
"""The variable that names axe-core's axe.min.js."""
RUN_AXE = "() => axe.run(document, {resultTypes: ['violations']})"


@contextmanager
def started_chromium() -> Iterator[Browser]:
    """Starts Chromium without a window and ends it; skips the test where it cannot start."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def open_page(
    chromium: Browser,
    url_or_path: str | Path,
    width: int = 1300,
    height: int = 900,
    dark: bool = False,
) -> Iterator[tuple[Page, list[str]]]:
    """Opens a page in a window of this size, in CSS pixels, and closes it.

    Yields:
        the page, loaded, and what goes wrong in it, a line each: errors on the console, exceptions
        that nobody caught, and requests without an answer. The list grows while the page is open.
    """
    address = url_or_path.absolute().as_uri() if isinstance(url_or_path, Path) else url_or_path
    problems: list[str] = []

    def note_message(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(f"console: {message.text}")

    def note_failure(request: Request) -> None:
        problems.append(f"request: {request.url}: {request.failure}")

    page = chromium.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
    )
    try:
        page.on("console", note_message)
        page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
        page.on("requestfailed", note_failure)
        page.goto(address)
        yield page, problems
    finally:
        page.close()


def axe_violations(page: Page) -> list[str]:
    """Returns what axe-core finds against a page as it is now: a line per element and rule.

    Skips the test where ``AXE`` names no file.
    """
    axe = os.environ.get(AXE, "")
    if not Path(axe).is_file():
        pytest.skip(f"{AXE} does not name the axe.min.js of axe-core")
    page.evaluate(Path(axe).read_text())  # a policy of the page's that forbids scripts lets it in
    found = page.evaluate(RUN_AXE)["violations"]
    return [
        f"{rule['id']}: {element['target']}: {' '.join(element['failureSummary'].split())}"
        for rule in found
        for element in rule["nodes"]
    ]
