"""``ddplab run``: the main job, benchmarks to report."""

from __future__ import annotations

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
    """Sizes: smoke (a minute), laptop (two CPU cores), gpu; by default gpu where there is one."""
    output_dir: str = "outputs"
    """Where run directories and the report go."""

    def run(self) -> None:
        """Do it and say where the results are."""
        from common.report.pipeline import run_assignments
        from common.report.progress import StageProgress

        preset = self.preset or ("gpu" if _has_gpu() else "laptop")
        run_assignments(self.what, preset, self.output_dir, StageProgress())


def _has_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU (asking torch would take seconds)."""
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU 0" in listed.stdout
