"""The search for the largest micro-batch: on one rank, on two of which one has little memory, and
what the CPU's calculation says against what the allocator gives."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from common.errors import RunFailed, UserError
from common.models.text_classifier import TextClassifier, TextClassifierConfig
from common.runtime import torch_internals
from common.runtime.group.process_group import Worker
from common.runtime.processes.ranks import current_ranks
from common.scheduling import memory_probe
from common.scheduling.memory_probe import (
    LocalStep,
    StepMemory,
    fits,
    largest_micro_batch,
    measure_step_memory,
    probe_largest_batches,
)
from common.training.recording.tracing import silence_profiler

ALONE = Worker(current_ranks({}), torch.device("cpu"), "gloo")
OUT_OF_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")


def memory_for(limit: int, tried: list[int]) -> Callable[[int], None]:
    """Makes a step that fits up to a batch size."""

    def step(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > limit:
            raise OUT_OF_MEMORY

    return step


@given(limit=st.integers(0, 300), upper_bound=st.integers(1, 200))
@settings(derandomize=True)
def test_the_largest_is_found_and_the_bound_never_exceeded(limit, upper_bound):
    tried: list[int] = []
    with pytest.MonkeyPatch.context() as patch:  # a collection each step would take seconds
        patch.setattr(gc, "collect", lambda: 0)
        found = largest_micro_batch(memory_for(limit, tried), upper_bound, lambda item: [item])
    assert found == min(limit, upper_bound)
    assert max(tried) <= upper_bound
    assert len(set(tried)) == len(tried) <= 2 * upper_bound.bit_length() + 1


def test_a_rank_that_is_done_tries_nothing_but_agrees():
    tried: list[int] = []
    rounds = iter(range(100))

    def agree(own: tuple) -> list:
        return [own, (next(rounds) == 9, None)]  # the other is done in its tenth round

    assert largest_micro_batch(memory_for(1, tried), 64, agree) == 1
    assert (next(rounds), tried) == (10, [1, 2])


def test_another_rank_that_fails_stops_this_one():
    with pytest.raises(RunFailed, match="memory probe: rank 1 failed: ValueError: no such size"):
        largest_micro_batch(
            lambda size: None, 8, lambda own: [own, (False, "ValueError: no such size")]
        )


def test_an_error_that_is_not_lack_of_memory_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        largest_micro_batch(lambda size: size / 0, 8, lambda own: [own])


def test_what_a_failed_step_held_is_freed():
    held = []

    def step(batch_size: int) -> None:
        tensor = torch.empty(batch_size)
        held.append(weakref.ref(tensor))
        raise MemoryError

    gc.disable()  # so that it is the probe which frees
    try:
        assert not fits(step, 5)
        assert held[0]() is None
    finally:
        gc.enable()


def test_an_upper_bound_below_one_is_a_mistake():
    with pytest.raises(UserError, match="probe_max_batch 0: at least 1"):
        probe_largest_batches(torch.nn.Linear(1, 1), 8, 0, ALONE)


@pytest.fixture(scope="module")
def two_ranks(rank_server) -> list[dict]:
    """Returns what each of two ranks found, of which rank 1 has 64 MiB left to write to."""
    if sys.platform != "linux":
        pytest.skip("only Linux limits a process's memory")
    done = rank_server.run(Path(__file__).with_name("probe_worker.py"), ranks=2, timeout_s=60)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return [json.loads(output) for output in done.stdout]


@pytest.mark.two_ranks
def test_ranks_agree_where_memory_ends_on_one_of_them(two_ranks):
    # A text takes 7 MiB, of which rank 1 has 64; 16 are the upper bound.
    first, second = two_ranks
    assert first["largest"] == second["largest"]
    plenty, little = first["largest"]
    assert plenty == 16
    assert little in (8, 9)
    # The calculation leaves a margin of a tenth and knows nothing of the search.
    assert first["calculated"] == second["calculated"] == [16, 8]


@pytest.mark.two_ranks
def test_nothing_is_left_of_the_search(two_ranks):
    for found in two_ranks:
        assert found["gradients"] == 0
        assert found["random_state_is_the_same"]
        assert found["kept_mib"] < 10  # the searches of rank 0 took 112 and 28


@pytest.mark.two_ranks
def test_ranks_end_together_where_one_fails(two_ranks):
    assert [found["broken"].splitlines()[0] for found in two_ranks] == [
        "RunFailed: memory probe: rank 1 failed: ValueError: no such size",
        "ValueError: no such size",
    ]
    for name in ("none_fits", "none_fits_by_calculation"):
        for found in two_ranks:
            assert found[name] == (
                "UserError: max_length 1536: not even one such text fits in the memory of rank 1; "
                "give a smaller --max_length or a smaller model"
            )


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("precision", [nullcontext, autocast])
@pytest.mark.parametrize("vocabulary", [100, 20000])  # its gradient is the peak of a small batch
def test_the_calculation_says_what_the_allocator_gives(vocabulary, precision):
    # PyTorch's allocator, as the profiler sees it, knows nothing of operators; and no batch of
    # these sizes was followed.
    silence_profiler(torch.device("cpu"))
    sizes = TextClassifierConfig(vocabulary, 2, 64, d_model=64, n_head=4, n_layer=2, d_ff=256)
    model = TextClassifier(sizes)
    step = LocalStep(model, 64, ALONE, precision=precision)
    step(8)  # buffers that a first step makes
    memory = measure_step_memory(step, model)
    for batch_size in (4, 16):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(batch_size)
        peak = max(itertools.accumulate(torch_internals.memory_changes(profiler)))
        # What kernels need inside is not followed: those of bfloat16 need some on a CPU.
        tolerance = 0.005 if precision is nullcontext else 0.08
        assert memory.peak_bytes(batch_size) == pytest.approx(peak, rel=tolerance)


def test_a_step_holds_the_optimizer_states_and_no_buckets_beside_the_gradients():
    model = torch.nn.Linear(10, 10, bias=False)
    two = dataclasses.replace(ALONE, ranks=dataclasses.replace(ALONE.ranks, world_size=2))
    assert LocalStep(model, 8, ALONE).besides_bytes == 2 * 400  # AdamW's two averages
    assert LocalStep(model, 8, two, optimizer_states=1).besides_bytes == 400


def test_the_largest_batch_of_a_limit_is_the_largest():
    # At first fixed memory is the most, 150 beside 2 a text, and from 9 texts 10 a text beside 80.
    memory = StepMemory(100, np.array([80, 150]), np.array([10, 2]))
    assert [memory.peak_bytes(size) for size in (1, 8, 9, 20)] == [252, 266, 270, 380]
    for limit in range(200, 400, 7):
        largest = memory.largest_batch(limit, 20)
        assert largest == 0 or memory.peak_bytes(largest) <= limit
        assert largest == 20 or memory.peak_bytes(largest + 1) > limit


@given(
    available=st.integers(0, 2**40),
    limit=st.one_of(st.none(), st.integers(0, 2**40)),
    ranks=st.integers(1, 16),
)
def test_a_rank_has_its_share_up_to_its_own_limit(available, limit, ranks):
    own = float("inf") if limit is None else limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_probe, "available_memory_bytes", lambda: available)
        patch.setattr(memory_probe, "_below_own_limit_bytes", lambda: own)
        given = memory_probe.rank_limit_bytes(ranks)
    assert given <= 0.9 * own
    assert ranks * given <= 0.9 * available
