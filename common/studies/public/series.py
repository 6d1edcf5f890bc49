"""Series of one job on more and more GPUs, and the error of the predicted scaling in each.

Rows belong to one series if source, GPU, network, model, parameters, sequence length, precision,
strategy, checkpointing, compilation, unit and degrees of parallelism are the same. In a ``weak``
series every GPU does the same work besides: micro-batch and accumulation are the same, too. Rows
that no weak series takes make series of a ``changed`` batch, of which the fastest row of each
number of GPUs counts: what is lost there comes in part from smaller batches, which a predictor
knows and a rival does not.

Where a source measured one number of GPUs several times, on machines that its notes name, each
machine has a series of its own: clocks and hosts differ between them by more than scaling loses.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

LOSSY = 0.03
"""Loss from which on a series is judged apart: a small error is no merit where little is lost."""

LOSS_PER_DOUBLING = 0.024
"""The second rival's loss: the one with the smallest median error over the lossy series of the
development rows (83 series of three sources; 3.1 %). Fitted to the other sources of each series it
would be twice as far off (6.0 %), so the stronger rival is this constant."""

REPEATS = 3
"""Machines from which on a job says how far apart machines are."""

JOB = ["source_repo", "gpu", "network", "model", "params_m", "seq_len", "precision", "strategy"]
SAME = [*JOB, "act_ckpt", "compile", "throughput_unit", "tp", "pp", "cp"]
BATCH = ["micro_batch_per_gpu", "grad_accum"]


def with_series(rows: pd.DataFrame) -> pd.DataFrame:
    """Adds the series of each row and the errors of three predictions of its scaling.

    Args:
        rows: published rows with ``predicted`` (samples per second and GPU; NaN where it was
            refused). Those with a problem belong to no series.

    Returns:
        The rows with ``series`` (a number; -1 where a row has none), ``scaling`` (weak, changed),
        ``is_anchor`` (of the smallest number of GPUs), ``doublings`` from the anchor, published
        ``efficiency`` relative to it, ``lost`` (by the series' largest number of GPUs) and, but for
        anchors, ``scaling_error`` (predicted over published efficiency, minus 1; infinite where the
        row or its anchor was refused), ``perfect_error`` and ``constant_error``. Also
        ``predicted_lost``, and ``repeat_error`` where a job ran on ``REPEATS`` machines or more:
        that of the median of its other machines.
    """
    rows = rows.assign(series=-1, scaling="", is_anchor=False, efficiency=np.nan)
    machine = rows["note"].str.replace(r"\b\d+ ?x ?", "", regex=True)
    count = 0
    for keys, scaling in (([*SAME, *BATCH], "weak"), (SAME, "changed")):
        open_rows = rows[(rows["series"] < 0) & (rows["problem"] == "")]
        for _, group in open_rows.groupby(keys, dropna=False):
            if scaling == "changed":
                group = group.loc[group.groupby("gpus")["per_gpu_throughput"].idxmax()]
            repeated = group["gpus"].duplicated().any()
            machines = machine[group.index] if repeated else np.zeros(len(group))
            for _, members in group.groupby(machines):
                if members["gpus"].nunique() > 1:
                    rows.loc[members.index, ["series", "scaling"]] = [count, scaling]
                    count += 1
    parts = [_scored(part) for number, part in rows.groupby("series") if number >= 0]
    scored = pd.concat([rows[rows["series"] < 0], *parts]).sort_index()
    weak = scored[(scored["scaling"] == "weak") & ~scored["is_anchor"].astype(bool)]
    repeats = weak.groupby([*SAME, *BATCH, "gpus"], dropna=False)["efficiency"]
    return scored.assign(repeat_error=repeats.transform(_others) / scored["efficiency"] - 1)


def _others(values: pd.Series) -> list[float]:
    """Returns for each value the median of the others; NaN where there are too few."""
    if len(values) < REPEATS:
        return [np.nan] * len(values)
    return [values.drop(index).median() for index in values.index]


def _scored(rows: pd.DataFrame) -> pd.DataFrame:
    """Scores a series."""
    anchors = rows["gpus"] == rows["gpus"].min()
    published = rows["per_gpu_throughput"] / rows.loc[anchors, "per_gpu_throughput"].mean()
    predicted = rows["predicted"] / rows.loc[anchors, "predicted"].mean(skipna=False)
    doublings = np.log2(rows["gpus"] / rows["gpus"].min())
    at_largest = rows["gpus"] == rows["gpus"].max()
    errors = {
        "scaling_error": (predicted / published - 1).fillna(np.inf),
        "perfect_error": 1 / published - 1,
        "constant_error": (1 - LOSS_PER_DOUBLING) ** doublings / published - 1,
    }
    return rows.assign(
        is_anchor=anchors,
        doublings=doublings,
        efficiency=published,
        lost=1 - published[at_largest].mean(),
        predicted_lost=1 - predicted[at_largest].mean(),
        **{name: error.where(~anchors) for name, error in errors.items()},
    )


def errors_by_series(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per series of ``with_series``.

    Columns: series, what its rows share, regime (of the largest number of GPUs), scaling,
    gpus_from, gpus_to, rows (without anchors), answered, lost, predicted_lost, model_parallel, and
    the medians and the largest of the absolute errors: scaling_error, perfect_error,
    constant_error, repeat_error, worst_error.
    """
    table = []
    for number, part in rows[rows["series"] >= 0].groupby("series"):
        last = part.loc[part["gpus"].idxmax()]
        errors = (
            part.loc[~part["is_anchor"]]
            .filter(regex="(scaling|perfect|constant|repeat)_error")
            .abs()
        )
        shared = {
            name: last[name] for name in (*SAME, "regime", "scaling", "lost", "predicted_lost")
        }
        counts = {"rows": len(errors), "answered": int(np.isfinite(errors["scaling_error"]).sum())}
        table.append(
            {"series": number}
            | shared
            | {"gpus_from": part["gpus"].min(), "gpus_to": part["gpus"].max()}
            | counts
            | {"model_parallel": last["model_parallel"]}
            | {name: column.median() for name, column in errors.items()}
            | {"worst_error": errors["scaling_error"].max()}
        )
    columns = ["series", *SAME, "regime", "scaling", "lost", "predicted_lost", "gpus_from"]
    columns += ["gpus_to", "rows", "answered", "model_parallel", "scaling_error", "perfect_error"]
    return pd.DataFrame(table, columns=[*columns, "constant_error", "repeat_error", "worst_error"])
