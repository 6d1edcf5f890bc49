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
from judging import DRAWN, assert_close
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
    student: Student, lengths: list[int], data: st.DataObject, cost: Cost
) -> None:
    exercise = student.exercise("min_max_partition")
    count = len(lengths)
    ranks = data.draw(st.integers(1, min(4, count)), label="ranks")
    limit = data.draw(st.integers(-(-count // ranks), count), label="limit")
    batch = exercise.SortedBatch.of(np.array(lengths))
    bottleneck, bounds = exercise.min_max_partition(batch, ranks, cost, limit)
    groups = batch.groups(bounds)
    case = f"{count} texts, {ranks} ranks, at most {limit} a rank"
    assert len(groups) == ranks, f"{len(groups)} groups: {case}"
    assert sorted(itertools.chain(*groups)) == list(range(count)), f"not every text once: {case}"
    assert all(1 <= len(group) <= limit for group in groups), f"sizes of the groups: {case}"
    costs = [cost(len(group), max(lengths[i] for i in group)) for group in groups]
    assert bottleneck == max(costs), f"the bottleneck is not that of the groups: {case}"
    best = inf
    for ranks_of in itertools.product(range(ranks), repeat=count):
        by_rank = [[i for i, rank in enumerate(ranks_of) if rank == r] for r in range(ranks)]
        if all(1 <= len(group) <= limit for group in by_rank):
            best = min(best, max(cost(len(g), max(lengths[i] for i in g)) for g in by_rank))
    assert bottleneck == best, f"there is a better partition: {case}"
    # Counting gives at least what these two groups cost, of which one is in every partition.
    low = exercise.lower_bound(batch, ranks, cost)
    fewest = -(-count // ranks)
    assert low <= best, f"the lower bound is above the best bottleneck: {case}"
    at_least = max(cost(1, max(lengths)), cost(fewest, sorted(lengths)[fewest - 1]))
    assert low >= at_least, f"the lower bound counts less than it could: {case}"


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
        case = f"128 texts, {ranks} ranks, at most {limit} a rank"
        for cost in (lambda b, m: b * m, lambda b, m: 1e-3 + 1e-6 * b * m + 1e-9 * b * m**2):
            bottleneck, bounds = exercise.min_max_partition(batch, ranks, cost, limit)
            best = best_of_contiguous(in_order, ranks, cost, limit)
            assert_close(bottleneck, best, f"not the best bottleneck: {case}")
            sizes = np.diff(bounds)
            is_whole = len(sizes) == ranks and (bounds[0], bounds[-1]) == (0, 128)
            assert is_whole, f"bounds of the groups: {case}"
            assert sizes.min() >= 1, f"a rank without a text: {case}"
            assert sizes.max() <= limit, f"a rank with {sizes.max()} texts: {case}"
            costs = cost(sizes, in_order[bounds[:-1]])
            assert_close(costs.max().item(), best, f"the groups are not the best: {case}")


@DRAWN
@given(
    longest=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    time=st.integers(0, 400),
    limit=st.integers(1, 60),
    constant=st.integers(0, 20),
)
def test_most_samples_is_what_counting_finds(
    student: Student, longest: list[int], time: int, limit: int, constant: int
) -> None:
    most_samples = student.exercise("min_max_partition").most_samples

    def cost(batch, longest):
        return constant + batch * longest

    most = most_samples(cost, np.array(longest), time, limit)
    expected = [sum(cost(b, length) <= time for b in range(1, limit + 1)) for length in longest]
    case = f"{len(longest)} longest texts, at most {limit} samples"
    assert np.asarray(most).dtype.kind == "i", "most_samples: not whole numbers"
    assert most.tolist() == expected, f"most_samples within {time}: {case}"
    # A cost may know it: then it is asked, and the limit holds.
    sizes = dict(zip(longest, expected, strict=True))
    solved = student.probe("searches").most_by_its_own(sizes, max(1, limit // 2))
    words = f"most_samples of a cost with `most` of its own: {case}"
    assert solved.tolist() == [min(size, max(1, limit // 2)) for size in sizes.values()], words


@DRAWN
@given(
    costs=st.lists(st.integers(1, 10**6), min_size=1, max_size=40, unique=True).map(sorted),
    scale=st.sampled_from([1, 1.0, 1e-7]),
    data=st.data(),
)
def test_the_search_ends_at_the_smallest_bottleneck(
    student: Student, costs: list[int], scale: float, data: st.DataObject
) -> None:
    search = student.exercise("min_max_partition").smallest_bottleneck
    costs = [scale * cost for cost in costs]
    first = data.draw(st.integers(0, len(costs) - 1), label="place of the smallest")
    tries = itertools.count()

    def attempt(time: float) -> tuple[bool, float]:
        """Fits from the smallest on; what is reached or comes next is one of the costs."""
        if next(tries) > 2000:
            raise RuntimeError("the search goes on and on")
        if time >= costs[first]:
            return True, max(cost for cost in costs if cost <= time)
        return False, min(cost for cost in costs if cost > time)

    low = data.draw(st.sampled_from(costs[: first + 1]), label="low")
    case = f"{len(costs)} costs from {costs[0]:g} to {costs[-1]:g}"
    assert search(low, costs[-1], attempt) == costs[first], f"smallest_bottleneck of {case}"
    if costs[0] < costs[-1]:
        for fits, other in ((True, 2 * costs[-1]), (False, costs[0] / 2)):

            def contradict(time: float, answer: tuple[bool, float] = (fits, other)) -> tuple:
                attempt(time)  # which counts it
                return answer

            words = f"a trial that {'fits' if fits else 'fails'} and contradicts its T"
            is_refused(words, search, costs[0], costs[-1], contradict)


def is_refused(words: str, function: Callable, *arguments: object) -> None:
    """Raises unless a call is refused as one with a cost that falls."""
    try:
        function(*arguments)
    except Raised as error:
        message = str(error)
    else:
        pytest.fail(f"not refused: {words}")
    is_as_said = message.startswith("ValueError: ") and "must not fall" in message
    assert is_as_said, f"{words}: it says {message}"


@DRAWN
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    data=st.data(),
)
def test_ranks_that_are_left_over_get_a_text_and_none_costs_more(
    student: Student, sizes: list[int], data: st.DataObject
) -> None:
    one_each = student.exercise("min_max_partition").one_each
    count = sum(sizes)
    ranks = data.draw(st.integers(len(sizes), count), label="ranks")
    lengths = sorted(
        data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)), reverse=True
    )
    before = [0, *np.cumsum(sizes).tolist()]
    after = one_each(list(before), ranks)
    case = f"{len(sizes)} groups of {count} texts for {ranks} ranks"
    assert len(after) == ranks + 1, f"{len(after)} bounds: {case}"
    assert (after[0], after[-1]) == (0, count), f"ends of the bounds: {case}"
    assert min(np.diff(after)) >= 1, f"a rank without a text: {case}"

    def bottleneck(bounds: list[int]) -> int:
        return max((b - a) * lengths[a] for a, b in itertools.pairwise(bounds))

    assert bottleneck(after) <= bottleneck(before), f"a group costs more than before: {case}"


def test_large_batches_take_at_most_twenty_times_the_references_time(
    student: Student, generator: np.random.Generator
) -> None:
    words = "4,096 texts on 1,024 ranks"
    times = {"his": [], "reference": []}
    for _ in range(4):  # of other texts each time: what was found before is of no use
        batches = [generator.geometric(0.003, 4096).tolist() for _ in range(4)]
        began = time.perf_counter()
        bottlenecks = student.probe("searches").partitions(batches, 1024)
        times["his"].append(time.perf_counter() - began)
        with student.sandbox.still():
            began = time.perf_counter()
            best = searches.partitions(batches, 1024)
            times["reference"].append(time.perf_counter() - began)
        for bottleneck, smallest in zip(bottlenecks, best, strict=True):
            assert_close(bottleneck, smallest, f"{words}: not the best bottlenecks")
    # The first call imports the exercise.
    ratio = min(times["his"][1:]) / min(times["reference"][1:])
    assert ratio <= 20, f"{words}: {ratio:.0f} times the reference's time"


def test_a_cost_that_falls_is_refused(student: Student) -> None:
    exercise = student.exercise("min_max_partition")
    batch = exercise.SortedBatch.of(np.array([5, 4, 3, 3, 2, 1, 1]))
    words = "a cost that falls as a batch grows"
    for falling in (lambda batch, longest: longest / (batch + 1), lambda batch, longest: -batch):
        is_refused(words, exercise.min_max_partition, batch, 2, falling, 6)
