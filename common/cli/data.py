"""``ddplab data record``: keep a run's measurements for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Data:
    """Keep a complete run's tables under data/<machine>/<assignment>, for others to read."""

    what: Annotated[Literal["record"], tyro.conf.Positional]
    """record"""
    run_dir: Annotated[str, tyro.conf.Positional]
    """The run directory."""
    machine: str
    """Name of the machine's folder, like h100-8."""
    assignment: str = "assignment2"

    def run(self) -> None:
        """Copy the tables and say where they are."""
        from common.report.recording import keep_run
        from common.runtime.paths import relative_to_project

        print(relative_to_project(keep_run(Path(self.run_dir), self.machine, self.assignment)))
