"""Tables of text scaling: the published study and the reader's own runs.

Where runs cannot be compared, a table says so before any ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from common.analysis.scaling.speedups import Speedup
from common.analysis.scaling.study import Compared, verdict
from common.analysis.scaling.study_report import diagnosis_of
from common.analysis.scaling.text_study import (
    TextStudy,
    epochs_to_loss,
    passes,
    rows_as_written,
    time_to_accuracy_s,
    updates_per_epoch,
)
from common.analysis.scaling.training_run import ScalingRun
from common.analysis.step_parts import PARTS

NO_RUNS = "There are no text runs in this run directory."
PUBLISHED = {
    "configuration.dataset": "data",
    "configuration.identity.model": "model",
    "configuration.ranks": "GPUs",
    "base.mean_epoch_s": "1 GPU (s)",
    "configuration.mean_epoch_s": "epoch (s)",
    "printed.value": ("as printed", "{:.2f}"),
    "configuration": ("passes", lambda configuration: f"{passes(configuration):.0f}"),
    "per_sample.value": "per sample",
    "per_sample.efficiency": "efficiency",
}
"""Titles of ``published_on_several``, as printed and per sample."""
OWN = {
    "configuration.dataset": "data",
    "configuration.name": "run",
    "configuration.mean_epoch_s": "epoch (s)",
    "configuration.identity.processed_per_epoch": ("computed", "{:,.0f}"),
    "configuration.identity.distinct_per_epoch": ("different", "{:,.0f}"),
    "configuration.identity.global_batch": "global batch",
    ("is_base", "speedup"): (
        "speedup",
        lambda is_base, speedup: (
            "base" if is_base else f"{speedup.value:.2f}x" if speedup else "n/a"
        ),
    ),
    "configuration.final_accuracy": "accuracy",
}
"""Titles of the reader's runs (``TextStudy.all_own``): samples as counted, and the speedup."""
USED = {
    ("left_out", "all_own"): (
        "runs used",
        lambda left_out, own: (
            f"none: {left_out}"
            if left_out
            else f"{sum(len(one.configuration.runs) for one in own)}"
        ),
    ),
    "problems": ("runs left out or used with a remark", lambda problems: f"{len(problems)}"),
    "warmup": "first epochs left out as warm-up",
}
"""Titles of ``TextStudy``: how many of the reader's runs were used, with how many remarks."""
PROBLEMS = {"path": "run", "what": "remark"}
"""Titles of the reader's runs that could not be used as they were."""
MOST_ROWS = 5
"""Epochs that a table of equal losses shows."""


def printed_facts(several: Compared) -> dict[str, str]:
    """Returns what the study printed for a configuration, and first whether it is a speedup."""
    base, ratio = several.base, several.printed
    found = {"comparable by our rule": f"no: {several.reason}" if several.reason else "yes"}
    if base is None or ratio is None:
        return found
    return found | {
        "epoch on 1 GPU": f"{base.mean_epoch_s:.2f} s",
        f"epoch on {several.configuration.ranks} GPUs": (
            f"{several.configuration.mean_epoch_s:.2f} s"
        ),
        "ratio as printed": f"{ratio.value:.2f}",
        "efficiency as printed": percent(ratio.efficiency),
        "the study's verdict": verdict(ratio),
    }


def file_facts(experiment: str) -> dict[str, str]:
    """Returns which jobs wrote into one file, what is lost, and if they slowed each other down."""
    rows = rows_as_written(experiment)
    jobs = dict(list(rows.groupby("job")))
    found = {"rows": f"{len(rows)}", "jobs": f"{len(jobs)}"}
    for job, own in jobs.items():
        found[f"epochs of job {job}"] = f"{own['epoch'].min()} to {own['epoch'].max()}"
    if len(jobs) == 1:
        return found
    # The first job to end has written its last row; later rows are of the other one alone.
    end = min(own["row"].max() for own in jobs.values())
    together, alone = rows[rows["row"] <= end], rows[rows["row"] > end]
    lost = max(own["epoch"].min() for own in jobs.values()) - 1
    found["epochs lost when a job opened the file anew"] = f"{lost}"
    found["mean epoch while both ran"] = f"{together['train_time_s'].mean():.1f} s"
    if len(alone):
        found["mean epoch after one had ended"] = f"{alone['train_time_s'].mean():.1f} s"
    return found


def same_loss_table(one: Compared, several: Compared) -> pd.DataFrame:
    """Returns how long one GPU trains to the losses of several, a row for each of a few epochs.

    ``worth`` is the epochs on one GPU for each epoch on several.
    """
    alone, run = one.configuration.runs[0], several.configuration.runs[0]
    gpus = f"{several.configuration.ranks} GPUs"
    updates = [updates_per_epoch(each.configuration) for each in (several, one)]
    return pd.DataFrame(
        [
            {
                f"epoch on {gpus}": epoch,
                "training loss": loss,
                "epochs on 1 GPU": needed,
                "worth": needed / epoch,
                f"updates on {gpus}": epoch * updates[0],
                "updates on 1 GPU": needed * updates[1],
            }
            for epoch, loss, needed in _epochs_alone(alone, run)
        ]
    )


def _epochs_alone(alone: ScalingRun, run: ScalingRun) -> list[tuple[int, float, float]]:
    """Returns epochs of ``run``, their loss, and how many epochs one GPU needs for that loss.

    Epochs whose loss one GPU never reaches, or has reached after its first epoch, are left out.
    """
    needed = [
        (int(epoch), float(loss), epochs_to_loss(alone, loss))
        for epoch, loss in zip(run.epochs["epoch"], run.epochs["train_loss"], strict=True)
    ]
    known = [row for row in needed if np.isfinite(row[2]) and row[2] > 1]
    if len(known) <= MOST_ROWS:
        return known
    chosen = np.linspace(0, len(known) - 1, MOST_ROWS).round().astype(int)
    return [known[place] for place in chosen]


