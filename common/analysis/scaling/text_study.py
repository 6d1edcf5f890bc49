"""Opens the published study and the reader's own runs, for the notebook of text scaling."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.runs import caption_of, choose_folder, is_recorded, origin
from common.analysis.scaling.study import Compared, Configuration, compare_configurations
from common.analysis.scaling.study_files import (
    PUBLISHED,
    PUBLISHED_HARDWARE,
    published_run,
    read_published,
    read_runs,
)
from common.analysis.scaling.training_run import Problem, ScalingRun
from common.analysis.step_parts import StepParts, decompose
from common.csv_tables import read_table
from common.diagnose.evidence.evidence import ASSIGNMENT
from common.errors import UserError
from common.runtime.paths import relative_to_project
from common.tables import STEP_COLUMNS

PUBLISHED_CAPTION = (
    f"{PUBLISHED_HARDWARE}; recorded: the original scaling study's metrics, exp020 to exp044; "
    f"data/{PUBLISHED}"
)
COMMAND = "uv run ddplab run assignment4"
WARMUP = 1
"""First epochs of a run that no time counts."""


@dataclass(frozen=True, eq=False)
class TextStudy:
    """The published runs and the reader's, each compared within their data set.

    Attributes:
        published: Published configurations by data set, ``IMDB`` and ``AGNews``.
        local: Reader's configurations by data set; empty without runs of train_text.py.
        problems: Reader's runs that could not be used as they were.
        left_out: Reason why there are none of the reader's; empty where there are.
        recorded, caption: As ``runs.Run`` has them, of the reader's runs.
    """

    published: dict[str, list[Compared]] = field(default_factory=lambda: by_data(read_published()))
    local: dict[str, list[Compared]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    left_out: str = ""
    recorded: bool = False
    caption: str = ""

    @property
    def warmup(self) -> int:
        """Returns the first epochs of the reader's runs that times leave out."""
        return self.all_local[0].configuration.warmup if self.local else WARMUP

    @property
    def origin(self) -> str:
        """Returns whose data these are, as Markdown."""
        what = f"The published runs: {PUBLISHED_CAPTION}"
        if self.recorded:
            what += f". So are the runs in the second part: {self.caption}"
            return origin(what, recorded=True, command=COMMAND)
        published = origin(what, recorded=True)  # no command measures these here
        if self.left_out:
            return f"{published} Runs of your own: {self.left_out}."
        return f"{published} The second part was measured in this run: {self.caption}."

    @property
    def all_local(self) -> list[Compared]:
        """Returns the reader's configurations of all data sets."""
        return [case for compared in self.local.values() for case in compared]

    @property
    def local_on_several(self) -> list[Compared]:
        """Returns the reader's configurations that are compared with another."""
        return [case for case in self.all_local if not case.is_base]

    @property
    def published_on_several(self) -> list[Compared]:
        """Returns the published configurations on several GPUs that have both ratios."""
        cases = [case for compared in self.published.values() for case in compared]
        return [case for case in cases if not case.is_base and case.printed and case.per_sample]

    @property
    def parts(self) -> pd.DataFrame:
        """Returns ``step_parts`` as a table: ``data set``, ``run``, ``step (ms)`` and each part."""
        rows = []
        for configuration, parts in self.step_parts.items():
            row = {"data set": configuration.dataset, "run": configuration.name}
            rows.append(row | {"step (ms)": parts.step_ms} | dict(parts.parts_ms))
        return pd.DataFrame(rows)

    @cached_property
    def step_parts(self) -> dict[Configuration, StepParts]:
        """Returns the mean step of those of the reader's configurations that were measured in
        parts, by their first run."""
        measured = {}
        for case in self.all_local:
            path = case.configuration.runs[0].folder / "steps.csv"
            with suppress(UserError):  # not in parts
                measured[case.configuration] = decompose(read_table(path, STEP_COLUMNS))
        return measured


def open_text_study(run_dir: str | Path | None = None) -> TextStudy:
    """Opens the published study, and the text runs in a run directory.

    By default the newest complete run below outputs/assignment4 with text runs in it, or else
    recorded ones. Raises UserError for no such directory.
    """
    folder = choose_folder(run_dir, ASSIGNMENT, ("epochs.csv",), must_exist=False)
    if not folder.is_dir():
        return TextStudy(left_out=f"none yet; `{COMMAND}` makes some")
    try:
        read = read_runs(folder)
    except UserError:  # of single runs that cannot be read, ``problems`` tells
        return TextStudy(left_out=f"{relative_to_project(folder)} holds no runs of train_text.py")
    problems = tuple(read.problems)
    runs = [run for run in read.runs if run.environment]
    if not runs:
        left_out = f"{relative_to_project(folder)} holds none that can be used"
        return TextStudy(left_out=left_out, problems=problems)
    last = max(runs, key=lambda run: run.identity.world_size)
    return TextStudy(
        local=by_data(runs),
        problems=problems,
        recorded=is_recorded(folder),
        caption=caption_of(last.environment, folder),
    )


def by_data(runs: list[ScalingRun]) -> dict[str, list[Compared]]:
    """Compares the runs of each data set; where one has a single epoch, none is warm-up."""
    warmup = min(WARMUP, *(len(run.epochs) - 1 for run in runs))
    names = dict.fromkeys(run.dataset for run in runs)
    return {
        name: compare_configurations([run for run in runs if run.dataset == name], warmup)
        for name in names
    }


def one_of(compared: list[Compared], model: str, ranks: int) -> Compared:
    """Returns the configuration of this model on so many ranks."""
    return next(
        case
        for case in compared
        if case.configuration.ranks == ranks and case.configuration.identity.model == model
    )


def rows_as_written(experiment: str) -> pd.DataFrame:
    """Returns the published rows of an experiment, with their job, as they were written."""
    epochs = published_run().table("epochs.csv")
    return epochs[epochs["experiment"] == experiment].sort_values("row", ignore_index=True)


def epoch_times_together_and_alone(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Returns the epoch times of a file while all of its jobs ran, and after one had ended."""
    # The first job to end has written its last row; later rows are of the other one alone.
    together = rows["row"] <= rows.groupby("job")["row"].max().min()
    return rows.loc[together, "train_time_s"], rows.loc[~together, "train_time_s"]


def passes(configuration: Configuration) -> float:
    """Returns how often an epoch goes through the data; NaN where it is not known."""
    run = configuration.runs[0]
    processed, distinct = run.processed_per_epoch, run.distinct_per_epoch
    return processed / distinct if processed and distinct else float("nan")


def updates_per_epoch(configuration: Configuration) -> float:
    """Returns the steps of an epoch of a published run, each of one batch per GPU."""
    settings = published_run().table("experiments.csv").set_index("experiment")
    row = settings.loc[configuration.runs[0].name.split("#")[0]]
    per_rank = row["processed_per_epoch"] / row["world_size"]
    return float(np.ceil(per_rank / row["batch_per_rank"]))


def epochs_to_loss(run: ScalingRun, loss: float) -> float:
    """Returns the epochs until the training loss is down to ``loss``, interpolated linearly.

    NaN where it never is.
    """
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
    """Returns the seconds of training until the validation accuracy is reached; NaN for never."""
    reached = np.flatnonzero(run.epochs["val_accuracy"].to_numpy() >= accuracy)
    if not len(reached):
        return float("nan")
    return float(run.epochs["train_time_s"].iloc[: reached[0] + 1].sum())
