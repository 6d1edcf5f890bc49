"""Seeds: the same everywhere for the model, different on each rank for the data."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager

import numpy as np
import torch


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seeds Python, NumPy and torch (all devices) with ``seed + rank``."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def kept_random_numbers(device: torch.device) -> AbstractContextManager:
    """Restores torch's generators, of the CPU and of ``device``, at the end of the block."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
