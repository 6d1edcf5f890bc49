"""Who waits for whom in a comparison of modes: how unequal ranks are, and the wait of each mode."""

from __future__ import annotations

import pandas as pd

from common.analysis.micro_batches.mode_comparison import (
    CONTROL,
    DYNAMIC,
    STATIC,
    ModeComparison,
    by_step,
)
from common.analysis.micro_batches.training_runs import mode_name
from common.analysis.show import judged_format
from common.judged import Judged
from common.samples import Interval, mean_ratio, paired_difference, student_quantile, welch

WAITING = {
    "mode": ("mode", mode_name),
    "waiting": "waiting",
    "above_control": ("above the control (points)", judged_format("{:+.1f}")),
    "above_static": ("above static (points)", judged_format("{:+.1f}")),
}
"""Titles of ``waiting_points``."""
STEPS_ALIKE = "static: std over ranks of computation, above that of whole steps"
COMPUTED_ALIKE = "dynamic: std over ranks of computation, above static's"


def static_imbalance(comparison: ModeComparison) -> dict[str, float]:
    """Returns how unequal the ranks of static are, on average over its steps.

    Keys: fullest and emptiest (padded tokens of these ranks), excess (of the fullest over the mean
    of the ranks), text_share (tokens of texts over padded tokens).
    """
    rows = comparison.times[comparison.times["mode"] == STATIC]
    steps = rows.groupby("step")["padded_tokens"]
    fullest = steps.max().mean()
    return {
        "fullest": float(fullest),
        "emptiest": float(steps.min().mean()),
        "excess": float(fullest / steps.mean().mean() - 1),
        "text_share": float(rows["tokens"].sum() / rows["padded_tokens"].sum()),
    }


def static_waits(comparison: ModeComparison) -> Judged:
    """Judges the share of all ranks' time that they wait under static."""
    rows = comparison.times[comparison.times["mode"] == STATIC]
    sums = rows.groupby("step")[["waiting_time_ms", "step_time_ms"]].sum()
    share = mean_ratio(sums["waiting_time_ms"], sums["step_time_ms"])
    return Judged(share, null=None, **comparison.conditions)


def waiting_points(comparison: ModeComparison) -> pd.DataFrame:
    """Returns by mode ``waiting``, and in percentage points above_control (of other batches) and
    above_static (on the same ones), each as it may be said.

    Differences are those of the shares in ``waiting``, with intervals over steps (``by_step``). The
    control is the last row. A difference that was not measured is None.
    """
    columns = ["waiting_time_ms", "step_time_ms"]
    sums = comparison.times.groupby(["mode", "step"])[columns].sum()
    points = {
        mode: 100 * by_step(rows["waiting_time_ms"], rows["step_time_ms"]).droplevel("mode")
        for mode, rows in sums.groupby("mode")
    }
    shares = comparison.waiting
    same, unlike = comparison.modes, comparison.own_batch_modes
    modes = [*same, *unlike, *({CONTROL} & set(shares.index))]
    control = points.get(CONTROL, ())
    above_control = {
        mode: _judged(comparison, welch(points[mode], control, claims=len(same + unlike)))
        for mode in same + unlike
        if min(len(control), len(points[mode])) > 1
    }
    above_static = {
        mode: _judged(comparison, _mean(points[mode] - points[STATIC], claims=len(same) - 1))
        for mode in same[1:]
    }
    return pd.DataFrame(
        {
            "waiting": shares[modes],
            "above_control": [above_control.get(mode) for mode in modes],
            "above_static": [above_static.get(mode) for mode in modes],
        }
    )


def unequal_ranks_ms(comparison: ModeComparison) -> dict[str, Judged]:
    """Judges ``STEPS_ALIKE`` and, where dynamic was measured, ``COMPUTED_ALIKE``, in ms."""
    columns = ["compute_time_ms", "step_time_ms"]
    spread = comparison.times.groupby(["mode", "step"])[columns].std(ddof=0)
    compute, steps = (spread[column].unstack("mode") for column in columns)
    pairs = {STEPS_ALIKE: (compute[STATIC], steps[STATIC])}
    if DYNAMIC in comparison.modes:
        pairs[COMPUTED_ALIKE] = compute[DYNAMIC], compute[STATIC]
    return {
        name: _judged(comparison, paired_difference(*pair, claims=len(pairs)))
        for name, pair in pairs.items()
    }


def _mean(values: pd.Series, *, claims: int) -> Interval:
    """Estimates a mean with Student's interval; none is trimmed, as the shares are of all steps."""
    values = values.dropna()
    off = student_quantile(len(values) - 1, claims=claims) * values.sem()
    mean = values.mean()
    return Interval(float(mean), float(mean - off), float(mean + off), rounds=len(values))


def _judged(comparison: ModeComparison, interval: Interval) -> Judged:
    return Judged(interval, null=0.0, **comparison.conditions)
