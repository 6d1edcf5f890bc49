"""Two training runs in numbers: summary.csv, the merged table, the figures, and the printout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis.micro_batches.training_figures import FIGURES
from common.analysis.micro_batches.training_runs import (
    MicroBatchRun,
    check_comparable,
    common_steps,
    find_run,
    mode_name,
    read_run,
    same_batches,
    what_text,
)
from common.analysis.runs import Run, caption_of, written_whole
from common.analysis.style import DPI
from common.runtime.paths import relative_to_project
from common.runtime.wording import digits
from common.samples import slowest_rank

CHANGE = "change in %"
MEASURES = {
    "step_time_mean_ms": "step of the slowest rank, mean (ms)",
    "step_time_p95_ms": "  P95 (ms)",
    "step_time_p99_ms": "  P99 (ms)",
    "step_time_median_ms": "  median (ms)",
    "compute_time_slowest_ms": "compute of the slowest rank, mean (ms)",
    "compute_time_mean_ms": "compute, mean over ranks (ms)",
    "waiting_time_mean_ms": "waiting, mean over ranks (ms)",
    "communication_time_mean_ms": "communication, mean over ranks (ms)",
    "planning_time_mean_ms": "held up by planning, mean (ms)",
    "step_time_std_ms": "std over ranks: step (ms)",
    "compute_time_std_ms": "std over ranks: compute (ms)",
    "padded_tokens_std": "std over ranks: padded tokens",
    "peak_mem_std_mb": "std over ranks: peak memory (MB)",
    "samples_per_s": "samples/s, all ranks",
    "tokens_per_s": "tokens/s, all ranks, no padding",
}
"""Columns of summary.csv and how they are printed."""
SHOWN = {
    "step_time_mean_ms": "step of the slowest rank, mean (ms)",
    "step_time_p95_ms": "step of the slowest rank, P95 (ms)",
    "compute_time_slowest_ms": "compute of the slowest rank, mean (ms)",
    "waiting_time_mean_ms": "waiting, mean over ranks (ms)",
    "planning_time_mean_ms": "held up by planning, mean (ms)",
    "compute_time_std_ms": "std over ranks: compute (ms)",
    "step_time_std_ms": "std over ranks: step (ms)",
    "padded_tokens_std": "std over ranks: padded tokens",
    "samples_per_s": "samples/s, all ranks",
    "peak_mem_mb": "largest peak memory of a step (MB)",
}
"""Columns of summary.csv that the notebook shows, the largest peak, and how."""
TRAINING = {
    "measure": ("measure", SHOWN),
    "static": ("static", digits),
    "dynamic": ("dynamic", digits),
    CHANGE: (CHANGE, "{:+.0f}"),
}
"""Titles of ``training_measures``."""
SAME_CURVE = 1e-4
"""Upper bound on the relative difference of losses that rounding explains."""


@dataclass(frozen=True)
class AnalyzeMetrics:
    """Summarise a training run, or compare two on the same global batches: static and dynamic.

    Writes merged_metrics.csv, summary.csv and figures/ into the first run's directory, all of it or
    nothing. Warm-up steps are left out; a step's time is that of its slowest rank.
    """

    run_dir: str
    """The run to start from, such as the static one: a path, or a run id below outputs/."""
    compare_dir: str = ""
    """The run to compare with it, such as the dynamic one; without it the first is summarised."""


def main(settings: AnalyzeMetrics) -> None:
    """Reads, checks, prints and writes. Raises UserError for runs that cannot be compared."""
    runs = [_open(settings.run_dir)]
    if settings.compare_dir:
        runs.append(_open(settings.compare_dir))
        check_comparable(*runs)
    print(printed(runs))
    written = write_analysis(runs)
    print(f"\nTables and figures: {relative_to_project(written)} (summary.csv, figures/)")


def measured_together(runs: Sequence[MicroBatchRun]) -> list[MicroBatchRun]:
    """Returns the runs with the measured steps that all of them have."""
    if len(runs) == 1:
        return list(runs)
    steps = common_steps(*runs)
    return [run.on_steps(steps) for run in runs]


def labels(runs: Sequence[MicroBatchRun]) -> list[str]:
    """Returns the modes of the runs; where two are of one mode, with their folders' names."""
    modes = [run.mode for run in runs]
    if len(set(modes)) == len(modes):
        return modes
    return [f"{run.mode} ({number}: {run.folder.name})" for number, run in enumerate(runs, 1)]


def summarise(run: MicroBatchRun) -> dict[str, float]:
    """Returns the measures of one run, by column of summary.csv, over its measured steps.

    Means over ranks are over all ranks and steps; standard deviations are over the ranks of a
    step, averaged over steps; a rate is what all ranks did over the sum of the slowest ranks'
    steps.
    """
    rows, slowest = run.measured, run.slowest
    total_s = slowest.sum() / 1e3
    return {
        "step_time_mean_ms": slowest.mean(),
        "step_time_p95_ms": slowest.quantile(0.95),
        "step_time_p99_ms": slowest.quantile(0.99),
        "step_time_median_ms": slowest.median(),
        "compute_time_slowest_ms": slowest_rank(rows, "compute_time_ms", by=["step"]).mean(),
        "compute_time_mean_ms": rows["compute_time_ms"].mean(),
        "waiting_time_mean_ms": rows["waiting_time_ms"].mean(),
        "communication_time_mean_ms": rows["communication_time_ms"].mean(),
        "planning_time_mean_ms": rows["planning_time_ms"].mean(),
        "step_time_std_ms": run.over_ranks("step_time_ms").mean(),
        "compute_time_std_ms": run.over_ranks("compute_time_ms").mean(),
        "padded_tokens_std": run.over_ranks("padded_tokens").mean(),
        "peak_mem_std_mb": run.over_ranks("peak_mem_mb").mean(),
        "samples_per_s": rows["local_batch"].sum() / total_s,
        "tokens_per_s": rows["tokens"].sum() / total_s,
    }


