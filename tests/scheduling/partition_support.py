"""Generated partition problems, and their optimum by trying every assignment of samples to ranks.

The brute force knows nothing of contiguous groups: it looks at all G^B ways to give each sample to
some rank, and leaves out those in which a rank has none or more than its limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.scheduling.cost import CalibratedCost, TokensCost, TokensSquaredCost

LENGTHS: dict[str, Callable[[np.random.Generator, int], NDArray]] = {
    "ties": lambda rng, count: rng.integers(1, 5, count),
    "ones": lambda rng, count: np.ones(count, np.int64),
    "equal": lambda rng, count: np.full(count, rng.integers(1, 300)),
    "one giant": lambda rng, count: np.append(rng.integers(1, 9, count - 1), 1000),
    "texts": lambda rng, count: np.clip(rng.lognormal(3, 0.8, count), 1, 256).astype(np.int64),
    "any": lambda rng, count: rng.integers(1, 70_000, count),
}


@dataclass(frozen=True)
class Stairs:
    """A cost without an inverse of its own, with plateaus: blocks of 2 samples and 8 tokens."""

    factor: int = 1

    def __call__(self, batch_size, longest):
        return self.factor * ((batch_size + 1) // 2) * ((longest + 7) // 8)


@dataclass(frozen=True)
class Scaled:
    """Another cost, some times as large; without an inverse of its own."""

    cost: object
    factor: float

    def __call__(self, batch_size, longest):
        return self.factor * self.cost(batch_size, longest)


@dataclass(frozen=True)
class Problem:
    lengths: NDArray
    costs: tuple
    limits: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.costs)


def problems(count: int, seed: int, unequal: bool) -> Iterator[Problem]:
    """Draws small problems; every way of drawing lengths, costs and limits gets its turn."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        world_size = int(rng.choice([1, 2, 2, 3, 3, 3, 4]))
        samples = int(rng.integers(world_size, 8 if world_size < 4 else 7))
        draw = list(LENGTHS.values())[index % len(LENGTHS)]
        lengths = rng.permutation(draw(rng, samples))
        costs = _costs(rng, world_size, unequal)
        yield Problem(lengths, costs, _limits(rng, samples, world_size))


def _costs(rng: np.random.Generator, world_size: int, unequal: bool) -> tuple:
    bases = (
        TokensCost(),
        TokensSquaredCost(),
        CalibratedCost(*(rng.uniform(0, 1, 3) * (3e-3, 2e-4, 2e-6))),
        CalibratedCost(0.0, rng.uniform(0, 1e-4), 0.0),
        CalibratedCost(rng.uniform(0, 1), 0.0, 0.0),
        Stairs(),
    )
    base = bases[rng.integers(len(bases))]
    if not unequal:
        return (base,) * world_size
    if rng.random() < 0.3:
        return tuple(bases[kind] for kind in rng.integers(len(bases), size=world_size))
    factors = rng.choice([1.0, 1.0, 2.0, 1.5, rng.uniform(0.5, 3)], world_size)
    if isinstance(base, CalibratedCost):
        return tuple(base.scaled(float(factor)) for factor in factors)
    return tuple(base if factor == 1 else Scaled(base, float(factor)) for factor in factors)


def _limits(rng: np.random.Generator, samples: int, world_size: int) -> tuple[int, ...]:
    if rng.random() < 0.4:
        return (samples,) * world_size
    limits = rng.integers(1, samples + 1, world_size)
    while limits.sum() < samples:
        limits[rng.integers(world_size)] += 1
    return tuple(limits.tolist())


@functools.cache
def _assignments(samples: int, world_size: int) -> tuple[NDArray, NDArray]:
    """Lists all ways [A, B] in which each rank has a sample, and their counts [A, G]."""
    ways = np.indices((world_size,) * samples).reshape(samples, -1).T
    counts = np.stack([(ways == rank).sum(axis=1) for rank in range(world_size)], axis=1)
    whole = (counts > 0).all(axis=1)
    return ways[whole], counts[whole]


def optimum(problem: Problem) -> float:
    """Finds the smallest bottleneck over all assignments."""
    ways, counts = _assignments(len(problem.lengths), problem.world_size)
    slowest = np.full(len(ways), -np.inf)
    for rank, cost in enumerate(problem.costs):
        longest = np.where(ways == rank, problem.lengths, 0).max(axis=1)
        slowest = np.maximum(slowest, cost(counts[:, rank], longest))
    return float(slowest[(counts <= problem.limits).all(axis=1)].min())


def bottleneck(problem: Problem, groups: list[list[int]]) -> float:
    """Computes the slowest rank's cost; asserts that each sample is on one rank and limits hold."""
    assert sorted(index for group in groups for index in group) == list(range(len(problem.lengths)))
    assert all(0 < len(g) <= limit for g, limit in zip(groups, problem.limits, strict=True))
    return max(
        float(cost(len(group), int(problem.lengths[group].max())))
        for cost, group in zip(problem.costs, groups, strict=True)
    )
