"""Texts on their way to the text scaling trainer: splits, a data set, micro-batches, a loader.

The classes are PyTorch's own (``DistributedSampler``, ``DataLoader``), used as its tutorials do.
Every sample carries its index, so that which samples reached the model can be counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.utils.data.distributed
from numpy.typing import NDArray

from common.data.text_sources import PUBLISHED, LabelledTexts
from common.data.text_splits import TextOptions, open_splits
from common.data.text_tokens import TokenizedTexts, hash_texts
from common.errors import UserError
from common.runtime.group.process_group import Worker
from common.training.scaling.data_parallel_step import Batch
from common.training.texts.config import TextScalingConfig

Sample = tuple[int, NDArray[np.int64], int]
"""Index, tokens and label of a text."""


def open_texts(options: TextOptions) -> tuple[IndexedTexts, IndexedTexts]:
    """Loads or draws the training and the validation split, as hashed words.

    Raises:
        UserError: the data set is not there, or cannot be read.
    """

    def tokenize(*splits: LabelledTexts) -> list[TokenizedTexts]:
        return [hash_texts(split, options.vocab_size, options.max_length) for split in splits]

    labels = PUBLISHED[options.synthetic_like].num_labels
    train, validation = open_splits(options, tokenize, synthetic_labels=labels)
    return IndexedTexts(train), IndexedTexts(validation)


class IndexedTexts(torch.utils.data.Dataset):
    """A split whose items are (index, tokens, label).

    The tokens of all texts are one array, so that worker processes share its memory: of a list of
    lists they would copy each page on which they count a reference. Text i is the part of the array
    from edge i to edge i + 1.
    """

    def __init__(self, texts: TokenizedTexts) -> None:
        self.texts = replace(texts, tokens=[])
        self._ids = np.concatenate([np.asarray(ids, np.int64) for ids in texts.tokens])
        self._edges = np.concatenate([[0], np.cumsum(texts.lengths)])

    def __len__(self) -> int:
        return len(self.texts.labels)

    def __getitem__(self, index: int) -> Sample:
        tokens = self._ids[self._edges[index] : self._edges[index + 1]]
        return index, tokens, int(self.texts.labels[index])


@dataclass(frozen=True)
class Collate:
    """A function from samples to a micro-batch, padded to its longest text, or to ``width`` if set.

    The model is called with tokens, int64 [batch, width], and a mask, bool of the same shape, that
    is True where a token is real.
    """

    pad_id: int
    width: int = 0

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Collates these samples into a micro-batch, in their order."""
        indices, tokens, labels = zip(*samples, strict=True)
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        width = self.width or int(lengths.max())
        # ``real`` [batch, width] is True where a row has a token. NumPy fills its True places row
        # by row, so the texts' tokens, one text after another, fall into their rows.
        real = np.arange(width) < lengths[:, None]
        ids = np.full((len(samples), width), self.pad_id, np.int64)
        ids[real] = np.concatenate(tokens)
        return Batch(
            inputs=(torch.from_numpy(ids), torch.from_numpy(real)),
            targets=torch.tensor(labels),
            identities=np.array(indices, np.int64),
            tokens=int(lengths.sum()),
            padded_tokens=ids.size,
            longest=int(lengths.max()),
        )


def open_loader(
    data: IndexedTexts, collate: Collate, config: TextScalingConfig, worker: Worker
) -> torch.utils.data.DataLoader:
    """Makes the loader of this rank's micro-batches of an epoch.

    ``loader.sampler.set_epoch`` gives them a new order. Rank r of R takes every R-th text of an
    order that all ranks have alike, so that the first R × n texts are the ranks' first n, whatever
    R is: a step of the same global batch sees the same texts on any number of ranks. One process
    is sampled in this way, too.

    Raises:
        UserError: fewer texts than a step takes.
    """
    total = worker.world_size * config.accumulation * config.batch_size
    if len(data) < total:
        raise UserError(
            f"{data.texts.name} has {len(data)} texts, a step takes {total} ({worker.world_size} "
            f"ranks × accumulation {config.accumulation} × batch_size {config.batch_size}); "
            "lower --batch_size, or raise --max_train_samples"
        )
    # PyTorch's own warning of too many workers takes five lines, twice; the trainer says it in one.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # Looked up when called, as a user's own sampler may stand in for PyTorch's.
    sampler = torch.utils.data.distributed.DistributedSampler(
        data,
        num_replicas=worker.world_size,
        rank=worker.rank,
        shuffle=True,
        seed=config.seed,
        drop_last=True,
    )
    return torch.utils.data.DataLoader(
        data,
        batch_size=config.batch_size,
        sampler=sampler,
        collate_fn=collate,
        drop_last=True,
        num_workers=config.workers,
        pin_memory=worker.device.type == "cuda",
        persistent_workers=config.persistent_workers and config.workers > 0,
    )


def drawn_batch(data: IndexedTexts, collate: Collate, size: int, seed: int) -> Batch:
    """Draws ``size`` texts, the same on every rank; with replacement if there are fewer."""
    drawn = np.random.default_rng(seed).choice(len(data), size, replace=size > len(data))
    return collate([data[int(index)] for index in drawn])
