"""Batches of samples of similar length, as Hugging Face's Trainer and fairseq form them.

Written from their behaviour: transformers/trainer_pt_utils.py (get_length_grouped_indices) and
fairseq/data/data_utils_fast.pyx (batch_by_size_fast).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MEGA_BATCH = 50
"""Number of batches that are sorted together by length, in Hugging Face's sampler."""


def length_grouped_order(lengths: NDArray, batch_size: int, permutation: NDArray) -> NDArray:
    """Returns the order [n] of Hugging Face's LengthGroupedSampler.

    Args:
        lengths: [n] tokens of each sample.
        batch_size: samples of one rank; the Trainer gives whole batches to its ranks in turn.
        permutation: [n] the random order to start from.

    Runs of 50 batches (fewer where that would leave less than four runs) are sorted, longest first.
    The longest sample of all changes places with the very first, to run out of memory early.
    """
    # One stable sort by (run, descending length) sorts all runs at once. The longest sample of a
    # run is then its first, so the longest of all is among the first of each run.
    run = max(1, min(len(lengths) // (4 * batch_size), MEGA_BATCH)) * batch_size
    runs = np.arange(len(lengths)) // run
    order = permutation[np.lexsort((-lengths[permutation], runs))]
    first_of_longest = run * int(np.argmax(lengths[order[::run]]))
    order[[0, first_of_longest]] = order[[first_of_longest, 0]]
    return order


def token_budget_bounds(ascending: NDArray, max_tokens: int, max_samples: int = 0) -> list[int]:
    """Cuts samples sorted by length, shortest first, as fairseq's batch_by_size does.

    Args:
        ascending: [n] lengths in tokens.
        max_tokens: tokens of a batch with padding, at least the longest sample's.
        max_samples: samples of a batch; 0 is without limit.

    Returns the bounds [batches + 1], from 0 to n, of the largest batches within the budget.
    fairseq's ``required_batch_size_multiple`` is 1 here.
    """
    count = len(ascending)
    start = np.arange(count)
    # For every possible start at once, the last end of a batch that fits is found by bisection. No
    # sample is shorter than the batch's first, which gives the upper bound of the search. The
    # batches are then followed from end to end.
    low, high = start + 1, np.minimum(count, start + max_tokens // ascending)
    if max_samples:
        high = np.minimum(high, start + max_samples)
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = (middle - start) * ascending[middle - 1] <= max_tokens
        low = np.where(fits, middle, low)
        high = np.where(fits, high, middle - 1)
    ends = low.tolist()
    bounds = [0]
    while bounds[-1] < count:
        bounds.append(ends[bounds[-1]])
    return bounds


def token_budget_batches(
    lengths: NDArray, bounds: list[int], rng: np.random.Generator
) -> list[NDArray]:
    """Makes the batches of an epoch, in random order; samples of equal length are shuffled."""
    shuffled = rng.permutation(len(lengths))
    order = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    batches = np.split(order, bounds[1:-1])
    return [batches[index] for index in rng.permutation(len(batches))]


def budget_for(ascending: NDArray, batch_size: float) -> int:
    """Returns the smallest budget of tokens at which batches average at least ``batch_size``."""

    def enough(budget: int) -> bool:
        batches = len(token_budget_bounds(ascending, budget)) - 1
        return len(ascending) >= batch_size * batches

    # The upper bound grows until it is enough, then the interval is bisected.
    low = max(int(ascending[-1]), int(batch_size * ascending.mean()))
    high = low
    while not enough(high):
        low, high = high + 1, high + high // 4 + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high
