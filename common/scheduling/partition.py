"""The partition of a padded step's samples among ranks that makes the slowest rank fastest.

A rank pads its b samples to its longest and takes cost(b, longest), which grows in both. Then some
optimal plan is made of contiguous groups of the samples sorted by length, for ranks of unequal
speed and limits too. Take any plan, its ranks ordered by their longest samples, and give each as
many samples as it had, now in order of length. The first i ranks had n samples together, so one of
the n + 1 longest samples was on a later rank, and the longest of those, on rank i + 1, was no
shorter than the (n + 1)-th, with which rank i + 1 begins now. No rank has more samples or a longer
one than before.

It remains to choose where to cut and, for unequal ranks, the order of the ranks. Exercise A3.1
does it for identical ranks and ``unequal_ranks`` for up to three kinds or eight ranks, and for more
that take no longer; both are exact. ``many_speeds`` does the rest, with a lower bound on the
optimum.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError
from common.exercises.min_max_partition import SortedBatch, min_max_partition
from common.scheduling.cost import Cost
from common.scheduling.many_speeds import heuristic_order
from common.scheduling.unequal_ranks import kinds_of, optimal_order, trial_steps

logger = logging.getLogger(__name__)

EXACT_KINDS = 3
EXACT_RANKS = 8
AFFORDABLE_STEPS = 10**6
"""Upper bound on the numbers that one trial of a bottleneck computes, about 0.1 s for all trials.
Up to it plans are exact with more kinds and ranks, too: with 13 ranks, each of its own kind."""


@dataclass(frozen=True)
class Plan:
    """The samples of each rank, and the quality of that partition.

    Attributes:
        groups: for each rank the indices of its samples, longest first.
        bottleneck: the largest cost of a rank.
        lower_bound: lower bound on the bottleneck of any plan.
        exact: True if the plan is known to be optimal.
    """

    groups: list[list[int]]
    bottleneck: float
    lower_bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """Returns an upper bound on the plan's relative distance to the optimum, as a fraction."""
        return self.bottleneck / self.lower_bound - 1 if self.bottleneck > self.lower_bound else 0.0


def min_max_contiguous(
    lengths: ArrayLike,
    world_size: int,
    cost: Cost | Sequence[Cost],
    max_batch: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns the samples of each rank, with the smallest possible cost of the slowest rank.

    Args:
        lengths: [B] tokens of each sample, at least 1.
        world_size: ranks; each gets at least one sample.
        cost: called as ``cost(batch_size, longest)``, non-decreasing in both (see
            ``common.scheduling.cost``); or one for each rank.
        max_batch: the most samples that a rank can hold; or one limit for each rank.

    The same input gives the same plan on every rank. With more than three kinds of rank among more
    than eight it may not be optimal: the log then gives an upper bound on the loss.

    Raises UserError where there is no plan.
    """
    plan = bounded_plan(lengths, world_size, cost, max_batch)
    if not plan.exact:
        logger.info(
            "micro-batches for ranks of many speeds: at most %.1f %% above the optimum",
            100 * plan.gap,
        )
    return plan.groups


def bounded_plan(
    lengths: ArrayLike,
    world_size: int,
    cost: Cost | Sequence[Cost],
    max_batch: int | Sequence[int] | None = None,
) -> Plan:
    """Makes the plan of ``min_max_contiguous``, with its bottleneck and a lower bound on any."""
    checked = check_lengths(lengths, world_size)
    costs = _for_each_rank(cost, world_size, "cost", callable(cost))
    limits = _limits(max_batch, world_size, len(checked))
    batch = SortedBatch.of(checked)
    kinds = kinds_of(costs, limits)
    if len(kinds) == 1:
        best, bounds = min_max_partition(batch, world_size, costs[0], limits[0])
        return Plan(batch.groups(bounds), best, best, exact=True)
    few = len(kinds) <= EXACT_KINDS or world_size <= EXACT_RANKS
    if few or trial_steps(kinds) <= AFFORDABLE_STEPS:
        best, bounds, used = optimal_order(batch, kinds)
        waiting = [iter(kind.ranks) for kind in kinds]
        ranks, low = [next(waiting[kind]) for kind in used], best
    else:
        best, bounds, ranks, low = heuristic_order(batch, costs, limits)
    groups: list[list[int]] = [[] for _ in range(world_size)]
    for rank, group in zip(ranks, batch.groups(bounds), strict=True):
        groups[rank] = group
    return Plan(groups, best, low, exact=best == low)


def check_ranks(samples: int, world_size: int) -> None:
    """Raises UserError for no ranks, or fewer samples than ranks."""
    if world_size < 1:
        raise UserError(f"{world_size} ranks; at least 1")
    if samples < world_size:
        raise UserError(
            f"{samples} samples for {world_size} ranks; each rank needs at least one: a larger "
            "global batch, or fewer ranks"
        )


def check_lengths(lengths: ArrayLike, world_size: int) -> NDArray:
    """Returns lengths as int64 [B]. Raises UserError for others, empty texts, or too few texts."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise UserError("lengths: give the number of tokens of each sample, whole numbers")
    check_ranks(len(tokens), world_size)
    if tokens.min() < 1:
        at = int(tokens.argmin())
        raise UserError(
            f"sample {at} has {tokens[at]} tokens; an empty text has no place in a step"
        )
    return tokens.astype(np.int64, copy=False)


def _limits(max_batch: int | Sequence[int] | None, world_size: int, count: int) -> list[int]:
    """Returns the limit of each rank, at most B − G + 1, as each other rank needs a sample.

    Raises UserError for a limit below 1, or limits that do not add up to the global batch.
    """
    if max_batch is None:
        return [count - world_size + 1] * world_size
    stated = _for_each_rank(max_batch, world_size, "limit", np.ndim(max_batch) == 0)
    limits = [int(limit) for limit in stated]
    if min(limits) < 1:
        rank = int(np.argmin(limits))
        raise UserError(f"rank {rank} has a limit of {limits[rank]} samples; at least 1")
    if sum(limits) < count:
        raise UserError(
            f"a global batch of {count} samples, and the ranks' limits add up to {sum(limits)}: "
            "a smaller global batch, higher limits or more ranks"
        )
    return [min(limit, count - world_size + 1) for limit in limits]


def _for_each_rank(value: object, world_size: int, what: str, single: bool) -> list:
    """Returns ``value`` for each rank. Raises UserError for a list of another length."""
    if single:
        return [value] * world_size
    values = list(value)
    if len(values) != world_size:
        raise UserError(f"{len(values)} {what}s for {world_size} ranks; give one, or one per rank")
    return values
