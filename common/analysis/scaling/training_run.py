"""One training run of a scaling study: what it was, its epochs, and what is wrong with them.

``read_own`` reads a run directory of train_text.py, samples counted; ``study_files`` reads the
original's files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from common.analysis.comparable import network_of
from common.analysis.runs import Run
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.runtime.wording import counted
from common.samples import slowest_rank
from common.tables import ARM_COLUMNS, EPOCH_COLUMNS, FACT_COLUMNS

STRONG, WEAK = "strong", "weak"
"""Regimes: the same global batch on any number of ranks, or the same batch on each rank."""
EPOCHS = ("epoch", "train_time_s", "train_loss", "val_loss", "val_accuracy")
"""Columns of a run's epochs, whatever it was read from; times are the slowest rank's."""
RENAMED = {"train_time": "train_time_s", "val_acc": "val_accuracy"}
DATA_NAMES = {"imdb": "IMDB", "agnews": "AGNews", "sst2": "SST2"}
"""Data sets that a folder's name may speak of, and what the original calls them."""
LOSSES = ("train_loss", "val_loss")


@dataclass(frozen=True)
class Problem:
    """Describes what is wrong with a run or a table, in one line."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True)
class RunIdentity:
    """Facts needed of two runs before one is called faster; None where unknown.

    Attributes:
        input_shape: Shape of a sample, such as ``128`` tokens.
        distinct_per_epoch: Different samples that reached the model in an epoch, on all ranks
            together, as counted.
        processed_per_epoch: Samples that reached it, repeated ones each time.
        processor: Kind of GPU, or of CPU where ranks compute on that.
        network, options: Network between ranks, and options of DDP; runs that differ in them may
            be compared, but are no repetitions of each other.
    """

    world_size: int
    data: str | None = None
    model: str | None = None
    precision: str | None = None
    input_shape: str | None = None
    global_batch: int | None = None
    batch_per_rank: int | None = None
    distinct_per_epoch: int | None = None
    processed_per_epoch: int | None = None
    processor: str | None = None
    network: str | None = None
    options: str | None = None


@dataclass(frozen=True)
class StatedSamples:
    """Samples per epoch of a run that counted none, as they are known from elsewhere."""

    distinct_per_epoch: int
    processed_per_epoch: int
    how_known: str


@dataclass(frozen=True, eq=False)
class ScalingRun:
    """One training run.

    Attributes:
        name: Name of the experiment; with ``#1``, ``#2`` where several jobs wrote into one file.
        epochs: A row per epoch with ``EPOCHS``; epochs count from 1.
        assumed: Fields of ``identity`` that were read from the folder's name.
        stated: Samples per epoch as known from elsewhere, where none were counted.
        notes: Remarks that a reader has to know.
        hardware: Hardware as in captions; empty where it is not known.
        dataset: Name of the data set in tables and files; ``identity.data`` is what was read.
    """

    name: str
    folder: Path
    identity: RunIdentity
    epochs: pd.DataFrame
    assumed: frozenset[str] = frozenset()
    stated: StatedSamples | None = None
    notes: tuple[str, ...] = ()
    environment: dict = field(default_factory=dict)
    hardware: str = ""
    dataset: str = ""

    def epoch_times_s(self, warmup: int = 1) -> np.ndarray:
        """Returns the seconds of each epoch's training, without the run's first ``warmup`` epochs.

        A job whose first epochs are lost has no warm-up left to leave out.
        """
        return self.epochs.loc[self.epochs["epoch"] > warmup, "train_time_s"].to_numpy()

    @property
    def processed_per_epoch(self) -> int | None:
        """Returns the samples that all ranks computed in an epoch: counted, else as stated."""
        return self._samples("processed_per_epoch")

    @property
    def distinct_per_epoch(self) -> int | None:
        """Returns the different samples computed in an epoch: counted, else as stated."""
        return self._samples("distinct_per_epoch")

    def _samples(self, name: str) -> int | None:
        counted, stated = (getattr(source, name, None) for source in (self.identity, self.stated))
        return stated if counted is None else counted

    @property
    def final_accuracy(self) -> float:
        """Returns the validation accuracy after the last epoch; NaN where it was not noted."""
        return float(self.epochs["val_accuracy"].iloc[-1])


def data_key(name: str) -> str:
    """Returns a data set's name in lower case without punctuation: ``agnews`` for ``AG News``."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def data_name(name: str) -> str:
    """Returns a data set's name as the original writes it; one it does not know stays as it is."""
    return DATA_NAMES.get(data_key(name), name)


