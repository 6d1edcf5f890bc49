"""The tables of the studies of T(b): what all cases measured, joined and kept small.

A step's times are its slowest rank's; the moments of gradients are medians over passes. All else
is raw.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import yaml

from common.analysis.buckets.sweep import slowest_steps
from common.benchmarks.buckets.ddp import STEP_COLUMNS, TIMES
from common.benchmarks.buckets.overlap_lab import OVERLAP_TIME_COLUMNS
from common.errors import UserError
from common.perfmodel.tables import read_ready_times
from common.runtime.records.run_directory import RunDirectory, SampleStream, read_environment
from common.samples import slowest_rank
from common.studies.accuracy.rounds import PREDICTION_COLUMNS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROUNDED = dict.fromkeys(
    (
        "forward_time_ms",
        "backward_time_ms",
        "step_time_ms",
        "ready_time_ms",
        "time_ms",
        "all_reduce_time_ms",
        "copy_out_time_ms",
        "predicted_ms",
        "low_ms",
        "high_ms",
        "written_s",
        "judged_from_s",
    ),
    4,
)
"""Column → decimals that are kept of it."""
NETWORK_FACTS = (
    "regime",
    "backend",
    "rate_mbit_per_s",
    "added_latency_ms",
    "replay_factor",
    "replay_time_factor",
)
FACTS = ("model", "batch_size", *NETWORK_FACTS)
"""Columns of ``cases.csv`` that come from the settings of a case."""


def _without_rank(columns: Sequence[str]) -> list[str]:
    return [column for column in columns if column != "rank"]


TABLES = {
    "cases.csv": (
        "case",
        "model",
        "batch_size",
        "network",
        "hosts",
        *NETWORK_FACTS,
        "gradient_bytes",
        "rounds",
        "judged_from_s",
        "start_time",
    ),
    "predictions.csv": ("case", *PREDICTION_COLUMNS),
    "steps.csv": ("case", "role", *_without_rank(STEP_COLUMNS)),
    "gradients.csv": (
        "case",
        "ready_index",
        "registration_index",
        "dtype",
        "size_bytes",
        "ready_time_ms",
    ),
    "all-reduces.csv": ("case", "mode", "total_bytes", "round", "iteration", "time_ms"),
    "overlap.csv": ("case", *_without_rank(OVERLAP_TIME_COLUMNS)),
}
"""Table → columns.

