"""Exercises that compute a number, against oracles that are not the solution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.exercises.accumulated_step import accumulated_step
from common.exercises.bucket_assignment import assign_buckets
from common.exercises.bucket_time import backward_time_s
from common.exercises.cap_search import fastest_cap
from common.exercises.cost_fit import fit_cost
from common.exercises.loss_scale import loss_scale
from common.exercises.step_apart import take_apart
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.simulator import simulate_buckets

SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=30)


@settings(deadline=None)
@given(SIZES, st.integers(1, 2 * 10**6), st.data())
def test_buckets_are_those_of_torch(sizes: list[int], cap: int, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    first = data.draw(st.integers(1, 10**6))
    tensors = [
        torch.empty(size, dtype=torch.int8 if kind else torch.uint8, device="meta")
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    expected, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(
        tensors, [first, cap]
    )
    assert sorted(assign_buckets(sizes, (first, cap), kinds=kinds)) == sorted(expected)


@given(SIZES, st.data())
def test_the_time_of_a_pass_is_the_simulators_without_costs(
    sizes: list[int], data: st.DataObject
) -> None:
    gaps = data.draw(
        st.lists(st.floats(0, 1e-2), min_size=len(sizes), max_size=len(sizes)), label="gaps"
    )
    ready = np.cumsum(gaps).tolist()
    buckets = assign_buckets(sizes, data.draw(st.integers(1, 10**6)))
    network = AlphaBeta(1e-4, 5e8)
    found = backward_time_s(sizes, ready, buckets, network.time_s)
    profile = BackwardProfile(
        names=tuple(map(str, range(len(sizes)))),
        sizes_bytes=np.array(sizes),
        ready_s=np.array(ready),
        backward_s=ready[-1],
    )
    assert found == pytest.approx(simulate_buckets(profile, network, buckets).total_s, rel=1e-12)
    # It ends neither before the computation nor before all that is sent could be.
    assert found >= ready[-1]
    assert found >= sum(network.time_s(sum(sizes[i] for i in bucket)) for bucket in buckets)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.data())
def test_no_cap_is_faster_than_the_one_that_is_found(sizes: list[int], data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    ready = np.cumsum(gaps).tolist()
    latency = data.draw(st.integers(0, 5))
    asked = []

    def all_reduce_s(size: float) -> float:
        asked.append(size)
        return latency + size

    cap, found = fastest_cap(sizes, ready, all_reduce_s)
    found_in = [assign_buckets(sizes, cap) for cap in range(1, sum(sizes) + 1)]
    distinct = {str(buckets): len(buckets) for buckets in found_in}
    assert len(asked) == sum(distinct.values())  # each bucketing once
    every = {
        cap: backward_time_s(sizes, ready, assign_buckets(sizes, cap), lambda size: latency + size)
        for cap in range(1, sum(sizes) + 1)
    }
    assert found == every[cap] == min(every.values())
    assert cap == max(cap for cap, time_s in every.items() if time_s == found)


def test_scaled_means_of_samples_have_the_gradient_of_the_whole_batch() -> None:
    check_scaled_means("samples")


def test_scaled_means_of_tokens_have_the_gradient_of_the_whole_batch() -> None:
    check_scaled_means("tokens")


def check_scaled_means(mean: str) -> None:
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


def test_a_planted_cost_is_found_and_noise_makes_none_negative() -> None:
    generator = np.random.default_rng(0)
    batch, longest = generator.integers(1, 64, 200) * 1.0, generator.integers(4, 256, 200) * 1.0
    planted = (3e-3, 2e-6, 5e-9)
    exact = planted[0] + planted[1] * batch * longest + planted[2] * batch * longest**2
    assert fit_cost(batch, longest, exact) == pytest.approx(planted, rel=1e-6)
    for _ in range(20):
        noisy = exact * generator.lognormal(0, 0.5, len(exact))
        assert min(fit_cost(batch, longest, noisy)) >= 0
    for missing in range(3):  # a term that is not there
        there = [0.0 if place == missing else value for place, value in enumerate(planted)]
        times = there[0] + there[1] * batch * longest + there[2] * batch * longest**2
        found = fit_cost(batch, longest, times)
        assert found[missing] == pytest.approx(0, abs=1e-3 * planted[missing])


@settings(deadline=None)  # the first call imports
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans())
def test_any_split_of_a_batch_makes_the_update_of_the_whole(sizes: list[int], clip: bool) -> None:
    torch.manual_seed(1)
    samples = torch.randn(sum(sizes), 4, dtype=torch.float64)
    models = [torch.nn.Linear(4, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[0].weight.grad = torch.ones_like(models[0].weight)  # of somebody else

    def loss_of(model: torch.nn.Module, piece: torch.Tensor) -> torch.Tensor:
        return model(piece).square().sum(dim=1).mean()

    loss = loss_of(models[1], samples)
    loss.backward()
    largest = 0.1 if clip else float("inf")
    norm = torch.nn.utils.clip_grad_norm_(models[1].parameters(), largest)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    optimizers[1].step()
    found = accumulated_step(
        models[0], optimizers[0], samples.split(sizes), loss_of, 0.1 if clip else None
    )
    assert found == pytest.approx((loss.item(), norm.item()), rel=1e-12)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4 if clip else 1e-12, atol=1e-12)
        assert one.grad is None


SPANS = st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 8)), max_size=6)


@given(SPANS, SPANS)
def test_every_moment_of_a_step_is_one_of_its_parts(
    computing: list[tuple[int, int]], communicating: list[tuple[int, int]]
) -> None:
    computation, communication = (
        [(start, start + span) for start, span in spans] for spans in (computing, communicating)
    )
    moments = np.arange(20) + 0.5

    def within(intervals: list[tuple[int, int]]) -> np.ndarray:
        return np.array([any(a < at < b for a, b in intervals) for at in moments])

    first, second = within(computation), within(communication)
    apart = take_apart((0, 20), computation, communication)
    assert (apart.total, apart.computation, apart.communication) == (20, first.sum(), second.sum())
    assert apart.overlap == (first & second).sum()
    assert apart.exposed == (second & ~first).sum()
    assert apart.idle == (~first & ~second).sum()
