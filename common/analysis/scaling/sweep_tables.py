"""Tables of a sweep: parts of steps, speedups, overlap, predictions, laws, the published V100s.

Where a number may say nothing, its table says so before the number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from common.analysis.scaling.laws import FittedLaw
from common.analysis.scaling.sweep_run import ARM, Series, SweepRun, arm_name
from common.analysis.step_parts import PARTS, TOLERANCE
from common.perfmodel.scaling.published_mlp import MEAN_SLOWDOWN, PCIE3_X16_BYTES_PER_S, Explanation
from common.perfmodel.scaling.published_mlp import TOLERANCE as PUBLISHED_TOLERANCE
from common.samples import Interval

NO_INTERVAL = "no interval: one round"


PARTS_OF_STEP = {
    tuple(ARM): ("arm", arm_name),
    ("adds_up", "plain_step_ms"): (
        "adds up",
        lambda adds_up, plain_ms: "–" if pd.isna(plain_ms) else "yes" if adds_up else "no",
    ),
    "step_ms": ("watched step (ms)", "{:.1f}"),
    "sum_ms": ("sum of parts (ms)", "{:.1f}"),
    **{
        (f"{part}_ms", "sum_ms"): (part, lambda own, all_ms: f"{own / all_ms:.0%}")
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
    "adjusted_step_ms": "adjusted (ms)",
    "adjusted_error": ("its error", "{:+.0%}"),
}
"""Titles of ``SweepRun.errors``."""


def parts_facts(run: SweepRun) -> dict[str, str]:
    """Returns how far the parts can be trusted, and how much ranks slow each other down."""
    parts = run.parts
    found = {"noise floor: the same step under two names differs by": noise_text(run)}
    several = parts.dropna(subset="plain_step_ms")
    if len(several):
        longer = several["watching_share"].astype(float)
        found |= {
            f"arms whose parts add up to the plain step within {TOLERANCE:.0%}": (
                f"{int(several['adds_up'].sum())} of {len(several)}"
            ),
            "watched over plain step, median over arms": f"± {longer.abs().median():.1%}",
            "watched over plain step, range": f"{longer.min():+.1%} to {longer.max():+.1%}",
        }
    left = parts["unaccounted_share"].abs().max()
    found["share of a watched step that no part explains, at most"] = f"{left:.1%}"
    last = parts.sort_values(["world_size", "batch_per_rank"]).iloc[-1]
    alone = parts[(parts["world_size"] == 1) & (parts["batch_per_rank"] == last["batch_per_rank"])]
    if len(alone):
        computed, by_itself = (
            row["forward_ms"] + row["backward_ms"] for row in (last, alone.iloc[0])
        )
        found[f"computation of {arm_name(*last[ARM])} over the same on one rank by itself"] = (
            f"{computed / by_itself:.2f}"
        )
    return found


def noise_text(run: SweepRun) -> str:
    """Returns the noise floor, or that it is not known."""
    return "not known" if run.noise_floor is None else f"{run.noise_floor:.1%}"


def speedup_table(run: SweepRun) -> pd.DataFrame:
    """Returns a row per arm on several ranks: speedup with its interval, and efficiency.

    The fourth column says first whether the arm can be told from one rank, or why there is no
    speedup.
    """
    columns = [
        "scaling",
        "batch",
        "ranks",
        "compared with one rank",
        "step (ms)",
        "samples/s",
        "speedup",
        "95 % interval",
        "efficiency",
    ]
    rows = [
        {
            "scaling": series.regime,
            "batch": series.label,
            "ranks": int(row.world_size),
            "compared with one rank": against_one_rank(row.speedup_low, row.speedup_high),
            "step (ms)": row.step_ms,
            "samples/s": row.throughput_samples_per_s,
            "speedup": row.speedup,
            "95 % interval": _interval(row.speedup_low, row.speedup_high),
            "efficiency": row.efficiency,
        }
        for series in run.series
        for row in series.table.itertuples()
        if row.world_size > 1
    ]
    refused = run.speedups[(run.speedups["refused"] != "") & (run.speedups["world_size"] > 1)]
    rows += [
        {
            "scaling": row.regime,
            "batch": f"batch per rank {row.batch_per_rank:,}",
            "ranks": int(row.world_size),
            "compared with one rank": row.refused,
            "step (ms)": row.step_ms,
            "samples/s": row.throughput_samples_per_s,
        }
        for row in refused.itertuples()
    ]
    return pd.DataFrame(rows, columns=columns)


def against_one_rank(low: float, high: float) -> str:
    """Returns whether a speedup with this 95 % interval is faster or slower than one rank."""
    if pd.isna(low) or pd.isna(high):
        return "not known: one round"
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "cannot be told"


def prediction_facts(run: SweepRun) -> dict[str, str]:
    """Returns the errors of predicted steps, beside the noise floor, or why there are none."""
    both = run.errors
    if both is None:
        return {"no prediction": run.predictions[1]}
    error, adjusted = both["error"], both["adjusted_error"].dropna().abs()
    found = {
        "noise floor of the measured steps": noise_text(run),
        "error, nothing taken from a step: median over arms": f"± {error.abs().median():.0%}",
        "error, nothing taken from a step: range": f"{error.min():+.0%} to {error.max():+.0%}",
    }
    if len(adjusted):
        found |= {
            "error of the other arms, adjusted: median": f"± {adjusted.median():.0%}",
            "error of the other arms, adjusted: at most": f"± {adjusted.max():.0%}",
        }
    return found


def laws_table(series: Sequence[Series]) -> pd.DataFrame:
    """Returns a row per fitted parameter; first, whether its law describes the points."""
    columns = [
        "scaling",
        "law",
        "describes the points",
        "parameter",
        "value",
        "95 % interval",
        "largest error",
        "R²",
    ]
    rows = [
        {
            "scaling": one.regime,
            "law": fitted.law.name,
            "describes the points": _yes_or_no(fitted),
            "parameter": name,
            "value": estimate.estimate,
            "95 % interval": _interval_of(estimate),
            "largest error": fitted.largest_error,
            "R²": fitted.r_squared,
        }
        for one in series
        for fitted in one.laws[0]
        for name, estimate in fitted.parameters.items()
    ]
    return pd.DataFrame(rows, columns=columns)


def limits_table(series: Sequence[Series]) -> pd.DataFrame:
    """Returns a row per law: the most speedup that it allows, and on how many ranks.

    A law that does not describe the points, or was not fitted, says nothing of more ranks.
    """
    columns = [
        "scaling",
        "law",
        "describes the points",
        "measured up to (ranks)",
        "most speedup",
        "on ranks",
        "95 % interval",
        "intervals from",
    ]
    rows = []
    for one in series:
        measured = int(one.table["world_size"].iloc[-1])
        for fitted in one.laws[0]:
            row = {
                "scaling": one.regime,
                "law": fitted.law.name,
                "describes the points": _yes_or_no(fitted),
                "measured up to (ranks)": measured,
                "intervals from": fitted.method,
            }
            rows.append(row | (_limit(fitted) if fitted.describes_points else {}))
        for name, reason in one.laws[1]:
            row = {"scaling": one.regime, "law": name, "measured up to (ranks)": measured}
            rows.append(row | {"describes the points": f"not fitted: {reason}"})
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


def _yes_or_no(fitted: FittedLaw) -> str:
    return "yes" if fitted.describes_points else "no"


def published_table(found: Explanation) -> pd.DataFrame:
    """Returns a row per published batch: one GPU, two, the model's, and the bandwidth it needs."""
    return pd.DataFrame(
        [
            {
                "batch per GPU": batch,
                "1 GPU (ms)": found.one_gpu_ms[batch],
                "2 GPUs (ms)": time_ms,
                "predicted (ms)": found.predicted_ms[batch],
                "speedup": 2 * found.one_gpu_ms[batch] / time_ms,
                "needs, no contention (GB/s)": found.needed[batch][0] / 1e9,
                "needs, 40 % (GB/s)": found.needed[batch][1] / 1e9,
            }
            for batch, time_ms in found.published_ms.items()
        ]
    )


