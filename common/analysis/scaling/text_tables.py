"""Tables of text scaling: the published study and the reader's own runs.

Where runs cannot be compared, a table says so before any ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from common.analysis.scaling.study import Compared, printed_verdict, verdict
from common.analysis.scaling.study_report import diagnosis_of
from common.analysis.scaling.text_study import (
    TextStudy,
    epoch_times_together_and_alone,
    epochs_to_loss,
    passes,
    rows_as_written,
    time_to_accuracy_s,
    updates_per_epoch,
)
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
"""Titles of ``TextStudy.published_on_several``, as printed and per sample."""
LOCAL = {
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
"""Titles of ``TextStudy.all_local``: samples as counted, and the speedup."""
USED = {
    ("left_out", "all_local"): (
        "runs used",
        lambda left_out, cases: (
            f"none: {left_out}"
            if left_out
            else f"{sum(len(case.configuration.runs) for case in cases)}"
        ),
    ),
    "problems": ("runs left out or used with a remark", lambda problems: f"{len(problems)}"),
    "warmup": "first epochs left out as warm-up",
}
"""Titles of ``TextStudy``: how many of the reader's runs were used, with how many remarks."""
PROBLEMS = {"path": "run", "what": "remark"}
"""Titles of the reader's runs that could not be used as they were."""
PRINTED = {
    "reason": ("comparable by our rule", lambda reason: f"no: {reason}" if reason else "yes"),
    "base.mean_epoch_s": ("epoch on 1 GPU", "{:.2f} s"),
    "configuration.mean_epoch_s": ("epoch on {0.configuration.ranks} GPUs", "{:.2f} s"),
    "printed.value": ("ratio as printed", "{:.2f}"),
    "printed.efficiency": (
        "efficiency as printed",
        lambda share: f"{share:.1%}".replace("%", " %"),
    ),
    "printed": ("the study's verdict", printed_verdict),
}
"""Titles of a published configuration: what the study printed, and whether it is a speedup."""
PER_SAMPLE = {
    "configuration.dataset": "data",
    "configuration.identity.model": "model",
    "reason": ("samples counted", lambda reason: "no" if reason else "yes"),
    "configuration.runs": (
        "how samples are known",
        lambda runs: runs[0].stated.how_known if runs[0].stated else "counted",
    ),
    "per_sample.value": "per sample",
    "per_sample.interval": "95 % interval",
    "per_sample": ("verdict", verdict),
}
"""Titles of ``TextStudy.published_on_several``: how samples are known, how far ratios carry."""
EQUAL_LOSSES = {
    "epoch": "epoch on 4 GPUs",
    "loss": ("training loss", "{:.3f}"),
    "alone": ("epochs on 1 GPU", "{:.1f}"),
    "worth": ("worth", "{:.1f}"),
    "updates": ("updates on 4 GPUs", "{:,.0f}"),
    "updates_alone": ("updates on 1 GPU", "{:,.0f}"),
}
"""Titles of ``equal_losses``; the study has one GPU and four."""
ADDED = {
    "data": "data",
    "model": "model",
    "gpus": "GPUs",
    "alone_ms": ("on 1 GPU (ms)", "{:.1f}"),
    "several_ms": ("on several (ms)", "{:.1f}"),
    "added_ms": ("added (ms)", "{:.1f}"),
    "share": ("of one GPU's step", "{:.1%}"),
}
"""Titles of ``added_to_steps``."""
TO_ACCURACY = {
    "data": "data",
    "target": ("accuracy to reach", "{:.1%}"),
    "alone_s": ("1 GPU (s)", "{:.0f}"),
    "several_s": ("4 GPUs (s)", "{:.0f}"),
    "ratio": "ratio",
    "best_alone": ("best on 1 GPU", "{:.1%}"),
    "best": ("best on several", "{:.1%}"),
}
"""Titles of ``times_to_accuracy``."""
SPEEDUPS = {
    ("configuration.dataset", "configuration.name"): ("run", "{}, {}".format),
    "reason": ("comparable", lambda reason: f"no: {reason}" if reason else "yes"),
    "speedup.value": ("speedup", "{:.2f}"),
    "per_sample.value": ("per sample", "{:.2f}"),
    "by_samples.interval": "95 % interval",
    "by_samples.efficiency": ("efficiency", "{:.1%}"),
    "speedup": ("verdict", verdict),
}
"""Titles of ``TextStudy.local_on_several``: whether they are comparable, then the ratios.

Interval and efficiency are those of ``Compared.by_samples``."""
GROWTH = {
    "from": "from",
    "to": "to",
    "step_ms": ("step (ms)", "{:+.1f}"),
    **{part: (part, "{:+.1f}") for part in PARTS},
    "largest": "largest",
    "share": ("of the step", "{:.1%}"),
    "verdict": "these runs are",
}
"""Titles of ``growth``."""
MOST_ROWS = 5
"""Epochs that a table of equal losses shows."""


