"""Exercises that compute a number, against oracles that are not the solution."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from judging import DRAWN

from common.course.sandbox.student import Student

SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=30)


@DRAWN
@given(sizes=SIZES, cap=st.integers(1, 2 * 10**6), data=st.data())
def test_buckets_are_those_of_torch(
    student: Student, sizes: list[int], cap: int, data: st.DataObject
) -> None:
    assign_buckets = student.exercise("bucket_assignment").assign_buckets
    kinds = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    first = data.draw(st.integers(1, 10**6))
    tensors = [
        torch.empty(size, dtype=torch.int8 if kind else torch.uint8, device="meta")
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    # With an order in which gradients are ready, it leaves buckets in that of their reductions.
    ready_order = list(range(len(sizes)))
    expected, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(
        tensors, [first, cap], [False] * len(sizes), ready_order
    )
    assert assign_buckets(sizes, (first, cap), kinds=kinds) == expected


@DRAWN
@given(sizes=SIZES, data=st.data())
def test_the_time_of_a_pass_is_the_simulators_without_costs(
    student: Student, sizes: list[int], data: st.DataObject
) -> None:
    backward_time_s = student.exercise("bucket_time").backward_time_s
    # In any order, as a branch of a model may have its gradients late.
    moments = st.lists(st.floats(0, 1e-1), min_size=len(sizes), max_size=len(sizes))
    ready = data.draw(moments, label="ready")
    buckets = buckets_of(sizes, data.draw(st.integers(1, 10**6)))
    found = backward_time_s(sizes, ready, buckets, lambda size: 1e-4 + size / 5e8)
    end = 0.0
    for bucket in buckets:  # an all-reduce at a time, once the bucket's last gradient is ready
        end = max(end, max(ready[i] for i in bucket)) + time_s(sizes, bucket)
    assert found == pytest.approx(max(end, *ready), rel=1e-12)
    ends = student.exercise("bucket_time").one_after_another([2.0, 1.0, 5.0], [1.0, 1.0, 2.0])
    assert list(ends) == [3.0, 4.0, 7.0]  # in their order, also where a later one is ready first
    # It ends neither before the computation nor before all that is sent could be.
    assert found >= max(ready)
    assert found >= sum(time_s(sizes, bucket) for bucket in buckets)


def time_s(sizes: list[int], bucket: list[int]) -> float:
    """Computes the time of a bucket's all-reduce."""
    return 1e-4 + sum(sizes[i] for i in bucket) / 5e8


def buckets_of(sizes: list[int], cap: int) -> list[list[int]]:
    """Returns the buckets of PyTorch's C++."""
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    found, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(tensors, [cap])
    return sorted(found)


@DRAWN
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8), data=st.data())
def test_no_cap_is_faster_than_the_one_that_is_found(
    student: Student, sizes: list[int], data: st.DataObject
) -> None:
    fastest_cap = student.exercise("cap_search").fastest_cap
    gaps = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    ready = np.cumsum(gaps).tolist()
    latency = data.draw(st.integers(0, 5))
    asked = []

    def all_reduce_s(size: float) -> float:
        asked.append(size)
        return latency + size

    cap, found = fastest_cap(sizes, ready, all_reduce_s)
    found_in = [buckets_of(sizes, cap) for cap in range(1, sum(sizes) + 1)]
    distinct = {str(buckets): len(buckets) for buckets in found_in}
    assert len(asked) == sum(distinct.values())  # each bucketing once
    every = {}
    for number, buckets in enumerate(found_in, start=1):
        end = 0
        for bucket in buckets:  # one after another, each when its last gradient is ready
            end = max(end, ready[max(bucket)]) + latency + sum(sizes[i] for i in bucket)
        every[number] = max(end, ready[-1])
    assert found == every[cap] == min(every.values())
    assert cap == max(cap for cap, time_s in every.items() if time_s == found)


@DRAWN
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_every_bucketing_is_walked_once_with_its_caps(student: Student, sizes: list[int]) -> None:
    total = sum(sizes)
    caps_of: dict[str, list[int]] = {}
    for cap in range(1, total + 1):
        caps_of.setdefault(str(buckets_of(sizes, cap)), []).append(cap)
    walked = student.probe("searches").bucketings(sizes)
    assert [(str(buckets), [low, high]) for low, high, buckets in walked] == [
        (buckets, [caps[0], caps[-1]]) for buckets, caps in caps_of.items()
    ]
    cap_interval = student.exercise("cap_search").cap_interval
    for low, high, buckets in walked:
        found = cap_interval(sizes, buckets)
        assert found[0] == low
        assert found[1] == high if high < total else found[1] >= total


def test_scaled_means_of_samples_have_the_gradient_of_the_whole_batch(student: Student) -> None:
    check_scaled_means(student, "samples")


def test_scaled_means_of_tokens_have_the_gradient_of_the_whole_batch(student: Student) -> None:
    check_scaled_means(student, "tokens")


