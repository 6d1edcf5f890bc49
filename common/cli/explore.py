"""``ddplab explore``: the model with sliders, as a page on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import webbrowser
from dataclasses import dataclass
from typing import Annotated

import tyro

from common.errors import NotYetWritten


@dataclass(frozen=True)
class Explore:
    """Play with the model of a step, and with micro-batches, in a browser.

    Sliders move latency, bandwidth, ranks, bucket cap, the time of computation and contention of a
    system, and show its timeline, T(b) with b* and efficiency. The page is served to this machine
    alone, to whoever has the address with its token; Ctrl-C ends it. In JupyterLab the same is
    notebooks/explore.ipynb.
    """

    run_dir: Annotated[str, tyro.conf.Positional] = ""
    """Run of assignment 2 to start from; by default the newest complete one, else the recorded
    one."""
    port: int = 0
    """Port of the page; by default one that is free."""
    token: str | None = None
    """Token in the page's address; by default a random one."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> None:
        """Serves the page until Ctrl-C."""
        from common.explore.server import serving

        if self.run_dir:
            check_run(self.run_dir)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        try:
            with serving(self.run_dir, self.port, self.token) as served:
                print(served.url, flush=True)
                print("Ctrl-C ends it.", flush=True)
                if self.browser and has_display():
                    webbrowser.open(served.url)
                served.wait()
        except KeyboardInterrupt:
            print("The explorer has ended.")


def check_run(run_dir: str) -> None:
    """Opens a run once. Raises UserError where it is none that can be explored."""
    from common.analysis.buckets.measurements import open_run

    with contextlib.suppress(NotYetWritten):  # in a student's tree the page names the task
        open_run(run_dir)


def has_display() -> bool:
    """Returns True where a browser can open a window; elsewhere one would take the terminal."""
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