def file_facts(experiment: str) -> dict[str, str]:
    """Returns which jobs wrote into one file, what is lost, and if they slowed each other down."""
    rows = rows_as_written(experiment)
    jobs = dict(list(rows.groupby("job")))
    facts = {"rows": f"{len(rows)}", "jobs": f"{len(jobs)}"}
    for job, written in jobs.items():
        facts[f"epochs of job {job}"] = f"{written['epoch'].min()} to {written['epoch'].max()}"
    if len(jobs) == 1:
        return facts
    together_s, alone_s = epoch_times_together_and_alone(rows)
    lost = max(written["epoch"].min() for written in jobs.values()) - 1
    facts["epochs lost when a job opened the file anew"] = f"{lost}"
    facts["mean epoch while both ran"] = f"{together_s.mean():.1f} s"
    if len(alone_s):
        facts["mean epoch after one had ended"] = f"{alone_s.mean():.1f} s"
    return facts


def equal_losses(alone: Compared, several: Compared) -> pd.DataFrame:
    """Returns how long one GPU trains to the losses of several, a row for each of a few epochs.

    Columns: epoch, loss, alone (epochs on one GPU), worth (of these for each epoch on several),
    updates, updates_alone. Epochs whose loss one GPU never reaches, or has reached after its first
    epoch, are left out.
    """
    epochs = several.configuration.runs[0].epochs
    table = pd.DataFrame({"epoch": epochs["epoch"], "loss": epochs["train_loss"]})
    needed = [epochs_to_loss(alone.configuration.runs[0], loss) for loss in table["loss"]]
    table = table.assign(alone=needed).query("alone > 1").reset_index(drop=True)
    if len(table) > MOST_ROWS:
        table = table.loc[np.linspace(0, len(table) - 1, MOST_ROWS).round()]
    return table.assign(
        worth=table["alone"] / table["epoch"],
        updates=table["epoch"] * updates_per_epoch(several.configuration),
        updates_alone=table["alone"] * updates_per_epoch(alone.configuration),
    )


def added_to_steps(study: TextStudy) -> pd.DataFrame:
    """Returns what several GPUs add to a step of the published runs; columns as in ``ADDED``."""
    rows = []
    for case in study.published_on_several:
        configuration = case.configuration
        alone_ms, several_ms = (
            side.mean_epoch_s / updates_per_epoch(side) * 1e3 for side in (case.base, configuration)
        )
        names = configuration.dataset, configuration.identity.model, configuration.ranks
        added_ms = several_ms - alone_ms
        rows.append((*names, alone_ms, several_ms, added_ms, added_ms / alone_ms))
    return pd.DataFrame(rows, columns=[*ADDED])


def times_to_accuracy(targets: Sequence[tuple[Compared, float]]) -> pd.DataFrame:
    """Returns the time to validation accuracies on one GPU and on these configurations.

    Columns as in ``TO_ACCURACY``.
    """
    rows = []
    for several, target in targets:
        runs = several.base.runs[0], several.configuration.runs[0]
        alone_s, several_s = (time_to_accuracy_s(run, target) for run in runs)
        best = (float(run.epochs["val_accuracy"].max()) for run in runs)
        data = several.configuration.dataset
        rows.append((data, target, alone_s, several_s, alone_s / several_s, *best))
    return pd.DataFrame(rows, columns=[*TO_ACCURACY])


def growth(study: TextStudy) -> pd.DataFrame:
    """Returns by how much each part of the step changes from one rank to several, in ms.

    Columns as in ``GROWTH``: ``largest`` is the part that grows most, ``share`` what it grows by
    over the step on several ranks, ``verdict`` that of the speedup of the same runs: of a single
    run on each side it is not known how much another would differ.
    """
    steps, rows = study.step_parts, []
    for case in study.local_on_several:
        pair = case.base, case.configuration
        if not {*pair} <= {*steps}:
            continue
        before, after = (steps[configuration] for configuration in pair)
        grown = {name: after.parts_ms[name] - before.parts_ms[name] for name in PARTS}
        largest = max(grown, key=grown.get)
        row = {"from": case.base.name, "to": case.configuration.name, "largest": largest}
        row |= {"step_ms": after.step_ms - before.step_ms, "share": grown[largest] / after.step_ms}
        row["verdict"] = case.speedup.judged.said if case.speedup else "not comparable"
        rows.append(row | grown)
    return pd.DataFrame(rows, columns=[*GROWTH])


def diagnosis_text(study: TextStudy) -> str:
    """Returns the diagnosis of the reader's runs on several ranks, as preformatted Markdown."""
    lines = []
    for case in study.local_on_several:
        lines += [*diagnosis_of(case.configuration.runs[0], case.base), ""]
    return "\n".join(["```text", *lines[:-1], "```"]) if lines else NO_RUNS