def check_scaled_means(student: Student, mean: str) -> None:
    loss_scale = student.exercise("loss_scale").loss_scale
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1).double()
    lengths = [[3, 1], [2], [4, 4, 1]]
    texts = [[torch.randn(length, 5).double() for length in rank] for rank in lengths]
    units = [len(rank) if mean == "samples" else sum(rank) for rank in lengths]

    def loss(batch: list[torch.Tensor], count: int) -> torch.Tensor:
        parts = [model(text).square() for text in batch]
        each = [part.mean() if mean == "samples" else part.sum() for part in parts]
        return torch.stack(each).sum() / count

    whole = loss([text for rank in texts for text in rank], sum(units))
    expected = torch.autograd.grad(whole, model.parameters())
    scaled = [
        loss(rank, own) * loss_scale(mean, 3, own, sum(units))
        for rank, own in zip(texts, units, strict=True)
    ]
    found = torch.autograd.grad(torch.stack(scaled).mean(), model.parameters())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_planted_cost_is_found_and_noise_makes_none_negative(
    student: Student, generator: np.random.Generator
) -> None:
    fit_cost = student.exercise("cost_fit").fit_cost
    batch, longest = generator.integers(1, 64, 200) * 1.0, generator.integers(4, 256, 200) * 1.0
    planted = (3e-3, 2e-6, 5e-9)
    exact = planted[0] + planted[1] * batch * longest + planted[2] * batch * longest**2
    assert fit_cost(batch, longest, exact) == pytest.approx(planted, rel=1e-6)
    for _ in range(20):
        noisy = exact * generator.lognormal(0, 0.5, len(exact))
        found = fit_cost(batch, longest, noisy)
        assert min(found) >= 0
        assert relative_error(batch, longest, noisy, found) <= 1.000001 * min(
            relative_error(batch, longest, noisy, fitted)
            for fitted in fits_without_some_terms(batch, longest, noisy)
        )
    for missing in range(3):  # a term that is not there
        there = [0.0 if place == missing else value for place, value in enumerate(planted)]
        times = there[0] + there[1] * batch * longest + there[2] * batch * longest**2
        found = fit_cost(batch, longest, times)
        assert found[missing] == pytest.approx(0, abs=1e-3 * planted[missing])


def relative_error(
    batch: np.ndarray, longest: np.ndarray, time_s: np.ndarray, cost: Sequence[float]
) -> float:
    """Returns the sum of squared relative errors of a cost."""
    predicted = cost[0] + cost[1] * batch * longest + cost[2] * batch * longest**2
    return float(((predicted / time_s - 1) ** 2).sum())


def fits_without_some_terms(
    batch: np.ndarray, longest: np.ndarray, time_s: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields least squares of each choice of terms whose coefficients all come out positive.

    The best fit without negative coefficients is one of them: that of the terms it has.
    """
    scale = np.array([1.0, 1e4, 1e6])
    terms = np.stack([np.ones_like(batch), batch * longest, batch * longest**2], axis=1)
    rows = terms / scale / time_s[:, None]
    for kept in itertools.product([False, True], repeat=3):
        cost = np.zeros(3)
        cost[list(kept)] = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (cost >= 0).all():
            yield cost / scale


@DRAWN
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    largest=st.sampled_from([0.1, 1000.0, None]),
)
def test_any_split_of_a_batch_makes_the_update_of_the_whole(
    student: Student, sizes: list[int], largest: float | None
) -> None:
    torch.manual_seed(1)
    samples = torch.randn(sum(sizes), 4, dtype=torch.float64)
    twin = torch.nn.Linear(4, 3).double()
    weight, bias = (parameter.detach().clone() for parameter in twin.parameters())
    loss = twin(samples).square().sum(dim=1).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), largest or float("inf"))
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    pieces = [piece.clone() for piece in samples.split(sizes)]
    found = student.probe("one_process").accumulated(weight, bias, pieces, largest)
    assert (found["loss"], found["norm"]) == pytest.approx((loss.item(), norm.item()), rel=1e-12)
    for name, expected in twin.state_dict().items():
        tolerance = 1e-4 if largest else 1e-12
        torch.testing.assert_close(found["state"][name], expected, rtol=tolerance, atol=1e-12)
    assert not found["left"], "gradients are left"


SPANS = st.lists(st.tuples(st.integers(-50, 250), st.integers(0, 80)), max_size=6)


@DRAWN
@given(computing=SPANS, communicating=SPANS)
@example(computing=[(0, 80), (10, 5), (20, 10)], communicating=[])  # one holds the two after it
def test_every_moment_of_a_step_is_one_of_its_parts(
    student: Student, computing: list[tuple[int, int]], communicating: list[tuple[int, int]]
) -> None:
    take_apart = student.exercise("step_apart").take_apart
    computation, communication = (
        [(start / 64, (start + span) / 64) for start, span in spans]
        for spans in (computing, communicating)
    )
    moments = (np.arange(200) + 0.5) / 64

    def within(intervals: list[tuple[float, float]]) -> np.ndarray:
        return np.array([any(a < at < b for a, b in intervals) for at in moments])

    first, second = within(computation), within(communication)
    apart = take_apart((0, 200 / 64), computation, communication)
    assert (apart.total, apart.computation) == (200 / 64, first.sum() / 64)
    assert apart.communication == second.sum() / 64
    assert apart.overlap == (first & second).sum() / 64
    assert apart.exposed == (second & ~first).sum() / 64
    assert apart.idle == (~first & ~second).sum() / 64
    exercise = student.exercise("step_apart")  # what the lab takes traces apart with
    left, right = (np.array(exercise.union(pairs)) for pairs in (computation, communication))
    for name, moments_of_it in (("difference", first & ~second), ("intersection", first & second)):
        part = np.array(getattr(exercise, name)(left, right))
        assert (within(part.tolist()) == moments_of_it).all()
        assert exercise.length(part) == pytest.approx((part[:, 1] - part[:, 0]).sum())
        assert (part[1:, 0] >= part[:-1, 1]).all()
