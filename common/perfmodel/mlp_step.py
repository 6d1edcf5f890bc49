"""The step of the synthetic MLP from its sizes: what explains the published times on two V100s.

A layer of i inputs and o outputs has i·o weights and o biases. Per sample its forward pass takes
2·i·o floating-point operations, its backward pass as many for the gradient of the weights and,
except in the first layer, whose input nobody differentiates, as many for that of its input.
Biases and activations are memory-bound and small beside it.

One device's step is t(b) = fixed + b · per sample: two batches give both. Of the fixed part the
update of SGD is known from the memory's bandwidth (parameters and gradients are read, parameters
written); the rest, launches, is spread over the passes as their work is.

Two GPUs then add all-reduces at some bandwidth, and what these take from computation beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import brentq, minimize_scalar

from common.errors import UserError
from common.perfmodel.collectives import PLAUSIBLE_ALPHA_S, AlphaBeta
from common.perfmodel.profile import BackwardProfile, DdpCosts
from common.perfmodel.recorded import DATA
from common.perfmodel.simulator import BackwardTimeline, simulate_backward
from common.perfmodel.tables import numbers, read_table

PUBLISHED = DATA / "v100-pcie-2"
FLOAT32_BYTES = 4
V100_MEMORY_BYTES_PER_S = 900e9
"""HBM2 of a V100-PCIe-16GB (NVIDIA Tesla V100 data sheet)."""
PCIE3_X16_BYTES_PER_S = 15.75e9
"""PCIe 3.0: 16 lanes of 8 GT/s, 128 of 130 bits of data, in one direction."""
MEAN_SLOWDOWN, LARGEST_SLOWDOWN = 1.189, 1.40
"""What communication beside it makes of computation's time on A100, H100, MI210 and MI250: on
average and at most (arXiv 2507.03114, abstract)."""
TOLERANCE = 0.03
"""What one published average may be off by; its spread was not published."""
SEARCHED_BYTES_PER_S = (0.2e9, 300e9)


@dataclass(frozen=True)
class Mlp:
    """Linear layers with a non-linearity between them; ``layers`` are (inputs, outputs)."""

    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, input_dim: int, hidden_dim: int, num_layers: int, output_dim: int) -> Mlp:
        """``num_layers`` hidden layers and the output layer."""
        if min(input_dim, hidden_dim, num_layers, output_dim) < 1:
            raise UserError("an MLP's sizes and its number of layers must be at least 1")
        widths = [input_dim, *[hidden_dim] * num_layers, output_dim]
        return cls(tuple(pairwise(widths)))

    @property
    def parameters(self) -> int:
        """3 · (4096·4096 + 4096) + (4096·2048 + 2048) = 58,734,592 at the benchmark's defaults."""
        return sum(i * o + o for i, o in self.layers)

    @property
    def forward_flops(self) -> int:
        """Per sample."""
        return sum(2 * i * o for i, o in self.layers)

    @property
    def backward_flops(self) -> tuple[int, ...]:
        """Per sample, of each layer in the order of the backward pass (the last one first)."""
        first, *others = (2 * i * o for i, o in self.layers)
        return (*(2 * flops for flops in reversed(others)), first)

    def profile(self, backward_s: float) -> BackwardProfile:
        """A backward pass of this length, with gradients ready as the work proceeds.

        Autograd hands over a layer's bias before its weight: the bias hangs on the operation
        itself, the weight behind a transposition (derivatives of addmm in PyTorch's
        tools/autograd/derivatives.yaml). Both are computed by then, so they share a time.
        """
        done = np.cumsum(self.backward_flops) / sum(self.backward_flops) * backward_s
        last = len(self.layers) - 1
        names = tuple(
            f"layer {last - place}.{kind}"
            for place in range(len(self.layers))
            for kind in ("bias", "weight")
        )
        sizes = [FLOAT32_BYTES * count for i, o in reversed(self.layers) for count in (o, i * o)]
        return BackwardProfile(
            names=names,
            sizes_bytes=np.array(sizes, dtype=np.int64),
            ready_s=np.repeat(done, 2),
            backward_s=float(done[-1]),
            assumptions=("ready times follow from floating-point operations",),
        )


