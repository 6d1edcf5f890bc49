"""A run of throughput.py, opened: rates by batch size, share of the peak, extrapolations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from common.analysis.one_device.origin import OneDeviceRun, step_text
from common.analysis.one_device.saturation import LEAST_BATCHES, Saturation
from common.analysis.one_device.throughput_text import (
    MEMORY,
    TARGET_DAYS,
    rate_text,
    significant,
    utilisation_text,
)
from common.analysis.runs import complete_runs, gpu_folder, open_run_with, read_peak
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.judged import Judged, fastest
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
from common.runtime.paths import project_root
from common.runtime.wording import digits
from common.samples import student

BATCHES, PEAK, TIMES = "throughput-batches.csv", "device-peak.csv", "throughput-times.csv"


@dataclass(frozen=True, eq=False)
class ThroughputRun(OneDeviceRun):
    """One run of throughput.py.

    Attributes:
        batches: Rows of throughput-batches.csv, the smallest batch first.
        peak: Peaks of the device, None where they are unknown.
    """

    batches: pd.DataFrame
    peak: DevicePeak | None

    @property
    def config(self) -> GPT2Config:
        """Returns the model's own sizes, without padding of the vocabulary."""
        return self.workload.unpadded

    @property
    def workload(self) -> Workload:
        """Returns the step that was timed."""
        return Workload.of(self.settings)

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Returns the rows of throughput-batches.csv that have a result, by batch size."""
        return self.batches[self.batches["status"] == "measured"]

    @cached_property
    def ended(self) -> pd.DataFrame:
        """Returns the rows of batches without a rate."""
        return self.batches[self.batches["status"] != "measured"]

    @property
    def batch_size(self) -> int:
        """Returns the batch that the headline and the extrapolations are about."""
        return self.settings["batch_size"]

    @cached_property
    def visits(self) -> pd.DataFrame:
        """Returns the rate of each visit's median step in tokens/s: a row per visit (round), a
        column per batch size. Runs of older versions visited each size once."""
        if self.opened.has(TIMES) and "round" in self.opened.table(TIMES):
            times = self.opened.table(TIMES)
            step_s = times.groupby(["round", "batch_size"])["step_time_ms"].median().unstack() / 1e3
            if self.batch_size in step_s:
                return self.tokens_per_sequence * step_s.columns / step_s
        return self.measured.set_index("batch_size")[["tokens_per_s"]].T

    @property
    def share_of_visits(self) -> float:
        """Returns the share of all measured steps' time that visits to the run's batch take."""
        if not self.opened.has(TIMES):
            return 1.0
        by_size = self.opened.table(TIMES).groupby("batch_size")["step_time_ms"].sum()
        return float(by_size.get(self.batch_size, 0.0) / by_size.sum())

    @cached_property
    def speed(self) -> Judged:
        """Returns the tokens per second at the run's batch; steps of one visit are no rounds."""
        return Judged(student(self.visits[self.batch_size]), null=None, **self.conditions)

    @property
    def tokens_per_s(self) -> float:
        """Returns the mean rate over visits, of the median step, at that batch size."""
        return self.speed.estimate

    @property
    def fastest_batch(self) -> str:
        """Returns the batch size with the highest rate, or that none is told from the others."""
        best = fastest(1 / self.visits, **self.conditions)
        rate = self.visits.mean()
        size = best.arm if best else rate.idxmax()
        text = f"{size:.0f}, at {rate[size]:,.0f} tokens/s"
        return text if best and best.lead.is_settled else f"not told from others; it may be {text}"

    @property
    def visited_once(self) -> str:
        """Returns the batch sizes of a single visit: how far another would differ is not known."""
        counts = self.visits.notna().sum()
        return ", ".join(f"{size:.0f}" for size in counts[counts == 1].index) or "none"

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
    def knows_peak(self) -> bool:
        """Returns True if the device's peak in this run's precision is known."""
        return self.peak_flops_per_s is not None

    @property
    def utilisation(self) -> str:
        """Returns MFU and where its peak comes from, or why it is unknown."""
        peaks = self.peak_flops_per_s, self.peak
        return utilisation_text(self.flops_per_s, *peaks, self.opened.device)

    @property
    def sweep(self) -> pd.DataFrame:
        """Returns ``batches`` with mfu (NaN where the peak is unknown) and memory_mib."""
        peak = self.peak_flops_per_s or float("nan")
        column, _ = MEMORY[self.settings["device"]]
        mfu = self.batches["tokens_per_s"] * self.flops_per_token / peak
        return self.batches.assign(mfu=mfu, memory_mib=self.batches[column])

    @property
    def naive(self) -> Extrapolation:
        """Extrapolates to 10¹² parameters, by their number."""
        return by_parameters(self.tokens_per_s, self.config.num_parameters())

    @property
    def by_operations(self) -> Extrapolation:
        """Extrapolates to 10¹² parameters, by operations."""
        return by_operations(self.flops_per_s)

    @property
    def extrapolations(self) -> pd.DataFrame:
        """Returns both extrapolations: way, tokens_per_s, years on one device, devices."""
        ways = {"by parameters (the course's)": self.naive, "by operations": self.by_operations}
        rows = [
            (way, large.tokens_per_s, large.years, large.devices_for(TARGET_DAYS))
            for way, large in ways.items()
        ]
        return pd.DataFrame(rows, columns=[*EXTRAPOLATIONS])

    @cached_property
    def saturation(self) -> Saturation | None:
        """Fits a straight line to the times of the steps; None where there is none (no_line)."""
        return Saturation.fit(self.measured["batch_size"], self.measured["steps_per_s"])

    @property
    def no_line(self) -> str | None:
        """Returns why there is no line through the steps' times; None where there is one."""
        if self.saturation is not None:
            return None
        if len(self.measured) < LEAST_BATCHES:
            return f"none: it takes {LEAST_BATCHES} batch sizes"
        return "none: no batch takes longer than another"

    @property
    def ceiling_tokens_per_s(self) -> float | None:
        """Returns the rate without the fixed part of a step; None without a line."""
        line = self.saturation
        return self.tokens_per_sequence / line.per_sequence_s if line else None

    @property
    def off_the_line(self) -> pd.Series | None:
        """Returns measured tokens/s over those of the fitted line, minus 1, by batch size."""
        if self.saturation is None:
            return None
        rate = self.measured.set_index("batch_size")["tokens_per_s"]
        batch = rate.index.to_numpy(float)
        return rate * self.saturation.step_s(batch) / (self.tokens_per_sequence * batch) - 1

    @property
    def tokens_per_sequence(self) -> int:
        """Returns the tokens that one more sequence in the batch adds to a step."""
        return self.settings["seq_len"] * self.settings["gradient_accumulation"]


