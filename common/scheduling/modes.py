"""The plan of a step in each mode: ours, equal counts, and those of other libraries.

A plan follows from mode, seed and step alone (and the cost, for ``dynamic``), so every rank makes
the same one without asking the others. ``static``, ``dynamic`` and ``karmarkar_karp`` divide the
same global batches among the ranks; ``length_grouped`` and ``token_budget`` form other batches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError, require_known
from common.runtime.script import is_main_rank
from common.scheduling.cost import Cost, TokensCost
from common.scheduling.length_samplers import (
    budget_for,
    length_grouped_order,
    token_budget_batches,
    token_budget_bounds,
)
from common.scheduling.packing import karmarkar_karp
from common.scheduling.partition import bounded_plan, check_lengths

logger = logging.getLogger(__name__)

MODES = ("static", "dynamic", "karmarkar_karp", "length_grouped", "token_budget")
SAME_BATCH = ("static", "dynamic", "karmarkar_karp")
"""Modes that share their global batches; the others form each rank's batch by themselves."""
Limits = int | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The samples of every rank in one step.

    Attributes:
        groups: for each rank the indices of its samples in the data set.
        lengths: [n] tokens of each sample of the data set.
    """

    groups: tuple[tuple[int, ...], ...]
    lengths: NDArray

    @cached_property
    def local_batch(self) -> NDArray:
        """Returns the number of samples of each rank, [G]."""
        return np.array([len(group) for group in self.groups])

    @cached_property
    def longest(self) -> NDArray:
        """Returns the tokens of each rank's longest sample, [G]."""
        return np.maximum.reduceat(self._own, self._starts)

    @cached_property
    def tokens(self) -> NDArray:
        """Returns the tokens of each rank without padding, [G]."""
        return np.add.reduceat(self._own, self._starts)

    @property
    def padded_tokens(self) -> NDArray:
        """Returns the tokens of each rank with padding, [G]."""
        return self.local_batch * self.longest

    @property
    def global_batch(self) -> int:
        """Returns the number of samples of all ranks."""
        return int(self.local_batch.sum())

    @property
    def total_tokens(self) -> int:
        """Returns the tokens of all ranks, without padding."""
        return int(self.tokens.sum())

    def slowest_cost(self, cost: Cost | Sequence[Cost]) -> float:
        """Computes the bottleneck, the slowest rank's cost; ``cost`` is one, or one per rank."""
        if callable(cost):
            return np.max(cost(self.local_batch, self.longest)).item()
        shapes = zip(cost, self.local_batch.tolist(), self.longest.tolist(), strict=True)
        return max(float(rank_cost(batch, longest)) for rank_cost, batch, longest in shapes)

    @cached_property
    def _own(self) -> NDArray:
        return self.lengths[np.concatenate([np.asarray(group) for group in self.groups])]

    @cached_property
    def _starts(self) -> NDArray:
        return np.cumsum(self.local_batch) - self.local_batch


def epoch_order(count: int, seed: int, epoch: int) -> NDArray:
    """Draws the permutation [n] of an epoch, from the seed and the epoch's number alone."""
    return np.random.default_rng((seed, epoch)).permutation(count)


