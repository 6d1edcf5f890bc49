"""A scaling study in one go: runs grouped by configuration, each compared with one rank.

The seven results of the original: four figures per data set (``study_figures``), a summary, a LaTeX
table and a report (``study_report``). Where runs cannot be compared, the results say so in place of
a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from common.analysis.scaling.speedups import (
    NOT_COUNTED,
    Speedup,
    distinct_per_epoch,
    per_sample_speedup,
    printed_speedup,
    processed_per_epoch,
    regime_of,
    speedup,
    why_not_comparable,
)
from common.analysis.scaling.training_run import RunIdentity, ScalingRun, data_key
from common.errors import UserError

SUMMARY_COLUMNS = (
    "Configuration",
    "Dataset",
    "Train Size",
    "Mean Epoch Time (s)",
    "Total Time (s)",
    "Speedup",
    "Efficiency",
    "Throughput (sps)",
    "Final Val Acc",
)
"""Columns of comprehensive_summary.csv, the original's."""
NONE, MARK = "n/a", "*"
"""Text of a cell without a number, and the mark behind a ratio of uncounted samples."""
EXCELLENT, LOW, NEGATIVE = 0.85, 0.70, 0.8
"""Efficiencies from which scaling is excellent and below which it is low; speedup below which it
is negative."""
TOLD_APART = (
    "model",
    "precision",
    "input_shape",
    "global_batch",
    "processor",
    "network",
    "options",
)
"""Fields that a configuration's name shows beside the number of ranks, where they differ."""
SHORT = {"input_shape": "sequence ", "global_batch": "batch "}


@dataclass(frozen=True, eq=False)
class Configuration:
    """Repetitions of one run.

    Attributes:
        name: short, and different from those of the other configurations of the data set.
        warmup: first epochs of a run that are left out of times.
    """

    name: str
    dataset: str
    runs: tuple[ScalingRun, ...]
    warmup: int

    @property
    def identity(self) -> RunIdentity:
        return self.runs[0].identity

    @property
    def ranks(self) -> int:
        return self.identity.world_size

    @property
    def epoch_times_s(self) -> np.ndarray:
        """Returns the seconds of each epoch of all repetitions, without warm-up."""
        return np.concatenate([run.epoch_times_s(self.warmup) for run in self.runs])

    @property
    def mean_epoch_s(self) -> float:
        """Returns the mean training time of an epoch, without warm-up."""
        return float(np.mean(self.epoch_times_s))

    @property
    def total_time_s(self) -> float:
        """Returns the training time of all epochs, warm-up too.

        The mean of the runs that have them all.
        """
        whole = [run for run in self.runs if run.epochs["epoch"].iloc[0] == 1] or self.runs
        return float(np.mean([run.epochs["train_time_s"].sum() for run in whole]))

    @property
    def throughput_samples_per_s(self) -> float | None:
        """Returns the samples that all ranks compute in a second, repeated ones each time."""
        processed = processed_per_epoch(self.runs[0])
        return None if processed is None else processed / self.mean_epoch_s

    @property
    def final_accuracy(self) -> float:
        return float(np.mean([run.final_accuracy for run in self.runs]))


@dataclass(frozen=True, eq=False)
class Compared:
    """A configuration beside the one on one rank.

    Attributes:
        speedup: where both did the same work, by count.
        printed: the ratio of epoch times, where samples were not counted.
        per_sample: the ratio of samples per second, where they are known.
        reason: why there is no ``speedup``; empty where there is.
    """

    configuration: Configuration
    base: Configuration | None
    speedup: Speedup | None = None
    printed: Speedup | None = None
    per_sample: Speedup | None = None
    reason: str = ""

    @property
    def is_base(self) -> bool:
        return self.base is self.configuration

    @property
    def shown(self) -> Speedup | None:
        """Returns the speedup, or else the printed ratio, which gets a mark in the summary."""
        return self.speedup or self.printed


def chosen_runs(
    runs: Sequence[ScalingRun], datasets: Sequence[str]
) -> tuple[dict[str, list[ScalingRun]], list[str]]:
    """Returns the runs of each data set that is asked for, and a line for each that has none.

    Names match whatever their case and punctuation. Raises UserError where none has any.
    """
    chosen: dict[str, list[ScalingRun]] = {}
    lines = []
    there = ", ".join(sorted({run.dataset for run in runs})) or "none"
    for asked in datasets:
        found = [run for run in runs if data_key(run.dataset) == data_key(asked)]
        if found:
            chosen[found[0].dataset] = found
        else:
            lines.append(f"no run of data set {asked}; there are runs of: {there}")
    if not chosen:
        raise UserError("; ".join(lines) or "--datasets: name at least one")
    return chosen, lines


def compare(runs: Sequence[ScalingRun], warmup: int) -> list[Compared]:
    """Compares the configurations of one data set, each with its speedup over one rank.

    Raises UserError for a run without any epoch after warm-up.
    """
    groups: dict[RunIdentity, list[ScalingRun]] = {}
    for run in runs:
        groups.setdefault(run.identity, []).append(run)
        if not len(run.epoch_times_s(warmup)):
            raise UserError(
                f"{run.name}: all of its {len(run.epochs)} epochs are warm-up (--warmup {warmup})"
            )
    ordered = sorted(
        groups, key=lambda one: (str(one.model != "small"), str(one.model), one.world_size)
    )
    names = configuration_names([groups[one][0] for one in ordered])
    configurations = [
        Configuration(name, groups[one][0].dataset, tuple(groups[one]), warmup)
        for one, name in zip(ordered, names, strict=True)
    ]
    return [_compared(one, configurations) for one in configurations]


