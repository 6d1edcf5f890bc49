"""Tables and sentences that read their own numbers: parts of a step, speedups, laws, a pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from common.analysis.assignment4 import Series, SweepRun
from common.analysis.scaling import STRONG
from common.analysis.scaling_laws import USL, FittedLaw
from common.analysis.scaling_plots import GOOD_EFFICIENCY, arm_name
from common.analysis.step_parts import PARTS, TOLERANCE
from common.perfmodel.published_mlp import PCIE3_X16_BYTES_PER_S, Explanation

FITS_WITHIN = 0.05
"""A law whose largest error is above this is said not to describe the points."""


def parts_shown(run: SweepRun) -> pd.DataFrame:
    """A row per arm: the watched step, its parts and what they leave; the plain step beside it."""
    parts = run.parts
    shares = pd.DataFrame({name: parts[f"{name}_ms"] / parts["sum_ms"] for name in PARTS})
    names = [arm_name(row) for row in parts.itertuples()]
    return pd.DataFrame(
        {
            "arm": names,
            "watched step (ms)": parts["step_ms"],
            "sum of parts (ms)": parts["sum_ms"],
            **{name: shares[name] for name in PARTS},
            "plain step (ms)": parts["plain_step_ms"],
            "watched / plain": parts["watching_share"],
        }
    )


def parts_sentence(run: SweepRun) -> str:
    """What the step on the most ranks is made of beside one rank's, and whose step that is."""
    parts = run.parts
    last = parts.sort_values(["world_size", "batch_per_rank"]).iloc[-1]
    alone = parts[(parts["world_size"] == 1) & (parts["batch_per_rank"] == last["batch_per_rank"])]
    computed = last["forward_ms"] + last["backward_ms"]
    text = (
        f"On {last['world_size']:.0f} ranks with a batch of {last['batch_per_rank']:,.0f} each, "
        f"{computed / last['sum_ms']:.0%} of the step is computation, "
        f"{last['communication_ms'] / last['sum_ms']:.0%} communication that nothing hides, "
        f"{last['waiting_ms'] / last['sum_ms']:.0%} waiting for a slower rank, "
        f"{last['optimizer_ms'] / last['sum_ms']:.0%} the optimizer."
    )
    if len(alone):
        first = alone.iloc[0]
        ratio = computed / (first["forward_ms"] + first["backward_ms"])
        text += f" The same computation takes {ratio:.2f} times what it takes on one rank by itself"
        text += ": ranks slow each other down." if ratio > 1.05 else "."
    watched = parts["unaccounted_share"].abs().max()
    several = parts.dropna(subset="plain_step_ms")
    text += f" The parts leave at most {watched:.1%} of the watched steps that they are taken from."
    if len(several):
        longer, holds = several["watching_share"], int(several["adds_up"].sum())
        text += (
            f" Watched steps take {longer.abs().median():.1%} more or less than plain ones of the "
            f"same rounds (median over arms; from {longer.min():+.1%} to {longer.max():+.1%}). "
        )
        if holds == len(several):
            text += f"The parts are those of a plain step, too, within {TOLERANCE:.0%}."
        else:
            text += (
                f"In {holds} of {len(several)} arms the parts are those of a plain step, too, "
                f"within {TOLERANCE:.0%}; in the others they say how a watched step is divided, "
                "and not how long a plain one takes."
            )
    if run.noise_floor is not None:
        text += (
            " Strong and weak arms that are the same step twice differ by "
            f"{run.noise_floor:.1%} (median): nothing here is known better than that."
        )
    return text


