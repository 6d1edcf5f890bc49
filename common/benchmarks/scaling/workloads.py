"""The workloads of a scaling sweep: a synthetic MLP, a text classifier, a recorded backward pass.

A workload makes the same model on every call and the same samples for the same step, so that every
arm of a sweep begins alike and what ranks compute together is what one rank computes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.benchmarks.one_device.replayed_profile import open_replayed
from common.models.mlp import MLP
from common.models.replay import ReplayModel
from common.training.scaling.data_parallel_step import Batch


@dataclass(frozen=True)
class Workload:
    """Something to train.

    Attributes:
        model, data: what it is called in tables.
        build: a model for micro-batches of so many samples; the weights are the same each time.
        make_optimizer: makes an optimizer of the parameters.
        loss_of: mean loss from the model's output and the batch.
        make_batch: makes a batch of ``size`` samples for (step, rank, ranks).
        note: what every caption must say of it.
        longest: length of the data's longest sample, where they differ.
    """

    model: str
    data: str
    build: Callable[[int], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss_of: Callable[[Tensor, Batch], Tensor]
    make_batch: Callable[[int, int, int, int], Batch]
    note: str = ""
    longest: int | None = None


@dataclass(frozen=True)
class MlpSizes:
    """Widths of the synthetic benchmark's model; the defaults have 58,734,592 parameters."""

    input_dim: int = 4096
    hidden_dim: int = 4096
    num_layers: int = 3
    output_dim: int = 2048


def mlp_workload(sizes: MlpSizes, device: torch.device, seed: int, lr: float = 1e-3) -> Workload:
    """Makes a regression of random numbers from random numbers, by SGD on the mean squared error.

    Weights and samples are drawn on the device, where a hundred million numbers a step take no
    time; so those of a GPU are not those of a CPU, nor of another kind of GPU.
    """

    def build(_: int) -> nn.Module:
        torch.manual_seed(seed)
        with device:
            return MLP(
                input_dim=sizes.input_dim,
                hidden_dim=sizes.hidden_dim,
                num_layers=sizes.num_layers,
                output_dim=sizes.output_dim,
            )

    def make_batch(size: int, step: int, rank: int, ranks: int) -> Batch:
        generator = torch.Generator(device).manual_seed((seed * 1_000_003 + step) * 1009 + rank)
        inputs = torch.randn(size, sizes.input_dim, generator=generator, device=device)
        targets = torch.randn(size, sizes.output_dim, generator=generator, device=device)
        return Batch((inputs,), targets, identities(inputs), size, size, 1)

    name = f"MLP {sizes.input_dim}-{sizes.num_layers}×{sizes.hidden_dim}-{sizes.output_dim}"
    return Workload(
        name,
        f"random numbers, seed {seed}",
        build,
        lambda parameters: torch.optim.SGD(parameters, lr=lr),
        lambda outputs, batch: functional.mse_loss(outputs, batch.targets),
        make_batch,
    )


def identities(inputs: Tensor) -> np.ndarray:
    """Returns int64 [batch]: for each row of float32 [batch, at least 2] a number of its own.

    Rows are random, so the bits of the first two values, side by side in 64 bits, tell them apart.
    """
    bits = inputs[:, :2].contiguous().cpu().numpy().view(np.uint32).astype(np.uint64)
    return (bits[:, 0] << np.uint64(32) | bits[:, -1]).view(np.int64)


def replay_workload(
    name: str, factor: float, time_factor: float, batch_size: int, forward_share: float = 0.5
) -> Workload:
    """Makes a workload that sleeps as a recorded backward pass computed: ranks need no core each.

    The recording stands for ``batch_size`` samples; of another number it takes proportionally
    long. A forward pass takes ``forward_share`` of a backward pass.
    """
    replayed = open_replayed(name, factor, time_factor)

    def build(size: int) -> nn.Module:
        profile = replayed.profile.scaled(compute=size / batch_size)
        return ReplayModel(profile, forward_s=forward_share * profile.backward_s)

    def make_batch(size: int, step: int, rank: int, ranks: int) -> Batch:
        first = (step * ranks + rank) * size
        return Batch((), torch.empty(0), np.arange(first, first + size), size, size, 1)

    return Workload(
        replayed.label,
        "none: a replay",
        build,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        lambda outputs, batch: outputs,
        make_batch,
        note=replayed.label,
    )
