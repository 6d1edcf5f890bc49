"""Sentences that read their own numbers: the published text scaling study."""

from __future__ import annotations

import numpy as np
import pandas as pd

from common.analysis.comprehensive import Compared, Configuration, verdict
from common.analysis.comprehensive_report import speedup_text
from common.analysis.scaling_run import ScalingRun
from common.analysis.text_study import (
    TextStudy,
    epochs_to_loss,
    passes,
    rows_as_written,
    time_to_accuracy_s,
    updates_per_epoch,
)

CLOSE = 0.02
"""Mean times this close are called equal."""
STEP_TIMES = ("on 1 GPU (ms)", "on several (ms)", "added (ms)")


def printed_sentence(several: Compared) -> str:
    """What the study printed for a configuration, and what that number is."""
    base, ratio = several.base, several.printed
    if base is None or ratio is None:
        return several.reason
    ranks = several.configuration.ranks
    return (
        f"An epoch takes {mean_epoch_s(base):.2f} s on one GPU and "
        f"{mean_epoch_s(several.configuration):.2f} s on {ranks} GPUs: **{ratio.value:.2f}x** as "
        f"printed, an efficiency of {percent(ratio.efficiency)}. "
        f"*{verdict(ratio)}*, the study says. Our rule says: not comparable, {several.reason}."
    )


def mixed_sentence(experiment: str) -> str:
    """Which jobs wrote into one file, what is lost, and whether they were in each other's way."""
    rows = rows_as_written(experiment)
    jobs = dict(list(rows.groupby("job")))
    if len(jobs) == 1:
        return f"{experiment} was written by one job."
    spans = [f"epochs {own['epoch'].min()} to {own['epoch'].max()}" for own in jobs.values()]
    end = min(own["row"].max() for own in jobs.values())
    together, alone = rows[rows["row"] <= end], rows[rows["row"] > end]
    text = (
        f"The {len(rows)} rows are {len(jobs)} jobs: {' and '.join(spans)}. A job that opens a "
        "file anew deletes what another one has written to it: the first "
        f"{max(own['epoch'].min() for own in jobs.values()) - 1} epochs of the second are lost. "
    )
    if alone.empty:
        return text
    times = together["train_time_s"].mean(), alone["train_time_s"].mean()
    same = abs(times[0] / times[1] - 1) < CLOSE
    return text + (
        f"While both were running an epoch took {times[0]:.1f} s, after one had ended "
        f"{times[1]:.1f} s: "
        + ("they hardly shared their GPUs." if same else "they were in each other's way.")
    )


def loss_sentence(one: Compared, several: Compared) -> str:
    """How the losses show how much data an epoch went through."""
    alone, run = one.configuration.runs[0], several.configuration.runs[0]
    first = [float(each.epochs["train_loss"].iloc[0]) for each in (alone, run)]
    reached = _epochs_alone(alone, run)
    gpus = f"{several.configuration.ranks} GPUs"
    text = (
        f"After the first epoch the training loss is {first[0]:.2f} on one GPU and {first[1]:.2f} "
        f"on {gpus}. "
    )
    if not reached:
        return text
    shown = ", ".join(f"{needed:.1f} for epoch {epoch}" for epoch, needed in reached)
    ahead = reached[-1][1] / reached[-1][0]
    text += f"To get as far as {gpus} in an epoch, one GPU needs so many: {shown}. "
    if ahead > 1:
        return text + (
            f"An epoch on {gpus} is worth up to {ahead:.1f} on one, which no split of the data "
            "could do: each GPU went through more than its share of it."
        )
    return text + (
        f"An epoch on {gpus} is worth {ahead:.1f} on one: it has fewer updates, each of a larger "
        "batch, as it is when the data are split. "
        f"In updates, epoch {reached[-1][0]} on {gpus} is the "
        f"{reached[-1][0] * updates_per_epoch(several.configuration):,.0f}th; one GPU comes to the "
        f"same loss at the {reached[-1][1] * updates_per_epoch(one.configuration):,.0f}th."
    )


def _epochs_alone(alone: ScalingRun, run: ScalingRun) -> list[tuple[int, float]]:
    """By epoch of ``run``, how many epochs one GPU needs for its loss; five of them at most."""
    needed = [
        (int(epoch), epochs_to_loss(alone, loss))
        for epoch, loss in zip(run.epochs["epoch"], run.epochs["train_loss"], strict=True)
    ]
    known = [(epoch, found) for epoch, found in needed if np.isfinite(found) and found > 1]
    if len(known) <= 5:
        return known
    chosen = np.linspace(0, len(known) - 1, 5).round().astype(int)
    return [known[place] for place in chosen]


