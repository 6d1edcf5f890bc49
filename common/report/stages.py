"""Measuring the stages of a preset, each on its ranks or hosts.

Stages on the same ranks or hosts share them, those of other assignments, too, and what one
assignment has measured is not measured again for another.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cluster.kept_ranks import KeptRanks, Place
from common.cluster.launch import launch
from common.errors import UserError, unwritten_task
from common.report.presets import Preset, Stage
from common.report.run_page import RunWatch
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import read_environment, write_atomically


class Measured:
    """The stages that one ``ddplab run`` has measured, for assignments that need the same again.

    A copy's ``environment.json`` has ``copied_from``, the run directory that was measured.
    """

    def __init__(self) -> None:
        self._runs: dict[str, Path] = {}

    def add(self, stage: Stage, preset: Preset, run_dir: Path) -> None:
        """Notes that a stage has been measured below ``run_dir``."""
        self._runs[preset.identity(stage)] = run_dir / stage.folder / stage.name

    def copy(self, stage: Stage, preset: Preset, run_dir: Path) -> Path | None:
        """Copies an earlier measurement of the stage below ``run_dir``.

        Returns the run directory that was copied; None where there is none.
        """
        source = self._runs.get(preset.identity(stage))
        if source is None:
            return None
        target = run_dir / stage.folder / stage.name
        shutil.copytree(source, target)
        environment = read_environment(target) | {"copied_from": relative_to_project(source)}
        write_atomically(target / "environment.json", json.dumps(environment, indent=1))
        return source


@dataclass(frozen=True, eq=False)
class Measuring:
    """The stages of one assignment being measured into one run directory.

    Attributes:
        ranks: Number of ranks of each stage.
        kept: Ranks that stages share; None where each stage has ranks of its own.
    """

    preset: Preset
    ranks: Mapping[Stage, int]
    run_dir: Path
    watch: RunWatch
    kept: KeptRanks | None

    def measure(self, stages: Sequence[Stage]) -> None:
        """Runs the stages; leaves out those that need a task which is not written yet."""
        for _, group in itertools.groupby(stages, self._place):
            self._measure_what_is_written(list(group))

    def is_complete(self, stage: Stage) -> bool:
        """Returns True if the stage has been measured."""
        folder = self.run_dir / stage.folder / stage.name
        is_there = (folder / "environment.json").is_file()
        return is_there and read_environment(folder)["status"] == "complete"

    def _measure_what_is_written(self, stages: Sequence[Stage]) -> None:
        waiting = list(stages)
        while waiting:
            try:
                self._measure(waiting)
                return
            except UserError as error:
                task = unwritten_task(str(error))
                if not task:
                    raise
                complete = sum(map(self.is_complete, waiting))
                stage = waiting[complete]
                self.watch.leave_out(
                    self.preset.assignment, stage.key, f"task {task} is not written yet"
                )
                waiting = waiting[complete + 1 :]

    def _measure(self, stages: Sequence[Stage]) -> None:
        """Runs neighbouring stages of one place."""
        if self.kept is None:
            for stage in stages:
                with self.watch.stage(self.preset.assignment, stage.key) as update:
                    launch(
                        stage.script,
                        self._arguments(stage),
                        self.ranks[stage],
                        self._log(stage),
                        hosts=stage.hosts,
                        on_output=update,
                    )
            return
        with self.kept.series(self._place(stages[0])) as series:
            for stage in stages:
                series.add(stage.script, *self._arguments(stage))
            for stage in stages:
                with self.watch.stage(self.preset.assignment, stage.key) as update:
                    series.wait(self._log(stage), update)

    def _place(self, stage: Stage) -> Place:
        return Place(self.ranks[stage], stage.hosts)

    def _arguments(self, stage: Stage) -> list[str]:
        where = ("--output_dir", str(self.run_dir / stage.folder), "--run_id", stage.name)
        return ["--config", str(self.preset.path), *where, *stage.flags()]

    def _log(self, stage: Stage) -> Path:
        return self.run_dir / "logs" / f"{stage.key.replace('/', '-')}.log"
