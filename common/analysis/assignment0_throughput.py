"""The throughput and the options of one run of assignment 0, opened for its notebook."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from common.analysis.opened_run import OpenedRun, open_tables, read_peak
from common.analysis.option_ratios import in_company, noise_floor, option_ratios
from common.errors import UserError
from common.perfmodel.architecture import CONFIGS, TITLES, GPT2Config
from common.perfmodel.extrapolation import Extrapolation, by_operations, by_parameters
from common.perfmodel.flops import training_flops_per_token
from common.perfmodel.peaks import DevicePeak
from common.perfmodel.tables import numbers

BATCHES, PEAK = "throughput-batches.csv", "device-peak.csv"
OPTION_TIMES, ARMS = "options-times.csv", "options-arms.csv"


@dataclass(frozen=True)
class Saturation:
    """A step's time as fixed_s + batch · per_sequence_s, which is what a sweep measures.

    The first part is paid once a step whatever its size: launching kernels, reading the weights,
    the update. The second is what each sequence adds.
    """

    fixed_s: float
    per_sequence_s: float

    @property
    def half_batch(self) -> float:
        """The batch at which half of the highest rate is reached."""
        return self.fixed_s / self.per_sequence_s

    def step_s(self, batch_size: np.ndarray) -> np.ndarray:
        """The time of a step, in seconds."""
        return self.fixed_s + np.asarray(batch_size) * self.per_sequence_s


@dataclass(frozen=True)
class ThroughputRun:
    """One run of throughput.py.

    Attributes:
        opened: where it comes from, its settings and its caption.
        batches: throughput-batches.csv, the smallest batch first.
        peak: the device's, None where it is unknown.
    """

    opened: OpenedRun
    batches: pd.DataFrame
    peak: DevicePeak | None

    @property
    def settings(self) -> dict:
        return self.opened.settings

    @property
    def config(self) -> GPT2Config:
        """The model's own sizes, without padding of the vocabulary."""
        return GPT2Config.named(self.settings["model"])

    @property
    def title(self) -> str:
        """The model's name, such as GPT-2 Small."""
        return next(TITLES[name] for name in CONFIGS if CONFIGS[name] == self.config)

    @property
    def device(self) -> str:
        """The name of the GPU or processor."""
        gpus = self.opened.environment["gpus"]
        return gpus[0]["name"] if gpus else self.opened.environment["cpu"]["model"]

    @cached_property
    def measured(self) -> pd.DataFrame:
        """The rows of throughput-batches.csv that have a result, by batch size."""
        return self.batches[self.batches["status"] == "measured"]

    @cached_property
    def ended(self) -> pd.DataFrame:
        """The rows that have none."""
        return self.batches[self.batches["status"] != "measured"]

    @property
    def batch_size(self) -> int:
        """The batch that the headline and the extrapolations are about."""
        return self.settings["batch_size"]

    @property
    def tokens_per_s(self) -> float:
        """Of the median step at that batch size."""
        row = self.measured[self.measured["batch_size"] == self.batch_size]
        return float(row["tokens_per_s"].iloc[0])

    @property
    def flops_per_token(self) -> int:
        """Operations that training needs for a token."""
        return training_flops_per_token(self.config, self.settings["seq_len"])

    @property
    def peak_flops_per_s(self) -> float | None:
        """The device's peak in this run's precision, where it is known."""
        how = self.settings["precision"], self.settings["tf32"]
        return self.peak.flops(*how) if self.peak else None

    @property
    def naive(self) -> Extrapolation:
        """To 10¹² parameters, by their number."""
        return by_parameters(self.tokens_per_s, self.config.num_parameters())

    @property
    def by_operations(self) -> Extrapolation:
        """To 10¹² parameters, by operations."""
        return by_operations(self.tokens_per_s * self.flops_per_token)

    @cached_property
    def saturation(self) -> Saturation | None:
        """The straight line through the times of the steps; None with fewer than three batches.

        By least squares of the relative error, neither part below zero.
        """
        if len(self.measured) < 3:
            return None
        batch = self.measured["batch_size"].to_numpy(float)
        step_s = 1 / self.measured["steps_per_s"].to_numpy(float)
        parts = np.column_stack([1 / step_s, batch / step_s])
        (fixed_s, per_sequence_s), _ = nnls(parts, np.ones(len(batch)))
        return Saturation(float(fixed_s), float(per_sequence_s))

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens that one more sequence in the batch adds to a step."""
        return self.settings["seq_len"] * self.settings["gradient_accumulation"]


@dataclass(frozen=True)
class OptionsRun:
    """One run of options.py.

    Attributes:
        opened: where it comes from, its settings and its caption.
        table: a row per arm with its ratio to the baseline (``option_ratios``).
        company: what each option adds to all the others (``in_company``).
        noise_floor: what two measurements of the baseline differ by.
    """

    opened: OpenedRun
    table: pd.DataFrame
    company: pd.DataFrame
    noise_floor: float


def open_throughput(run_dir: str | Path | None = None) -> ThroughputRun:
    """Open the throughput of a run; by default the newest complete one, or else a recorded one.

    Raises UserError where a table is missing or cannot be right.
    """
    opened = open_tables(run_dir, "assignment0", BATCHES, [PEAK])
    path, batches = opened.folder / BATCHES, opened.tables[BATCHES]
    measured = batches[batches["status"] == "measured"]
    for column in ("batch_size", "tokens_per_s", "steps_per_s"):
        numbers(measured, column, path, above=0)
    if opened.settings["batch_size"] not in set(measured["batch_size"]):
        raise UserError(f"{path}: no result for batch_size {opened.settings['batch_size']}")
    batches = batches.sort_values("batch_size", ignore_index=True)
    return ThroughputRun(opened, batches, read_peak(opened.tables[PEAK]))


def open_options(run_dir: str | Path | None = None) -> OptionsRun:
    """Open the options of a run; by default the newest complete one, or else a recorded one.

    Raises UserError where a table is missing or cannot be right.
    """
    opened = open_tables(run_dir, "assignment0", OPTION_TIMES, [ARMS])
    times, arms = opened.tables[OPTION_TIMES], opened.tables[ARMS]
    for column in ("tokens", "step_time_ms"):
        numbers(times, column, opened.folder / OPTION_TIMES, above=0)
    return OptionsRun(opened, option_ratios(times, arms), in_company(times), noise_floor(times))
