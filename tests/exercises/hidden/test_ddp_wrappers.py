"""A1.2, A1.3 and A2.4 against a twin: one process in float64 that sees the samples of all ranks.

Every rank draws its own weights, so that a wrapper that does not hand out rank 0's is seen.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from judging import assert_states_equal, on_so_many_ranks
from probes.models import layers, odd_model, sgd, tokens

from common.errors import UserError
from common.samples import Interval, paired_ratio

pytestmark = pytest.mark.two_ranks
RANKS = on_so_many_ranks(2, 3, graded=(4,))
STEPS = 4


def check_training(on_ranks, name: str, ranks: int, seed: int) -> None:
    """Checks that training is the twin's, and that it begins with rank 0's weights and buffers."""
    twin = odd_model(seed)
    first = {key: value.clone() for key, value in twin.state_dict().items()}
    optimizer = sgd(twin)
    for step in range(STEPS):
        losses = [twin(tokens(seed, step, rank), rank == step % ranks) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in on_ranks(ranks).call("train", name, seed, STEPS):
        assert found["kept"], "parameters are other objects"
        assert_states_equal(found["first"], first)
        assert_states_equal(found["last"], twin.state_dict())


def check_accumulation(on_ranks, name: str, ranks: int, seed: int) -> None:
    """Checks two micro-batches a step, of which only the second exchanges anything."""
    twin = odd_model(seed)
    optimizer = sgd(twin)
    for step in range(STEPS):
        losses = [
            twin(tokens(seed, step + 10 * part, rank), True) / 2
            for part in range(2)
            for rank in range(ranks)
        ]
        (torch.stack(losses).sum() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in on_ranks(ranks).call("accumulate", name, seed, STEPS):
        assert found["calls"] == 0, "something was exchanged under no_sync"
        assert_states_equal(found["last"], twin.state_dict())


def check_overlap(on_ranks, name: str, ranks: int) -> None:
    """Checks that nine tenths of the all-reduces, and of their bytes, precede the last gradient.

    The bytes are read here when a rank asks, and are not told to it: it could not give them back
    changed.
    """
    together = on_ranks(ranks)
    readings: dict[int, list[int]] = {}  # each rank is served by a thread of its own

    def read() -> None:
        sent = together.sent_when_quiet()
        readings.setdefault(threading.get_ident(), []).append(sent)

    for one in together.call("overlap", name, read):
        assert one["calls"] > 10
        assert one["launched"] >= 0.9 * one["calls"], f"{one['launched']} of {one['calls']}"
    assert [len(own) for own in readings.values()] == [3] * ranks, "bytes were read otherwise"
    start, before_last, end = (max(moment) for moment in zip(*readings.values(), strict=True))
    early = before_last - start
    assert early >= 0.85 * (end - start), f"{early} of {end - start} bytes"


@RANKS
def test_naive_ddp_trains_as_its_twin(on_ranks, ranks: int, variant: int) -> None:
    check_training(on_ranks, "naive", ranks, variant + 1000)


@RANKS
def test_flat_ddp_trains_as_its_twin(on_ranks, ranks: int, variant: int) -> None:
    check_training(on_ranks, "flat", ranks, variant + 1000)


def test_all_reduces_are_one_a_gradient_and_one_a_dtype(on_ranks, variant: int) -> None:
    together = on_ranks(2)
    for name, count in (("naive", 13), ("flat", 2)):
        assert together.call("all_reduces", name, variant) == [count, count], name


@RANKS
def test_overlapped_ddp_trains_as_its_twin(on_ranks, ranks: int, variant: int) -> None:
    check_training(on_ranks, "overlapped", ranks, variant + 1000)


@RANKS
def test_overlapped_ddp_accumulates(on_ranks, ranks: int, variant: int) -> None:
    check_accumulation(on_ranks, "overlapped", ranks, variant + 1000)


@RANKS
def test_overlapped_ddp_sends_early(on_ranks, ranks: int) -> None:
    check_overlap(on_ranks, "overlapped", ranks)


@RANKS
def test_bucketed_ddp_trains_as_its_twin(on_ranks, ranks: int, variant: int) -> None:
    check_training(on_ranks, "bucketed", ranks, variant + 1000)


@RANKS
def test_default_buckets_train_as_their_twin(on_ranks, ranks: int, variant: int) -> None:
    check_training(on_ranks, "bucketed by default", ranks, variant + 1000)


@RANKS
def test_bucketed_ddp_accumulates(on_ranks, ranks: int, variant: int) -> None:
    check_accumulation(on_ranks, "bucketed", ranks, variant + 1000)


@RANKS
def test_bucketed_ddp_sends_early(on_ranks, ranks: int) -> None:
    check_overlap(on_ranks, "bucketed", ranks)


def test_buckets_are_those_of_torch(on_ranks, variant: int) -> None:
    together = on_ranks(2)
    assign = dist._compute_bucket_assignment_by_size
    parameters = list(reversed(list(layers(20, 16, 1).float().parameters())))
    for cap_mb in (1e-6, 0.0005, 0.001, 0.003, 1.0, None):
        limits = [2**20, 25 * 2**20] if cap_mb is None else [int(cap_mb * 2**20)]
        expected, _ = assign(parameters, limits, [False] * len(parameters))
        for found in together.call("buckets", cap_mb):
            assert found == expected, cap_mb
    assert together.call("all_reduces", "bucketed by default", variant) == [2, 2]


def step_times(student, reference) -> Interval:
    """Compares steps on a slow network, whose computation is a pause, so that cores do not matter.

    They are timed here and not by the student. Rounds alternate between his and the reference's.
    """
    with ExitStack() as limits:
        try:
            for one in (student, reference):
                limits.enter_context(one.sandbox.limited_network("750mbit"))
        except UserError as refusal:
            pytest.skip(f"not timed here: {refusal}")
        jobs = {"his": student.on_ranks(2), "reference": reference.on_ranks(2)}
        times = {name: [] for name in jobs}
        for number in range(10):
            for name in list(jobs)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                found = jobs[name].call("timed_steps", "bucketed to 1 MiB", 3)
                times[name].append(time.perf_counter() - began)
                for one in found:
                    assert one == pytest.approx([1.5] * len(one))
    # The first two rounds make the models and the connections.
    return paired_ratio(times["his"][2:], times["reference"][2:])


@pytest.mark.grading
def test_steps_are_at_most_half_as_long_again_as_the_references(student, reference) -> None:
    assert step_times(student, reference).estimate <= 1.5


@pytest.mark.grading
def test_steps_are_as_fast_as_the_references(student, reference) -> None:
    assert step_times(student, reference).low <= 1.1


def test_models_that_differ_are_refused_on_all_ranks_alike(on_ranks) -> None:
    cases = {
        "other shape": "rank 2: parameter weight (3×4, float32)",
        "integers": "rank 0: parameter weight is int64",
        "fewer": "parameter bias (4, float32)",
        "none": "rank 0: the model has no parameters",
    }
    together = on_ranks(3)
    for case, words in cases.items():
        for name in ("naive", "flat", "overlapped", "bucketed"):
            for said in together.call("refused", case, name):
                assert said.startswith("UserError"), said
                assert words in said, said


@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed", "bucketed by default"])
def test_one_rank_trains_alone(on_ranks, name: str, variant: int) -> None:
    check_training(on_ranks, name, 1, variant + 1000)
