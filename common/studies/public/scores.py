"""Scores of predictions held against published rows.

A refusal is an infinite error: it stands above every other in a median or a quantile, so nothing is
won by answering the easy rows alone. ``of_answered`` is the median without refusals.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from common.samples import median
from common.studies.public.series import LOSSY

SETTINGS = ["precision", "strategy", "act_ckpt", "compile", "network"]
SAME_PAIR = ["source_repo", "gpu", "gpus", "model", "seq_len", "tp", "pp", "cp", "throughput_unit"]
RIVALS = ("perfect", "constant", "repeat")
TIED = 0.01
"""Difference of two published throughputs below which they have no order."""
GIB = 2**30


def summary(errors: ArrayLike) -> dict[str, float]:
    """Summarises absolute errors: their number, how many are finite, median, quantiles.

    Args:
        errors: [rows or series]; infinite where nothing was predicted.

    Returns:
        count, answered, value (the median), low and high (its 95 % interval, by the bootstrap over
        what is given), of_answered, p90 and worst; NaN of nothing.
    """
    errors = np.abs(np.asarray(errors, dtype=float))
    finite = errors[np.isfinite(errors)]
    counts = {"count": len(errors), "answered": len(finite)}
    if not len(errors):
        return counts | dict.fromkeys(
            ["value", "low", "high", "of_answered", "p90", "worst"], np.nan
        )
    middle = median(errors)
    return counts | {
        "value": middle.estimate,
        "low": middle.low,
        "high": middle.high,
        "of_answered": float(np.median(finite)) if len(finite) else np.nan,
        "p90": float(np.quantile(errors, 0.9, method="higher")),
        "worst": float(errors.max()),
    }


def scaling_scores(series: pd.DataFrame) -> pd.DataFrame:
    """Scores the scaling of series without model parallelism, each by its median error.

    Returns a row per group: series that lose ``LOSSY`` or more, of all, by source, by regime and by
    the kind of series; then all series, and as a whole those that are predicted to lose as much,
    and those of jobs that ran on several machines. Columns: score, group, those of ``summary``;
    perfect, constant and repeat, the medians of the rivals' errors over the same series. The last
    rival is the same job on the other machines: no prediction from its configuration is expected to
    come closer.
    """
    series = series[~series["model_parallel"].astype(bool)]
    scores = []
    lossy, repeated = series["lost"] >= LOSSY, series["repeat_error"].notna()
    for score, chosen, columns in (
        (f"scaling, {LOSSY:.0%} lost or more", lossy, ["source_repo", "regime", "scaling"]),
        ("scaling", lossy | ~lossy, ["source_repo", "regime", "scaling"]),
        (f"scaling, {LOSSY:.0%} predicted or more", series["predicted_lost"] >= LOSSY, []),
        ("scaling, several machines", repeated, []),
        (f"scaling, several machines, {LOSSY:.0%} lost or more", repeated & lossy, []),
    ):
        for group, part in _groups(series[chosen], columns):
            rivals = {name: part[f"{name}_error"].median() for name in RIVALS}
            summed = summary(part["scaling_error"]) | {"worst": part["worst_error"].max()}
            scores.append({"score": score, "group": group} | summed | rivals)
    return pd.DataFrame(scores)


def absolute_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Scores throughput per GPU: a row per group (all, source, regime), then intervals.

    Answered rows whose unit cannot be converted have no published samples/s: they are counted in a
    row of their own, and left out of the others.

    Args:
        rows: published rows without model parallelism, with source_repo, regime, absolute_error,
            published, predicted, low and high.
    """
    scores = []
    comparable = rows[rows["absolute_error"].notna()]
    for group, part in _groups(comparable, ["source_repo", "regime"]):
        scores.append({"score": "throughput", "group": group} | summary(part["absolute_error"]))
    answered = comparable[np.isfinite(comparable["absolute_error"])]
    held = answered["published"].between(answered["low"], answered["high"])
    half_width = (answered["high"] - answered["low"]) / 2 / answered["predicted"]
    error = answered["absolute_error"].abs().median()
    ratio = half_width.median() / error if error else np.inf
    shares = [
        ("90 % intervals that hold", len(answered), held.mean()),
        ("half-width of intervals, median", len(answered), half_width.median()),
        ("half-width over error, medians", len(answered), ratio),
        ("answered, unit not converted, rows", len(rows), len(rows) - len(comparable)),
    ]
    for score, count, value in shares:
        scores.append({"score": score, "group": "all", "count": count, "value": value})
    return pd.DataFrame(scores)


