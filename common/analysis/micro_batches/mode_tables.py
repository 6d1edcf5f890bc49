"""Tables of modes for a reader: real differences, ratios to static, imbalance, waiting."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from common.analysis.micro_batches.mode_comparison import CONTROL, STATIC, ModeComparison
from common.analysis.micro_batches.training_runs import mode_name

SPREAD = ("ratio_low", "ratio_high")
INTERVAL = ("95 % interval", lambda low, high: "–" if low == high else f"{low:.2f}–{high:.2f}")
"""Static, which is compared with itself, has none."""
VERDICTS = {
    "mode": ("mode", mode_name),
    "differs": "differs from static",
    "tied": "tied with the fastest",
    "ratio": "step over static",
    SPREAD: INTERVAL,
}
MODES = {
    "mode": ("mode", mode_name),
    "mean_ms": "mean step (ms)",
    "p95_ms": "P95 (ms)",
    "ratio": "mean",
    "p95_ratio": "P95",
    "paired_median": "median",
    "compute_ratio": "computed",
    "padded_ratio": "promised",
    "planning_ms": ("plan (ms)", "{:.2f}"),
    "waiting": "waiting",
}
"""Titles of ``ModeComparison.summary``."""
PER_TEXT = {
    "mode": ("mode", mode_name),
    "differs": "differs from static",
    "same_batch": "same texts a step",
    "texts": ("texts a step", "{:.1f}"),
    "ratio": "time per text over static",
    SPREAD: INTERVAL,
}
"""Titles of ``ModeComparison.per_sample``."""
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
                "differs from static": row["differs"],
                "pays": row["ratio"] < PAYS_FROM,
                "steps": len(comparison.ratios()),
                "promised": row["padded_ratio"],
                "computation": row["compute_ratio"],
                "step": row["ratio"],
                "95 % interval": INTERVAL[1](row["ratio_low"], row["ratio_high"]),
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
