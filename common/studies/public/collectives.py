"""Published tables of a collective: from hardware alone, and from every second size of a table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from common.errors import UserError
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.nccl import COLLECTIVES, NcclAllReduce, NcclRing
from common.perfmodel.collectives import MeasuredAllReduce
from common.studies.public.hardware import cluster_name
from common.studies.public.jobs import job_of

TABLE = ["source_repo", "source_path", "gpu", "gpus", "network", "operation", "strategy", "note"]
NO_NVLS, WITHOUT_NVLS = "NCCL_NVLS_ENABLE=0", ("Ring", "Tree")
"""Setting of NCCL that a source's note names, and the algorithms that it leaves."""
LEAST_SIZES = 5
"""Sizes of a table that is interpolated: three are given."""


def predict_collectives(rows: pd.DataFrame) -> pd.DataFrame:
    """Predicts every row of every table of collectives.

    Args:
        rows: published rows without a problem.

    Returns:
        The rows with ``table`` (a number), ``operation``, ``hardware_s`` (NaN where ``reason`` says
        why not), ``interpolated_s`` (for sizes that were not given), and both errors, predicted
        over published time minus 1; ``hardware_error`` is infinite where it was refused.
    """
    text = rows["model"].where(rows["model"] != "", rows["strategy"])
    operations = "|".join(("all_reduce", *COLLECTIVES))
    rows = rows.assign(operation=text.str.extract(f"({operations})", expand=False).fillna(text))
    parts = []
    for number, (_, part) in enumerate(rows.groupby(TABLE, dropna=False)):
        part = part.sort_values("size_bytes").drop_duplicates("size_bytes")
        seconds, reason = _from_hardware(part)
        inner = _interpolated(part)
        published = part["time_us"] / 1e6
        parts.append(
            part.assign(
                table=number,
                hardware_s=seconds,
                interpolated_s=inner,
                reason=reason,
                hardware_error=np.nan_to_num(seconds / published - 1, nan=np.inf),
                interpolation_error=inner / published - 1,
            )
        )
    return pd.concat(parts)


def collective_tables(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per table of ``predict_collectives``, with the medians of absolute errors."""
    errors = ["hardware_error", "interpolation_error"]
    tables = rows.assign(**{name: rows[name].abs() for name in errors})
    shared = tables.groupby("table")[[*TABLE, "reason"]].first()
    medians = tables.groupby("table")[errors].median()
    sizes = tables.groupby("table").size().rename("sizes")
    return shared.join(sizes).join(medians).reset_index()


def _from_hardware(part: pd.DataFrame) -> tuple[np.ndarray, str]:
    job, operation = job_of(part.iloc[0]), part["operation"].iloc[0]
    try:
        cluster = load_cluster(cluster_name(job))
        if operation == "all_reduce":
            allowed = WITHOUT_NVLS if NO_NVLS in part["note"].iloc[0] else None
            network = NcclAllReduce(cluster, job.gpus, algorithms=allowed)
        else:
            network = NcclRing(cluster, job.gpus, operation)
    except UserError as error:
        return np.full(len(part), np.nan), str(error)
    return network.time_s(part["size_bytes"].to_numpy()), ""


def _interpolated(part: pd.DataFrame) -> np.ndarray:
    """Predicts every second size, from the second on, by the others; NaN for those given."""
    sizes, times = part["size_bytes"].to_numpy(), part["time_us"].to_numpy() / 1e6
    predicted = np.full(len(sizes), np.nan)
    if len(sizes) >= LEAST_SIZES:
        curve = MeasuredAllReduce(sizes[::2], times[::2])
        predicted[1::2] = curve.time_s(sizes[1::2])
    return predicted
