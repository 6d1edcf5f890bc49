"""A text classifier as a workload of scaling sweeps: an experiment of ``train_text.py``."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import nn

from common.benchmarks.scaling.workloads import Workload
from common.models.text_classifier import TextClassifier
from common.training.micro_batches.sampled_run import loss_of
from common.training.scaling.data_parallel_step import Batch
from common.training.texts.data import Collate, open_texts
from common.training.texts.files import parse_experiment
from common.training.texts.model import make_optimizer


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
        device: where the model and the batches are.
        seed: seed of weights, texts and their order.
    """
    named = parse_experiment(["--experiment", experiment]).dataset
    flags = ["--experiment", experiment, "--max_train_samples", str(samples), "--seed", str(seed)]
    flags += ["--dataset", dataset, "--dataset_dir", dataset_dir, "--dropout", "0"]
    flags += ["--pad", "max_length"]
    if dataset == "synthetic":
        flags += ["--synthetic_like", named]
    config = parse_experiment(flags)
    train, _ = open_texts(config.texts())
    collate = Collate(train.texts.pad_id, config.loading().width)

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
