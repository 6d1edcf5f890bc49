"""``ddplab study explore``: how long after a slider's move the explorer shows new data.

In the kernel: from a slider's new place to the figures' data, of every system and slider. In the
browser: from the move until the last of the figures that it changes is painted, over the server and
the kernel's connection. It needs chromium and the package playwright.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from common.errors import UserError
from common.explore.bucket_tab import BucketTab
from common.explore.known_systems import known_systems
from common.explore.server import serving
from common.report.progress import StageProgress
from common.runtime.recorder import require_positive
from common.studies.study import study_run, with_verdicts

KERNEL, BROWSER = "kernel", "browser"
AIMS = {KERNEL: (0.5, 100.0), BROWSER: (0.95, 300.0)}
"""Place of measurement → the quantile that is judged, and the milliseconds it should stay under."""
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
DRAWN = ".js-plotly-plot .main-svg .xtick"
QUIET_MS = 500
MOVE = """([place, index, quiet]) => new Promise((resolve) => {
    const input = document.querySelectorAll(".ddplab-slider input")[place];
    const figures = Array.from(document.querySelectorAll(".js-plotly-plot"));
    const start = performance.now();
    let seen = null, timer;
    const finish = () => {
        figures.forEach((one) => one.removeListener("plotly_afterplot", drawn));
        resolve(seen);
    };
    const drawn = () => requestAnimationFrame(() => requestAnimationFrame(() => {
        seen = performance.now() - start;
        clearTimeout(timer);
        timer = setTimeout(finish, quiet);
    }));
    figures.forEach((one) => one.on("plotly_afterplot", drawn));
    timer = setTimeout(finish, 4 * quiet);
    input.value = index;
    input.dispatchEvent(new Event("input", { bubbles: true }));
})"""
"""Moves a slider; returns when the last figure that it changed was painted, or null for none."""


@dataclass(frozen=True)
class ExploreStudy:
    """Settings of the study."""

    moves: int = 4
    """Of each slider on each system."""
    systems: int = 4
    """The first systems of the list."""

    def __post_init__(self) -> None:
        require_positive(self, "moves", "systems")


def run_study(study: ExploreStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures and judges; returns the run directory."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise UserError("study explore needs chromium, which is not installed")
    if find_spec("playwright") is None:
        raise UserError("study explore needs playwright: uv sync --group dev")
    with study_run("explore", study, output_dir, progress, backend=None, ranks=1) as run:
        with progress.stage("in the kernel"):
            rows = list(in_kernel(study))
        with progress.stage("in the browser"):
            rows += in_browser(study, chromium)
        samples = pd.DataFrame(rows)
        run.write_table("samples.csv", samples)
        verdicts = judge(samples)
        run.write_table("verdicts.csv", verdicts)
    progress.say(verdicts.to_string(index=False, float_format="%.1f"))
    return run.path


def in_kernel(study: ExploreStudy) -> Iterator[dict]:
    """Yields the time of each move: a slider's new place until the figures have new data."""
    systems = dict(list(known_systems().items())[: study.systems])
    tab = BucketTab(systems)
    for system in systems:
        tab.open(system)
        for name, slider in tab.sliders.items():
            tab.start_anew()
            for move, index in enumerate(places(len(slider.values), slider.index, study.moves)):
                start = time.perf_counter()
                slider.index = index
                elapsed_ms = (time.perf_counter() - start) * 1e3
                yield sample(KERNEL, system, name, move, elapsed_ms)


def in_browser(study: ExploreStudy, chromium: str) -> list[dict]:
    """Returns the time of each move until it is seen."""
    from playwright.sync_api import sync_playwright

    rows = []
    with serving() as served, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=list(QUIET))
        page = browser.new_page(viewport={"width": 1920, "height": 1080})
        page.set_default_timeout(60_000)
        page.goto(served.url)
        page.wait_for_selector(DRAWN)
        options = page.get_by_label("Start from").locator("option").all_inner_texts()
        for system in options[: study.systems]:
            page.get_by_label("Start from").select_option(label=system)
            page.wait_for_timeout(2000)  # until the system is open
            for place, slider in enumerate(page.locator(".ddplab-slider").all()[:6]):
                label = slider.locator("label").inner_text()
                page.get_by_role("button", name="Back to the system").click()
                page.wait_for_timeout(500)
                field = slider.locator("input")
                most, at = int(field.get_attribute("max")), int(field.input_value())
                for move, index in enumerate(places(most + 1, at, study.moves)):
                    elapsed_ms = page.evaluate(MOVE, [place, index, QUIET_MS])
                    if elapsed_ms is not None:  # a system without contention does not change
                        name = label.split(",")[0]
                        rows.append(sample(BROWSER, system, name, move, elapsed_ms))
        browser.close()
    return rows


def places(count: int, at: int, moves: int) -> Iterator[int]:
    """Yields places of a slider with ``count`` of them, each another one than the last."""
    for _ in range(moves):
        at = (at + 1) % count
        yield at


def sample(where: str, system: str, slider: str, move: int, time_ms: float) -> dict:
    """Returns a row of ``samples.csv``."""
    return {
        "where": where,
        "system": system,
        "slider": slider,
        "move": move,
        "time_ms": time_ms,
    }


def judge(samples: pd.DataFrame) -> pd.DataFrame:
    """Compares the times with what is aimed at; returns a row for kernel and browser."""
    rows = []
    for where, (quantile, aim_ms) in AIMS.items():
        times = samples.loc[samples["where"] == where, "time_ms"]
        rows.append(
            {
                "promise": f"{where}: {quantile:.0%} of {len(times)} moves (ms)",
                "at_most": aim_ms,
                "found": times.quantile(quantile),
                "median": times.median(),
                "largest": times.max(),
            }
        )
    return with_verdicts(pd.DataFrame(rows))
