"""One run of assignment 3, opened for its notebook: every part of it that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.analysis.micro_batches.mode_comparison import (
    MODE_TIMES,
    ModeComparison,
    read_comparison,
)
from common.analysis.micro_batches.simulation import SIMULATED, Simulation, read_simulation
from common.analysis.micro_batches.training_runs import (
    FIRST_RANK,
    MicroBatchRun,
    check_comparable,
    common_steps,
    dataset_name,
    read_run,
    what_text,
)
from common.analysis.runs import Run, caption_of, choose_folder, complete_runs, is_recorded, origin
from common.errors import UserError
from common.runtime.paths import relative_to_project
from common.runtime.records.run_directory import find_table

COMMAND = "uv run ddplab run assignment3"


@dataclass(frozen=True, eq=False)
class MicroBatchLab:
    """The contents of one run directory.

    Attributes:
        folder: Directory that was named or chosen.
        comparison: All modes on the same global batches.
        other_data: Comparisons on other data sets; may be empty.
        training: Training runs to be compared, by mode, static first; may be empty.
        left_out: Reason why training runs are not compared; empty where they are.
        simulation: Bottlenecks for many ranks, or None.
    """

    folder: Path
    comparison: ModeComparison
    other_data: tuple[ModeComparison, ...]
    training: Mapping[str, MicroBatchRun]
    left_out: str
    simulation: Simulation | None

    @property
    def comparisons(self) -> tuple[ModeComparison, ...]:
        """Returns the comparisons of modes on all data sets, the main one first."""
        return self.comparison, *self.other_data

    @property
    def caption(self) -> str:
        """Returns hardware, date and source, for figures of the whole run."""
        return caption_of(self.comparison.environment, self.folder)

    @property
    def training_caption(self) -> str:
        """Returns hardware, date and source of the training runs; empty where there are none."""
        static = self.training.get("static")
        return caption_of(static.environment, self.folder) if static else ""

    @property
    def origin(self) -> str:
        """Returns whose data these are, as Markdown."""
        what = what_text(self.comparison.settings, self.comparison.ranks)
        return origin(f"{self.caption}. {what}", is_recorded(self.folder), COMMAND)

    @property
    def contents(self) -> dict[str, str]:
        """Returns what this run measured and what it lacks, in the order of the notebook."""
        comparison = self.comparison
        trained = self.left_out
        if self.training:
            trained = f"{len(self.training['static'].slowest)} measured steps each"
        return {
            "modes compared on": ", ".join(run.dataset for run in self.comparisons),
            "modes with batches of their own": _measured(comparison.own_batch_modes),
            "training in modes static and dynamic": trained,
            "calibrated costs": _measured(comparison.calibration is not None),
            "one rank slowed on purpose": _measured(comparison.slow_rank is not None),
            "simulation of many ranks": _measured(self.simulation),
        }


def open_assignment3(run_dir: str | Path | None = None) -> MicroBatchLab:
    """Opens a run directory, or all runs that it holds.

    By default it is the newest complete run below outputs/assignment3 with a comparison of modes,
    or else recorded measurements. Training runs are told apart by their modes, not by their
    folders' names.

    Raises UserError for no such directory, or none with a complete comparison of modes.
    """
    folder = choose_folder(run_dir, "assignment3", (MODE_TIMES,))
    comparisons = [read_comparison(run) for run in complete_runs(folder, MODE_TIMES)]
    if not comparisons:
        raise UserError(f"{relative_to_project(folder)}: no complete run with {MODE_TIMES}")
    training, left_out = _training(folder)
    main, *other_data = _by_data(comparisons, training)
    simulated = find_table(folder, SIMULATED)
    return MicroBatchLab(
        folder=folder,
        comparison=main,
        other_data=tuple(other_data),
        training=training,
        left_out=left_out,
        simulation=read_simulation(Run(simulated.parent, simulated.parent)) if simulated else None,
    )


def _by_data(
    comparisons: list[ModeComparison], training: Mapping[str, MicroBatchRun]
) -> list[ModeComparison]:
    """Returns the newest comparison of each data set; that of the training runs comes first.

    Without training runs the oldest comes first.
    """
    newest = {comparison.dataset: comparison for comparison in comparisons}
    trained = {dataset_name(run.settings) for run in training.values()}
    return sorted(newest.values(), key=lambda comparison: comparison.dataset not in trained)


def _training(folder: Path) -> tuple[dict[str, MicroBatchRun], str]:
    """Returns the newest static and dynamic run on their common steps, or why there are none."""
    newest: dict[str, MicroBatchRun] = {}
    for opened in complete_runs(folder, FIRST_RANK):
        run = read_run(opened)
        newest[run.mode] = run
    if not {"static", "dynamic"} <= set(newest):
        return {}, "this run holds no training run in mode static beside one in mode dynamic"
    static, dynamic = newest["static"], newest["dynamic"]
    try:
        check_comparable(static, dynamic)
    except UserError as reason:
        return {}, str(reason)
    steps = common_steps(static, dynamic)
    return {"static": static.on_steps(steps), "dynamic": dynamic.on_steps(steps)}, ""


def _measured(part: object) -> str:
    return "measured" if part else "not in this run"
