"""Tables of a sweep: parts of steps, speedups, overlap, predictions, laws, the published V100s.

Where a number may say nothing, its table says so before the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from common.analysis.scaling.laws import FITS_WITHIN, FittedLaw
from common.analysis.scaling.sweep_rounds import (
    correction_error,
    exchange_falls,
    grown_share,
    more_hidden,
    slowed_passes,
    told_by_rounds,
    waits_and_sends,
)
from common.analysis.scaling.sweep_run import ARM, Series, SweepRun, arm_name
from common.analysis.show import judged_format
from common.analysis.step_parts import PARTS, TOLERANCE
from common.analysis.sweep_speedups import against_one_rank
from common.perfmodel.scaling.published_mlp import MEAN_SLOWDOWN, PCIE3_X16_BYTES_PER_S, Explanation
from common.perfmodel.scaling.published_mlp import TOLERANCE as PUBLISHED_TOLERANCE

SPEEDUPS = {
    "regime": "scaling",
    "batch": "batch",
    "world_size": "ranks",
    ("judged", "refused"): ("compared with one rank", against_one_rank),
    "step_ms": ("step (ms)", "{:.1f}"),
    "throughput_samples_per_s": "samples/s",
    "speedup": "speedup",
    ("refused", "judged"): (
        "95 % interval",
        lambda refused, judged: "–" if refused else judged.interval.text(),
    ),
    "efficiency": ("efficiency", "{:.0%}"),
}
"""Titles of ``on_several_ranks``: first, whether an arm can be told from one rank."""
PARTS_OF_STEP = {
    tuple(ARM): ("arm", arm_name),
    ("adds_up", "plain_step_ms"): (
        "adds up",
        lambda adds_up, plain_ms: "–" if pd.isna(plain_ms) else "yes" if adds_up else "no",
    ),
    "step_ms": ("watched step (ms)", "{:.1f}"),
    "sum_ms": ("sum of parts (ms)", "{:.1f}"),
    **{
        (f"{part}_ms", "sum_ms"): (part, lambda part_ms, sum_ms: f"{part_ms / sum_ms:.0%}")
        for part in PARTS
    },
    "plain_step_ms": ("plain step (ms)", "{:.1f}"),
    "watching_share": "watched / plain",
}
"""Titles of ``SweepRun.parts``. Parts are shares of their sum; they add up where that is the plain
step within ``TOLERANCE``."""
OVERLAP = {
    tuple(ARM): ("arm", arm_name),
    "total_ratio": "all-reduces / computation",
    "exposed_ratio": "exposed / computation",
    ("total_ratio", "exposed_ratio"): (
        "hidden",
        lambda total, exposed: f"{1 - exposed / total if total > 0 else 0:.0%}",
    ),
}
"""Titles of ``SweepRun.exchanges``."""
PREDICTIONS = {
    tuple(ARM): ("arm", arm_name),
    "measured_ms": "measured (ms)",
    "predicted_step_ms": "predicted (ms)",
    "error": ("error", "{:+.0%}"),
    "judged": ("over the rounds, 95 %", judged_format("{:+.0%}")),
    "adjusted_step_ms": "adjusted (ms)",
    "adjusted_error": ("its error", "{:+.0%}"),
}
"""Titles of ``judged_predictions``."""
LAWS = {
    "regime": "scaling",
    "law": "law",
    "describes_points": "describes the points",
    "parameter": "parameter",
    "value": ("value", "{:.3g}"),
    "interval": "95 % interval",
    "largest_error": "largest error",
    "r_squared": ("R²", "{:.3f}"),
}
"""Titles of ``fitted_parameters``: first, whether a law describes the points."""
PUBLISHED = {
    "batch": ("batch per GPU", "{:,}"),
    "one_gpu_ms": ("1 GPU (ms)", "{:.2f}"),
    "two_gpus_ms": ("2 GPUs (ms)", "{:.2f}"),
    "predicted_ms": ("predicted (ms)", "{:.2f}"),
    "speedup": "speedup",
    "bare_bandwidth": "needs, no contention (GB/s)",
    "slowed_bandwidth": "needs, 40 % (GB/s)",
}
"""Titles of ``published_batches``."""


OF_PARTS = {
    "passes of the largest batch on the most ranks, over one rank's (weak)": (
        slowed_passes,
        "{:.2f}",
    ),
    "communication's share of a step, smallest batch above largest (weak)": (
        grown_share,
        "{:+.0%}",
    ),
}
OF_OVERLAP = {
    "share that is hidden, largest batch above smallest": (more_hidden, "{:+.0%}"),
    "all-reduces / computation, smallest batch over largest": (exchange_falls, "{:.2f}"),
}
OF_MOST_RANKS = {
    "waiting and communication of a step on the most ranks": (waits_and_sends, "{:.0%}")
}
OF_CORRECTION = {
    "error of the other arms, adjusted above plain": (correction_error, "{:+.1%}"),
}
"""What a section's facts judge by rounds: title → how, and its format."""


