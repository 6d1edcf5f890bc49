"""A run of throughput.py, opened: rates by batch size, share of the peak, extrapolations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from common.analysis.one_device.origin import origin_of, step_text
from common.analysis.one_device.throughput_text import (
    MEMORY,
    TARGET_DAYS,
    rate_text,
    significant,
    utilisation_text,
)
from common.analysis.runs import OfRun, complete_runs, gpu_folder, open_run_with, read_peak
from common.csv_tables import numbers
from common.errors import UserError
from common.perfmodel.one_device.architecture import GPT2Config
from common.perfmodel.one_device.flops import (
    ONE_TRILLION,
    PARAMETERS,
    Extrapolation,
    by_operations,
    by_parameters,
    matrix_parameters,
    training_flops_per_token,
)
from common.perfmodel.one_device.peaks import DevicePeak
from common.perfmodel.one_device.workload import Workload
from common.runtime.wording import digits

BATCHES, PEAK = "throughput-batches.csv", "device-peak.csv"
LEAST_BATCHES = 3
"""Measured batch sizes from which on a line is put through the steps' times."""


@dataclass(frozen=True)
class Saturation:
    """The time of a step as fixed_s + batch · per_sequence_s.

    The first part is paid once a step whatever its size: launching kernels, reading the weights,
    the update. The second is what each sequence adds.
    """

    fixed_s: float
    per_sequence_s: float

    @property
    def half_batch(self) -> float:
        """Returns the batch at which half of the highest rate is reached."""
        return self.fixed_s / self.per_sequence_s

    def step_s(self, batch_size: np.ndarray) -> np.ndarray:
        """Computes the time of a step, in seconds."""
        return self.fixed_s + np.asarray(batch_size) * self.per_sequence_s


