"""Tabulates a prediction, its accuracy, and what its choice costs and gains, for a notebook."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from common.analysis.buckets.measurements import Assignment2Run
from common.analysis.buckets.sweep import DEFAULT_NAME, Accuracy, BucketSweep
from common.analysis.show import judged_format
from common.judged import DISTURBED, Fastest, Judged
from common.perfmodel.ddp.best_cap import BestCap
from common.perfmodel.model import DdpModel
from common.runtime.wording import counted
from common.samples import student

ACCURACY = {
    "error.said": "median error can be told from noise",
    "median_error": ("median error of T(b)", "{:.1%}"),
    "worst_error": ("worst error of T(b)", "{:.1%}"),
    "noise_floor": ("noise floor", "{:.1%}"),
    ("median_error", "noise_floor"): (
        "median error over noise floor",
        lambda error, noise: "not known" if noise != noise else f"{error / noise:.1f}",
    ),
}
"""Titles of ``sweep.Accuracy``: the prediction's errors beside the measurement's own noise."""
ERRORS = {
    **dict.fromkeys(("bucket_cap_mib", "num_buckets", "predicted_ms", "measured_ms", "error")),
    "judged": ("over the rounds, 95 %", judged_format("{:+.1%}")),
}
"""Titles of ``judged_errors``."""
SEARCH = {
    "candidates": ("distinct bucketings", lambda candidates: f"{len(candidates)}"),
    "cap_mib": ("b*, predicted to be the fastest", "{:.3g} MiB"),
    "total_s": ("T(b*)", lambda seconds: f"{seconds * 1e3:.1f} ms"),
}
"""Titles of ``BestCap``: the search over all caps."""
MOST_INTERVALS = 4
"""Number of intervals of caps that are listed one by one."""
TOUCHING = 1.01
"""Ratio of two ends up to which neighbouring intervals are shown as one."""


gain_text = judged_format("{:.1%}")


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


def _joined(parts: Sequence[str], last: str = "or") -> str:
    comma = "," if len(parts) > 2 or last == "or" else ""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}{comma} {last} {parts[-1]}"


def cap_or_ties(which: Fastest | None) -> str:
    """Returns the cap that is told from all others, or all that are tied."""
    if which is None:
        return "only one was measured"
    if which.lead.is_settled:
        return f"{which.arm:g} MiB"
    if which.lead.machine == DISTURBED or which.lead.rounds < which.lead.least_rounds:
        return which.lead.said
    tied = _joined([f"{cap:g}" for cap in which.tied], "and")
    return f"{counted(len(which.tied), 'cap')} are tied: {tied} MiB"


def judged_errors(accuracy: Accuracy) -> pd.DataFrame:
    """Returns the table of a prediction's accuracy with each error as it may be said, judged."""
    return accuracy.table.assign(judged=[*accuracy.errors.values()])


def choice_facts(accuracy: Accuracy, best: BestCap) -> dict[str, str]:
    """Returns the cap that the model chooses, of the measured ones and of all, and its cost."""
    chosen = accuracy.predicted_best_mib
    facts = {
        "regret can be told from noise": accuracy.regret.said,
        "predicted best of the measured caps": f"{chosen:g} MiB",
        "measured best": cap_or_ties(accuracy.best),
        "regret of the prediction": f"{accuracy.regret.estimate:.1%}",
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
    worst = cap_or_ties(accuracy.worst)
    if accuracy.worst is not None and accuracy.worst.lead.is_settled:
        buckets = accuracy.table.set_index("bucket_cap_mib")["num_buckets"]
        worst += f", {counted(int(buckets[accuracy.worst.arm]), 'bucket')}"
    return {
        "worst measured cap": worst,
        "the slowest cap's T(b) over the fastest's": ratio_or_verdict(accuracy.worst_over_best),
    }


def ratio_or_verdict(ratio: Judged) -> str:
    """Returns a ratio, or why there is none."""
    return f"{ratio.estimate:.2f}" if ratio.is_settled else ratio.said


def default_facts(model: DdpModel, sweep: BucketSweep, accuracy: Accuracy) -> dict[str, str]:
    """Returns the default's time, and what the predicted best measured cap gains over it."""
    measured = sweep.default()
    if measured is None:
        return {DEFAULT_NAME: "not measured in this run"}
    predicted_ms = model.backward_s(None) * 1e3
    chosen = accuracy.predicted_best_mib
    return {
        f"{DEFAULT_NAME}, measured": f"{measured['median_ms']:.1f} ms",
        "its buckets": f"{measured['num_buckets']:.0f}",
        "its T(b), predicted": f"{predicted_ms:.1f} ms",
        "predicted against measured": f"{predicted_ms / measured['median_ms'] - 1:+.1%}",
        f"gain of {chosen:g} MiB over it, by rounds": gain_text(sweep.gain_over_default(chosen)),
    }


def gap_facts(run: Assignment2Run, accuracy: Accuracy) -> dict[str, str]:
    """Returns predicted − measured, split into computation and all the rest.

    The backward pass without DDP was measured among the rounds of the sweep; the profile of the
    model came from another benchmark. What the two differ by is computation's part of the error.
    """
    gap_ms = accuracy.table["predicted_ms"] - accuracy.table["measured_ms"]
    compute_ms = (run.profile.backward_s - run.local_s) * 1e3
    other_ms = gap_ms - compute_ms
    worst = accuracy.table.loc[other_ms.abs().idxmax()]
    in_ms = judged_format("{:+.1f} ms")
    return {
        "predicted − measured, mean over caps": f"{gap_ms.mean():+.1f} ms",
        "pass alone, where gradients were timed": f"{run.profile.backward_s * 1e3:.1f} ms",
        "pass alone, among the sweep's rounds": f"{run.local_s * 1e3:.1f} ms",
        "the second over the first, by rounds": judged_format()(run.local_over_timed),
        "part of computation": f"{compute_ms:+.1f} ms",
        "part of communication, median, by rounds": in_ms(communication_gap(run, accuracy)),
        "part of communication, largest": f"{other_ms.loc[worst.name]:+.1f} ms at "
        f"{worst['bucket_cap_mib']:g} MiB",
    }


def communication_gap(run: Assignment2Run, accuracy: Accuracy) -> Judged:
    """Judges predicted − measured without computation's part, in ms: the median over caps."""
    computed_ms = (run.profile.backward_s - run.local_s) * 1e3
    other_ms = accuracy.table["predicted_ms"].to_numpy() - accuracy.rounds - computed_ms
    return Judged(student(other_ms.median(axis=1)), null=0.0, **accuracy.conditions)


MOVED = ("equation, before", "equation, after", "simulation, before", "simulation, after")


def moves(table: pd.DataFrame, low: float, high: float) -> pd.DataFrame:
    """Returns where b* goes when each quantity grows from the factor ``low`` to ``high``.

    Args:
        table: Result of ``whatif.best_caps``.

    Columns: quantity, and those of ``MOVED``, b* in MiB.
    """
    rows = []
    for quantity, by_factor in table.groupby("quantity", sort=False):
        ends = by_factor.set_index("factor").loc[[low, high]]
        rows.append((quantity, *ends["closed_form_mib"], *ends["best_mib"]))
    return pd.DataFrame(rows, columns=["quantity", *MOVED])