def per_sample_table(study: TextStudy) -> pd.DataFrame:
    """Returns how the published runs' samples are known, and how far ratios per sample carry."""
    rows = []
    for one in published_on_several(study):
        stated = one.configuration.runs[0].stated
        rows.append(
            {
                "data": one.configuration.dataset,
                "model": one.configuration.identity.model,
                "samples counted": "no" if one.reason else "yes",
                "how samples are known": stated.how_known if stated else "counted",
                "per sample": one.per_sample.value,
                "95 % interval": _interval(one.per_sample),
                "verdict": verdict(one.per_sample),
            }
        )
    return pd.DataFrame(rows)


def published_on_several(study: TextStudy) -> list[Compared]:
    """Returns the published configurations on several GPUs that have both ratios."""
    return [
        one
        for compared in study.published.values()
        for one in compared
        if not one.is_base and one.base and one.printed and one.per_sample
    ]


def step_table(study: TextStudy) -> pd.DataFrame:
    """Returns what several GPUs add to a step of the published runs."""
    rows = []
    for compared in study.published.values():
        for one in compared:
            if one.is_base or one.base is None:
                continue
            alone_ms, several_ms = (
                each.mean_epoch_s / updates_per_epoch(each) * 1e3
                for each in (one.base, one.configuration)
            )
            rows.append(
                {
                    "data": one.configuration.dataset,
                    "model": one.configuration.identity.model,
                    "GPUs": one.configuration.ranks,
                    "on 1 GPU (ms)": alone_ms,
                    "on several (ms)": several_ms,
                    "added (ms)": several_ms - alone_ms,
                    "of one GPU's step": (several_ms - alone_ms) / alone_ms,
                }
            )
    return pd.DataFrame(rows)


def accuracy_table(targets: Sequence[tuple[Compared, float]]) -> pd.DataFrame:
    """Returns the time to an accuracy on one and on several GPUs.

    Args:
        targets: a configuration on several GPUs, and the validation accuracy to reach.
    """
    rows = []
    for several, target in targets:
        if several.base is None:
            continue
        alone, run = several.base.runs[0], several.configuration.runs[0]
        alone_s, several_s = (time_to_accuracy_s(each, target) for each in (alone, run))
        rows.append(
            {
                "data": several.configuration.dataset,
                "accuracy to reach": target,
                "1 GPU (s)": alone_s,
                f"{several.configuration.ranks} GPUs (s)": several_s,
                "ratio": alone_s / several_s,
                "best on 1 GPU": float(alone.epochs["val_accuracy"].max()),
                "best on several": float(run.epochs["val_accuracy"].max()),
            }
        )
    return pd.DataFrame(rows)


def own_speedup_table(study: TextStudy) -> pd.DataFrame:
    """Returns the reader's runs on several ranks: whether they are comparable, then the ratios.

    Interval and efficiency are of the speedup, or else of the ratio per sample.
    """
    rows = []
    for one in study.all_own:
        if one.is_base:
            continue
        row = {
            "run": f"{one.configuration.dataset}, {one.configuration.name}",
            "comparable": f"no: {one.reason}" if one.reason else "yes",
            "speedup": one.speedup.value if one.speedup else np.nan,
            "per sample": one.per_sample.value if one.per_sample else np.nan,
        }
        found = one.speedup or one.per_sample
        if found:
            row |= {"95 % interval": _interval(found), "efficiency": found.efficiency}
        if one.speedup:
            row["verdict"] = verdict(one.speedup)
        rows.append(row)
    columns = [
        "run",
        "comparable",
        "speedup",
        "per sample",
        "95 % interval",
        "efficiency",
        "verdict",
    ]
    return pd.DataFrame(rows, columns=columns)


def growth_table(study: TextStudy) -> pd.DataFrame:
    """Returns by how much each part of the step changes from one rank to several, in ms.

    ``largest`` is the part that grows most, ``of the step`` what it grows by over the step on
    several ranks.
    """
    parts, names = study.parts, list(PARTS)
    rows = []
    for compared in study.own.values() if len(parts) else ():
        base = next((one.configuration.name for one in compared if one.is_base), None)
        own = parts[parts["data set"] == compared[0].configuration.dataset].set_index("run")
        for name in own.index.difference([base]) if base in own.index else []:
            grown = own.loc[name, names].astype(float) - own.loc[base, names].astype(float)
            step_ms = own.loc[name, "step (ms)"]
            row = {"from": base, "to": name, "step (ms)": step_ms - own.loc[base, "step (ms)"]}
            rows.append(
                row
                | grown.to_dict()
                | {"largest": grown.idxmax(), "of the step": grown.max() / step_ms}
            )
    columns = ["from", "to", "step (ms)", *names, "largest", "of the step"]
    return pd.DataFrame(rows, columns=columns)


def diagnosis_text(study: TextStudy) -> str:
    """Returns the diagnosis of the reader's runs on several ranks, as preformatted Markdown."""
    lines = []
    for one in study.all_own:
        if not one.is_base:
            lines += [*diagnosis_of(one.configuration.runs[0], one.base), ""]
    return "\n".join(["```text", *lines[:-1], "```"]) if lines else NO_RUNS


def percent(share: float) -> str:
    """Returns a share as text: ``87.3 %``."""
    return f"{share:.1%}".replace("%", " %")


def _interval(found: Speedup) -> str:
    if np.isnan(found.low):
        return "none: a single epoch"
    return f"{found.low:.2f} to {found.high:.2f}, over {found.over}"
