"""``ddplab study``: evidence that takes longer than a test."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

STUDIES = {
    "emulation": ("emulation", "EmulationStudy"),
    "memory": ("memory", "MemoryStudy"),
    "transformers": ("transformers_step", "TransformersStudy"),
    "bookkeeping": ("bookkeeping", "BookkeepingStudy"),
}
"""Study → its module below common.studies, which has ``run_study``, and its settings."""


@dataclass(frozen=True)
class Study:
    """Run a study: emulation (links and left-overs of emulated hosts; about 15 minutes), memory
    (predicted against tracked; 12), transformers (our training step beside theirs; 15) or
    bookkeeping (what timing and recording add to a step; 2)."""

    what: Annotated[
        Literal["emulation", "memory", "transformers", "bookkeeping"], tyro.conf.Positional
    ]
    """emulation, memory, transformers or bookkeeping"""
    output_dir: str = "outputs/studies"
    """Where its run directory goes."""

    def run(self) -> None:
        """Run it and say where the results are."""
        from common.report.progress import StageProgress

        name, settings = STUDIES[self.what]
        module = importlib.import_module(f"common.studies.{name}")
        progress = StageProgress()
        path = module.run_study(getattr(module, settings)(), self.output_dir, progress)
        progress.say(f"Done in {progress.elapsed_s:.0f} s: {path}")
