"""The text that throughput.py prints: the course's blocks word for word, and what was added.

Every function returns text from plain values, so that the notebook and the script agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from common.perfmodel.one_device.flops import (
    ONE_TRILLION,
    ONE_TRILLION_SOURCE,
    by_operations,
    by_parameters,
    training_flops_per_token,
)
from common.perfmodel.one_device.peaks import DevicePeak
from common.perfmodel.one_device.workload import Workload

MEMORY = {
    "cpu": ("peak_resident_mib", "peak of the process in RAM, Python and PyTorch included"),
    "cuda": ("peak_allocated_mib", "peak allocated by PyTorch during a step"),
}
"""The column that stands for memory on a kind of device, and what it is."""
TARGET_DAYS = 90


def workload_lines(workload: Workload, device_type: str) -> str:
    """Returns model, batch, sequence and device, a line each."""
    return "\n".join(
        [
            f"Model: {workload.title}",
            f"Batch size: {workload.batch_size}",
            f"Sequence length: {workload.seq_len}",
            f"Device: {device_type.upper()}",
        ]
    )


def results_block(step_times_ms: Sequence[float], tokens_per_step: int) -> str:
    """Returns totals over all measured steps, as the course prints them, and the median step."""
    elapsed_s = sum(step_times_ms) / 1e3
    tokens = len(step_times_ms) * tokens_per_step
    slow, median, fast = tokens_per_step / np.quantile(step_times_ms, [0.75, 0.5, 0.25]) * 1e3
    return "\n".join(
        [
            "\n--- Throughput Results ---",
            f"Total tokens processed: {tokens:,}",
            f"Time elapsed: {elapsed_s:.2f} s",
            f"Tokens per second: {tokens / elapsed_s:,.1f}",
            f"Steps per second: {len(step_times_ms) / elapsed_s:.2f}",
            f"Median step: {median:,.1f} tokens/s (quartiles {slow:,.1f} to {fast:,.1f})",
        ]
    )


def naive_block(title: str, tokens_per_s: float, parameters: int) -> str:
    """Returns the course's extrapolation, by the number of parameters."""
    large = by_parameters(tokens_per_s, parameters)
    return "\n".join(
        [
            "\n--- Modern LLM Training Extrapolation ---",
            f"{title}: {tokens_per_s:,.0f} tokens/sec",
            f"1T Model throughput: {significant(large.tokens_per_s)} tokens/sec",
            "Training 10T tokens:",
            f"Time: {large.days:,.0f} days ({large.years:.1f} years)\n",
        ]
    )


def batch_block(batches: pd.DataFrame, device_type: str) -> str:
    """Returns the sweep: median tokens per second and memory, or how the point ended."""
    column, meaning = MEMORY[device_type]
    lines = [f"{'Batch Size':>10}  {'Tokens/sec':>12}  {'Memory':>14}"]
    for row in batches.itertuples():
        if row.status == "measured":
            memory = f"{getattr(row, column):,.0f} MiB"
            lines.append(f"{row.batch_size:>10}  {row.tokens_per_s:>12,.0f}  {memory:>14}")
        else:
            lines.append(f"{row.batch_size:>10}  {row.status:>12}")
    return "\n".join(["\n--- Batch Size Results ---", *lines, f"Memory: {meaning}."])


def utilisation_text(
    flops_per_s: float, peak_flops_per_s: float | None, peak: DevicePeak | None, device: str
) -> str:
    """Returns MFU and where its peak comes from; unknown where there is none."""
    if peak is None:
        return f"unknown ({device} is not in the table of peaks)"
    if peak_flops_per_s is None:
        return f"unknown ({peak.source} has no peak in this precision for {device})"
    utilisation = flops_per_s / peak_flops_per_s
    doubt = "; above 100 %: the machine was busier when the peak was measured"
    source = f"{peak.source}{doubt if utilisation > 1 else ''}"
    return f"{utilisation:.1%} of {rate_text(peak_flops_per_s)} ({source})"


def operations_block(
    workload: Workload, tokens_per_s: float, peak: DevicePeak | None, device: str
) -> str:
    """Returns achieved operations per second, MFU, and the extrapolation by operations."""
    per_token = training_flops_per_token(workload.unpadded, workload.seq_len)
    flops_per_s = tokens_per_s * per_token
    peak_flops_per_s = peak.flops(workload.precision, workload.tf32) if peak else None
    large = by_operations(flops_per_s)
    model = ONE_TRILLION
    needed = training_flops_per_token(model, model.n_positions)
    return "\n".join(
        [
            "\n--- Utilization, and the Extrapolation by Operations ---",
            f"Operations per token: {per_token:.3g} (6N + 12 · layers · width · length)",
            f"Achieved: {rate_text(flops_per_s)}",
            f"MFU: {utilisation_text(flops_per_s, peak_flops_per_s, peak, device)}",
            f"1T Model: {model.n_layer} layers of width {model.n_embd:,}, sequence "
            f"{model.n_positions:,}, {needed:.3g} operations per token ({ONE_TRILLION_SOURCE})",
            f"1T Model throughput at the same operations per second: "
            f"{significant(large.tokens_per_s)} tokens/sec",
            f"Training 10T tokens: {large.days:,.0f} days ({large.years:.1f} years)",
            f"For {TARGET_DAYS} days: {large.devices_for(TARGET_DAYS):,} of this device, scaling "
            "perfectly",
        ]
    )


def rate_text(flops_per_s: float) -> str:
    """Returns a rate in the largest unit that fits: ``312 TFLOP/s``."""
    for unit, name in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if flops_per_s >= unit:
            return f"{flops_per_s / unit:.3g} {name}"
    return f"{flops_per_s:.3g} FLOP/s"


def significant(value: float) -> str:
    """Returns three decimals, as in the course's 4.055; of rates below 1 four digits."""
    return f"{value:.3f}" if value >= 1 else f"{value:.4g}"