@dataclass(frozen=True)
class OneDevice:
    """t(b) = ``fixed_s`` + b · ``per_sample_s``, of which ``update_s`` is the optimizer."""

    mlp: Mlp
    fixed_s: float
    per_sample_s: float
    update_s: float

    @property
    def flops_per_s(self) -> float:
        """What each further sample is computed at."""
        return (self.mlp.forward_flops + sum(self.mlp.backward_flops)) / self.per_sample_s

    def step_s(self, batch: float) -> float:
        return self.fixed_s + batch * self.per_sample_s

    def passes_s(self, batch: float) -> tuple[float, float]:
        """Forward and backward pass; what is fixed but the update is spread as their work is."""
        both = self.step_s(batch) - self.update_s
        backward = sum(self.mlp.backward_flops)
        share = backward / (self.mlp.forward_flops + backward)
        return both * (1 - share), both * share


def fit_one_device(
    mlp: Mlp,
    step_s: Mapping[int, float],
    memory_bytes_per_s: float = V100_MEMORY_BYTES_PER_S,
) -> OneDevice:
    """The line through the steps at two batches (of more, the least squares' line).

    Raises UserError for fewer than two batches, or where a larger batch is not slower, or where
    the update alone would take longer than what is fixed.
    """
    if len(step_s) < 2:
        raise UserError("one device: step times at two batches or more are needed")
    per_sample, fixed = np.polyfit(list(step_s), list(step_s.values()), 1)
    update = 3 * FLOAT32_BYTES * mlp.parameters / memory_bytes_per_s
    if not per_sample > 0 or not fixed >= update:
        raise UserError(
            f"one device: {fixed * 1e3:.3g} ms + {per_sample * 1e3:.3g} ms a sample cannot be; the "
            f"update alone takes {update * 1e3:.3g} ms"
        )
    return OneDevice(mlp, float(fixed), float(per_sample), update)


@dataclass(frozen=True)
class TwoGpuModel:
    """The step under DDP at any bandwidth, from one device's."""

    one: OneDevice
    bucket_cap_mb: float = 50.0
    alpha_s: float = PLAUSIBLE_ALPHA_S
    memory_bytes_per_s: float = V100_MEMORY_BYTES_PER_S

    def backward(
        self, batch: int, bandwidth_bytes_per_s: float, slowdown: float = 1.0
    ) -> BackwardTimeline:
        """Its backward pass. Gradients are views of the buckets: nothing is copied, but each is
        divided by the number of ranks, which reads and writes it."""
        _, backward_s = self.one.passes_s(batch)
        costs = DdpCosts(copy_in_s_per_byte=2 / self.memory_bytes_per_s, compute_slowdown=slowdown)
        network = AlphaBeta(self.alpha_s, bandwidth_bytes_per_s)
        profile = self.one.mlp.profile(backward_s)
        return simulate_backward(
            profile, network, self.bucket_cap_mb, costs=costs, static_graph=True
        )

    def step_s(self, batch: int, bandwidth_bytes_per_s: float, slowdown: float = 1.0) -> float:
        """The whole step.

        Args:
            batch: per GPU.
            bandwidth_bytes_per_s: algorithm bandwidth; on two ranks also the bus bandwidth.
            slowdown: computation beside an all-reduce takes so many times longer.
        """
        forward_s, _ = self.one.passes_s(batch)
        timeline = self.backward(batch, bandwidth_bytes_per_s, slowdown)
        return forward_s + timeline.total_s + self.one.update_s

    def bandwidth_for(self, batch: int, step_s: float, slowdown: float = 1.0) -> float | None:
        """The bandwidth at which the step takes so long; None where no bandwidth does that."""
        return _root(lambda beta: self.step_s(batch, beta, slowdown) - step_s)


