"""Measuring the stages of a preset, each on its ranks or hosts.

Stages on the same ranks or hosts share them, those of other assignments, too, and what one
assignment has measured is not measured again for another.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common.analysis.runs import AGAIN, Run
from common.cluster.kept_ranks import KeptRanks, Place
from common.cluster.launch import launch
from common.errors import RunFailed, UserError, unwritten_task
from common.judged import DISTURBED, DRIFTING, NOT_WITNESSED, QUIET
from common.machine_state import MachineState
from common.report.presets import Preset, Stage
from common.report.run_page import RunWatch
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import read_environment, write_atomically

DEPENDENT = {"simulate_modes.py", "verify_changes.py"}
"""Programs that start from what an earlier stage of their assignment has measured."""
STATES = (QUIET, NOT_WITNESSED, DRIFTING, DISTURBED)
"""States of the machine, the best first."""


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

    def is_complete(self, stage: Stage, suffix: str = "") -> bool:
        """Returns True if the stage has been measured; ``suffix`` as in its folder's name."""
        return read_environment(self._folder(stage, suffix))["status"] == "complete"

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
        """Runs neighbouring stages of one place, those again whose machine was disturbed.

        The preset's ``retry_budget_s`` says how long the latter may take.
        """
        self._run(stages)
        budget_s, again = self.preset.content.get("retry_budget_s", 0), []
        took_s = {
            entry.key: entry.took_s
            for entry in self.watch.timetable.entries
            if entry.assignment == self.preset.assignment
        }
        budget_s -= sum(seconds for key, seconds in took_s.items() if key.endswith(AGAIN))
        starts = [number for number, stage in enumerate(stages) if stage.script.name in DEPENDENT]
        for number, stage in enumerate(stages):
            if any(start >= number for start in starts):
                continue  # what started from it would no longer fit it
            if self._machine(stage).state == DISTURBED and took_s[stage.key] <= budget_s:
                again.append(stage)
                budget_s -= took_s[stage.key]
        if again:
            try:
                self._run(again, AGAIN)
            except (RunFailed, UserError) as error:  # the first measurements are there
                self.watch.progress.say(f"  not measured again: {error}")
        for stage in again:
            self._keep_better(stage)

    def _run(self, stages: Sequence[Stage], suffix: str = "") -> None:
        """Runs stages; ``suffix`` is added to the names of their folders and logs."""
        with ExitStack() as stack:
            series = self.kept and stack.enter_context(self.kept.series(self._place(stages[0])))
            for stage in stages if series else ():
                series.add(stage.script, *self._arguments(stage, suffix))
            for stage in stages:
                log = self.run_dir / "logs" / f"{stage.key.replace('/', '-')}{suffix}.log"
                with self.watch.stage(self.preset.assignment, stage.key + suffix) as update:
                    if series:
                        series.wait(log, update)
                    else:
                        launch(
                            stage.script,
                            self._arguments(stage, suffix),
                            self.ranks[stage],
                            log,
                            hosts=stage.hosts,
                            on_output=update,
                        )
                machine = self._machine(stage, suffix)
                if machine.reason:
                    self.watch.progress.say(f"  the machine was {machine}")

    def _keep_better(self, stage: Stage) -> None:
        """Keeps of two measurements of a stage the one with the quieter machine."""
        first, second = self._folder(stage), self._folder(stage, AGAIN)
        if not self.is_complete(stage, AGAIN):
            shutil.rmtree(second, ignore_errors=True)
            return
        states = [self._machine(stage, suffix).state for suffix in ("", AGAIN)]
        is_better = STATES.index(states[1]) < STATES.index(states[0])
        shutil.rmtree(first if is_better else second)
        if is_better:
            second.rename(first)
        kept = "second" if is_better else "first"
        self.watch.progress.say(f"  {stage.title}: measured twice, and the {kept} measurement kept")

    def _machine(self, stage: Stage, suffix: str = "") -> MachineState:
        """Returns the state of the machine during a stage."""
        folder = self._folder(stage, suffix)
        return Run(folder, folder).machine

    def _folder(self, stage: Stage, suffix: str = "") -> Path:
        """Returns the run directory of a stage."""
        return self.run_dir / stage.folder / (stage.name + suffix)

    def _place(self, stage: Stage) -> Place:
        return Place(self.ranks[stage], stage.hosts)

    def _arguments(self, stage: Stage, suffix: str) -> list[str]:
        folder = self._folder(stage, suffix)
        where = ("--output_dir", str(folder.parent), "--run_id", folder.name)
        return ["--config", str(self.preset.path), *where, *stage.flags()]
