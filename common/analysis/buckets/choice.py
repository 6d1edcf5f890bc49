"""Tabulates a prediction, its accuracy and the cost of its choice, for a notebook."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from common.analysis.buckets.measurements import Assignment2Run
from common.analysis.buckets.sweep import Accuracy
from common.perfmodel.ddp.best_cap import BestCap
from common.runtime.wording import counted

ACCURACY = {
    "median_error": ("median error of T(b)", "{:.1%}"),
    "worst_error": ("worst error of T(b)", "{:.1%}"),
    "noise_floor": ("noise floor", "{:.1%}"),
    ("median_error", "noise_floor"): (
        "median error over noise floor",
        lambda error, noise: "not known" if noise != noise else f"{error / noise:.1f}",
    ),
}
"""Titles of ``sweep.Accuracy``: the prediction's errors beside the measurement's own noise."""
MOST_INTERVALS = 4
"""Number of intervals of caps that are listed one by one."""
TOUCHING = 1.01
"""Ratio of two ends up to which neighbouring intervals are shown as one."""


def near_text(best: BestCap) -> str:
    """Returns all caps within 1 % of the best; of many intervals their number and the ends."""
    near = [best.near_mib[0]]
    for low, high in best.near_mib[1:]:
        if low > near[-1][1] * TOUCHING:
            near.append((low, high))
        else:
            near[-1] = (near[-1][0], high)
    if len(near) > MOST_INTERVALS:
        return f"{_interval(near[0][0], near[-1][1], best)} MiB, in {len(near)} intervals"
    return _joined([_interval(low, high, best) for low, high in near]) + " MiB"


def _interval(low: float, high: float, best: BestCap) -> str:
    """Returns one interval; every cap above the largest searched one gives the single bucket."""
    last = best.candidates[-1]
    without_end = last.num_buckets == 1 and high >= last.high_mib
    if low < 0.001:
        return "any" if without_end else f"up to {high:.3g}"
    return f"{low:.3g} and more" if without_end else f"{low:.3g} to {high:.3g}"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f", or {parts[-1]}"


def prediction_facts(best: BestCap) -> dict[str, str]:
    """Returns what the search over all caps found."""
    return {
        "distinct bucketings": f"{len(best.candidates)}",
        "b*, predicted to be the fastest": f"{best.cap_mib:.3g} MiB",
        "T(b*)": f"{best.total_s * 1e3:.1f} ms",
        "caps within 1 % of it": near_text(best),
    }


def choice_facts(accuracy: Accuracy, best: BestCap) -> dict[str, str]:
    """Returns the cap that the model chooses, of the measured ones and of all, and its cost."""
    chosen = accuracy.predicted_best_mib
    facts = {
        "regret can be told from noise": "yes" if accuracy.regret_is_clear else "no",
        "predicted best of the measured caps": f"{chosen:g} MiB",
        "measured best": f"{accuracy.measured_best_mib:g} MiB",
        "regret of the prediction": f"{accuracy.regret:.1%}",
    }
    if best.matched_by(accuracy.table["bucket_cap_mib"]):
        return facts
    shorter = 1 - best.total_s / best.predicted_s(chosen)
    return facts | {
        "predicted best of all caps, not measured": f"{best.cap_mib:.3g} MiB",
        "its predicted gain over the chosen one": f"{shorter:.1%}",
    }


def spread_facts(accuracy: Accuracy) -> dict[str, str]:
    """Returns how much the choice of the cap matters at all on this system."""
    times = accuracy.table["measured_ms"]
    worst = accuracy.table.loc[times.idxmax()]
    buckets = counted(int(worst["num_buckets"]), "bucket")
    return {
        "worst measured cap": f"{worst['bucket_cap_mib']:g} MiB, {buckets}",
        "its T(b) over the best cap's": f"{times.max() / times.min():.2f}",
    }


def gap_facts(run: Assignment2Run, accuracy: Accuracy) -> dict[str, str]:
    """Returns predicted − measured, split into computation and all the rest.

    The backward pass without DDP was measured among the rounds of the sweep; the profile of the
    model came from another benchmark. What the two differ by is computation's part of the error.
    """
    gap_ms = accuracy.table["predicted_ms"] - accuracy.table["measured_ms"]
    compute_ms = (run.profile.backward_s - run.local_s) * 1e3
    rest = gap_ms - compute_ms
    worst = accuracy.table.loc[rest.abs().idxmax()]
    larger = "computation" if abs(compute_ms) > rest.abs().median() else "communication"
    return {
        "predicted − measured, mean over caps": f"{gap_ms.mean():+.1f} ms",
        "pass alone, where gradients were timed": f"{run.profile.backward_s * 1e3:.1f} ms",
        "pass alone, among the sweep's rounds": f"{run.local_s * 1e3:.1f} ms",
        "part of computation": f"{compute_ms:+.1f} ms",
        "part of communication, median": f"{rest.median():+.1f} ms",
        "part of communication, largest": f"{rest.loc[worst.name]:+.1f} ms at "
        f"{worst['bucket_cap_mib']:g} MiB",
        "larger part": larger,
    }


EQUATION, SIMULATION = "equation", "simulation"
MOVED = (
    f"{EQUATION}, before",
    f"{EQUATION}, after",
    f"{SIMULATION}, before",
    f"{SIMULATION}, after",
)


def moves_table(table: pd.DataFrame, low: float, high: float) -> pd.DataFrame:
    """Returns where b* goes when each quantity grows from the factor ``low`` to ``high``.

    Args:
        table: of ``whatif.best_caps``.

    Columns: quantity, and those of ``MOVED``, b* in MiB.
    """
    rows = []
    for quantity, found in table.groupby("quantity", sort=False):
        ends = found.set_index("factor").loc[[low, high]]
        rows.append((quantity, *ends["closed_form_mib"], *ends["best_mib"]))
    return pd.DataFrame(rows, columns=["quantity", *MOVED])
