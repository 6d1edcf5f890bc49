"""The published steps on two V100s: one link bandwidth that explains both.

A recorded pair of measurements (``data/v100-pcie-2``), held against the model in ``mlp_step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import yaml
from scipy.optimize import minimize_scalar

from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.perfmodel.published import DATA
from common.perfmodel.scaling.mlp_step import Mlp, TwoGpuModel, bandwidth_root, fit_one_device

PUBLISHED = DATA / "v100-pcie-2"
PCIE3_X16_BYTES_PER_S = 15.75e9
"""PCIe 3.0: 16 lanes of 8 GT/s, 128 of 130 bits of data, in one direction."""
MEAN_SLOWDOWN, LARGEST_SLOWDOWN = 1.189, 1.40
"""Factors by which communication beside it lengthens computation on A100, H100, MI210 and MI250: on
average and at most (arXiv 2507.03114, abstract)."""
TOLERANCE = 0.03
"""Relative error allowed to one published average, whose spread was not published."""


@dataclass(frozen=True)
class Explanation:
    """One bandwidth for all published steps on two GPUs.

    Attributes:
        bandwidth_bytes_per_s, slowdown: values with the least largest error of any point.
        low, high: bandwidths that explain every point within ``TOLERANCE``, with some slowdown
            between none and the largest published.
        predicted_ms, published_ms: batch → time, predicted at ``bandwidth_bytes_per_s`` and
            ``slowdown``.
        needed: batch → bandwidths that give the published time exactly: (with no
            slowdown, with the largest); NaN where no bandwidth does.
        at_mean_slowdown: (bandwidth, largest error) with the published mean slowdown, so with the
            bandwidth alone free.
        without_slowdown: (bandwidth, largest error) with no slowdown.
    """

    model: TwoGpuModel
    bandwidth_bytes_per_s: float
    slowdown: float
    low: float
    high: float
    predicted_ms: dict[int, float]
    published_ms: dict[int, float]
    one_gpu_ms: dict[int, float]
    needed: dict[int, tuple[float, float]]
    at_mean_slowdown: tuple[float, float]
    without_slowdown: tuple[float, float]

    @property
    def errors(self) -> dict[int, float]:
        """Returns predicted over published, minus 1, by batch."""
        return {b: self.predicted_ms[b] / self.published_ms[b] - 1 for b in self.published_ms}

    @property
    def share_of_pcie(self) -> float:
        """Returns the bandwidth as a share of what PCIe 3.0 x16 carries in one direction."""
        return self.bandwidth_bytes_per_s / PCIE3_X16_BYTES_PER_S


def explain_published() -> Explanation:
    """Finds one link bandwidth, with its range, for the published pair of steps on two V100s.

    At the small batch nearly all communication is exposed, so the time tells the bandwidth and
    hardly anything else. At the large one two of three all-reduces run beside computation, so the
    time tells what they take from it. Two numbers are found from two, so what is tested is whether
    both are possible: a slowdown such as others measured, a bandwidth such as PCIe has. What had to
    be assumed matters little: any latency up to 100 µs, or memory from 700 GB/s to infinitely fast,
    moves the bandwidth by less than 1.5 %.
    """
    times, source = read_published()
    settings = source["settings"]
    mlp = Mlp.of(
        input_dim=settings["input_dim"],
        hidden_dim=settings["hidden_dim"],
        num_layers=settings["num_layers"],
        output_dim=settings["output_dim"],
    )
    device = fit_one_device(mlp, times[1])
    return explain(TwoGpuModel(device, settings["bucket_cap_mb"]), times[2], times[1])


def read_published() -> tuple[dict[int, dict[int, float]], dict]:
    """Reads step times in seconds by world size and batch, and the source with the settings."""
    path = PUBLISHED / "mlp-step-times.csv"
    table = read_table(path, ["world_size", "batch_per_rank", "step_time_ms"])
    table["step_time_ms"] = numbers(table, "step_time_ms", path, above=0)
    times: dict[int, dict[int, float]] = {}
    for row in table.itertuples():
        times.setdefault(int(row.world_size), {})[int(row.batch_per_rank)] = row.step_time_ms / 1e3
    for world_size in (1, 2):
        if world_size not in times:
            raise UserError(f"{path}: no step on {world_size} GPU(s)")
    return times, yaml.safe_load((PUBLISHED / "source.yaml").read_text())


def explain(
    model: TwoGpuModel, published_s: Mapping[int, float], one_gpu_s: Mapping[int, float]
) -> Explanation:
    """Finds one link bandwidth, with its range, for any steps on two GPUs, by batch, in seconds."""

    def errors(bandwidth: float, slowdown: float) -> list[float]:
        return [model.step_s(b, bandwidth, slowdown) / t - 1 for b, t in published_s.items()]

    def best(slowdown: float) -> tuple[float, float]:
        """Returns the bandwidth with the smallest largest error, and that error.

        More bandwidth makes every step shorter, so it is where the largest error above 0 equals
        the largest below.
        """
        beta = bandwidth_root(lambda b: max(errors(b, slowdown)) + min(errors(b, slowdown)))
        if beta is None:
            raise UserError("no bandwidth explains these step times, even roughly")
        return beta, max(map(abs, errors(beta, slowdown)))

    def within(slowdown: float) -> list[float]:
        """Returns the lowest and highest bandwidth with all errors within tolerance, if any."""
        low = bandwidth_root(lambda b: max(errors(b, slowdown)) - TOLERANCE)
        high = bandwidth_root(lambda b: min(errors(b, slowdown)) + TOLERANCE)
        return [low, high] if low and high and low <= high else []

    # The largest error is minimised over both numbers: ``best`` gives the bandwidth for a slowdown,
    # so only the slowdown is searched. For the range, a grid of slowdowns is tried beside the best.
    bounds = (1.0, LARGEST_SLOWDOWN)
    slowdown = float(minimize_scalar(lambda c: best(c)[1], bounds=bounds, method="bounded").x)
    bandwidth = best(slowdown)[0]
    tried = (slowdown, *np.linspace(*bounds, 9))
    possible = [beta for c in tried for beta in within(c)]
    return Explanation(
        model=model,
        bandwidth_bytes_per_s=bandwidth,
        slowdown=slowdown,
        low=min(possible, default=bandwidth),
        high=max(possible, default=bandwidth),
        predicted_ms={b: model.step_s(b, bandwidth, slowdown) * 1e3 for b in published_s},
        published_ms={b: t * 1e3 for b, t in published_s.items()},
        one_gpu_ms={b: t * 1e3 for b, t in one_gpu_s.items()},
        needed={
            b: tuple(model.bandwidth_for(b, t, c) or float("nan") for c in (1.0, LARGEST_SLOWDOWN))
            for b, t in published_s.items()
        },
        at_mean_slowdown=best(MEAN_SLOWDOWN),
        without_slowdown=best(1.0),
    )