def published_facts(found: Explanation) -> dict[str, str]:
    """Returns the one bandwidth, its range, and what was assumed beside it."""
    fixed_beta, fixed_error = found.at_mean_slowdown
    _, bare_error = found.without_slowdown
    worst = max(abs(error) for error in found.errors.values())
    parameters = found.model.device.mlp.parameters
    all_reduce_ms = parameters * 4 / found.bandwidth_bytes_per_s * 1e3
    return {
        "bandwidth that explains both steps best": f"{found.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
        "computation then takes longer beside an all-reduce by": f"{found.slowdown - 1:.0%}",
        "largest error of the two steps": f"below {max(worst, 1e-3):.1%}",
        f"bandwidths that explain both within {PUBLISHED_TOLERANCE:.0%}": (
            f"{found.low / 1e9:.1f} to {found.high / 1e9:.1f} GB/s"
        ),
        f"largest error with others' mean slowdown of {MEAN_SLOWDOWN - 1:.1%}": (
            f"{fixed_error:.1%}, at {fixed_beta / 1e9:.1f} GB/s"
        ),
        "largest error without any slowdown": f"{bare_error:.1%}",
        "PCIe 3.0 x16 carries, in one direction": f"{PCIE3_X16_BYTES_PER_S / 1e9:.2f} GB/s",
        "the bandwidth as a share of that": f"{found.share_of_pcie:.0%}",
        "gradients of a step": f"{parameters:,} numbers, {parameters * 4 / 2**20:.0f} MiB",
        "their all-reduce takes": f"{all_reduce_ms:.0f} ms",
    }


def _interval_of(estimate: Interval) -> str:
    if estimate.estimate == estimate.high == 0:
        return "at its bound"  # 0 in every draw, as parameters cannot be negative
    return _interval(estimate.low, estimate.high, "{:.3g}")


def _interval(low: float, high: float, form: str = "{:.2f}") -> str:
    if pd.isna(low) or pd.isna(high):
        return NO_INTERVAL
    return f"{form.format(low)} to {form.format(high)}"
