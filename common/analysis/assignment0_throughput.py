"""The throughput and the options of one run of assignment 0, opened for its notebook."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from scipy.optimize import nnls

from common.analysis.option_ratios import in_company, noise_floor, option_ratios
from common.errors import UserError
from common.perfmodel.architecture import TITLES, GPT2Config
from common.perfmodel.extrapolation import Extrapolation, by_operations, by_parameters
from common.perfmodel.flops import training_flops_per_token
from common.perfmodel.peaks import DevicePeak
from common.perfmodel.tables import numbers, read_table
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import find_table, newest_complete_run, read_environment

BATCHES, TIMES, PEAK = "throughput-batches.csv", "throughput-times.csv", "device-peak.csv"
OPTION_TIMES, ARMS = "options-times.csv", "options-arms.csv"
RECORDED = "data/epyc-2-cores/assignment0"


@dataclass(frozen=True)
class Source:
    """Where measurements come from.

    Attributes:
        caption: hardware, date and folder, for every figure.
        settings: all settings of the run.
        device: the name of the GPU or processor.
    """

    recorded: bool
    caption: str
    settings: dict
    device: str

    @property
    def config(self) -> GPT2Config:
        """The model's own sizes, without padding of the vocabulary."""
        return GPT2Config.named(self.settings["model"])

    @property
    def title(self) -> str:
        """The model's name, such as GPT-2 Small."""
        return TITLES["gpt2-" + self.settings["model"].removeprefix("gpt2").removeprefix("-")]

    @property
    def on_cpu(self) -> bool:
        return self.settings["device"] == "cpu"


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
    """One run of throughput.py: its batch sizes and its device's peak (None where unknown)."""

    source: Source
    batches: pd.DataFrame
    times: pd.DataFrame
    peak: DevicePeak | None

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
        return self.source.settings["batch_size"]

    @property
    def tokens_per_s(self) -> float:
        """Of the median step at that batch size."""
        row = self.measured[self.measured["batch_size"] == self.batch_size]
        return float(row["tokens_per_s"].iloc[0])

    @property
    def flops_per_token(self) -> int:
        """Operations that training needs for a token."""
        return training_flops_per_token(self.source.config, self.source.settings["seq_len"])

    @property
    def peak_flops_per_s(self) -> float | None:
        """The device's peak in this run's precision, where it is known."""
        settings = self.source.settings
        return self.peak.flops(settings["precision"], settings["tf32"]) if self.peak else None

    @property
    def naive(self) -> Extrapolation:
        """To 10¹² parameters, by their number."""
        return by_parameters(self.tokens_per_s, self.source.config.num_parameters())

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
        settings = self.source.settings
        return settings["seq_len"] * settings["gradient_accumulation"]


@dataclass(frozen=True)
class OptionsRun:
    """One run of options.py.

    Attributes:
        table: a row per arm with its ratio to the baseline (``option_ratios``).
        company: what each option adds to all the others (``in_company``).
        noise_floor: what two measurements of the baseline differ by.
    """

    source: Source
    table: pd.DataFrame
    company: pd.DataFrame
    noise_floor: float


def open_throughput(run_dir: str | Path | None = None) -> ThroughputRun:
    """Open the throughput of a run; by default the newest complete one, or else a recorded one.

    Raises UserError where a table is missing or cannot be right.
    """
    path = _find(run_dir, BATCHES)
    batches = read_table(path, ["batch_size", "status", "tokens_per_s", "steps_per_s"])
    measured = batches[batches["status"] == "measured"]
    for column in ("batch_size", "tokens_per_s", "steps_per_s"):
        numbers(measured, column, path, above=0)
    source = _source(path)
    if source.settings["batch_size"] not in set(measured["batch_size"]):
        raise UserError(f"{path}: no result for batch_size {source.settings['batch_size']}")
    return ThroughputRun(
        source=source,
        batches=batches.sort_values("batch_size", ignore_index=True),
        times=read_table(path.parent / TIMES, ["batch_size", "iteration", "step_time_ms"]),
        peak=read_peak(path.parent / PEAK),
    )


def open_options(run_dir: str | Path | None = None) -> OptionsRun:
    """Open the options of a run; by default the newest complete one, or else a recorded one.

    Raises UserError where a table is missing or cannot be right.
    """
    path = _find(run_dir, OPTION_TIMES)
    times = read_table(path, ["arm", "round", "iteration", "tokens", "step_time_ms"])
    for column in ("tokens", "step_time_ms"):
        numbers(times, column, path, above=0)
    arms = read_table(path.parent / ARMS, ["arm", "measured", "reason"])
    return OptionsRun(
        _source(path), option_ratios(times, arms), in_company(times), noise_floor(times)
    )


def read_peak(path: Path) -> DevicePeak | None:
    """A device's peaks from device-peak.csv; None where it has no rows."""
    table = pd.read_csv(path)
    if table.empty:
        return None
    first = table.iloc[0]
    rates = dict(zip(table["precision"], table["flops_per_s"], strict=True))
    return DevicePeak(first["device"], rates, first["memory_bytes_per_s"], first["source"])


def _find(run_dir: str | Path | None, name: str) -> Path:
    """The table in this run directory, in the newest complete run, or among the recorded ones."""
    if run_dir:
        folder = Path(run_dir)
        if not folder.is_absolute() and not folder.is_dir():
            folder = project_root() / folder
        if not folder.is_dir():
            raise UserError(f"{run_dir}: no such run directory")
    else:
        newest = newest_complete_run(project_root() / "outputs" / "assignment0", (name,))
        folder = newest or project_root() / RECORDED
    path = find_table(folder, name)
    if path is None:
        raise UserError(f"{relative_to_project(folder)}: no complete run with {name}")
    return path


def _source(table: Path) -> Source:
    """The record beside a table."""
    environment = read_environment(table.parent)
    folder = table.parent.resolve()
    recorded = folder.is_relative_to(project_root() / "data")
    below = folder.is_relative_to(project_root())
    where = relative_to_project(folder) if below else folder.name
    gpus = environment["gpus"]
    return Source(
        recorded=recorded,
        caption=f"{environment['hardware']}; {environment['start_time'][:10]}; "
        f"{'recorded' if recorded else 'run'} {where}",
        settings=yaml.safe_load((table.parent / "config.yaml").read_text()),
        device=gpus[0]["name"] if gpus else environment["cpu"]["model"],
    )
