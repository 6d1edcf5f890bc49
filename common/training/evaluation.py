"""The evaluation of a text classifier: loss and accuracy on a split, divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from common.runtime.group.process_group import Worker
from common.training.precision import autocast

LabelledBatch = tuple[tuple[Tensor, ...], Tensor]
"""The model's inputs, and the labels: int64 [batch]."""


def own_batches(lengths: Sequence[int], batch_size: int, worker: Worker) -> Iterator[list[int]]:
    """Yields this rank's part of a split's texts, by index, ``batch_size`` at a time.

    They come from the shortest to the longest: neighbours are of similar length, so that batches
    of them have little padding.
    """
    order = np.argsort(lengths, kind="stable")
    indices = order[worker.rank :: worker.world_size].tolist()
    for start in range(0, len(indices), batch_size):
        yield indices[start : start + batch_size]


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[LabelledBatch], worker: Worker, precision: str
) -> tuple[float, float]:
    """Computes mean loss (nats) and accuracy over the batches of all ranks; all ranks call it.

    Args:
        model: classifier; ``model(*inputs)`` returns logits [batch, labels].
    """
    # Each rank sums loss, right answers and texts of its share in float64, and the all-reduce sums
    # over ranks. So each text counts once, also where shares differ in size.
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=worker.device)
    for inputs, labels in batches:
        with autocast(precision, worker.device):
            logits = model(*inputs)
        loss = functional.cross_entropy(logits.double(), labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        sums += torch.stack([loss, right, torch.tensor(len(labels)).to(loss)])
    model.train()
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return loss / count, right / count