def summary(runs: Sequence[MicroBatchRun]) -> pd.DataFrame:
    """Returns a row per run, and the change from the first to the second in per cent.

    The index, ``mode``, has the labels of the runs and ``CHANGE``.
    """
    together = measured_together(runs)
    table = pd.DataFrame([summarise(run) for run in together], index=labels(runs))
    if len(runs) == 2:
        first, second = table.iloc[0], table.iloc[1]
        table.loc[CHANGE] = (second / first.where(first != 0) - 1) * 100
    return table.rename_axis("mode")


def training_measures(runs: Mapping[str, MicroBatchRun]) -> pd.DataFrame:
    """Returns the measures of static and dynamic, a row for each of ``SHOWN``; none without runs.

    Columns: static, dynamic, ``CHANGE``.
    """
    if not runs:
        return pd.DataFrame(columns=["static", "dynamic", CHANGE])
    table = summary(list(runs.values())).T
    static_mb, dynamic_mb = (run.peak_memory_mb for run in runs.values())
    table.loc["peak_mem_mb"] = [static_mb, dynamic_mb, (dynamic_mb / static_mb - 1) * 100]
    return table.loc[[*SHOWN]].rename_axis("measure")


def loss_agreement(runs: Mapping[str, MicroBatchRun]) -> pd.DataFrame:
    """Returns one row on how far static and dynamic are apart; none without recorded losses.

    Columns: within rounding (in all steps by at most ``SAME_CURVE``), steps, largest difference
    (over static's loss), at step, in the first step, accuracy of static and of dynamic at the end
    (NaN without evaluations).
    """
    away = pd.Series(dtype=float)
    if runs:
        static, dynamic = (run.loss for run in runs.values())
        away = ((dynamic - static).abs() / static.abs()).dropna()
    if away.empty:
        return pd.DataFrame({"within rounding": [], "steps": [], "largest difference": []})
    row = {
        "within rounding": "yes" if away.max() <= SAME_CURVE else "no",
        "steps": len(away),
        "largest difference": away.max(),
        "at step": away.idxmax(),
        "in the first step": away.iloc[0],
    }
    for mode, run in runs.items():
        at_end = float("nan") if run.accuracy.empty else run.accuracy.iloc[-1]
        row[f"accuracy, {mode}"] = at_end
    return pd.DataFrame([row])


def merged(runs: Sequence[MicroBatchRun]) -> pd.DataFrame:
    """Returns all rows of all runs, warm-up included, each with its mode in front."""
    parts = [run.metrics.assign(mode=label) for run, label in zip(runs, labels(runs), strict=True)]
    table = pd.concat(parts, ignore_index=True)
    return table[["mode", *(column for column in table if column != "mode")]]


def write_analysis(runs: Sequence[MicroBatchRun]) -> Path:
    """Writes tables and figures into the first run's directory, whole or not at all.

    Returns that directory. Raises UserError where it cannot be written to.
    """
    target = runs[0].folder
    where = caption_of(runs[0].environment, target)
    where += "".join(f" and {run.folder.name}" for run in runs[1:])
    together = dict(zip(map(_name, labels(runs)), measured_together(runs), strict=True))
    with written_whole(target) as folder:
        merged(runs).to_csv(folder / "merged_metrics.csv", index=False)
        summary(runs).to_csv(folder / "summary.csv")
        (folder / "figures").mkdir()
        for name, draw in FIGURES.items():
            draw(together, where).savefig(folder / "figures" / f"{name}.png", dpi=DPI)
    return target


def printed(runs: Sequence[MicroBatchRun]) -> str:
    """Returns the summary as text: what was compared, a line per measure, and the ratio."""
    table = summary(runs)
    steps = len(measured_together(runs)[0].slowest)
    what = f"{what_text(runs[0].settings, runs[0].ranks)}; {steps} measured steps"
    width = max(map(len, table.index)) + 2
    head = f"{'':42}" + "".join(f"{label:>{max(width, 12)}}" for label in table.index)
    lines = [what, "", head]
    for column, name in MEASURES.items():
        cells = [_number(value, label) for label, value in table[column].items()]
        lines.append(f"{name:42}" + "".join(f"{cell:>{max(width, 12)}}" for cell in cells))
    if len(runs) == 2:
        lines += ["", ratio_sentence(runs)]
    return "\n".join(lines)


def ratio_sentence(runs: Sequence[MicroBatchRun]) -> str:
    """Returns the slowest rank's step of the second run over that of the first, as printed."""
    first, second = (run.slowest for run in measured_together(runs))
    name, other = labels(runs)
    if not same_batches(*runs):
        per_sample = [summarise(run)["samples_per_s"] for run in measured_together(runs)]
        return (
            f"{other}/{name}: {per_sample[0] / per_sample[1]:.3f} of the time per sample. The two "
            "modes make up their batches of different samples: steps are not compared."
        )
    return (
        f"{other}/{name}: {second.mean() / first.mean():.3f} in the mean step, "
        f"{(second / first).median():.3f} in the median of steps on the same global batch."
    )


def _open(named: str) -> MicroBatchRun:
    folder = find_run(named)
    return read_run(Run(folder, folder))


def _name(label: str) -> str:
    mode, bracket, folder = label.partition(" (")
    return mode_name(mode) + bracket + folder


def _number(value: float, label: str) -> str:
    if pd.isna(value):
        return "–"
    return f"{value:+.1f}" if label == CHANGE else f"{value:,.2f}"