UTILISATION = {
    "knows_peak": "the peak of this device is known",
    "tokens_per_s": ("tokens/s at batch {0.batch_size} (median step)", "{:,.0f}"),
    "speed.said": "tokens/s are",
    "speed.rounds": "visits to this batch",
    "flops_per_token": ("operations per token of {0.workload.title}", digits),
    "flops_per_s": ("operations per second", rate_text),
    "utilisation": "MFU",
}
"""Titles of ``ThroughputRun``: tokens and operations per second, and their share of the peak."""
SWEEP = {
    "batch_size": "batch",
    "status": "result",
    "tokens_per_s": "tokens/s",
    "mfu": ("MFU", "{:.1%}"),
    "memory_mib": ("memory (MiB)", "{:,.0f}"),
}
"""Titles of ``ThroughputRun.sweep``."""
SATURATION = {
    "no_line": "a line through the steps' times",
    "off_the_line": (
        "point furthest from the line",
        lambda error: f"batch {error.abs().idxmax()}, {max(error, key=abs):+.1%}",
    ),
    "saturation.fixed_s": ("fixed part of a step", lambda time_s: f"{time_s * 1e3:.3g} ms"),
    "saturation.per_sequence_s": ("part of each sequence", lambda time_s: f"{time_s * 1e3:.3g} ms"),
    "ceiling_tokens_per_s": ("ceiling", "{:,.0f} tokens/s"),
    "saturation.half_batch": ("batch at half of the ceiling", "{:.2g}"),
    "fastest_batch": "fastest batch",
    "visited_once": "batches visited once, so without an interval",
    "ended": (
        "batches without a result",
        lambda rows: (
            ", ".join(f"{row.batch_size} ({row.status})" for row in rows.itertuples()) or "none"
        ),
    ),
}
"""Titles of ``ThroughputRun``: parts of the fitted line, the point furthest off, the fastest."""
EXTRAPOLATIONS = {
    "way": "way",
    "tokens_per_s": ("tokens/s of 1T parameters", significant),
    "years": ("years on one device", digits),
    "devices": (f"devices for {TARGET_DAYS} days", digits),
}
"""Titles of ``ThroughputRun.extrapolations``: 10¹² parameters and 10¹³ tokens, a row each."""


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