class Planner:
    """The plans of all steps in one mode; ``planner(step)`` makes one.

    Args:
        mode: one of MODES.
        lengths: [n] tokens of each sample of the data set.
        world_size: G ranks.
        global_batch: B samples a step (in ``token_budget`` on average); at least one per rank.
        seed: seed of the samples' order.
        max_tokens: the budget of ``token_budget``, with padding; 0 chooses the smallest with which
            a rank has B/G samples on average.

    Raises UserError for an unknown mode, or a batch that cannot be made.
    """

    def __init__(
        self,
        mode: str,
        lengths: ArrayLike,
        world_size: int,
        global_batch: int,
        seed: int = 42,
        max_tokens: int = 0,
    ) -> None:
        require_known("mode", mode, MODES)
        if not world_size <= global_batch:
            raise UserError(
                f"a global batch of {global_batch} samples for {world_size} ranks; each rank needs "
                "at least one"
            )
        self.lengths = check_lengths(lengths, 1)
        if len(self.lengths) < global_batch:
            raise UserError(
                f"a data set of {len(self.lengths)} samples makes no global batch of {global_batch}"
            )
        self.mode, self.world_size, self.global_batch = mode, world_size, global_batch
        self.seed = seed
        self.max_tokens = max_tokens
        if mode == "token_budget":
            self._ascending = np.sort(self.lengths)
            longest = int(self._ascending[-1])
            if max_tokens and max_tokens < longest:
                raise UserError(f"max_tokens {max_tokens}; the longest sample has {longest} tokens")
            share = global_batch / world_size
            self.max_tokens = max_tokens or budget_for(self._ascending, share)
        self._bounds: dict[int, list[int]] = {}
        self._epoch: tuple = (None, None)
        self._said_gap = False

    def __call__(
        self, step: int, cost: Cost | Sequence[Cost] | None = None, max_batch: Limits = None
    ) -> StepPlan:
        """Makes the plan of a step.

        Args:
            step: number of the step, from 0, over all epochs.
            cost: the cost that ``dynamic`` balances (one, or one for each rank); tokens by default.
            max_batch: the most samples a rank can hold; one, or one for each rank.

        Raises UserError where limits do not allow it; equal counts need limits of at least these.
        """
        if self.mode == "token_budget":
            groups = self._budgeted(step, max_batch)
        else:
            drawn = self._drawn(step)
            if self.mode == "dynamic":
                cost = cost or TokensCost()
                lengths = self.lengths[drawn]
                parts = self._smallest_bottleneck(lengths, cost, max_batch)
            elif self.mode == "karmarkar_karp":
                parts = karmarkar_karp(self.lengths[drawn], self.world_size, equal_size=True)
            else:
                parts = np.array_split(np.arange(self.global_batch), self.world_size)
            groups = [drawn[part].tolist() for part in parts]
            if self.mode != "dynamic":
                self._require_room(groups, max_batch)
        return StepPlan(tuple(map(tuple, groups)), self.lengths)

    def steps_per_epoch(self, max_batch: Limits = None) -> int:
        """Returns the number of whole steps of an epoch; limits matter only in ``token_budget``.

        Raises UserError for fewer batches than ranks.
        """
        if self.mode != "token_budget":
            return len(self.lengths) // self.global_batch
        batches = len(self._budget_bounds(max_batch)) - 1
        if batches < self.world_size:
            raise UserError(
                f"batches of up to {self.max_tokens} tokens: {batches} for the whole data set, and "
                f"there are {self.world_size} ranks; lower max_tokens"
            )
        return batches // self.world_size

    def _drawn(self, step: int) -> NDArray:
        """Returns the samples of a step, in the order in which ranks take them."""
        epoch, index = divmod(step, self.steps_per_epoch())
        if self._epoch[0] != epoch:
            order = epoch_order(len(self.lengths), self.seed, epoch)
            if self.mode == "length_grouped":
                rank_batch = -(-self.global_batch // self.world_size)
                order = length_grouped_order(self.lengths, rank_batch, order)
            self._epoch = (epoch, order)
        start = index * self.global_batch
        return self._epoch[1][start : start + self.global_batch]

    def _smallest_bottleneck(
        self, lengths: NDArray, cost: Cost | Sequence[Cost], limits: Limits
    ) -> list[list[int]]:
        """Computes the groups of ``dynamic``; logs once if they may not be optimal."""
        plan = bounded_plan(lengths, self.world_size, cost, limits)
        if not plan.exact and not self._said_gap and is_main_rank():
            self._said_gap = True
            logger.info(
                "ranks of many speeds: this step's plan is at most %.1f %% above the optimum",
                100 * plan.gap,
            )
        return plan.groups

    def _budgeted(self, step: int, max_batch: Limits) -> list[list[int]]:
        """Returns a batch for each rank, dealt in turn as by fairseq's ShardedIterator."""
        epoch, index = divmod(step, self.steps_per_epoch(max_batch))
        bounds = self._budget_bounds(max_batch)
        if self._epoch[0] != (epoch, len(bounds)):
            rng = np.random.default_rng((self.seed, epoch))
            batches = token_budget_batches(self.lengths, bounds, rng)
            self._epoch = ((epoch, len(bounds)), batches)
        start = index * self.world_size
        return [batch.tolist() for batch in self._epoch[1][start : start + self.world_size]]

    def _budget_bounds(self, max_batch: Limits) -> list[int]:
        """Returns the batches' bounds among the sorted samples, which all epochs share."""
        limit = 0 if max_batch is None else int(np.min(max_batch))
        if limit not in self._bounds:
            self._bounds[limit] = token_budget_bounds(self._ascending, self.max_tokens, limit)
        return self._bounds[limit]

    def _require_room(self, groups: Sequence[Sequence[int]], max_batch: Limits) -> None:
        """Raises UserError if a rank cannot hold its share, which these modes do not adapt."""
        if max_batch is None:
            return
        limits = np.broadcast_to(np.asarray(max_batch), self.world_size).tolist()
        # Which rank has the larger share differs from step to step, but for equal counts in order.
        largest = max(map(len, groups)) if self.mode == "karmarkar_karp" else 0
        for rank, (group, limit) in enumerate(zip(groups, limits, strict=True)):
            if (most := max(len(group), largest)) > limit:
                raise UserError(
                    f"{self.mode} gives rank {rank} {most} samples, and its limit is "
                    f"{limit}; a smaller global batch, or the mode dynamic"
                )