``role`` is local (without DDP, while the case was calibrated), witness (the same while bucketings
were judged), forward (DDP's, whose buffers are broadcast; nothing else is known of it) or judged.
``mode`` is sequential (one all-reduce after another) or in_flight (several launched at once; the
time of each). ``predictions.csv`` was written before ``judged_from_s``.
"""


def earlier_cases(
    what: str, study: DataclassInstance, free: Collection[str], jobs: Sequence[Sequence[str]]
) -> dict[str, list[dict]]:
    """Reads the rows of the complete jobs of the study that another one continues, by table.

    Args:
        what: name of the study, for messages.
        study: the new one; ``continues`` is the run directory of the earlier one, or empty.
        free: settings in which the two may differ.
        jobs: the cases of each job, which is taken over if all of them are there.

    Raises:
        UserError: there is no such study, or it measured something else.
    """
    if not study.continues:
        return {name: [] for name in TABLES}
    folder = Path(study.continues)
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text())
        paths = {name: _table_or_its_part(folder / name) for name in TABLES}
        tables = {name: pd.read_csv(path, dtype=object) for name, path in paths.items()}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--continues {folder}: not an {what} study ({error})") from None
    if not isinstance(settings, dict):
        raise UserError(f"--continues {folder}: its config.yaml has no settings")
    for name, table in tables.items():
        if missing := set(TABLES[name]) - set(table.columns):
            raise UserError(f"--continues {folder}: its {name} has no column {min(missing)}")
    wanted = yaml.safe_load(yaml.safe_dump(asdict(study)))  # with lists, as they were written
    for name, value in wanted.items():
        if name not in free and settings.get(name) != value:
            raise UserError(
                f"--continues {folder}: its {name} was {settings.get(name)}, now it is {value}"
            )
    finished = set(tables["cases.csv"]["case"])
    complete = {case for job in jobs if finished.issuperset(job) for case in job}
    return {
        name: table[table["case"].isin(complete)].fillna("").to_dict("records")
        for name, table in tables.items()
    }


def _table_or_its_part(path: Path) -> Path:
    return path if path.exists() else path.with_name(f"{path.name}.partial")


def open_tables(run: RunDirectory, earlier: Mapping[str, list[dict]]) -> dict[str, SampleStream]:
    """Opens the joined tables of a study's run directory, with rows of ``earlier_cases``."""
    streams = {name: run.stream(name, columns) for name, columns in TABLES.items()}
    for name, rows in earlier.items():
        streams[name].write(rows)
    return streams


def join_case(streams: dict[str, SampleStream], folder: Path) -> None:
    """Adds a case's rows to the joined tables, and deletes its own tables."""
    tables = case_rows(folder)
    last = tables.pop("cases.csv")  # a case that is named here is complete
    for name, rows in tables.items():
        streams[name].write(rows)
    streams["cases.csv"].write(last)
    for table in folder.glob("*.csv"):
        table.unlink()


def case_rows(folder: Path) -> dict[str, list[dict]]:
    """Reads the rows that a case adds to each table from its run directory."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    environment = read_environment(folder)
    overlap = pd.read_csv(folder / "overlap-times.csv")
    steps = _steps(folder)
    facts = {name: settings[name] for name in FACTS} | {
        "network": environment["network"],
        "hosts": environment["world_size"],
        "gradient_bytes": int(overlap["gradient_bytes"].iloc[0]),
        "rounds": int(steps.loc[steps["role"] == "judged", "round"].max()) + 1,
        "judged_from_s": float(pd.read_csv(folder / "caps.csv")["began_s"].min()),
        "start_time": environment["start_time"],
    }
    profile = read_ready_times(folder / "gradient-ready-times.csv")
    gradients = pd.DataFrame(
        {
            "ready_index": range(len(profile.names)),
            "registration_index": profile.registration,
            "dtype": profile.kinds,
            "size_bytes": profile.sizes_bytes,
            "ready_time_ms": profile.ready_s * 1e3,
        }
    )
    tables = {
        "cases.csv": pd.DataFrame([facts]),
        "predictions.csv": pd.read_csv(folder / "predictions.csv"),
        "steps.csv": steps,
        "gradients.csv": gradients,
        "all-reduces.csv": _all_reduces(folder),
        "overlap.csv": _overlap(overlap),
    }
    return {
        name: table.assign(case=folder.name)[list(TABLES[name])].round(ROUNDED).to_dict("records")
        for name, table in tables.items()
    }


def _steps(folder: Path) -> pd.DataFrame:
    judged = slowest_steps(pd.read_csv(folder / "ddp-times.csv"))
    local, witness, forward = (
        slowest_rank(pd.read_csv(folder / f"{name}-times.csv"), times, by=["round", "iteration"])
        for name, times in (("local", TIMES), ("witness", TIMES), ("forward", ["forward_time_ms"]))
    )
    roles = {
        "local": local.reset_index(),
        "witness": witness.reset_index(),
        "forward": forward.reset_index(),
        "judged": judged,
    }
    steps = pd.concat([rows.assign(role=role) for role, rows in roles.items()])
    counts = ["num_buckets", "first_bucket_bytes", "last_bucket_bytes"]
    return steps.reset_index(drop=True).astype(dict.fromkeys(counts, "Int64"))


def _all_reduces(folder: Path) -> pd.DataFrame:
    samples = pd.read_csv(folder / "allreduce-samples.csv")
    keys = ["mode", "total_bytes", "round", "iteration"]
    return slowest_rank(samples, "time_ms", by=keys).reset_index()


def _overlap(samples: pd.DataFrame) -> pd.DataFrame:
    keys = ["arm", "message_bytes", "messages", "round", "iteration", "gradient_bytes"]
    # The maxima go together: the rank with the longest pass has seen the most all-reduces end.
    times = ["backward_time_ms", "all_reduce_time_ms", "messages_done", "copy_out_time_ms"]
    return slowest_rank(samples, times, by=keys).reset_index()
