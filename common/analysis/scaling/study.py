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
    NO_INTERVAL,
    NOT_COUNTED,
    OVER_EPOCHS,
    OVER_RUNS,
    Speedup,
    per_sample_speedup,
    printed_speedup,
    regime_of,
    speedup,
    why_not_comparable,
)
from common.analysis.scaling.training_run import RunIdentity, ScalingRun, data_key
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS
from common.runtime.wording import counted

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
        name: Short name, different from those of the other configurations of the data set.
        warmup: Number of first epochs of a run that are left out of times.
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
        complete = [run for run in self.runs if run.epochs["epoch"].iloc[0] == 1] or self.runs
        return float(np.mean([run.epochs["train_time_s"].sum() for run in complete]))

    @property
    def throughput_samples_per_s(self) -> float | None:
        """Returns the samples that all ranks compute in a second, repeated ones each time."""
        processed = self.runs[0].processed_per_epoch
        return None if processed is None else processed / self.mean_epoch_s

    @property
    def final_accuracy(self) -> float:
        return float(np.mean([run.final_accuracy for run in self.runs]))


@dataclass(frozen=True, eq=False)
class Compared:
    """Compares a configuration with the one on one rank.

    Attributes:
        speedup: Speedup, where both did the same work, by count.
        printed: Ratio of epoch times, where samples were not counted.
        per_sample: Ratio of samples per second, where they are known.
        reason: Reason why there is no ``speedup``; empty where there is one.
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
    def by_samples(self) -> Speedup | None:
        """Returns the speedup, or else the ratio per sample."""
        return self.speedup or self.per_sample

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
    for name in datasets:
        matching = [run for run in runs if data_key(run.dataset) == data_key(name)]
        if matching:
            chosen[matching[0].dataset] = matching
        else:
            lines.append(f"no run of data set {name}; there are runs of: {there}")
    if not chosen:
        raise UserError("; ".join(lines) or "--datasets: name at least one")
    return chosen, lines


def compare_configurations(runs: Sequence[ScalingRun], warmup: int) -> list[Compared]:
    """Compares the configurations of one data set, each with its speedup over one rank.

    Each run has an epoch after warm-up.
    """
    groups: dict[RunIdentity, list[ScalingRun]] = {}
    for run in runs:
        groups.setdefault(run.identity, []).append(run)
    ordered = sorted(groups.values(), key=lambda repeats: _order(repeats[0].identity))
    names = configuration_names([repeats[0] for repeats in ordered])
    configurations = [
        Configuration(name, repeats[0].dataset, tuple(repeats), warmup)
        for repeats, name in zip(ordered, names, strict=True)
    ]
    return [_compared(configuration, configurations) for configuration in configurations]


def _order(identity: RunIdentity) -> tuple[bool, str, int]:
    """Returns a key that sorts the small model first, then by model and ranks."""
    return identity.model != "small", str(identity.model), identity.world_size


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
        unit = "rank" if run.environment.get("device") == "cpu" else "GPU"
        names.append(", ".join([*parts, counted(run.identity.world_size, unit)]))
    return [
        f"{name} ({run.name})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def _compared(configuration: Configuration, configurations: Sequence[Configuration]) -> Compared:
    runs, warmup = configuration.runs, configuration.warmup
    if configuration.ranks == 1:
        return Compared(configuration, configuration, speedup=Speedup(1.0, 1.0, 1.0, "", 1.0))
    bases = [base for base in configurations if base.ranks == 1]
    if not bases:
        sizes = sorted({other.ranks for other in configurations})
        why = "one world size only" if len(sizes) == 1 else "no run on one rank"
        why = f"{why} ({' and '.join(map(str, sizes))}): no speedup can be computed"
        return Compared(configuration, None, reason=why)
    identity = configuration.identity
    base = min(bases, key=lambda base: _how_far(base.identity, identity))
    result = Compared(configuration, base, reason=_why_not(base.identity, identity) or "")
    if not result.reason:
        regime = regime_of(base.identity, identity)
        result = replace(result, speedup=speedup(base.runs, runs, regime, warmup))
    elif result.reason == NOT_COUNTED:
        result = replace(result, printed=printed_speedup(base.runs, runs, warmup))
    try:
        return replace(result, per_sample=per_sample_speedup(base.runs, runs, warmup))
    except UserError:
        return result


def _why_not(base: RunIdentity, run: RunIdentity) -> str | None:
    return why_not_comparable(base, run, regime_of(base, run))


def _how_far(base: RunIdentity, run: RunIdentity) -> tuple[int, int]:
    """Returns a key that sorts comparable runs first, then those that agree in most."""
    fields = ("model", "precision", "input_shape", "batch_per_rank", "global_batch", "options")
    refused = _why_not(base, run) is not None
    return refused, sum(getattr(base, field) != getattr(run, field) for field in fields)


def verdict(ratio: Speedup) -> str:
    """Returns ``printed_verdict``; says so where that is not certain."""
    words = printed_verdict(ratio)
    if ratio.over in (OVER_EPOCHS, NO_INTERVAL):
        return f"{words}, not certain: runs were not repeated"
    if ratio.over == OVER_RUNS and ratio.repeats < FIRST_PAGE_ROUNDS:
        return f"{words}, not certain: too few runs"
    ends = {_words(end, ratio.ranks) for end in (ratio.low, ratio.high) if not np.isnan(end)}
    return words if ends <= {words} else f"{words}, not certain by this interval"


def printed_verdict(ratio: Speedup) -> str:
    """Returns the words that the original prints, which looks at no interval."""
    return _words(ratio.value, ratio.ranks)


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
    return pd.DataFrame([_summary_row(case) for case in compared])


def _summary_row(case: Compared) -> dict[str, str]:
    configuration, ratio = case.configuration, case.shown
    mark = MARK if ratio is not None and ratio is case.printed else ""
    throughput = configuration.throughput_samples_per_s
    size, accuracy = configuration.runs[0].distinct_per_epoch, configuration.final_accuracy
    return {
        "Configuration": configuration.name,
        "Dataset": configuration.dataset,
        "Train Size": NONE if size is None else f"{size}",
        "Mean Epoch Time (s)": f"{configuration.mean_epoch_s:.2f}",
        "Total Time (s)": f"{configuration.total_time_s:.2f}",
        "Speedup": NONE if ratio is None else f"{ratio.value:.2f}{mark}",
        "Efficiency": NONE if ratio is None else f"{ratio.efficiency:.3f}{mark}",
        "Throughput (sps)": NONE if throughput is None else f"{throughput:.1f}",
        "Final Val Acc": NONE if np.isnan(accuracy) else f"{accuracy:.4f}",
    }
