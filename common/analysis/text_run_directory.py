"""A run directory of our text training as one run of a scaling study, samples counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from common.analysis.comparable import network_of
from common.analysis.scaling_columns import ARM_COLUMNS, EPOCH_COLUMNS, FACT_COLUMNS
from common.analysis.scaling_run import (
    RENAMED,
    RunIdentity,
    ScalingRun,
    checked_epochs,
    data_name,
    with_notes,
)
from common.errors import UserError
from common.perfmodel.tables import numbers, read_table
from common.runtime.run_directory import read_environment


def read_own(folder: Path) -> ScalingRun:
    """A run of our text training, with its samples as they were counted.

    Raises UserError for a run that is not complete and for tables that cannot be read.
    """
    environment = read_environment(folder)
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
    slowest = rows.groupby("epoch")["train_time_s"].max()
    table = rows[rows["rank"] == rows["rank"].min()].set_index("epoch")
    table = table.assign(train_time=slowest).drop(columns="train_time_s").reset_index()
    table["epoch"] = table["epoch"] + (1 - min(1, table["epoch"].min()))  # epochs count from 1
    settings = _settings(folder)
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
            found = ", ".join(map(str, facts[column].unique()))
            raise UserError(f"facts.csv: ranks differ in {column} ({found})")
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
    """What a rank computes with: a GPU, or so many threads on a CPU."""
    gpus, cpu = environment.get("gpus"), environment.get("cpu") or {}
    if gpus:
        return gpus[0].get("name")
    path = folder / "placement.csv"
    threads = int(read_table(path, ("threads",))["threads"].max()) if path.is_file() else 0
    shown = f"{threads} thread{'s' if threads != 1 else ''}"
    return f"{cpu['model']}, {shown}" if cpu.get("model") and threads else None


def _options(arm: pd.Series, world_size: int) -> str | None:
    """What was asked of DDP, where it is not the default; None for nothing."""
    parts = [f"accumulation {arm['accumulation']}"] if arm["accumulation"] != 1 else []
    if world_size > 1:  # one rank sends nothing
        kept = pd.isna(arm["compression"]) or arm["compression"] == "none"
        parts += [] if kept else [str(arm["compression"])]
        parts += [] if pd.isna(arm["bucket_cap_mb"]) else [f"cap {arm['bucket_cap_mb']:g} MiB"]
    return ", ".join(parts) or None


def _settings(folder: Path) -> dict:
    """A run's settings; none where they cannot be read."""
    path = folder / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text()) if path.is_file() else None
    except yaml.YAMLError:
        raise UserError("config.yaml: not YAML") from None
    return settings if isinstance(settings, dict) else {}
