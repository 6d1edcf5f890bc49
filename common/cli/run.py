"""``ddplab run``: the main job, benchmarks to report."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Run:
    """Run the benchmarks of an assignment, execute its notebooks and write report.pdf."""

    what: Annotated[str, tyro.conf.Positional] = "all"
    """all, or one assignment such as assignment2."""
    preset: Literal["smoke", "laptop", "gpu"] | None = None
    """smoke (a minute an assignment), laptop (two CPU cores) or gpu (at least two GPUs, then the
    default)."""
    output_dir: str = "outputs"
    """Where run directories and the report go."""
    run_dir: str | None = None
    """Measure nothing: write the report of the measurements in this folder (of cluster jobs)."""

    def run(self) -> None:
        """Do it and say where the results are."""
        from common.report.pipeline import report_measured, run_assignments
        from common.report.progress import StageProgress
        from common.runtime.bytecode import shared_bytecode

        if self.run_dir:
            report_measured(self.what, self.run_dir, StageProgress())
            return
        preset = self.preset or ("gpu" if _gpus() >= 2 else "laptop")
        with shared_bytecode():
            run_assignments(self.what, preset, self.output_dir, StageProgress())


def _gpus() -> int:
    """GPUs that the NVIDIA driver lists and that are visible (asking torch would take seconds)."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    count = listed.stdout.count("GPU ") if listed.returncode == 0 else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len(visible.split(",")) if visible else 0)