def on_gpu() -> pd.DataFrame:
    """Returns the rates and MFU that were recorded on a GPU, a row per batch.

    Columns: device, step, tokens/s, peak (TFLOP/s), MFU; NaN where the peak is unknown.
    """
    opened = complete_runs(gpu_folder("assignment0"), BATCHES)
    runs = [open_throughput(run.folder) for run in opened]
    return pd.concat([_rates(run, run.measured["batch_size"]) for run in runs], ignore_index=True)


MODELS = {
    "case": "step of",
    "held_out": "may be fitted to",
    "step_ms": ("step (ms)", "{:.1f}"),
    "predicted_step_ms": ("predicted", "{:.1f}"),
    "step_error": ("off by", "{:+.1%}"),
    "peak_error": ("its peak off by", "{:+.1%}"),
}
"""Titles of ``of_models``."""


def of_models() -> pd.DataFrame:
    """Returns the recorded steps of other models on a GPU, beside what was predicted of them.

    Columns: those of ``by-case.csv`` of the study models; ``held_out`` says whether predictions
    may be fitted to the case, in a word.
    """
    folder = project_root() / "data" / "h200-1" / "study-models"
    cases = read_table(folder / "by-case.csv", [*MODELS])
    return cases.assign(held_out=cases["held_out"].map({True: "no", False: "yes"}))


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


def extrapolation_facts(run: ThroughputRun) -> dict[str, str]:
    """Returns the difference of the two extrapolations, and what it consists of.

    By parameters, a token costs as many operations per parameter in the large model as in the
    small one. The ratio of the two numbers of operations is the ratio of the two answers.
    """
    config, name = run.config, run.workload.title
    length, longest = run.settings["seq_len"], ONE_TRILLION.n_positions
    of_large = training_flops_per_token(ONE_TRILLION, longest) / PARAMETERS
    attention, of_largest = attention_share(config, length), attention_share(ONE_TRILLION, longest)
    more = run.naive.years / run.by_operations.years - 1
    outside = 1 - matrix_parameters(config) / config.num_parameters()
    per_parameter = run.flops_per_token / config.num_parameters()
    return {
        "years by parameters, over years by operations": f"{more:+.1%}",
        f"operations per token and parameter, {name}": f"{per_parameter:.3f}",
        "operations per token and parameter, 1T model": f"{of_large:.3f}",
        f"attention's share of operations, {name}, {length:,} tokens": f"{attention:.1%}",
        f"attention's share of operations, 1T model, {longest:,} tokens": f"{of_largest:.1%}",
        f"parameters outside of matrix products, {name}": f"{outside:.1%}",
    }


def attention_share(config: GPT2Config, seq_len: int) -> float:
    """Returns the share of a token's operations that is attention's two products."""
    return 1 - 6 * matrix_parameters(config) / training_flops_per_token(config, seq_len)
