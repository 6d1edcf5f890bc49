"""Training runs on one and on several ranks, read from the original's files or from our own.

The original wrote ``<experiment>/metrics.csv`` and nothing else, so that the number of GPUs and the
data set are known from the folder's name alone: what is read from a name is marked as assumed. Our
run directories say what ran and count the samples. Whatever cannot be right becomes one line, a
``Problem``, and the rest is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from common.analysis.runs import Run
from common.analysis.scaling.training_run import (
    DATA_NAMES,
    EPOCHS,
    RENAMED,
    Problem,
    RunIdentity,
    ScalingRun,
    StatedSamples,
    checked_epochs,
    data_key,
    read_own,
    separate_jobs,
    with_notes,
)
from common.csv_tables import read_table
from common.errors import UserError
from common.runtime.paths import project_root, relative_to_project
from common.tables import METRIC_COLUMNS

LABEL = "assignment4-text"
"""Label of our text training in ``environment.json``."""
PUBLISHED = "text-scaling-published"
PUBLISHED_HARDWARE = "1 and 4 GPUs of one node (kind and date not stated), NCCL"
ASSUMED = frozenset({"world_size", "data", "model"})
"""Fields of an original run that are read from its folder's name."""


@dataclass(frozen=True)
class RunsRead:
    """The runs below a folder, and one line for everything that could not be used as it was."""

    runs: list[ScalingRun]
    problems: list[Problem]


def read_runs(root: Path | str) -> RunsRead:
    """Reads all training runs in ``root`` and up to two folders below it.

    Raises UserError for no such folder, or one that holds neither runs nor what is left of some.
    """
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    runs: list[ScalingRun] = []
    problems: list[Problem] = []
    for folder in _candidates(root):
        ours = (folder / "environment.json").is_file()
        try:
            read = [read_own(folder)] if ours else read_original(folder)
        except UserError as error:
            problems.append(_problem(folder, error))
            continue
        runs += read
        problems += [Problem(run.name, note) for run in read for note in run.notes]
    if not runs and not problems:
        raise UserError(f"{root}: no runs; looked for <experiment>/metrics.csv in it")
    return RunsRead(runs, problems)


def _candidates(root: Path) -> list[Path]:
    """Returns folders that hold a training run, or what is left of one, in order of their names."""
    tables = ("metrics.csv", "metrics.csv.partial", "epochs.csv", "epochs.csv.partial")
    folders: set[Path] = set()
    for below in ("", "*/", "*/*/"):
        folders |= {path.parent for name in tables for path in root.glob(below + name)}
        # A run that broke off early has no table yet.
        records = [record.parent for record in root.glob(f"{below}environment.json")]
        folders |= {
            folder for folder in records if Run(folder, folder).environment.get("label") == LABEL
        }
    return sorted(folders)


def _problem(folder: Path, error: UserError) -> Problem:
    """Returns the error as a line that names the folder once, as a user would type it."""
    name = relative_to_project(folder)
    what = str(error)
    for start in (f"{folder}/", f"{folder}: ", f"{name}/", f"{name}: "):
        what = what.removeprefix(start)
    return Problem(name, f"{what}; left out")


def read_original(folder: Path) -> list[ScalingRun]:
    """Reads the jobs that wrote into a ``metrics.csv`` of the original; mostly one.

    Raises UserError for a table of another schema, times that are none, or a folder's name that
    does not tell the data set and the number of GPUs.
    """
    path = folder / "metrics.csv"
    table = read_table(path, METRIC_COLUMNS).rename(columns=RENAMED)
    identity = identity_of_name(folder.name)
    base = ScalingRun(
        name=folder.name,
        folder=folder,
        dataset=str(identity.data),
        identity=identity,
        epochs=checked_epochs(table, path),
        assumed=ASSUMED,
    )
    if _is_published(base):
        base = replace(base, stated=stated_samples()[base.name], hardware=PUBLISHED_HARDWARE)
    jobs = separate_jobs(base.epochs["epoch"].tolist())
    expected = re.search(r"(\d+)ep(?![a-z0-9])", folder.name)
    number = int(expected[1]) if expected else None
    return [with_notes(run, number, "its name") for run in _one_run_each(base, jobs)]


def _one_run_each(base: ScalingRun, jobs: Sequence[Sequence[int]]) -> list[ScalingRun]:
    if len(jobs) == 1:
        return [base]
    tables = [base.epochs.iloc[list(rows)].reset_index(drop=True) for rows in jobs]
    ends = [dict.fromkeys(map(str, table["epoch"].iloc[[0, -1]])) for table in tables]
    which = ", ".join(f"#{number} epochs {' to '.join(end)}" for number, end in enumerate(ends, 1))
    note = f"{len(jobs)} jobs wrote into one metrics.csv ({which}); each is read as a run"
    return [
        replace(base, name=f"{base.name}#{number}", epochs=table, notes=(note,) * (number == 1))
        for number, table in enumerate(tables, 1)
    ]


def identity_of_name(name: str) -> RunIdentity:
    """Returns what the name of an original experiment says.

    Raises UserError where it does not tell the data set or the number of GPUs.
    """
    key, lower = data_key(name), name.lower()
    data = next((name for part, name in DATA_NAMES.items() if part in key), None)
    if data is None:
        names = ", ".join(DATA_NAMES.values())
        raise UserError(f"its name does not tell the data set (known: {names}), nor does a file")
    counted = re.search(r"(\d+)_?gpu", lower)
    if counted:
        world_size = int(counted[1])
    else:  # a single node had four, as the original's write-up says
        world_size = 1 if "single_gpu" in lower else 4 if "single_node" in lower else 0
    if not world_size:
        raise UserError("its name does not tell the number of GPUs (such as 4gpu), nor does a file")
    model = "optimized" if "optimized" in lower else "small"
    return RunIdentity(world_size=world_size, data=data, model=model)


@cache
def published_run() -> Run:
    """Opens the published epochs and experiments, in the project's own tables."""
    folder = project_root() / "data" / PUBLISHED
    return Run(folder, folder)


def _is_published(run: ScalingRun) -> bool:
    """Returns True if these are the published epochs, whatever else bears the same name."""
    epochs = published_run().table("epochs.csv")
    published, times_s = (
        np.sort(table["train_time_s"].to_numpy())
        for table in (epochs[epochs["experiment"] == run.name], run.epochs)
    )
    same = len(published) == len(times_s)
    return same and np.allclose(published, times_s, rtol=0, atol=1e-3)


def stated_samples() -> dict[str, StatedSamples]:
    """Returns the samples per epoch of the published experiments, by name."""
    return {
        row.experiment: StatedSamples(
            int(row.distinct_per_epoch), int(row.processed_per_epoch), row.how_known
        )
        for row in published_run().table("experiments.csv").itertuples()
    }


def read_published() -> list[ScalingRun]:
    """Reads the published runs from the project's own tables, a run for each job."""
    folder, epochs = published_run().folder, published_run().table("epochs.csv")
    jobs = epochs.groupby("experiment")["job"].nunique()
    stated, runs = stated_samples(), []
    for (experiment, job), rows in epochs.groupby(["experiment", "job"]):
        identity = identity_of_name(str(experiment))
        run = ScalingRun(
            name=experiment if jobs[experiment] == 1 else f"{experiment}#{job}",
            folder=folder,
            dataset=str(identity.data),
            identity=identity,
            epochs=rows[[*EPOCHS]].reset_index(drop=True),
            assumed=ASSUMED,
            stated=stated.get(experiment),
            hardware=PUBLISHED_HARDWARE,
        )
        runs.append(with_notes(run, None, ""))
    return runs