@dataclass(frozen=True, eq=False)
class ThroughputRun(OfRun):
    """One run of throughput.py.

    Attributes:
        opened: where it comes from, its settings and its caption.
        batches: throughput-batches.csv, the smallest batch first.
        peak: the device's, None where it is unknown.
    """

    batches: pd.DataFrame
    peak: DevicePeak | None

    @property
    def origin(self) -> str:
        """Returns the line that says whose data these are, as Markdown."""
        return origin_of(self.opened)

    @property
    def config(self) -> GPT2Config:
        """Returns the model's own sizes, without padding of the vocabulary."""
        return self.workload.unpadded

    @property
    def workload(self) -> Workload:
        """Returns the step that was timed."""
        return Workload.of(self.settings)

    @property
    def title(self) -> str:
        """Returns the model's name, such as GPT-2 Small."""
        return self.workload.title

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Returns the rows of throughput-batches.csv that have a result, by batch size."""
        return self.batches[self.batches["status"] == "measured"]

    @cached_property
    def ended(self) -> pd.DataFrame:
        """Returns the rows that have none."""
        return self.batches[self.batches["status"] != "measured"]

    @property
    def batch_size(self) -> int:
        """Returns the batch that the headline and the extrapolations are about."""
        return self.settings["batch_size"]

    @property
    def tokens_per_s(self) -> float:
        """Returns the rate of the median step at that batch size."""
        row = self.measured[self.measured["batch_size"] == self.batch_size]
        return float(row["tokens_per_s"].iloc[0])

    @property
    def flops_per_token(self) -> int:
        """Returns the operations that training needs for a token."""
        return training_flops_per_token(self.config, self.settings["seq_len"])

    @property
    def flops_per_s(self) -> float:
        """Returns the operations per second that training achieved, of those the model needs."""
        return self.tokens_per_s * self.flops_per_token

    @property
    def peak_flops_per_s(self) -> float | None:
        """Returns the device's peak in this run's precision, None where it is unknown."""
        how = self.settings["precision"], self.settings["tf32"]
        return self.peak.flops(*how) if self.peak else None

    @property
    def naive(self) -> Extrapolation:
        """Extrapolates to 10¹² parameters, by their number."""
        return by_parameters(self.tokens_per_s, self.config.num_parameters())

    @property
    def by_operations(self) -> Extrapolation:
        """Extrapolates to 10¹² parameters, by operations."""
        return by_operations(self.flops_per_s)

    @cached_property
    def saturation(self) -> Saturation | None:
        """Fits a straight line to the times of the steps; None with fewer than three batches."""
        if len(self.measured) < LEAST_BATCHES:
            return None
        batch = self.measured["batch_size"].to_numpy(float)
        step_s = 1 / self.measured["steps_per_s"].to_numpy(float)
        # Least squares of the relative error: each row is divided by its measured time, so that
        # the line has to give 1 everywhere, and long steps do not outweigh short ones. Neither
        # part of a step can be negative, hence NNLS.
        parts = np.column_stack([1 / step_s, batch / step_s])
        (fixed_s, per_sequence_s), _ = nnls(parts, np.ones(len(batch)))
        return Saturation(float(fixed_s), float(per_sequence_s))

    @property
    def off_the_line(self) -> pd.Series:
        """Returns measured tokens/s over those of the fitted line, minus 1, by batch size."""
        rate = self.measured.set_index("batch_size")["tokens_per_s"]
        step_s = self.saturation.step_s(rate.index.to_numpy(float))
        return rate * step_s / (self.tokens_per_sequence * rate.index.to_numpy(float)) - 1

    @property
    def tokens_per_sequence(self) -> int:
        """Returns the tokens that one more sequence in the batch adds to a step."""
        return self.settings["seq_len"] * self.settings["gradient_accumulation"]


def open_throughput(run_dir: str | Path | None = None) -> ThroughputRun:
    """Opens the throughput of a run; by default the newest complete one, or else a recorded one.

    Raises UserError where a table is missing or cannot be right.
    """
    opened = open_run_with(run_dir, "assignment0", BATCHES, [PEAK])
    path, batches = opened.folder / BATCHES, opened.table(BATCHES)
    measured = batches[batches["status"] == "measured"]
    for column in ("batch_size", "tokens_per_s", "steps_per_s"):
        numbers(measured, column, path, above=0)
    if opened.settings["batch_size"] not in set(measured["batch_size"]):
        raise UserError(f"{path}: no result for batch_size {opened.settings['batch_size']}")
    return ThroughputRun(
        opened=opened,
        batches=batches.sort_values("batch_size", ignore_index=True),
        peak=read_peak(opened.table(PEAK)),
    )


def utilisation_facts(run: ThroughputRun) -> dict[str, str]:
    """Returns tokens per second, operations per second and their share of the peak."""
    mfu = utilisation_text(run.flops_per_s, run.peak_flops_per_s, run.peak, run.opened.device)
    return {
        "the peak of this device is known": "yes" if run.peak_flops_per_s else "no",
        f"tokens/s at batch {run.batch_size} (median step)": f"{run.tokens_per_s:,.0f}",
        f"operations per token of {run.title}": digits(run.flops_per_token),
        "operations per second": rate_text(run.flops_per_s),
        "MFU": mfu.removeprefix("MFU: "),
    }


def on_gpu() -> pd.DataFrame:
    """Returns the rates and MFU that were recorded on a GPU, a row per batch.

    Columns: device, step, tokens/s, peak (TFLOP/s), MFU; NaN where the peak is unknown.
    """
    opened = complete_runs(gpu_folder("assignment0"), BATCHES)
    found = [open_throughput(each.folder) for each in opened]
    return pd.concat([_rates(run, run.measured["batch_size"]) for run in found], ignore_index=True)


def beside_gpu(run: ThroughputRun) -> pd.DataFrame:
    """Returns the row of the run's own batch, and below it those of ``on_gpu``."""
    return pd.concat([_rates(run, [run.batch_size]), on_gpu()], ignore_index=True)


def _rates(run: ThroughputRun, batch_sizes: Iterable[int]) -> pd.DataFrame:
    rate = run.measured.set_index("batch_size")["tokens_per_s"]
    peak = run.peak_flops_per_s or float("nan")
    return pd.DataFrame(
        {
            "device": run.opened.device,
            "step": step_text(run.settings | {"batch_size": size}),
            "tokens/s": rate[size],
            "peak (TFLOP/s)": peak / 1e12,
            "MFU": rate[size] * run.flops_per_token / peak,
        }
        for size in batch_sizes
    )


