"""The tables of the studies of T(b): what all cases measured, joined and kept small.

A step's times are its slowest rank's; the moments of gradients are medians over passes. All else
is raw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

from common.analysis.buckets.sweep import slowest_steps
from common.benchmarks.buckets.ddp import STEP_COLUMNS, TIMES
from common.benchmarks.buckets.overlap_lab import OVERLAP_TIME_COLUMNS
from common.perfmodel.tables import read_ready_times
from common.runtime.records.run_directory import RunDirectory, SampleStream, read_environment
from common.samples import slowest_rank
from common.studies.accuracy.rounds import PREDICTION_COLUMNS

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


def open_tables(run: RunDirectory, earlier: Mapping[str, pd.DataFrame]) -> dict[str, SampleStream]:
    """Opens the joined tables of a study's run directory, with rows of an earlier one's."""
    streams = {name: run.stream(name, columns) for name, columns in TABLES.items()}
    for name, table in earlier.items():
        streams[name].write(table.to_dict("records"))
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
