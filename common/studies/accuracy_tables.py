"""The accuracy study's tables: what all cases measured, joined and kept small.

A step's times are its slowest rank's; the moments of gradients are medians over passes. All else
is raw.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from common.analysis.sweep import slowest_steps
from common.perfmodel.tables import read_ready_times
from common.runtime.run_directory import read_environment

if TYPE_CHECKING:
    from common.studies.accuracy import Case

ROUNDED = dict.fromkeys(
    (
        *("forward_time_ms", "backward_time_ms", "step_time_ms"),
        *("ready_time_ms", "time_ms", "all_reduce_time_ms"),
    ),
    4,
)
"""Column → decimals."""
TIMES = ("forward_time_ms", "backward_time_ms", "step_time_ms")
TABLES = {
    "cases.csv": (
        *("case", "model", "batch_size", "network", "hosts", "regime", "rate_mbit_per_s"),
        *("added_latency_ms", "replay_factor", "replay_time_factor", "gradient_bytes", "rounds"),
    ),
    "steps.csv": (
        *("case", "role", "bucket_cap_mib", "num_buckets", "first_bucket_bytes"),
        *("last_bucket_bytes", "round", "iteration", *TIMES),
    ),
    "gradients.csv": (
        *("case", "ready_index", "registration_index", "dtype", "size_bytes", "ready_time_ms"),
    ),
    "all-reduces.csv": ("case", "mode", "total_bytes", "round", "iteration", "time_ms"),
    "overlap.csv": (
        *("case", "arm", "message_bytes", "messages", "round", "iteration"),
        *("backward_time_ms", "all_reduce_time_ms", "messages_done", "gradient_bytes"),
    ),
}
"""Table → columns. ``role`` is local (without DDP), calibration or judged; ``mode`` is sequential
(one all-reduce after another) or in_flight (several launched at once; the time of each)."""


def case_rows(case: Case, folder: Path) -> dict[str, list[dict]]:
    """The rows that a case adds to each table, from its run directory."""
    overlap = pd.read_csv(folder / "overlap-times.csv")
    steps = _steps(folder)
    facts = {
        "model": case.model,
        "batch_size": case.batch_size,
        "network": read_environment(folder)["network"],
        "hosts": case.hosts,
        "regime": case.regime,
        "rate_mbit_per_s": case.rate_mbit,
        "added_latency_ms": case.added_latency_ms,
        "replay_factor": case.replay_factor,
        "replay_time_factor": case.replay_time_factor,
        "gradient_bytes": int(overlap["gradient_bytes"].iloc[0]),
        "rounds": int(steps["round"].max()) + 1,
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
        "steps.csv": steps,
        "gradients.csv": gradients,
        "all-reduces.csv": _all_reduces(folder),
        "overlap.csv": _overlap(overlap),
    }
    return {
        name: table.assign(case=case.name)[list(TABLES[name])].round(ROUNDED).to_dict("records")
        for name, table in tables.items()
    }


def _steps(folder: Path) -> pd.DataFrame:
    caps = pd.read_csv(folder / "caps.csv").drop_duplicates("bucket_cap_mib")
    judged = slowest_steps(pd.read_csv(folder / "ddp-times.csv"))
    roles = dict(zip(caps["bucket_cap_mib"].round(9), caps["role"], strict=True))
    judged["role"] = judged["bucket_cap_mib"].round(9).map(roles)
    local = pd.read_csv(folder / "local-times.csv")
    local = local.groupby(["round", "iteration"])[list(TIMES)].max().reset_index()
    steps = pd.concat([local.assign(role="local"), judged], ignore_index=True)
    counts = ["num_buckets", "first_bucket_bytes", "last_bucket_bytes"]
    return steps.astype(dict.fromkeys(counts, "Int64"))


def _all_reduces(folder: Path) -> pd.DataFrame:
    samples = pd.read_csv(folder / "allreduce-samples.csv")
    keys = ["mode", "total_bytes", "round", "iteration"]
    return samples.groupby(keys)["time_ms"].max().reset_index()


def _overlap(samples: pd.DataFrame) -> pd.DataFrame:
    keys = ["arm", "message_bytes", "messages", "round", "iteration", "gradient_bytes"]
    slowest = {"backward_time_ms": "max", "all_reduce_time_ms": "max", "messages_done": "min"}
    return samples.groupby(keys).agg(slowest).reset_index()