def parts_facts(run: SweepRun) -> dict[str, str]:
    """Returns how far the parts can be trusted, and how much ranks slow each other down."""
    parts = run.parts
    facts = {"noise floor: the same step under two names differs by": _noise_text(run)}
    several = parts.dropna(subset="plain_step_ms")
    if len(several):
        longer = several["watching_share"].astype(float)
        facts |= {
            f"arms whose parts add up to the plain step within {TOLERANCE:.0%}": (
                f"{int(several['adds_up'].sum())} of {len(several)}"
            ),
            "watched over plain step, median over arms": f"± {longer.abs().median():.1%}",
            "watched over plain step, range": f"{longer.min():+.1%} to {longer.max():+.1%}",
        }
    unexplained = parts["unaccounted_share"].abs().max()
    facts["share of a watched step that no part explains, at most"] = f"{unexplained:.1%}"
    return facts | told_by_rounds(run, OF_PARTS)


def _noise_text(run: SweepRun) -> str:
    return "not known" if run.noise_floor is None else f"{run.noise_floor:.1%}"


def on_several_ranks(run: SweepRun) -> pd.DataFrame:
    """Returns the arms on several ranks in the order of ``run.series``, then the refused ones.

    Columns are those of ``sweep_speedups``, and ``batch``, what the arms of a series share.
    """
    tables = [series.table.assign(batch=series.label) for series in run.series]
    refused = run.speedups[run.speedups["refused"] != ""]
    batches = refused["batch_per_rank"].map("batch per rank {:,}".format)
    table = pd.concat([*tables, refused.assign(batch=batches)], ignore_index=True)
    return table[table["world_size"] > 1]


def prediction_facts(run: SweepRun) -> dict[str, str]:
    """Returns the errors of predicted steps, beside the noise floor, or why there are none."""
    errors = run.errors
    if errors is None:
        return {"no prediction": run.predictions[1]}
    error, adjusted = errors["error"], errors["adjusted_error"].dropna().abs()
    facts = {
        **told_by_rounds(run, OF_MOST_RANKS),
        "noise floor of the measured steps": _noise_text(run),
        "error, nothing taken from a step: median over arms": f"± {error.abs().median():.0%}",
        "error, nothing taken from a step: range": f"{error.min():+.0%} to {error.max():+.0%}",
    }
    if len(adjusted):
        facts |= {
            "error of the other arms, adjusted: median": f"± {adjusted.median():.0%}",
            "error of the other arms, adjusted: at most": f"± {adjusted.max():.0%}",
            **told_by_rounds(run, OF_CORRECTION),
        }
    return facts


def fitted_parameters(series: Sequence[Series]) -> pd.DataFrame:
    """Returns a row per fitted parameter; columns as in ``LAWS``."""
    rows = [
        {
            "regime": arms.regime,
            "law": fitted.law.name,
            "describes_points": describes_points(arms, fitted),
            "parameter": name,
            "value": estimate.estimate,
            # 0 in every draw is a bound, as parameters cannot be negative.
            "interval": "at its bound" if estimate.high == 0 else estimate.text("{:.3g}"),
            "largest_error": fitted.largest_error,
            "r_squared": fitted.r_squared,
        }
        for arms in series
        for fitted in arms.laws[0]
        for name, estimate in fitted.parameters.items()
    ]
    return pd.DataFrame(rows, columns=[*LAWS])


