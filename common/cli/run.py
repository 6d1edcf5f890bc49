"""``ddplab run``: the main job, benchmarks to report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from common.cli.flags import refuse_given


@dataclass(frozen=True)
class Run:
    """Run the benchmarks of an assignment, execute its notebooks and write report.pdf."""

    what: Annotated[str, tyro.conf.Positional] = "all"
    """What to run: all, or one assignment such as assignment2."""
    preset: Literal["smoke", "laptop", "gpu"] | None = None
    """Size of the measurements: smoke (a minute an assignment), laptop (two CPU cores) or gpu (the
    default on two GPUs and more)."""
    output_dir: str = "outputs"
    """Folder of the run directories and the report."""
    run_dir: str | None = None
    """Measure nothing: write the report of the measurements in this folder (of cluster jobs)."""
    full: bool = False
    """Put the notebooks into report.pdf whole, as they are in index.html."""
    answers: bool = False
    """Show the staff's answers after each notebook, and what this run says of their conclusions. A
    student's project has none."""

    def run(self) -> None:
        """Runs the benchmarks, or only reports, and says where the results are."""
        from common.report.pipeline import report_measured, run_assignments
        from common.runtime.processes.bytecode import shared_bytecode
        from common.runtime.stage_progress import StageProgress

        if self.run_dir is not None:
            refuse_given(self, "has no effect with --run-dir", only=("preset", "output_dir"))
            report_measured(
                self.what,
                self.run_dir,
                StageProgress(),
                full=self.full,
                with_answers=self.answers,
            )
            return
        with shared_bytecode():
            run_assignments(
                self.what,
                self.preset or default_preset(),
                self.output_dir,
                StageProgress(),
                full=self.full,
                with_answers=self.answers,
            )


def default_preset() -> str:
    """Returns ``gpu`` where torch can use at least two GPUs, else ``laptop``.

    Raises UserError where a job was granted GPUs that torch cannot use.
    """
    from common.runtime.machine.device import choose_device, gpus_visible, granted_gpus

    if not (gpus_visible() or granted_gpus()):
        return "laptop"  # without asking torch, which takes seconds to import
    if choose_device(instead="--preset laptop") == "cpu":
        return "laptop"
    import torch

    return "gpu" if torch.cuda.device_count() >= 2 else "laptop"
