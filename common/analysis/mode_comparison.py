"""All modes on the same global batches: ratios to static step by step, waiting, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from common.analysis.micro_batches import caption, dataset_name, in_order
from common.errors import UserError
from common.perfmodel.tables import numbers, read_table
from common.runtime.paths import relative_to_project
from common.runtime.run_directory import read_environment

MODE_TIMES, CALIBRATION, SLOW_RANK = "mode-times.csv", "calibration.csv", "slow-rank.csv"
TIMES = ("step_time_ms", "compute_time_ms", "waiting_time_ms", "communication_time_ms")
COLUMNS = (
    *("mode", "same_batch", "step", "rank", "local_batch", "max_seq_len_in_batch"),
    *("padded_tokens", "tokens", "global_batch", *TIMES, "planning_time_ms"),
)
CONTROL, STATIC = "control", "static"
DRAWS, INTERVAL = 1000, (2.5, 97.5)
"""A bootstrap draws so many samples of the steps; its interval holds the middle 95 %."""


@dataclass(frozen=True, eq=False)
class ModeComparison:
    """Steps of every mode, measured in turns on the same ranks.

    Attributes:
        times: a row per step, mode and rank, with ``COLUMNS``.
        calibration: measured times of passes over batch size and longest text, by rank, or None.
        slow_rank: steps with one rank slowed on purpose, or None.
    """

    folder: Path
    caption: str
    settings: dict
    environment: dict
    times: pd.DataFrame
    calibration: pd.DataFrame | None = None
    slow_rank: pd.DataFrame | None = None

    @property
    def dataset(self) -> str:
        return dataset_name(self.settings)

    @property
    def like(self) -> str:
        """The data set whose lengths these are."""
        synthetic = self.settings.get("dataset") == "synthetic"
        return str(self.settings.get("synthetic_like" if synthetic else "dataset", "?"))

    @property
    def ranks(self) -> int:
        return int(self.times["rank"].max()) + 1

    @property
    def modes(self) -> list[str]:
        """Those that share static's global batches, static first."""
        same = self.times[self.times["same_batch"] & (self.times["mode"] != CONTROL)]
        return in_order(same["mode"])

    @property
    def own_batch_modes(self) -> list[str]:
        """Those that make up batches of their own."""
        own = self.times[~self.times["same_batch"] & (self.times["mode"] != CONTROL)]
        return in_order(own["mode"])

    def slowest(self, column: str = "step_time_ms") -> pd.DataFrame:
        """The slowest rank's value: a row per step, a column per mode that shares the batches."""
        rows = self.times[self.times["mode"].isin(self.modes)]
        by_step = rows.groupby(["step", "mode"])[column].max().unstack("mode")
        return by_step[self.modes].dropna()

    def ratios(self, column: str = "step_time_ms") -> pd.DataFrame:
        """The same over static's on the same global batch: paired, by step."""
        slowest = self.slowest(column)
        return slowest.div(slowest[STATIC], axis=0)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """A row per mode that shares the global batches; times are those of the slowest rank.

        Columns: mean_ms, p95_ms; ratio (mean over static's mean) with ratio_low and ratio_high
        (bootstrap over steps, 95 %), p95_ratio; paired_median, paired_q25, paired_q75 (of the
        ratios step by step); compute_ratio, compute_p95_ratio; padded_ratio (what the plan
        promises: the largest number of padded tokens of a rank, over static's); planning_ms
        (what steps were held up by planning, mean); waiting (share of all ranks' step time) and
        waiting_points (above the control, in percentage points; NaN without a control).
        """
        slowest, compute = self.slowest(), self.slowest("compute_time_ms")
        padded = self.slowest("padded_tokens")
        paired = self.ratios().quantile([0.25, 0.5, 0.75]).T
        low, high = bootstrap_ratio(slowest.to_numpy(), slowest[STATIC].to_numpy())
        table = pd.DataFrame(
            {
                "mean_ms": slowest.mean(),
                "p95_ms": slowest.quantile(0.95),
                "ratio": slowest.mean() / slowest[STATIC].mean(),
                "ratio_low": low,
                "ratio_high": high,
                "p95_ratio": slowest.quantile(0.95) / slowest[STATIC].quantile(0.95),
                "paired_median": paired[0.5],
                "paired_q25": paired[0.25],
                "paired_q75": paired[0.75],
                "compute_ratio": compute.mean() / compute[STATIC].mean(),
                "compute_p95_ratio": compute.quantile(0.95) / compute[STATIC].quantile(0.95),
                "padded_ratio": padded.mean() / padded[STATIC].mean(),
            },
            index=pd.Index(self.modes, name="mode"),
        )
        table["planning_ms"] = self.times.groupby("mode")["planning_time_ms"].mean()
        table["waiting"] = self.waiting
        table["waiting_points"] = (table["waiting"] - self.waiting.get(CONTROL, np.nan)) * 100
        return table

    @cached_property
    def waiting(self) -> pd.Series:
        """The share of all ranks' step time that is waiting for slower ranks, by mode."""
        sums = self.times.groupby("mode")[["waiting_time_ms", "step_time_ms"]].sum()
        return sums["waiting_time_ms"] / sums["step_time_ms"]

    @cached_property
    def noise_floor(self) -> float:
        """What two halves of static's own steps differ by in the mean, half the time, as a ratio.

        Halves are drawn at random, so this holds how unequal global batches are as well; paired
        ratios, which do not, can be trusted to less.
        """
        times = self.slowest()[STATIC].to_numpy()
        order = np.random.default_rng(0).random((DRAWS, len(times))).argsort(axis=1)
        half = len(times) // 2
        if half == 0:
            return float("nan")
        first, second = times[order[:, :half]].mean(axis=1), times[order[:, half:]].mean(axis=1)
        return float(np.median(np.abs(first / second - 1)))

    @cached_property
    def per_sample(self) -> pd.DataFrame:
        """Every mode by the text, those with batches of their own as well.

        Columns: same_batch, texts (a step, mean), per_text_ms (the slowest rank's steps over all
        texts), ratio (to static), ratio_low, ratio_high (bootstrap; where global batches are the
        same, as in ``summary``, else the steps of both drawn apart), padded_per_text (the largest
        rank's, over all texts) and padded_ratio.
        """
        rows = self.times[self.times["mode"].isin([*self.modes, *self.own_batch_modes])]
        steps = rows.groupby(["mode", "step"]).agg(
            step_ms=("step_time_ms", "max"),
            texts=("global_batch", "first"),
            padded=("padded_tokens", "max"),
        )
        sums = steps.groupby("mode").sum()
        table = pd.DataFrame(
            {
                "same_batch": rows.groupby("mode")["same_batch"].first(),
                "texts": steps.groupby("mode")["texts"].mean(),
                "per_text_ms": sums["step_ms"] / sums["texts"],
                "padded_per_text": sums["padded"] / sums["texts"],
            }
        ).loc[[*self.modes, *self.own_batch_modes]]
        static = _drawn_rates(steps.loc[STATIC], seed=0)
        bounds = {
            mode: np.percentile(_drawn_rates(steps.loc[mode], seed=1) / static, INTERVAL)
            for mode in self.own_batch_modes
        }
        paired = self.summary[["ratio_low", "ratio_high"]]
        bounds |= {mode: paired.loc[mode].tolist() for mode in self.modes}
        table["ratio"] = table["per_text_ms"] / table.loc[STATIC, "per_text_ms"]
        table["ratio_low"] = [bounds[mode][0] for mode in table.index]
        table["ratio_high"] = [bounds[mode][1] for mode in table.index]
        table["padded_ratio"] = table["padded_per_text"] / table.loc[STATIC, "padded_per_text"]
        return table


