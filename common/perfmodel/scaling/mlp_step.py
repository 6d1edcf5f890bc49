"""The step of the synthetic MLP from its sizes, on one device and on two.

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

import numpy as np
from scipy.optimize import brentq

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import PLAUSIBLE_ALPHA_S, AlphaBeta
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.perfmodel.model import DdpModel
from common.perfmodel.one_device.peaks import copy_s_per_byte

FLOAT32_BYTES = 4
V100_MEMORY_BYTES_PER_S = 900e9
"""HBM2 of a V100-PCIe-16GB (NVIDIA Tesla V100 data sheet)."""
SEARCHED_BYTES_PER_S = (0.2e9, 300e9)


@dataclass(frozen=True)
class Mlp:
    """Linear layers with a non-linearity between them; ``layers`` are (inputs, outputs)."""

    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, input_dim: int, hidden_dim: int, num_layers: int, output_dim: int) -> Mlp:
        """Makes an MLP of ``num_layers`` hidden layers and the output layer."""
        if min(input_dim, hidden_dim, num_layers, output_dim) < 1:
            raise UserError("an MLP's sizes and its number of layers must be at least 1")
        widths = [input_dim, *[hidden_dim] * num_layers, output_dim]
        return cls(tuple(pairwise(widths)))

    @property
    def parameters(self) -> int:
        """Counts weights and biases."""
        return sum(i * o + o for i, o in self.layers)

    @property
    def forward_flops(self) -> int:
        """Counts the operations of the forward pass per sample."""
        return sum(2 * i * o for i, o in self.layers)

    @property
    def backward_flops(self) -> tuple[int, ...]:
        """Counts the backward pass's operations per sample, by layer (the last one first)."""
        first, *later = (2 * i * o for i, o in self.layers)
        return (*(2 * flops for flops in reversed(later)), first)

    def profile(self, backward_s: float) -> BackwardProfile:
        """Returns a backward pass of this length, with gradients ready as the work proceeds.

        Autograd hands over a layer's bias before its weight, which hangs behind a transposition
        (derivatives of addmm in PyTorch's tools/autograd/derivatives.yaml). They share a time.
        """
        ready_s = np.cumsum(self.backward_flops) / sum(self.backward_flops) * backward_s
        last = len(self.layers) - 1
        names = tuple(
            f"layer {last - index}.{kind}"
            for index in range(len(self.layers))
            for kind in ("bias", "weight")
        )
        sizes = [FLOAT32_BYTES * count for i, o in reversed(self.layers) for count in (o, i * o)]
        return BackwardProfile(
            names=names,
            sizes_bytes=np.array(sizes, dtype=np.int64),
            ready_s=np.repeat(ready_s, 2),
            backward_s=float(ready_s[-1]),
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
        """Returns the rate at which each further sample is computed, in FLOP/s."""
        return (self.mlp.forward_flops + sum(self.mlp.backward_flops)) / self.per_sample_s

    def step_s(self, batch: float) -> float:
        return self.fixed_s + batch * self.per_sample_s

    def passes_s(self, batch: float) -> tuple[float, float]:
        """Returns the seconds of (forward pass, backward pass), which share what is no update."""
        passes = self.step_s(batch) - self.update_s
        backward = sum(self.mlp.backward_flops)
        share = backward / (self.mlp.forward_flops + backward)
        return passes * (1 - share), passes * share


def fit_one_device(
    mlp: Mlp, step_s: Mapping[int, float], memory_bytes_per_s: float = V100_MEMORY_BYTES_PER_S
) -> OneDevice:
    """Fits a line to step times by batch: through two exactly, by least squares to more.

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

    device: OneDevice
    bucket_cap_mb: float = 50.0
    alpha_s: float = PLAUSIBLE_ALPHA_S
    memory_bytes_per_s: float = V100_MEMORY_BYTES_PER_S

    def model(self, batch: int, bandwidth_bytes_per_s: float, slowdown: float = 1.0) -> DdpModel:
        """Returns the model of a pass whose gradients are views: divided, and not copied."""
        _, backward_s = self.device.passes_s(batch)
        return calibrated_model(
            profile=self.device.mlp.profile(backward_s),
            network=AlphaBeta(self.alpha_s, bandwidth_bytes_per_s),
            costs=DdpCosts(
                copy_in_s_per_byte=copy_s_per_byte(self.memory_bytes_per_s),
                compute_slowdown=slowdown,
            ),
        )

    @property
    def ddp(self) -> DdpOptions:
        """Returns the arguments that the published run gave to DDP."""
        return DdpOptions(self.bucket_cap_mb, static_graph=True)

    def backward(
        self, batch: int, bandwidth_bytes_per_s: float, slowdown: float = 1.0
    ) -> BackwardTimeline:
        """Predicts its backward pass."""
        return self.model(batch, bandwidth_bytes_per_s, slowdown).backward(self.ddp)

    def step_s(self, batch: int, bandwidth_bytes_per_s: float, slowdown: float = 1.0) -> float:
        """Predicts the seconds of the whole step.

        ``batch`` is per GPU; the bandwidth is the algorithm's, on two ranks also that of the bus;
        computation beside an all-reduce takes ``slowdown`` times longer.
        """
        forward_s, _ = self.device.passes_s(batch)
        parts = StepParts(forward_s=forward_s, update_s=self.device.update_s)
        model = self.model(batch, bandwidth_bytes_per_s, slowdown)
        return model.step(parts, StepOptions(self.ddp)).total_s

    def bandwidth_for(self, batch: int, step_s: float, slowdown: float = 1.0) -> float | None:
        """Finds the bandwidth (bytes/s) at which the step takes ``step_s``; None if none does."""
        return bandwidth_root(lambda beta: self.step_s(batch, beta, slowdown) - step_s)


def bandwidth_root(above: Callable[[float], float]) -> float | None:
    """Finds the bandwidth at which a quantity that falls with it is 0; None if there is none."""
    low, high = SEARCHED_BYTES_PER_S
    if above(low) < 0 or above(high) > 0:
        return None
    return float(brentq(above, low, high, rtol=1e-6))
