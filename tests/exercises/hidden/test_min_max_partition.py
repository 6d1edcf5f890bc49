"""A3.1: the best partition, against brute force and dynamic programming."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import DRAWN
from numpy.typing import ArrayLike, NDArray
from probes import searches

from common.course.sandbox.student import Student
from common.course.sandbox.wire import Raised

Cost = Callable[[ArrayLike, ArrayLike], NDArray]

COSTS = st.sampled_from(
    [
        lambda batch, longest: batch * longest,
        lambda batch, longest: batch * longest * longest,
        lambda batch, longest: 3.0 + 0.25 * batch * longest,
        lambda batch, longest: 100 + 0 * batch * longest,
    ]
)


@DRAWN
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    data=st.data(),
    cost=COSTS,
)
def test_no_partition_of_any_kind_is_better(
    student: Student, lengths: list[int], data, cost: Cost
) -> None:
    exercise = student.exercise("min_max_partition")
    ranks = data.draw(st.integers(1, min(4, len(lengths))))
    batch = exercise.SortedBatch.of(np.array(lengths))
    found, bounds = exercise.min_max_partition(batch, ranks, cost, len(lengths))
    groups = batch.groups(bounds)
    assert len(groups) == ranks
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    assert found == max(cost(len(group), max(lengths[i] for i in group)) for group in groups)
    best = inf
    for ranks_of in itertools.product(range(ranks), repeat=len(lengths)):
        if len(set(ranks_of)) == ranks:  # every rank has a sample
            by_rank = [[i for i, rank in enumerate(ranks_of) if rank == r] for r in range(ranks)]
            best = min(best, max(cost(len(g), max(lengths[i] for i in g)) for g in by_rank))
    assert found == best
    assert exercise.lower_bound(batch, ranks, cost) <= best


def best_of_contiguous(lengths: np.ndarray, ranks: int, cost: Cost, limit: int) -> float:
    """Computes the best bottleneck of contiguous groups, by dynamic programming over their ends."""
    count = len(lengths)
    reached = [0.0] + [inf] * count  # with no rank
    for _ in range(ranks):
        reached = [inf] + [
            min(
                max(reached[start], cost(end - start, int(lengths[start])))
                for start in range(max(0, end - limit), end)
            )
            for end in range(1, count + 1)
        ]
    return reached[count]


def test_larger_batches_and_limits_are_what_dynamic_programming_finds(
    student: Student, generator: np.random.Generator
) -> None:
    exercise = student.exercise("min_max_partition")
    for ranks, limit in ((2, 128), (5, 30), (16, 8), (16, 9), (127, 2), (128, 1)):
        lengths = generator.geometric(0.02, 128)
        batch, in_order = exercise.SortedBatch.of(lengths), np.sort(lengths)[::-1]
        for cost in (lambda b, m: b * m, lambda b, m: 1e-3 + 1e-6 * b * m + 1e-9 * b * m**2):
            found, bounds = exercise.min_max_partition(batch, ranks, cost, limit)
            assert found == pytest.approx(best_of_contiguous(in_order, ranks, cost, limit))
            sizes = np.diff(bounds)
            assert sizes.min() >= 1
            assert sizes.max() <= limit


def test_most_samples_is_what_counting_finds(student: Student) -> None:
    most_samples = student.exercise("min_max_partition").most_samples

    def cost(batch, longest):
        return 5 + batch * longest

    longest = np.array([1, 2, 3, 50])
    for limit in (4, 5, 6, 11, 105, 10**6):
        expected = [
            max([b for b in range(1, 41) if cost(b, length) <= limit], default=0)
            for length in longest.tolist()
        ]
        assert most_samples(cost, longest, limit, 40).tolist() == expected


def test_large_batches_take_at_most_twenty_times_the_references_time(
    student: Student, generator: np.random.Generator
) -> None:
    batches = [generator.geometric(0.003, 4096).tolist() for _ in range(4)]
    found, times = {}, {"his": [], "reference": []}
    for _ in range(4):
        for name, module in (("his", student.probe("searches")), ("reference", searches)):
            began = time.perf_counter()
            found[name] = module.partitions(batches, 1024)
            times[name].append(time.perf_counter() - began)
    assert found["his"] == pytest.approx(found["reference"])
    # The first call imports the exercise.
    assert min(times["his"][1:]) <= 20 * min(times["reference"][1:])


def test_a_cost_that_falls_is_refused(student: Student) -> None:
    exercise = student.exercise("min_max_partition")
    batch = exercise.SortedBatch.of(np.array([5, 4, 3, 3, 2, 1, 1]))
    for falling in (lambda batch, longest: longest / (batch + 1), lambda batch, longest: -batch):
        with pytest.raises(Raised, match=r"ValueError: .*must not fall"):
            exercise.min_max_partition(batch, 2, falling, 6)