def efficiency_shown(run: SweepRun) -> pd.DataFrame:
    """A row per arm on several ranks: speedup with its interval, and efficiency."""
    rows = [
        {
            "scaling": series.regime,
            "batch": series.label,
            "ranks": int(row.world_size),
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
    return pd.DataFrame(rows)


def speedup_sentence(run: SweepRun) -> str:
    """The best and the worst series on the most ranks, and whether that can be told."""
    if not run.series:
        return "No arm has a counterpart on one rank, so there is no speedup."
    ends = sorted(run.series, key=lambda series: series.most["speedup"])
    worst, best = ends[0], ends[-1]
    text = f"{_speedup(best)}."
    if worst is not best:
        text += f" The least is {_speedup(worst)}."
    slower = [series for series in run.series if series.most["speedup_high"] < 1]
    if slower:
        text += (
            f" {len(slower)} of {len(run.series)} series are **slower on "
            f"{slower[0].most['world_size']:.0f} ranks than on one**, beyond doubt."
        )
    good = [series for series in run.series if series.most["efficiency"] >= GOOD_EFFICIENCY]
    text += f" {len(good)} of {len(run.series)} keep an efficiency of {GOOD_EFFICIENCY:.0%}."
    return text[0].upper() + text[1:]


def _speedup(series: Series) -> str:
    most = series.most
    interval = _interval(most["speedup_low"], most["speedup_high"])
    return (
        f"{series.regime} scaling, {series.label}: {most['speedup']:.2f}x on "
        f"{most['world_size']:.0f} ranks ({interval}), efficiency {most['efficiency']:.0%}"
    )


def laws_shown(series: Sequence[Series]) -> pd.DataFrame:
    """A row per fitted parameter."""
    rows = [
        {
            "scaling": one.regime,
            "law": fitted.law.name,
            "parameter": name,
            "value": estimate.value,
            "95 % interval": _interval(estimate.low, estimate.high, "{:.3g}"),
            "largest error": fitted.largest_error,
            "R²": fitted.r_squared,
        }
        for one in series
        for fitted in one.laws[0]
        for name, estimate in fitted.parameters.items()
    ]
    columns = ["scaling", "law", "parameter", "value", "95 % interval", "largest error", "R²"]
    return pd.DataFrame(rows, columns=columns)


def laws_sentence(series: Series) -> str:
    """Which law describes the points, and what it says of more ranks."""
    fitted, refused = series.laws
    text = " ".join(_law_sentence(one) for one in fitted)
    if refused:
        text += " Not fitted: " + "; ".join(refused) + "."
    if fitted:
        text += f" (Intervals: {fitted[0].method}.)"
    return text.strip()


def _law_sentence(fitted: FittedLaw) -> str:
    name, error = fitted.law.name, fitted.largest_error
    if error > FITS_WITHIN:
        text = f"{name}'s law" if fitted.law is not USL else f"The {name}"
        return f"{text} does not describe the points: it is off by up to {error:.0%}."
    values = [
        f"{key} = {e.value:.3g} ({_interval(e.low, e.high, '{:.3g}')})"
        for key, e in fitted.parameters.items()
    ]
    text = f"**{name}** describes the points within {error:.1%}, with {' and '.join(values)}."
    if fitted.law is USL:
        return f"{text} {_peak_sentence(fitted)}"
    share = fitted.parameters["s"].value
    if fitted.law.name == "Amdahl" and share > 0:
        text += f" It would end at {1 / share:.3g} times one rank, however many ranks there are."
    return text


def _peak_sentence(fitted: FittedLaw) -> str:
    peak, (low, high) = fitted.peak_ranks, fitted.peak_interval
    if not np.isfinite(peak):
        return "κ is 0: more ranks never make it slower."
    most = fitted.ranks.max()
    where = "among those measured" if peak <= most else f"beyond the {most:.0f} that were measured"
    bounds = f"{low:.1f} to {high:.1f}" if np.isfinite(high) else f"{low:.1f} or more"
    return (
        f"Throughput is highest on **{peak:.1f} ranks** ({bounds}), {where}, with "
        f"{float(fitted.predict(peak)):.1f} times one rank's; each further rank makes it slower."
    )


def ratio_sentence(run: SweepRun) -> str:
    """How communication compares with computation, and how much of it is hidden."""
    several = run.parts[run.parts["world_size"] > 1].dropna(subset="total_ratio")
    if several.empty:
        return "No bucket was watched, so communication beside computation is not known."
    several = several.astype({"total_ratio": float})
    small = several.loc[several["total_ratio"].idxmax()]
    large = several.loc[several["total_ratio"].idxmin()]
    text = f"With {arm_name(small)}, {_ratio(small)}."
    if small["arm"] != large["arm"]:
        text += f" With {arm_name(large)}, {_ratio(large)}."
    if several["batch_per_rank"].nunique() > 1:
        text += " What is sent does not grow with the batch, and what is computed does."
    return text


def _ratio(row: pd.Series) -> str:
    hidden = 1 - row["exposed_ratio"] / row["total_ratio"] if row["total_ratio"] else 0.0
    return (
        f"all-reduces are under way {row['total_ratio']:.2f} times as long as is computed, "
        f"{hidden:.0%} of it beside computation"
    )


def predictions_shown(run: SweepRun) -> pd.DataFrame:
    """A row per arm on several ranks: measured and predicted step."""
    predicted, _ = run.predictions
    columns = ["arm", "measured (ms)", "predicted (ms)", "error", "adjusted (ms)"]
    if predicted is None:
        return pd.DataFrame(columns=columns)
    both = _measured_and_predicted(run)
    return pd.DataFrame(
        {
            "arm": [arm_name(row) for row in both.itertuples()],
            "measured (ms)": both["measured_ms"],
            "predicted (ms)": both["predicted_step_ms"],
            "error": both["error"],
            "adjusted (ms)": both["adjusted_step_ms"],
            "its error": both["adjusted_error"].where(~both["reference"]),
        }
    )


def prediction_sentence(run: SweepRun) -> str:
    """How far predicted steps are from measured ones, with and without what was fitted."""
    predicted, reason = run.predictions
    if predicted is None:
        return f"{reason[0].upper()}{reason[1:]}."
    both = _measured_and_predicted(run)
    error = both["error"].abs().median()
    text = (
        f"From what was measured apart, with nothing taken from a step, the steps of {len(both)} "
        f"arms on several ranks are predicted with an error of {error:.0%} (median; "
        f"from {both['error'].min():+.0%} to {both['error'].max():+.0%})."
    )
    others = both[~both["reference"]]
    if len(others):
        text += (
            " With what one arm shows of ranks that disturb each other, the steps of the other "
            f"{len(others)} are off by {others['adjusted_error'].abs().median():.0%} "
            f"(median; at most {others['adjusted_error'].abs().max():.0%})."
        )
    return text


def _measured_and_predicted(run: SweepRun) -> pd.DataFrame:
    both = run.parts.merge(run.predictions[0], on="arm")
    both = both[both["world_size"] > 1].copy()
    both["measured_ms"] = both["plain_step_ms"].fillna(both["step_ms"])
    both["error"] = both["predicted_step_ms"] / both["measured_ms"] - 1
    both["adjusted_error"] = both["adjusted_step_ms"] / both["measured_ms"] - 1
    return both


def published_shown(found: Explanation) -> pd.DataFrame:
    """A row per published batch: one GPU, two, what the model says, and the bandwidth it needs."""
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


def published_sentence(found: Explanation) -> str:
    """The one bandwidth, its range, what else was assumed, and what that is worth."""
    fixed_beta, fixed_error = found.at_mean_slowdown
    _, bare_error = found.without_slowdown
    worst = max(abs(error) for error in found.errors.values())
    parameters = found.model.one.mlp.parameters
    return (
        f"**{found.bandwidth_bytes_per_s / 1e9:.1f} GB/s** explains both steps on two GPUs "
        f"(errors below {max(worst, 1e-3):.1%}), if computation beside an all-reduce takes "
        f"{found.slowdown - 1:.0%} longer; from {found.low / 1e9:.1f} to {found.high / 1e9:.1f} "
        f"GB/s both are explained within 3 %. Two numbers were found from two, so the test is "
        "whether they are possible. Others measured 18.9 % on average and 40 % at most: with their "
        f"average and the bandwidth alone free, {fixed_beta / 1e9:.1f} GB/s leaves an error of "
        f"{fixed_error:.1%}; with no contention at all {bare_error:.1%}. PCIe 3.0 x16 carries "
        f"{PCIE3_X16_BYTES_PER_S / 1e9:.2f} GB/s in one direction; {found.share_of_pcie:.0%} of "
        "that is what such a link may leave to copies through the host's memory. Every step sends "
        f"gradients of {parameters:,} parameters, {parameters * 4 / 2**20:.0f} MiB, which takes "
        f"{parameters * 4 / found.bandwidth_bytes_per_s * 1e3:.0f} ms: far more than the "
        f"{found.one_gpu_ms[min(found.one_gpu_ms)]:.1f} ms that the small batch computes, and "
        "less than what the large one does."
    )


def regime_name(series: Series) -> str:
    """For a heading: strong or weak, and the batch that is kept."""
    kind = "strong" if series.regime == STRONG else "weak"
    return f"{kind} scaling, {series.label}"


def _interval(low: float, high: float, form: str = "{:.2f}") -> str:
    if pd.isna(low) or pd.isna(high):
        return "no interval: one round"
    return f"{form.format(low)} to {form.format(high)}"