def per_sample_sentence(several: Compared) -> str:
    """What is left of a printed ratio when samples are what is counted."""
    found = several.per_sample
    if found is None:
        return "Nobody knows how many samples an epoch of this run went through."
    stated = several.configuration.runs[0].stated
    count = passes(several.configuration)
    known = f" ({stated.how_known})" if stated else " (counted)"
    name = ", ".join(dict.fromkeys((several.configuration.dataset, several.configuration.name)))
    if count <= 1.01:
        text = f"{name}: an epoch is one pass over the data{known}, so the ratio stays: "
    else:
        text = f"{name}: an epoch is {count:.0f} passes over the data{known}. Per sample it is "
    return text + f"**{speedup_text(found)}**. *{verdict(found)}*."


def published_shown(study: TextStudy) -> pd.DataFrame:
    """The published runs on several GPUs, as printed and per sample."""
    rows = [one for compared in study.published.values() for one in compared if not one.is_base]
    return pd.DataFrame(
        {
            "data": one.configuration.dataset,
            "model": one.configuration.identity.model,
            "GPUs": one.configuration.ranks,
            "1 GPU (s)": mean_epoch_s(one.base),
            "epoch (s)": mean_epoch_s(one.configuration),
            "as printed": one.printed.value,
            "passes": passes(one.configuration),
            "per sample": one.per_sample.value,
            "efficiency": one.per_sample.efficiency,
        }
        for one in rows
        if one.base and one.printed and one.per_sample
    )


def steps_shown(study: TextStudy) -> pd.DataFrame:
    """What several GPUs add to a step of the published runs."""
    rows = []
    for compared in study.published.values():
        for one in compared:
            if one.is_base or one.base is None:
                continue
            times = [
                mean_epoch_s(each) / updates_per_epoch(each) * 1e3
                for each in (one.base, one.configuration)
            ]
            row = {"data": one.configuration.dataset, "model": one.configuration.identity.model}
            row |= {"GPUs": one.configuration.ranks}
            row |= dict(zip(STEP_TIMES, (*times, times[1] - times[0]), strict=True))
            rows.append(row)
    return pd.DataFrame(rows)


def steps_sentence(study: TextStudy) -> str:
    """Which model loses most to what several GPUs add to each step."""
    table = steps_shown(study)
    share = table["added (ms)"] / table[STEP_TIMES[0]]
    worst, least = table.loc[share.idxmax()], table.loc[share.idxmin()]
    text = (
        f"Every step on several GPUs is longer, by {table['added (ms)'].min():.1f} to "
        f"{table['added (ms)'].max():.1f} ms: {percent(share.max())} of the step on one GPU on "
        f"{worst['data']} ({worst['model']}), {percent(share.min())} on {least['data']} "
        f"({least['model']}). "
    )
    if worst["model"] == least["model"]:
        text += "Model and gradients are as large in both: the exchange cannot be all of it. "
    return text + (
        "What was added, the exchange, waiting or loading data, nobody can tell from "
        "`metrics.csv`. The runs below note it."
    )


def accuracy_sentence(several: Compared, target: float) -> str:
    """Time to an accuracy, which is what training is for."""
    if several.base is None:
        return several.reason
    alone, run = several.base.runs[0], several.configuration.runs[0]
    best = [float(each.epochs["val_accuracy"].max()) for each in (alone, run)]
    times = [time_to_accuracy_s(each, target) for each in (alone, run)]
    ranks = several.configuration.ranks
    shown = [f"{time:.0f} s" if np.isfinite(time) else "never" for time in times]
    text = (
        f"{several.configuration.dataset}: {percent(target)} validation accuracy is reached after "
        f"{shown[0]} on one GPU and {shown[1]} on {ranks} GPUs; the best is {percent(best[0])} and "
        f"{percent(best[1])}. "
    )
    if not np.isfinite(times).all():
        return text
    return text + f"That is {times[0] / times[1]:.2f}x, to the same accuracy."


def mean_epoch_s(one: Configuration) -> float:
    """Mean training time of an epoch, without warm-up."""
    return float(np.mean(one.epoch_times_s))


def percent(share: float) -> str:
    """``87.3 %``."""
    return f"{share:.1%}".replace("%", " %")