def memory_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Scores memory: its error by source, rows that ran and are said not to fit, the other side.

    The other side is what a source tuned: of each job the largest micro-batch that it published,
    beside the largest one that is said to fit. A source that did not look for it published less.

    Args:
        rows: published rows with source_repo, memory_gib, memory_bytes, fits, micro_batch_per_gpu
            and largest_micro_batch.
    """
    scores = []
    measured = rows[rows["memory_gib"].notna()]
    error = measured["memory_bytes"] / GIB / measured["memory_gib"] - 1
    for group, part in _groups(measured.assign(error=error), ["source_repo"]):
        scores.append({"score": "memory", "group": group} | summary(part["error"].fillna(np.inf)))
    fits = rows["fits"].dropna().astype(bool)
    refused = {"score": "ran and said not to fit, rows", "count": len(fits)}
    scores.append(refused | {"group": "all", "value": (~fits).sum()})
    jobs = rows[rows["largest_micro_batch"].notna()].groupby([*SAME_PAIR, *SETTINGS], dropna=False)
    most = jobs[["micro_batch_per_gpu", "largest_micro_batch"]].max().reset_index()
    most["ratio"] = most["largest_micro_batch"] / most["micro_batch_per_gpu"]
    for group, part in _groups(most, ["source_repo"]):
        above = {"group": group, "count": len(part)}
        median = {"score": "largest micro-batch, predicted over published"}
        scores.append(median | above | {"value": part["ratio"].median()})
        double = {"score": "twice the largest published micro-batch said not to fit"}
        scores.append(double | above | {"value": (part["ratio"] < 2).mean()})
    return pd.DataFrame(scores)


def pair_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Scores the order of pairs: jobs of one source that differ in one setting.

    A pair has one GPU, number of GPUs, model and sequence length, and differs in exactly one of
    ``SETTINGS``, or in the micro-batch and in none of them. What was measured several times counts
    once, by its mean. A pair that was refused is wrong; one whose published throughputs differ by
    less than ``TIED`` is none.

    Returns:
        A row for all pairs and one for each setting: score, group, count, answered, value (the
        share in the right order, of all), of_answered.
    """
    varied = [*SETTINGS, "micro_batch_per_gpu"]
    rows = rows.assign(predicted=rows["predicted"].fillna(-np.inf))  # refused, also in a mean
    measured = rows.groupby([*SAME_PAIR, *varied], dropna=False)[
        ["per_gpu_throughput", "predicted"]
    ]
    pairs = []
    for _, part in measured.mean().reset_index().groupby(SAME_PAIR, dropna=False):
        for (_, first), (_, second) in combinations(part.iterrows(), 2):
            differ = [name for name in SETTINGS if first[name] != second[name]] or varied[-1:]
            published = np.log(first["per_gpu_throughput"] / second["per_gpu_throughput"])
            if len(differ) > 1 or abs(published) < TIED:
                continue
            answered = np.isfinite(first["predicted"]) and np.isfinite(second["predicted"])
            right = answered and (first["predicted"] - second["predicted"]) * published > 0
            pairs.append((differ[0], answered, right))
    table = pd.DataFrame(pairs, columns=["setting", "answered", "right"])
    scores = []
    for group, part in _groups(table, ["setting"]):
        answered = part["answered"].astype(bool)
        scores.append(
            {
                "score": "order of pairs",
                "group": group,
                "count": len(part),
                "answered": int(answered.sum()),
                "value": part["right"].mean(),
                "of_answered": part.loc[answered, "right"].mean(),
            }
        )
    return pd.DataFrame(scores)


def collective_scores(tables: pd.DataFrame) -> pd.DataFrame:
    """Scores collectives, each table by its median error: from hardware alone, from every second.

    Args:
        tables: a row per table: hardware_error, interpolation_error (NaN of a table too short).
    """
    names = {"hardware": "collectives from hardware", "interpolation": "collectives interpolated"}
    scores = []
    for column, score in names.items():
        errors = tables[f"{column}_error"].dropna()
        scores.append({"score": score, "group": "all"} | summary(errors))
    return pd.DataFrame(scores)


def _groups(table: pd.DataFrame, columns: list[str]) -> list[tuple[str, pd.DataFrame]]:
    """Returns all rows as ``all``, and those of each value of each column."""
    groups = [("all", table)]
    for column in columns:
        groups += [(str(value), part) for value, part in table.groupby(column)]
    return groups
