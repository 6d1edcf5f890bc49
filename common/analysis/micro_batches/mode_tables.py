"""Tables of modes for a reader: real differences, ratios to static, imbalance, waiting."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from common.analysis.micro_batches.mode_comparison import CONTROL, STATIC, ModeComparison
from common.analysis.micro_batches.training_runs import mode_name

PAYS_FROM = 0.95
"""Upper bound on the ratio to static of a step that is called a gain."""


def static_imbalance(comparison: ModeComparison) -> dict[str, float]:
    """Returns how unequal the ranks of static are, on average over its steps.

    Keys: fullest and emptiest (padded tokens of these ranks), excess (of the fullest over the mean
    of the ranks), text_share (tokens of texts over padded tokens), waiting (share of step time).
    """
    rows = comparison.times[comparison.times["mode"] == STATIC]
    steps = rows.groupby("step")["padded_tokens"]
    fullest = steps.max().mean()
    return {
        "fullest": float(fullest),
        "emptiest": float(steps.min().mean()),
        "excess": float(fullest / steps.mean().mean() - 1),
        "text_share": float(rows["tokens"].sum() / rows["padded_tokens"].sum()),
        "waiting": float(comparison.waiting[STATIC]),
    }


def verdicts_shown(comparison: ModeComparison) -> pd.DataFrame:
    """Returns which differences between modes on the same batches the intervals support.

    A mode differs from static if its interval excludes 1. It is tied with the fastest mode if its
    interval begins below the end of that mode's.
    """
    table = comparison.summary
    fastest = table.loc[table["ratio"].idxmin()]
    return pd.DataFrame(
        {
            "mode": [mode_name(mode) for mode in table.index],
            "differs from static": differs_from_static(table),
            "tied with the fastest": _yes_or_no(table["ratio_low"] <= fastest["ratio_high"]),
            "step over static": table["ratio"],
            "95 % interval": _intervals(table),
        }
    )


def modes_shown(comparison: ModeComparison) -> pd.DataFrame:
    """Returns times and ratios to static of the modes that share the global batches."""
    table = comparison.summary.reset_index()
    return pd.DataFrame(
        {
            "mode": table["mode"].map(mode_name),
            "mean step (ms)": table["mean_ms"],
            "P95 (ms)": table["p95_ms"],
            "mean": table["ratio"],
            "P95": table["p95_ratio"],
            "median": table["paired_median"],
            "computed": table["compute_ratio"],
            "promised": table["padded_ratio"],
            "plan (ms)": table["planning_ms"],
            "waiting": table["waiting"],
        }
    )


def per_text_shown(comparison: ModeComparison) -> pd.DataFrame:
    """Returns the time per text of all modes over static's, with those of other batches last."""
    table = comparison.per_sample
    return pd.DataFrame(
        {
            "mode": [mode_name(mode) for mode in table.index],
            "differs from static": differs_from_static(table),
            "same texts a step": _yes_or_no(table["same_batch"]),
            "texts a step": table["texts"],
            "time per text over static": table["ratio"],
            "95 % interval": _intervals(table),
        }
    )


def datasets_shown(comparisons: Iterable[ModeComparison]) -> pd.DataFrame:
    """Returns dynamic over static on each data set, and whether it pays there."""
    rows = []
    for comparison in comparisons:
        table = comparison.summary
        if "dynamic" not in table.index:
            continue
        row = table.loc["dynamic"]
        rows.append(
            {
                "data": comparison.dataset,
                "differs from static": differs_from_static(table)["dynamic"],
                "pays": "yes" if row["ratio"] < PAYS_FROM else "no",
                "steps": len(comparison.ratios()),
                "promised": row["padded_ratio"],
                "computation": row["compute_ratio"],
                "step": row["ratio"],
                "95 % interval": _intervals(table)["dynamic"],
                "P95": row["p95_ratio"],
            }
        )
    return pd.DataFrame(rows)


def waiting_shown(comparison: ModeComparison) -> pd.DataFrame:
    """Returns the share of step time that ranks wait, by mode, and how far above the control.

    The control is the last row, and its difference NaN for all where it was not measured.
    """
    shares = comparison.waiting
    modes = [*comparison.modes, *comparison.own_batch_modes]
    if CONTROL in shares:
        modes.append(CONTROL)
    above = (shares[modes] - shares.get(CONTROL, np.nan)) * 100
    return pd.DataFrame(
        {
            "mode": [mode_name(mode) for mode in modes],
            "waiting": shares[modes],
            "above the control (points)": above.where(above.index != CONTROL),
        }
    )


def differs_from_static(table: pd.DataFrame) -> pd.Series:
    """Returns yes where a mode's interval excludes 1, else no; missing for static itself."""
    outside = (table["ratio_low"] > 1) | (table["ratio_high"] < 1)
    return _yes_or_no(outside).where(table.index != STATIC)


def _intervals(table: pd.DataFrame) -> pd.Series:
    """Returns the 95 % intervals as texts; missing for static itself."""
    texts = [
        f"{low:.2f}–{high:.2f}"
        for low, high in zip(table["ratio_low"], table["ratio_high"], strict=True)
    ]
    return pd.Series(texts, index=table.index).where(table.index != STATIC)


def _yes_or_no(flags: pd.Series) -> pd.Series:
    return flags.map({True: "yes", False: "no"})