def configuration_names(runs: Sequence[ScalingRun]) -> list[str]:
    """Returns a short name for each run: its ranks, and what tells it from the others."""
    differing = [
        field for field in TOLD_APART if len({getattr(run.identity, field) for run in runs}) > 1
    ]
    if len({run.identity.world_size for run in runs}) == len(runs):
        differing = []
    names = []
    for run in runs:
        parts = [
            f"{SHORT.get(field, '')}{getattr(run.identity, field)}"
            for field in differing
            if getattr(run.identity, field) is not None
        ]
        names.append(", ".join([*parts, ranks_name(run)]))
    repeated = {name for name in names if names.count(name) > 1}
    return [
        f"{name} ({run.name})" if name in repeated else name
        for name, run in zip(names, runs, strict=True)
    ]


def ranks_name(run: ScalingRun) -> str:
    """Returns the number of ranks in words: ``4 GPUs``, or ``2 ranks`` of a CPU."""
    count = run.identity.world_size
    unit = "rank" if run.environment.get("device") == "cpu" else "GPU"
    return f"{count} {unit}{'s' * (count > 1)}"


def _compared(one: Configuration, all_of_them: Sequence[Configuration]) -> Compared:
    if one.ranks == 1:
        return Compared(one, one, speedup=Speedup(1.0, 1.0, 1.0, "", 1.0))
    bases = [base for base in all_of_them if base.ranks == 1]
    if not bases:
        sizes = sorted({other.ranks for other in all_of_them})
        why = "one world size only" if len(sizes) == 1 else "no run on one rank"
        counts = " and ".join(map(str, sizes))
        return Compared(one, None, reason=f"{why} ({counts}): no speedup can be computed")
    base = min(bases, key=lambda base: _how_far(base.identity, one.identity))
    result = Compared(one, base, reason=_why_not(base.identity, one.identity) or "")
    if not result.reason:
        regime = regime_of(base.identity, one.identity)
        result = replace(result, speedup=speedup(base.runs, one.runs, regime, one.warmup))
    elif result.reason == NOT_COUNTED:
        result = replace(result, printed=printed_speedup(base.runs, one.runs, one.warmup))
    try:
        return replace(result, per_sample=per_sample_speedup(base.runs, one.runs, one.warmup))
    except UserError:
        return result


def _why_not(base: RunIdentity, one: RunIdentity) -> str | None:
    return why_not_comparable(base, one, regime_of(base, one))


def _how_far(base: RunIdentity, one: RunIdentity) -> tuple[int, int]:
    """Returns a key that sorts comparable runs first, then those that agree in most."""
    fields = ("model", "precision", "input_shape", "batch_per_rank", "global_batch", "options")
    refused = _why_not(base, one) is not None
    return refused, sum(getattr(base, field) != getattr(one, field) for field in fields)


def verdict(found: Speedup) -> str:
    """Returns the words that users of the original know; says so where others are possible."""
    words = _words(found.value, found.ranks)
    ends = {_words(end, found.ranks) for end in (found.low, found.high) if not np.isnan(end)}
    return words if ends <= {words} else f"{words}, not certain by this interval"


def _words(value: float, ranks: float) -> str:
    if value < NEGATIVE:
        return "Negative scaling detected"
    if value / ranks >= EXCELLENT:
        return "Excellent scaling performance"
    if value / ranks < LOW:
        return "Low scaling efficiency"
    return "Good scaling performance"


def summary(compared: Sequence[Compared]) -> pd.DataFrame:
    """Returns comprehensive_summary.csv: a row per configuration, every cell as text.

    Efficiency is the speedup over the number of ranks. ``n/a`` stands where there is no number, and
    ``*`` behind a ratio of epochs whose samples were not counted.
    """
    return pd.DataFrame([_summary_row(one) for one in compared], columns=[*SUMMARY_COLUMNS])


def _summary_row(compared: Compared) -> dict[str, str]:
    one, shown = compared.configuration, compared.shown
    mark = MARK if shown is not None and shown is compared.printed else ""
    throughput, size = one.throughput_samples_per_s, distinct_per_epoch(one.runs[0])
    accuracy = one.final_accuracy
    return {
        "Configuration": one.name,
        "Dataset": one.dataset,
        "Train Size": NONE if size is None else f"{size}",
        "Mean Epoch Time (s)": f"{one.mean_epoch_s:.2f}",
        "Total Time (s)": f"{one.total_time_s:.2f}",
        "Speedup": NONE if shown is None else f"{shown.value:.2f}{mark}",
        "Efficiency": NONE if shown is None else f"{shown.efficiency:.3f}{mark}",
        "Throughput (sps)": NONE if throughput is None else f"{throughput:.1f}",
        "Final Val Acc": NONE if np.isnan(accuracy) else f"{accuracy:.4f}",
    }