def batch_table(run: ThroughputRun) -> pd.DataFrame:
    """Returns the sweep with MFU (where the peak is known) and memory."""
    column, _ = MEMORY[run.settings["device"]]
    memory = "memory (MiB)"
    table = run.batches[["batch_size", "status", "tokens_per_s", column]]
    table = table.rename(columns={"batch_size": "batch", "status": "result", column: memory})
    if run.peak_flops_per_s:
        mfu = run.batches["tokens_per_s"] * run.flops_per_token / run.peak_flops_per_s
        table.insert(3, "MFU", mfu)
    return table.rename(columns={"tokens_per_s": "tokens/s"})


def saturation_facts(run: ThroughputRun) -> dict[str, str]:
    """Returns the parts of the fitted line, the point furthest off it, and the fastest batch."""
    facts = _line_facts(run)
    best = run.measured.loc[run.measured["tokens_per_s"].idxmax()]
    facts["fastest batch"] = f"{best['batch_size']:.0f}, at {best['tokens_per_s']:,.0f} tokens/s"
    ended = [f"{row.batch_size} ({row.status})" for row in run.ended.itertuples()]
    facts["batches without a result"] = ", ".join(ended) or "none"
    return facts


def _line_facts(run: ThroughputRun) -> dict[str, str]:
    """Returns the parts of the fitted line; that there is none, where there is none."""
    line = run.saturation
    if line is None:
        return {"a line through the steps' times": f"none: it takes {LEAST_BATCHES} batch sizes"}
    if line.per_sequence_s == 0:
        return {"a line through the steps' times": "none: no batch takes longer than another"}
    error = run.off_the_line
    worst = error.abs().idxmax()
    ceiling = run.tokens_per_sequence / line.per_sequence_s
    return {
        "point furthest from the line": f"batch {worst}, {error.loc[worst]:+.1%}",
        "fixed part of a step": f"{line.fixed_s * 1e3:.3g} ms",
        "part of each sequence": f"{line.per_sequence_s * 1e3:.3g} ms",
        "ceiling": f"{ceiling:,.0f} tokens/s",
        "batch at half of the ceiling": f"{line.half_batch:.2g}",
    }


def extrapolation_table(run: ThroughputRun) -> pd.DataFrame:
    """Returns both extrapolations to 10¹² parameters and 10¹³ tokens, a row each."""
    ways = {"by parameters (the course's)": run.naive, "by operations": run.by_operations}
    return pd.DataFrame(
        [
            {
                "way": way,
                "tokens/s of 1T parameters": significant(large.tokens_per_s),
                "years on one device": digits(large.years),
                f"devices for {TARGET_DAYS} days": digits(large.devices_for(TARGET_DAYS)),
            }
            for way, large in ways.items()
        ]
    )


def extrapolation_facts(run: ThroughputRun) -> dict[str, str]:
    """Returns the difference of the two extrapolations, and what it consists of.

    By parameters, a token costs as many operations per parameter in the large model as in the
    small one. The ratio of the two numbers of operations is the ratio of the two answers.
    """
    length, longest = run.settings["seq_len"], ONE_TRILLION.n_positions
    per_parameter = run.flops_per_token / run.config.num_parameters()
    of_large = training_flops_per_token(ONE_TRILLION, longest) / PARAMETERS
    return {
        "years by parameters, over years by operations": (
            f"{run.naive.years / run.by_operations.years - 1:+.1%}"
        ),
        f"operations per token and parameter, {run.title}": f"{per_parameter:.3f}",
        "operations per token and parameter, 1T model": f"{of_large:.3f}",
        f"attention's share of operations, {run.title}, {length:,} tokens": (
            f"{attention_share(run.config, length):.1%}"
        ),
        f"attention's share of operations, 1T model, {longest:,} tokens": (
            f"{attention_share(ONE_TRILLION, longest):.1%}"
        ),
        f"parameters outside of matrix products, {run.title}": (
            f"{1 - matrix_parameters(run.config) / run.config.num_parameters():.1%}"
        ),
    }


def attention_share(config: GPT2Config, seq_len: int) -> float:
    """Returns the share of a token's operations that is attention's two products."""
    return 1 - 6 * matrix_parameters(config) / training_flops_per_token(config, seq_len)
