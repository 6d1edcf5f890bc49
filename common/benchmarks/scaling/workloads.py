"""The workloads of a scaling sweep: a synthetic MLP, a text classifier, a recorded backward pass.

A workload makes the same model on every call and the same samples for the same step, so that every
arm of a sweep begins alike and what ranks compute together is what one rank computes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.benchmarks.one_device.replayed_profile import open_replayed
from common.models.mlp import MLP
from common.models.replay import ReplayModel
from common.models.text_classifier import TextClassifier
from common.training.micro_batches.sampled_run import loss_of
from common.training.scaling.data_parallel_step import Batch
from common.training.texts.data import Collate, open_texts
from common.training.texts.files import parse_experiment
from common.training.texts.model import make_optimizer


@dataclass(frozen=True)
class Workload:
    """Something to train.

    Attributes:
        model, data: names of model and data in tables.
        build: a model for micro-batches of so many samples; the weights are the same each time.
        make_optimizer: makes an optimizer of the parameters.
        loss_of: mean loss from the model's output and the batch.
        make_batch: makes a batch of ``size`` samples for (step, rank, ranks).
        note: text that every caption must have.
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


def mlp_workload(sizes: MlpSizes, device: torch.device, seed: int) -> Workload:
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
        state = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(state[0]))
        inputs = torch.randn(size, sizes.input_dim, generator=generator, device=device)
        targets = torch.randn(size, sizes.output_dim, generator=generator, device=device)
        return Batch((inputs,), targets, identities(inputs), size, size, 1)

    name = f"MLP {sizes.input_dim}-{sizes.num_layers}×{sizes.hidden_dim}-{sizes.output_dim}"
    return Workload(
        name,
        f"random numbers, seed {seed}",
        build,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        lambda outputs, batch: functional.mse_loss(outputs, batch.targets),
        make_batch,
    )


def identities(inputs: Tensor) -> np.ndarray:
    """Returns int64 [batch]: for each row of float32 [batch, at least 2] a number of its own.

    Rows are random, so the bits of the first two values, side by side in 64 bits, tell them apart.
    """
    bits = inputs[:, :2].contiguous().cpu().numpy().view(np.uint32).astype(np.uint64)
    return (bits[:, 0] << np.uint64(32) | bits[:, -1]).view(np.int64)


def replay_workload(name: str, factor: float, time_factor: float, batch_size: int) -> Workload:
    """Makes a workload that sleeps as a recorded backward pass computed: ranks need no core each.

    The recording stands for ``batch_size`` samples; of another number it takes proportionally
    long. A forward pass takes half as long as a backward pass.
    """
    replayed = open_replayed(name, factor, time_factor)

    def build(size: int) -> nn.Module:
        profile = replayed.profile.scaled(compute=size / batch_size)
        return ReplayModel(profile, forward_s=profile.backward_s / 2)

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


def text_workload(
    experiment: str, dataset: str, dataset_dir: str, samples: int, device: torch.device, seed: int
) -> Workload:
    """Makes the workload of an experiment: its model, optimizer and texts.

    Texts are filled up to the experiment's length, as the original's were, so that every step
    computes as much. The texts of a step are the next of a random order: rank r of R takes every
    R-th of them, as ``DistributedSampler`` does, so that a global batch has the same texts on any
    number of ranks.

    Args:
        experiment: a name below assignments/assignment4/configs, or a file.
        dataset: ``synthetic`` (as long as the experiment's data), or a real data set.
        dataset_dir: folder of local files of a real one.
        samples: texts to draw from.
        seed: seed of weights, texts and their order.
    """
    named = parse_experiment(["--experiment", experiment]).dataset
    flags = ["--experiment", experiment, "--max_train_samples", str(samples)]
    flags += ["--seed", str(seed), "--data_seed", str(seed), "--pad", "max_length"]
    flags += ["--dataset", dataset, "--dataset_dir", dataset_dir, "--dropout", "0"]
    if dataset == "synthetic":
        flags += ["--synthetic_like", named]
    config = parse_experiment(flags)
    train, _ = open_texts(config.texts())
    collate = Collate(train.texts.pad_id, config.width)

    def build(_: int) -> nn.Module:
        torch.manual_seed(seed)
        return TextClassifier(config.classifier(train.texts.num_labels)).to(device)

    def make_batch(size: int, step: int, rank: int, ranks: int) -> Batch:
        drawn = global_batch(len(train), size * ranks, step, seed)[rank::ranks]
        return collate([train[int(index)] for index in drawn]).to(device)

    return Workload(
        f"encoder of {experiment}",
        train.texts.source,
        build,
        functools.partial(make_optimizer, lr=config.lr, weight_decay=config.weight_decay),
        loss_of,
        make_batch,
        longest=config.max_length,
    )


def global_batch(texts: int, size: int, step: int, seed: int) -> np.ndarray:
    """Returns the indices [size] of a step's texts: the next of one random order after another."""
    # All steps together count places without an end; each epoch of ``texts`` places has a random
    # order of its own, and a step may reach from one epoch into the next.
    places = np.arange(step * size, (step + 1) * size)
    epochs, within = np.divmod(places, texts)
    pairs = zip(epochs.tolist(), within.tolist(), strict=True)
    return np.array([_order(texts, epoch, seed)[position] for epoch, position in pairs])


@functools.lru_cache(maxsize=4)
def _order(texts: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(texts)
