"""One run of assignment 3, opened for its notebook: all that it measured, as far as it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.analysis.micro_batches import (
    MicroBatchRun,
    caption,
    check_comparable,
    common_steps,
    dataset_name,
    read_run,
    what_text,
)
from common.analysis.mode_comparison import MODE_TIMES, ModeComparison, read_comparison
from common.analysis.mode_simulation import SIMULATED, Simulation, read_simulation
from common.analysis.opened_run import given_folder, recorded_assignment
from common.errors import UserError
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import find_table, newest_complete_run, read_environment


@dataclass(frozen=True, eq=False)
class MicroBatchLab:
    """What one run directory holds.

    Attributes:
        recorded: whether these are measurements that came with the project.
        comparison: all modes on the same global batches.
        others: the same on other data sets; may be empty.
        training: training runs to be compared, by mode, static first; may be empty.
        left_out: why training runs are not compared; empty where they are.
        simulation: bottlenecks for many ranks, or None.
    """

    folder: Path
    recorded: bool
    comparison: ModeComparison
    others: tuple[ModeComparison, ...]
    training: Mapping[str, MicroBatchRun]
    left_out: str
    simulation: Simulation | None

    @property
    def caption(self) -> str:
        """Hardware, date and source, for figures of the whole run."""
        return caption(self.comparison.environment, self.folder)

    @property
    def training_caption(self) -> str:
        """The same, of the training runs."""
        static = self.training.get("static")
        return caption(static.environment, self.folder) if static else ""

    def where_from(self) -> str:
        """Whose data these are, as Markdown."""
        what = what_text(self.comparison.settings, self.comparison.ranks)
        if self.recorded:
            return (
                f"> **Recorded data, not yours.** {self.caption}. {what}. "
                "`uv run ddplab run assignment3` measures here."
            )
        return f"> Measured in this run: {self.caption}. {what}."


def open_assignment3(run_dir: str | Path | None = None) -> MicroBatchLab:
    """What is in a run directory, or in the runs that it holds.

    By default the newest complete run below outputs/assignment3 with a comparison of modes, or else
    recorded measurements. Training runs are told apart by their modes, not by their folders' names.

    Raises UserError for no such directory, or none with a complete comparison of modes.
    """
    folder = _choose(run_dir)
    comparisons = [read_comparison(path) for path in _complete(folder, MODE_TIMES)]
    if not comparisons:
        raise UserError(f"{relative_to_project(folder)}: no complete run with {MODE_TIMES}")
    training, left_out = _training(folder)
    main, *others = _by_data(comparisons, training)
    simulated = find_table(folder, SIMULATED)
    return MicroBatchLab(
        folder=folder,
        recorded=folder.resolve().is_relative_to(project_root() / "data"),
        comparison=main,
        others=tuple(others),
        training=training,
        left_out=left_out,
        simulation=read_simulation(simulated) if simulated else None,
    )


def _choose(run_dir: str | Path | None) -> Path:
    if run_dir:
        return given_folder(run_dir)
    newest = newest_complete_run(project_root() / "outputs" / "assignment3", (MODE_TIMES,))
    return newest or given_folder(recorded_assignment("assignment3"))


def _complete(folder: Path, table: str) -> list[Path]:
    """The folders of complete runs with this table, the oldest first."""
    found = [folder / table, *folder.glob(f"*/{table}")]
    runs = [path.parents[len(Path(table).parts) - 1] for path in found if path.is_file()]
    complete = [run for run in runs if read_environment(run)["status"] == "complete"]
    return sorted(complete, key=lambda run: (read_environment(run).get("start_time", ""), run))


def _by_data(
    comparisons: list[ModeComparison], training: Mapping[str, MicroBatchRun]
) -> list[ModeComparison]:
    """The newest comparison of each data set; that of the training runs first, else the oldest."""
    newest = {comparison.dataset: comparison for comparison in comparisons}
    trained = {dataset_name(run.settings) for run in training.values()}
    return sorted(newest.values(), key=lambda comparison: comparison.dataset not in trained)


def _training(folder: Path) -> tuple[dict[str, MicroBatchRun], str]:
    """Static and the newest run of another mode, on the steps both have; or why there are none."""
    newest: dict[str, MicroBatchRun] = {}
    for path in _complete(folder, "metrics/rank0.csv"):
        run = read_run(path)
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
