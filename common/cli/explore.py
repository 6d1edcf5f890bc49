"""``ddplab explore``: the model of a step with sliders, as a page on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from common.errors import NotYetWritten, UserError

if TYPE_CHECKING:
    from common.explore.chosen_model import ChosenModel


@dataclass(frozen=True)
class Explore:
    """Play with the model of a step, with micro-batches and with clusters, in a browser.

    Sliders move latency, bandwidth, ranks, bucket cap, the time of computation and contention of a
    system, and show its timeline, T(b) with b* and efficiency. Another tab puts any model on a
    cluster, and shows step and memory by strategy and number of GPUs; one more shows its plans
    there, as ddplab plan finds them. The page is served to this machine alone, to whoever has the
    address with its token; Ctrl-C ends it. In JupyterLab the same is notebooks/explore.ipynb.
    """

    run_dir: Annotated[str, tyro.conf.Positional] = ""
    """Run of assignment 2 to start from; by default the newest complete one, else the recorded
    one."""
    from_traces: str = ""
    """Folder with a job's traces, as for ddplab predict --from-traces; shown first."""
    model: str | None = None
    """Model to put on clusters, by default gpt2-large: name of a published size, a Hugging Face
    config.json, or MODULE:FUNCTION that returns (module, batch, loss)."""
    seq_len: int | None = None
    """Tokens of its sequences, by default 1024."""
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
        if self.from_traces:
            from common.explore.known_systems import from_traces

            from_traces("traces", Path(self.from_traces))  # refused before a page is opened
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        try:
            with serving(
                self.run_dir, self.port, self.token, self._model(), self.from_traces
            ) as served:
                print(served.url, flush=True)
                print("Ctrl-C ends it.", flush=True)
                if self.browser and has_display():
                    webbrowser.open(served.url)
                served.wait()
        except KeyboardInterrupt:
            print("The explorer has ended.")

    def _model(self) -> ChosenModel | None:
        if self.model is None:
            if self.seq_len is not None:
                raise UserError("--seq-len has an effect with --model only")
            return None
        from common.cli.prediction.asked_model import asked_model
        from common.explore.chosen_model import ChosenModel

        return ChosenModel(self.model, *asked_model(self.model, self.seq_len))


def check_run(run_dir: str) -> None:
    """Opens a run once. Raises UserError where it is none that can be explored."""
    from common.analysis.buckets.measurements import open_run

    with contextlib.suppress(NotYetWritten):  # in a student's tree the page names the task
        open_run(run_dir)


def has_display() -> bool:
    """Returns True where a browser can open a window; elsewhere one would take the terminal."""
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
