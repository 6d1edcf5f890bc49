"""A trainer's text classifier, alike on all ranks, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from common.runtime.group.process_group import Worker
from common.runtime.seeding import seed_everything


def build_on_rank(
    build: Callable[[], nn.Module], *, seed: int, precision: str, worker: Worker
) -> nn.Module:
    """Builds a model with the same weights on every rank, which then draws dropout of its own.

    Args:
        build: makes the model, float32, from torch's random numbers.
        seed: seed of the initial weights; rank r goes on with seed + r.
        precision: weights are float64 under ``float64``; other precisions are autocast's.
        worker: this rank, on whose device the model is put.
    """
    seed_everything(seed)
    model = build()
    seed_everything(seed, worker.rank)
    return model.to(worker.device, torch.float64 if precision == "float64" else None)


def make_optimizer(
    parameters: Iterable[nn.Parameter], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Makes AdamW in its fused implementation."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
