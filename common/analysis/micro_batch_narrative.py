"""Sentences that read their own numbers: lengths, one worked step, training in two modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from common.analysis.assignment3 import MicroBatchLab
from common.analysis.length_plots import expected_longest
from common.analysis.micro_batch_summary import MEASURES, summary
from common.analysis.micro_batches import MicroBatchRun
from common.analysis.mode_comparison import STATIC, ModeComparison
from common.analysis.planned_costs import bottleneck

SHOWN = (
    *("step_time_mean_ms", "step_time_p95_ms", "compute_time_slowest_ms", "waiting_time_mean_ms"),
    *("planning_time_mean_ms", "compute_time_std_ms", "padded_tokens_std", "samples_per_s"),
)
"""Measures of training runs that the notebook shows."""
SAME_CURVE = 1e-4
"""Losses that differ by no more, relatively, in all steps are one curve, but for rounding."""


def lengths_sentence(lengths: Mapping[str, np.ndarray]) -> str:
    """How unequal the texts of each data set are, and which is most unequal."""
    parts, excess = [], {}
    for name, values in lengths.items():
        longest = expected_longest(values, 16)
        excess[name] = longest / values.mean()
        parts.append(
            f"{name}: {values.mean():.0f} tokens on average, the longest of 16 texts "
            f"{longest:.0f} (**{excess[name]:.1f}** times as many){_cut(values)}"
        )
    most, least = max(excess, key=excess.get), min(excess, key=excess.get)
    text = "; ".join(parts) + "."
    if most != least:
        text += f" Padding costs most on {most} and least on {least}."
    return text


def _cut(values: np.ndarray) -> str:
    share = float((values == values.max()).mean())
    return f", {share:.0%} as long as the longest" if share >= 0.02 else ""


def imbalance_sentence(comparison: ModeComparison) -> str:
    """What the ranks of static are given, and what they wait for it."""
    rows = comparison.times[comparison.times["mode"] == STATIC]
    steps = rows.groupby("step")["padded_tokens"]
    most, least, mean = steps.max(), steps.min(), steps.mean()
    share = rows["tokens"].sum() / rows["padded_tokens"].sum()
    return (
        f"On average the fullest rank has **{most.mean():,.0f}** padded tokens and the emptiest "
        f"{least.mean():,.0f}: the fullest has {most.mean() / mean.mean() - 1:.0%} more than the "
        f"mean of its step. Of all padded tokens {share:.0%} are text, the rest is padding. Ranks "
        f"wait {comparison.waiting[STATIC]:.0%} of their time."
    )


def worked_sentence(lengths: Sequence[int], partitions: Mapping[str, Sequence]) -> str:
    """What the worked step's partitions have as bottleneck, beside a bound."""
    values = np.asarray(lengths)
    found = {name: bottleneck(values, groups) for name, groups in partitions.items()}
    first, *_, last = found
    ranks = len(partitions[last])
    bound = max(int(values.max()), -(-int(values.sum()) // ranks))
    bottlenecks = ", ".join(f"{name} {value:,}" for name, value in found.items())
    return (
        f"Bottlenecks in padded tokens: {bottlenecks}. The last has "
        f"**{found[last] / found[first]:.2f}** of the first. No plan can have less than {bound:,}: "
        f"the {values.sum():,} tokens of the texts shared out over {ranks} ranks without any "
        "padding, or the longest text if that is more."
    )


def training_shown(lab: MicroBatchLab) -> pd.DataFrame:
    """The table of the training runs for a reader; a row per measure."""
    if not lab.training:
        return pd.DataFrame({"measure": [], "static": [], "dynamic": []})
    table = summary(list(lab.training.values()))[list(SHOWN)].T
    table.insert(0, "measure", [MEASURES[name].strip() for name in table.index])
    table.loc["step_time_p95_ms", "measure"] = "step of the slowest rank, P95 (ms)"
    return table.reset_index(drop=True)


def training_sentence(lab: MicroBatchLab) -> str:
    """Whether training in mode dynamic is faster, and how its ranks differ."""
    if not lab.training:
        return f"Training is not compared: {lab.left_out}."
    static, dynamic = lab.training.values()
    ratio = dynamic.slowest.mean() / static.slowest.mean()
    faster = "less" if ratio < 1 else "more"
    spread = {
        column: [run.over_ranks(column).mean() for run in (static, dynamic)]
        for column in ("step_time_ms", "compute_time_ms")
    }
    return (
        f"Over {len(static.slowest)} steps a step of dynamic takes **{ratio:.2f}** of the time of "
        f"one of static ({abs(ratio - 1):.0%} {faster}). These are two runs, one after the other. "
        f"Between ranks, computation differs by {spread['compute_time_ms'][0]:.1f} ms under static "
        f"and {spread['compute_time_ms'][1]:.1f} ms under dynamic (standard deviation over ranks); "
        f"whole steps by {spread['step_time_ms'][0]:.2f} and {spread['step_time_ms'][1]:.2f} ms. "
        "Under DDP a rank that is done waits for the others within its step, which makes whole "
        "steps about equally long on all ranks."
    )


def loss_difference(lab: MicroBatchLab) -> pd.Series:
    """|loss of dynamic − loss of static| / loss of static, by step."""
    static, dynamic = (run.loss for run in lab.training.values())
    return ((dynamic - static).abs() / static.abs()).dropna()


def loss_sentence(lab: MicroBatchLab) -> str:
    """Whether both modes trained the same, and what accuracy they reached."""
    if not lab.training:
        return f"Losses are not compared: {lab.left_out}."
    static, dynamic = lab.training.values()
    away = loss_difference(lab)
    if away.empty:
        return "These runs noted no losses."
    if away.max() == 0:
        text = f"The losses are equal in all digits that were noted, in all {len(away)} steps."
        return text + _accuracies(static, dynamic)
    text = (
        f"The losses differ by at most **{away.max():.1g}** of their value, at step {away.idxmax()}"
    )
    if away.max() <= SAME_CURVE:
        text += ": the same curve, but for rounding."
    else:
        text += (
            f"; in the first step by {away.iloc[0]:.1g}. "
            "That is more than rounding in a single step makes; see whether it grew from there, as "
            "rounding does when each step starts from the last, or was there at once."
        )
    return text + _accuracies(static, dynamic)


def _accuracies(static: MicroBatchRun, dynamic: MicroBatchRun) -> str:
    if static.accuracy.empty or dynamic.accuracy.empty:
        return ""
    one, other = static.accuracy.iloc[-1], dynamic.accuracy.iloc[-1]
    return f" Validation accuracy at the end: {one:.1%} (static), {other:.1%} (dynamic)."


def peak_memory_sentence(lab: MicroBatchLab) -> str:
    """How much memory the fullest rank needs in either mode."""
    if not lab.training:
        return f"Memory is not compared: {lab.left_out}."
    peaks = [run.measured["peak_mem_mb"].max() for run in lab.training.values()]
    if np.isnan(peaks).any():
        return "Peak memory of steps was not measured here."
    return (
        f"The step that needs most memory on any rank takes {peaks[0]:,.0f} MB under static and "
        f"{peaks[1]:,.0f} MB under dynamic."
    )