def checked_epochs(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Returns the columns ``EPOCHS``; losses may be NaN, epochs and times may not.

    Raises UserError with the line of the first value that is no epoch or no time.
    """
    as_written = table.rename(columns={new: old for old, new in RENAMED.items()})
    checked = table[[*EPOCHS]].copy()
    checked["epoch"] = numbers(as_written, "epoch", path, at_least=0).astype(int)
    checked["train_time_s"] = numbers(as_written, "train_time", path, above=0)
    for column in ("val_accuracy", *LOSSES):
        checked[column] = pd.to_numeric(checked[column], errors="coerce")
    return checked.reset_index(drop=True)


def separate_jobs(epochs: Sequence[int]) -> list[list[int]]:
    """Groups rows by the job that wrote them, from the epochs in the order they were written.

    Epochs that only rise are one job's, with gaps or without. Others come from several: each row
    continues the job that has just written the epoch before it, and begins another one where there
    is none. The job that begins with the smallest epoch comes first.
    """
    if all(later > earlier for earlier, later in itertools.pairwise(epochs)):
        return [list(range(len(epochs)))]
    jobs: list[list[int]] = []
    for row, epoch in enumerate(epochs):
        waiting = [job for job in jobs if epochs[job[-1]] == epoch - 1]
        if waiting:
            min(waiting, key=lambda job: job[-1]).append(row)
        else:
            jobs.append([row])
    return sorted(jobs, key=lambda job: (epochs[job[0]], job[0]))


def with_notes(run: ScalingRun, expected: int | None, who_says: str) -> ScalingRun:
    """Returns the run with a note for each epoch that is missing and each loss that is no number.

    ``expected`` is the number of epochs according to ``who_says``; None where nobody says.
    """
    epochs, notes = run.epochs["epoch"].tolist(), []
    if epochs[0] > 1:
        notes.append(f"epochs 1 to {epochs[0] - 1} are lost; the rest is used")
    gone = sorted(set(range(epochs[0], epochs[-1] + 1)) - set(epochs))
    if gone:
        notes.append(f"epochs missing: {', '.join(map(str, gone))}; the rest is used")
    if expected is not None and epochs[-1] < expected:
        notes.append(
            f"cut off: {who_says} says {expected} epochs, the last one there is {epochs[-1]}; "
            "its times are used"
        )
    for column in LOSSES:
        bad = run.epochs.loc[~np.isfinite(run.epochs[column]), "epoch"].tolist()
        if bad:
            notes.append(
                f"{column} is not a number from epoch {bad[0]} on ({len(bad)} of {len(epochs)} "
                "epochs): it did not learn; its times are used"
            )
    return replace(run, notes=(*run.notes, *notes))


def read_own(folder: Path) -> ScalingRun:
    """Reads a run of our text training, with its samples as they were counted.

    Raises UserError for a run that is not complete and for tables that cannot be read.
    """
    opened = Run(folder, folder)
    environment = opened.environment
    if environment["status"] != "complete":
        reason = f": {environment['reason']}" if environment.get("reason") else ""
        raise UserError(f"this run is not complete ({environment['status']}{reason})")
    path = folder / "epochs.csv"
    rows = read_table(path, EPOCH_COLUMNS)
    rows["train_time_s"] = numbers(rows, "train_time_s", path, above=0)
    world_size = int(environment.get("world_size") or 0)
    if world_size < 1:
        raise UserError("environment.json has no world_size")
    if rows["rank"].nunique() != world_size:
        raise UserError(f"epochs.csv has rows of {rows['rank'].nunique()} of {world_size} ranks")
    slowest = slowest_rank(rows, "train_time_s", by=["epoch"])
    table = rows[rows["rank"] == rows["rank"].min()].set_index("epoch")
    table = table.assign(train_time=slowest).drop(columns="train_time_s").reset_index()
    table["epoch"] = table["epoch"] + (1 - min(1, table["epoch"].min()))  # epochs count from 1
    settings = _settings(opened)
    identity = _own_identity(folder, environment, world_size)
    run = ScalingRun(
        name=folder.name,
        folder=folder,
        dataset=data_name(str(settings.get("dataset") or identity.data)),
        identity=identity,
        epochs=checked_epochs(table.rename(columns=RENAMED), path),
        environment=environment,
        hardware=str(environment.get("hardware", "")),
    )
    expected = settings.get("epochs")
    return with_notes(run, int(expected) if expected else None, "config.yaml")


def _own_identity(folder: Path, environment: dict, world_size: int) -> RunIdentity:
    facts = read_table(folder / "facts.csv", FACT_COLUMNS)
    for column in ("model", "data", "compute_dtype", "input_shape"):
        if facts[column].nunique() > 1:
            values = ", ".join(map(str, facts[column].unique()))
            raise UserError(f"facts.csv: ranks differ in {column} ({values})")
    fact, arm = facts.iloc[0], read_table(folder / "arms.csv", ARM_COLUMNS).iloc[0]
    identity = RunIdentity(
        world_size=world_size,
        data=str(fact["data"]),
        model=str(fact["model"]),
        precision=str(fact["compute_dtype"]),
        input_shape=str(fact["input_shape"]),
        global_batch=int(arm["global_batch"]),
        batch_per_rank=int(arm["batch_per_rank"]) * int(arm["accumulation"]),
        processor=_processor(folder, environment),
        network=network_of(environment) if world_size > 1 else None,
        options=_options(arm, world_size),
    )
    path = folder / "samples.csv"
    if not path.is_file():
        return identity
    samples = read_table(path, ("epoch", "processed", "distinct_all_ranks"))
    processed = samples.groupby("epoch")["processed"].sum()
    distinct = samples.groupby("epoch")["distinct_all_ranks"].max()
    return replace(
        identity,
        distinct_per_epoch=int(np.median(distinct)),
        processed_per_epoch=int(np.median(processed)),
    )


def _processor(folder: Path, environment: dict) -> str | None:
    """Returns what a rank computes with: a GPU, or so many threads on a CPU."""
    gpus, cpu = environment.get("gpus"), environment.get("cpu") or {}
    if gpus:
        return gpus[0].get("name")
    path = folder / "placement.csv"
    threads = int(read_table(path, ("threads",))["threads"].max()) if path.is_file() else 0
    return f"{cpu['model']}, {counted(threads, 'thread')}" if cpu.get("model") and threads else None


def _options(arm: pd.Series, world_size: int) -> str | None:
    """Returns what was asked of DDP, where it is not the default; None for nothing."""
    parts = [f"accumulation {arm['accumulation']}"] if arm["accumulation"] != 1 else []
    if world_size > 1:  # one rank sends nothing
        kept = pd.isna(arm["compression"]) or arm["compression"] == "none"
        parts += [] if kept else [str(arm["compression"])]
        parts += [] if pd.isna(arm["bucket_cap_mb"]) else [f"cap {arm['bucket_cap_mb']:g} MiB"]
    return ", ".join(parts) or None


def _settings(opened: Run) -> dict:
    """Returns a run's settings; none where they are no mapping. Raises UserError for no YAML."""
    try:
        settings = opened.settings
    except yaml.YAMLError:
        raise UserError("config.yaml: not YAML") from None
    return settings if isinstance(settings, dict) else {}
