"""What the notebook of text scaling opens: the published study, and the reader's own runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.comprehensive import Compared, Configuration, compare
from common.analysis.opened_run import given_folder, recorded_assignment
from common.analysis.scaling import distinct_per_epoch, processed_per_epoch
from common.analysis.scaling_run import ScalingRun
from common.analysis.scaling_runs import (
    PUBLISHED,
    PUBLISHED_HARDWARE,
    published_folder,
    read_published,
    read_runs,
)
from common.errors import UserError
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import newest_complete_run

PUBLISHED_CAPTION = (
    f"{PUBLISHED_HARDWARE}; recorded: the original scaling study's metrics, exp020 to exp044; "
    f"data/{PUBLISHED}"
)
WARMUP = 1
"""First epochs of a run that no time counts."""


@dataclass(frozen=True, eq=False)
class TextStudy:
    """The published runs and the reader's, each compared within their data set.

    Attributes:
        published: by data set, ``IMDB`` and ``AGNews``.
        own: by data set; empty where there are no runs of train_text.py.
        problems: a line for each of the reader's runs that could not be used as it was.
        left_out: why there are none of the reader's; empty where there are.
        recorded: whether these came with the project.
        caption: hardware, date and source of the reader's runs.
        warmup: first epochs of the reader's runs that times leave out.
    """

    published: dict[str, list[Compared]]
    own: dict[str, list[Compared]]
    problems: tuple[str, ...]
    left_out: str
    recorded: bool
    caption: str
    warmup: int

    def where_from(self) -> str:
        """Whose data these are, as Markdown."""
        published = f"> **Recorded data, not yours.** The published runs: {PUBLISHED_CAPTION}."
        if self.left_out:
            return f"{published} Runs of your own: {self.left_out}."
        if self.recorded:
            return (
                f"{published} So are the runs in the second part: {self.caption}. "
                "`uv run ddplab run assignment4` measures here."
            )
        return f"{published} The second part was measured in this run: {self.caption}."


def open_text_study(run_dir: str | Path | None = None) -> TextStudy:
    """The published study, and the text runs in a run directory.

    By default the newest complete run below outputs/assignment4 with text runs in it, or else
    recorded ones. Raises UserError for no such directory.
    """
    published = by_data(read_published(), WARMUP)
    folder = _choose(run_dir)
    if folder is None:
        left_out = "none yet; `uv run ddplab run assignment4` makes some"
        return TextStudy(published, {}, (), left_out, False, "", WARMUP)
    try:
        read = read_runs(folder)
    except UserError:
        left_out = f"{relative_to_project(folder)} holds no runs of train_text.py"
        return TextStudy(published, {}, (), left_out, False, "", WARMUP)
    problems = tuple(map(str, read.problems))
    runs = [run for run in read.runs if run.environment]
    if not runs:
        left_out = f"{relative_to_project(folder)} holds none that can be used"
        return TextStudy(published, {}, problems, left_out, False, "", WARMUP)
    # A run of a single epoch would have none left.
    warmup = min(WARMUP, min(len(run.epochs) for run in runs) - 1)
    return TextStudy(
        published=published,
        own=by_data(runs, warmup),
        problems=problems,
        left_out="",
        recorded=folder.resolve().is_relative_to(project_root() / "data"),
        caption=_caption(runs, folder),
        warmup=warmup,
    )


def by_data(runs: list[ScalingRun], warmup: int) -> dict[str, list[Compared]]:
    """The runs compared, by data set."""
    names = dict.fromkeys(run.dataset for run in runs)
    return {name: compare([run for run in runs if run.dataset == name], warmup) for name in names}


def one_of(compared: list[Compared], model: str, ranks: int) -> Compared:
    """The configuration of this model on so many ranks."""
    return next(
        one
        for one in compared
        if one.configuration.ranks == ranks and one.configuration.identity.model == model
    )


def rows_as_written(experiment: str) -> pd.DataFrame:
    """The published rows of an experiment in the order they were written, with their job."""
    epochs = pd.read_csv(published_folder() / "epochs.csv")
    return epochs[epochs["experiment"] == experiment].sort_values("row", ignore_index=True)


def passes(configuration: Configuration) -> float:
    """How often an epoch goes through the data, as far as it is known; NaN where it is not."""
    run = configuration.runs[0]
    processed, distinct = processed_per_epoch(run), distinct_per_epoch(run)
    return processed / distinct if processed and distinct else float("nan")


def updates_per_epoch(configuration: Configuration) -> float:
    """Steps of an epoch of a published run, each of one batch per GPU."""
    settings = pd.read_csv(published_folder() / "experiments.csv").set_index("experiment")
    row = settings.loc[configuration.runs[0].name.split("#")[0]]
    per_rank = row["processed_per_epoch"] / row["world_size"]
    return float(np.ceil(per_rank / row["batch_per_rank"]))


def epochs_to_loss(run: ScalingRun, loss: float) -> float:
    """Epochs until the training loss is down to ``loss``, between two by a straight line."""
    losses = run.epochs["train_loss"].to_numpy()
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return float("nan")
    first = int(below[0])
    if first == 0:
        return float(run.epochs["epoch"].iloc[0])
    share = (losses[first - 1] - loss) / (losses[first - 1] - losses[first])
    return float(run.epochs["epoch"].iloc[first - 1] + share)


def time_to_accuracy_s(run: ScalingRun, accuracy: float) -> float:
    """Seconds of training until the validation accuracy is first reached; NaN where it is not."""
    reached = np.flatnonzero(run.epochs["val_accuracy"].to_numpy() >= accuracy)
    if not len(reached):
        return float("nan")
    return float(run.epochs["train_time_s"].iloc[: reached[0] + 1].sum())


def _choose(run_dir: str | Path | None) -> Path | None:
    if run_dir:
        return given_folder(run_dir)
    newest = newest_complete_run(project_root() / "outputs" / "assignment4", ("epochs.csv",))
    recorded = recorded_assignment("assignment4")
    return newest or (recorded if recorded.is_dir() else None)


def _caption(runs: list[ScalingRun], folder: Path) -> str:
    inside = folder.resolve().is_relative_to(project_root())
    kind = "recorded" if folder.resolve().is_relative_to(project_root() / "data") else "run"
    last = max(runs, key=lambda run: run.identity.world_size)
    date = str(last.environment.get("start_time", ""))[:10]
    source = relative_to_project(folder) if inside else folder.name
    return f"{last.hardware}; {date}; {kind} {source}"
