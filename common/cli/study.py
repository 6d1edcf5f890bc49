"""``ddplab study``: evidence that takes longer than a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Study:
    """Run a study: emulation (links and left-overs of emulated hosts; about 15 minutes)."""

    what: Annotated[Literal["emulation"], tyro.conf.Positional]
    """emulation"""
    output_dir: str = "outputs/studies"
    """Where its run directory goes."""

    def run(self) -> None:
        """Run it and say where the results are."""
        from common.report.progress import StageProgress
        from common.studies.emulation import EmulationStudy, run_study

        progress = StageProgress()
        path = run_study(EmulationStudy(), self.output_dir, progress)
        progress.say(f"Done in {progress.elapsed_s:.0f} s: {path}")