def read_comparison(folder: Path) -> ModeComparison:
    """The comparison of modes in ``folder``.

    Raises UserError for a table without a column, or without steps of static.
    """
    path = folder / MODE_TIMES
    shown = relative_to_project(path)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{relative_to_project(folder)}: has {MODE_TIMES} but no config.yaml")
    times = read_table(path, COLUMNS)
    for column in ("step_time_ms", "global_batch"):
        times[column] = numbers(times, column, shown, above=0)
    times["same_batch"] = times["same_batch"].astype(str).str.lower().isin(["true", "1"])
    if STATIC not in set(times["mode"]):
        raise UserError(f"{shown}: no steps of mode static, which the others are compared with")
    environment = read_environment(folder)
    return ModeComparison(
        folder=folder,
        caption=caption(environment, folder),
        settings=yaml.safe_load((folder / "config.yaml").read_text()) or {},
        environment=environment,
        times=times,
        calibration=_beside(folder, CALIBRATION, "rank batch_size longest time_ms"),
        slow_rank=_beside(
            folder, SLOW_RANK, "mode step rank step_time_ms slow_factor estimated_factor"
        ),
    )


def _beside(folder: Path, name: str, columns: str) -> pd.DataFrame | None:
    path = folder / name
    return read_table(path, columns.split()) if path.is_file() else None


def bootstrap_ratio(values: NDArray, base: NDArray) -> tuple[NDArray, NDArray]:
    """Bounds of mean(values) / mean(base) over samples of the steps, which stay paired.

    Args:
        values: [steps, modes].
        base: [steps].
    """
    steps = len(base)
    chosen = np.random.default_rng(0).integers(0, steps, (DRAWS, steps))
    ratios = values[chosen].mean(axis=1) / base[chosen].mean(axis=1)[:, None]
    low, high = np.percentile(ratios, INTERVAL, axis=0)
    return low, high


def _drawn_rates(steps: pd.DataFrame, seed: int) -> NDArray:
    """Step time over texts, of samples of the steps, [DRAWS]."""
    chosen = np.random.default_rng(seed).integers(0, len(steps), (DRAWS, len(steps)))
    times, texts = steps["step_ms"].to_numpy(), steps["texts"].to_numpy()
    return times[chosen].sum(axis=1) / texts[chosen].sum(axis=1)
