"""Learning rates over a training run."""

from __future__ import annotations

import math

import torch


def cosine(step: int, lr: float, min_lr: float, warmup_steps: int, num_steps: int) -> float:
    """Returns the learning rate of step ``step`` (from 0): linear warm-up, then a cosine.

    The cosine falls from ``lr`` to ``min_lr``, which it reaches right after the last step
    (Loshchilov and Hutter, SGDR, 2017, equation 5, without restarts).
    """
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / (num_steps - warmup_steps)
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


def linear(step: int, lr: float, warmup_steps: int, num_steps: int) -> float:
    """Returns the learning rate of step ``step`` (from 0): linear warm-up, then linear decay.

    The decay would reach 0 right after the last step.
    """
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    return lr * (num_steps - step) / max(1, num_steps - warmup_steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
