"""Numbers that assignment 0 asks for, recomputed from the tables of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from common.course.numbers.tables import table
from common.errors import UserError
from common.perfmodel.one_device.flops import mfu
from common.perfmodel.one_device.workload import Workload
from common.runtime.flags import read_yaml

LEAST_BATCHES = 3
"""Batch sizes from which on a line is put through the steps' times."""


def mfu_percent(run: Path) -> float:
    """Returns MFU of the median step at the ``batch_size`` of the run's settings, in per cent.

    Raises:
        UserError: that batch was not measured, or the device's peak is unknown.
    """
    settings, step_s = _settings(run), _median_steps_s(run)
    batch_size, precision = settings["batch_size"], settings["precision"]
    if batch_size not in step_s.index:
        raise UserError(f"throughput-times.csv: no steps of batch_size {batch_size}")
    peaks = table(run, "device-peak", "throughput").set_index("precision")["flops_per_s"]
    if precision == "float32" and settings["tf32"] and "tf32" in peaks.index:
        precision = "tf32"
    if precision not in peaks.index:
        raise UserError(f"device-peak.csv: no peak in {precision}")
    tokens_per_s = batch_size * _tokens_per_sequence(settings) / step_s[batch_size]
    config = Workload.of(settings).unpadded
    return float(100 * mfu(tokens_per_s, config, settings["seq_len"], peaks[precision]))


def ceiling_tokens_per_s(run: Path) -> float:
    """Returns the rate that the line t0 + batch · t1 through the median steps tends to, tokens/s.

    Raises:
        UserError: fewer than ``LEAST_BATCHES`` were measured, or steps do not grow with the batch.
    """
    steps = _median_steps_s(run)
    if len(steps) < LEAST_BATCHES:
        raise UserError(f"throughput-times.csv: {len(steps)} batch sizes; {LEAST_BATCHES} needed")
    batch, step_s = steps.index.to_numpy(float), steps.to_numpy()
    # Divided by its time each row has to give 1: least squares are then of relative errors.
    parts = np.column_stack([1 / step_s, batch / step_s])
    (_, per_sequence_s), _ = nnls(parts, np.ones(len(batch)))
    if per_sequence_s == 0:
        raise UserError("throughput-times.csv: no batch takes longer than another")
    return float(_tokens_per_sequence(_settings(run)) / per_sequence_s)


def backward_over_forward(run: Path) -> float:
    """Returns the backward pass's time over the forward pass's, the median over profiled steps."""
    phases = table(run, "profile-phases", "profile_training")
    by_step = phases.pivot(index="step", columns="phase", values="time_ms")
    return float((by_step["backward"] / by_step["forward"]).median())


def _settings(run: Path) -> dict:
    """Returns the settings that throughput was measured with."""
    return read_yaml(run / "throughput" / "config.yaml")


def _median_steps_s(run: Path) -> pd.Series:
    """Returns the median time of a step by batch size, in seconds."""
    times = table(run, "throughput-times", "throughput")
    return times.groupby("batch_size")["step_time_ms"].median() / 1e3


def _tokens_per_sequence(settings: dict) -> int:
    """Returns the tokens that a sequence of the batch adds to a step."""
    return settings["seq_len"] * settings["gradient_accumulation"]