def describes_points(arms: Series, law: FittedLaw) -> str:
    """Returns whether a law is off by at most ``FITS_WITHIN`` at every point: yes, no, or the
    verdict where that is open."""
    errors = arms.law_errors(law)
    near = [replace(e, null=math.copysign(FITS_WITHIN, e.estimate)) for e in errors]
    if any(error.is_settled and abs(error.estimate) > FITS_WITHIN for error in near):
        return "no"
    sides = [*near, *(replace(error, null=-error.null) for error in near)]
    return next((side.said for side in sides if not side.is_settled), "yes")


def limits_table(series: Sequence[Series]) -> pd.DataFrame:
    """Returns a row per law: the most speedup that it allows, and on how many ranks.

    A law that does not describe the points, or was not fitted, says nothing of more ranks.
    """
    columns = ["scaling", "law", "describes the points", "measured up to (ranks)", "most speedup"]
    columns += ["on ranks", "95 % interval", "intervals from"]
    rows = []
    for arms in series:
        of_series = {"scaling": arms.regime}
        of_series["measured up to (ranks)"] = int(arms.table["world_size"].iloc[-1])
        for fitted in arms.laws[0]:
            described = describes_points(arms, fitted)
            row = {"law": fitted.law.name, "describes the points": described}
            row["intervals from"] = fitted.method
            if described == "yes":
                row |= _limit(fitted)
            rows.append(of_series | row)
        for name, reason in arms.laws[1]:
            row = {"law": name, "describes the points": f"not fitted: {reason}"}
            rows.append(of_series | row)
    return pd.DataFrame(rows, columns=columns)


def _limit(fitted: FittedLaw) -> dict[str, str]:
    """Returns the most speedup and the number of ranks that reaches it."""
    most = fitted.most_speedup
    limit = {"most speedup": f"{most:.3g}" if np.isfinite(most) else "no bound"}
    peak = fitted.peak_ranks
    if peak is None or not np.isfinite(peak):
        return limit | {"on ranks": "as many as there are"}
    low, high = fitted.peak_interval
    interval = f"{low:.1f} to {high:.1f}" if np.isfinite(high) else f"{low:.1f} or more"
    return limit | {"on ranks": f"{peak:.1f}", "95 % interval": interval}


def published_batches(explanation: Explanation) -> pd.DataFrame:
    """Returns a row per published batch: one GPU, two, the model's, and the bandwidth it needs.

    Columns as in ``PUBLISHED``; bandwidths in bytes per second.
    """
    rows = [
        (
            batch,
            explanation.one_gpu_ms[batch],
            time_ms,
            explanation.predicted_ms[batch],
            2 * explanation.one_gpu_ms[batch] / time_ms,
            *explanation.needed[batch],
        )
        for batch, time_ms in explanation.published_ms.items()
    ]
    return pd.DataFrame(rows, columns=[*PUBLISHED])


def published_facts(explanation: Explanation) -> dict[str, str]:
    """Returns the one bandwidth, its range, and what was assumed beside it."""
    fixed_beta, fixed_error = explanation.at_mean_slowdown
    _, bare_error = explanation.without_slowdown
    worst = max(abs(error) for error in explanation.errors.values())
    parameters = explanation.model.device.mlp.parameters
    bandwidth = explanation.bandwidth_bytes_per_s
    return {
        "bandwidth that explains both steps best": f"{bandwidth / 1e9:.1f} GB/s",
        "computation then takes longer beside an all-reduce by": f"{explanation.slowdown - 1:.0%}",
        "largest error of the two steps": f"below {max(worst, 1e-3):.1%}",
        f"bandwidths that explain both within {PUBLISHED_TOLERANCE:.0%}": (
            f"{explanation.low / 1e9:.1f} to {explanation.high / 1e9:.1f} GB/s"
        ),
        f"largest error with others' mean slowdown of {MEAN_SLOWDOWN - 1:.1%}": (
            f"{fixed_error:.1%}, at {fixed_beta / 1e9:.1f} GB/s"
        ),
        "largest error without any slowdown": f"{bare_error:.1%}",
        "PCIe 3.0 x16 carries, in one direction": f"{PCIE3_X16_BYTES_PER_S / 1e9:.2f} GB/s",
        "the bandwidth as a share of that": f"{explanation.share_of_pcie:.0%}",
        "gradients of a step": f"{parameters:,} numbers, {parameters * 4 / 2**20:.0f} MiB",
        "their all-reduce takes": f"{parameters * 4 / bandwidth * 1e3:.0f} ms",
    }