@dataclass(frozen=True)
class Explanation:
    """One bandwidth for all published steps on two GPUs.

    Attributes:
        bandwidth_bytes_per_s, slowdown: at which the largest error of any point is least.
        low, high: bandwidths that explain every point within ``TOLERANCE``, with some slowdown
            between none and the largest published.
        predicted_ms, published_ms: by batch, at ``bandwidth_bytes_per_s`` and ``slowdown``.
        needed: by batch, the bandwidths that give the published time exactly: (with no
            slowdown, with the largest); NaN where no bandwidth does.
        at_mean_slowdown: (bandwidth, largest error) with the published mean slowdown, so with the
            bandwidth alone free.
        without_slowdown: the same with none.
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
        """Predicted over published, minus 1, by batch."""
        return {b: self.predicted_ms[b] / self.published_ms[b] - 1 for b in self.published_ms}

    @property
    def share_of_pcie(self) -> float:
        """The bandwidth over what PCIe 3.0 x16 carries in one direction."""
        return self.bandwidth_bytes_per_s / PCIE3_X16_BYTES_PER_S


def explain_published(folder: Path = PUBLISHED) -> Explanation:
    """One link bandwidth, with its range, for the published pair of steps on two V100s.

    At the small batch nearly all communication is exposed, so the time tells the bandwidth and
    hardly anything else. At the large one two of three all-reduces run beside computation, so the
    time tells what they take from it. Two numbers are found from two, so what is tested is whether
    both are possible: a slowdown such as others measured, a bandwidth such as PCIe has.
    """
    times, source = read_published(folder)
    settings = source["settings"]
    sizes = ("input_dim", "hidden_dim", "num_layers", "output_dim")
    mlp = Mlp.of(*(settings[name] for name in sizes))
    one = fit_one_device(mlp, times[1])
    return explain(TwoGpuModel(one, settings["bucket_cap_mb"]), times[2], times[1])


def read_published(folder: Path = PUBLISHED) -> tuple[dict[int, dict[int, float]], dict]:
    """Step times in seconds by world size and batch, and the source with the settings."""
    path = folder / "mlp-step-times.csv"
    table = read_table(path, ["world_size", "batch_per_rank", "step_time_ms"])
    table["step_time_ms"] = numbers(table, "step_time_ms", path, above=0)
    times: dict[int, dict[int, float]] = {}
    for row in table.itertuples():
        times.setdefault(int(row.world_size), {})[int(row.batch_per_rank)] = row.step_time_ms / 1e3
    for world_size in (1, 2):
        if world_size not in times:
            raise UserError(f"{path}: no step on {world_size} GPU(s)")
    return times, yaml.safe_load((folder / "source.yaml").read_text())


def explain(
    model: TwoGpuModel, published_s: Mapping[int, float], one_gpu_s: Mapping[int, float]
) -> Explanation:
    """The same for any steps on two GPUs, by batch, in seconds."""

    def errors(bandwidth: float, slowdown: float) -> list[float]:
        return [model.step_s(b, bandwidth, slowdown) / t - 1 for b, t in published_s.items()]

    def best(slowdown: float) -> tuple[float, float]:
        """The bandwidth with the least largest error, and that error.

        More bandwidth makes every step shorter, so it is where the largest error above 0 equals
        the largest below.
        """
        beta = _root(lambda b: max(errors(b, slowdown)) + min(errors(b, slowdown)))
        if beta is None:
            raise UserError("no bandwidth explains these step times, even roughly")
        return beta, max(map(abs, errors(beta, slowdown)))

    def within(slowdown: float) -> list[float]:
        """The least and the greatest bandwidth with every error within the tolerance, if any."""
        low = _root(lambda b: max(errors(b, slowdown)) - TOLERANCE)
        high = _root(lambda b: min(errors(b, slowdown)) + TOLERANCE)
        return [low, high] if low and high and low <= high else []

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


def _root(above: Callable[[float], float]) -> float | None:
    low, high = SEARCHED_BYTES_PER_S
    if above(low) < 0 or above(high) > 0:
        return None
    return float(brentq(above, low, high, rtol=1e-6))
