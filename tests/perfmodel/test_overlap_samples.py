"""Contention from passes beside all-reduces without pause, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.perfmodel.samples import BesideMessages, OverlapSamples


def samples(beside_s: float, until_done_s: float, done: float) -> OverlapSamples:
    """Makes passes of 2 s; beside them four all-reduces without pause, which alone take 4 s."""
    beside = BesideMessages(
        messages=4.0,
        backward_s=np.full(3, beside_s),
        until_done_s=np.full(3, until_done_s),
        alone_s=np.full(3, 4.0),
        done=np.full(3, float(done)),
    )
    return OverlapSamples(
        bookkeeping_s=np.full(3, 0.2),
        local_s=np.full(3, 2.0),
        gradient_bytes=100.0,
        beside={10.0: beside},
    )


def test_contention_is_worked_out_by_hand():
    # The pass takes 3 s instead of 2. What is left of the all-reduces then takes 2.5 s, so 1.5 of
    # the four were done, one of them whole: each took 2 s instead of 1, and cost 1 s / 1.5.
    costs = samples(3.0, 5.5, done=1).costs()
    assert costs.delays == ((10.0,), (pytest.approx(1.0),))
    assert costs.lost_compute == ((10.0,), (pytest.approx(1 / 1.5),))
    assert costs.copy_in_s_per_byte == costs.copy_out_s_per_byte == pytest.approx(0.2 / 2 / 100)


def test_what_was_counted_bounds_what_the_time_says():
    # By time none was done, but three were seen to be; by time all were, but no more than two can
    # be under way besides the one that was counted.
    assert samples(3.0, 9.0, done=3).costs().lost_compute[1] == (pytest.approx(1 / 3),)
    assert samples(3.0, 3.0, done=1).costs().lost_compute[1] == (pytest.approx(1 / 3),)


@pytest.mark.parametrize(("backend", "most"), [("nccl", 1), ("gloo", 2), (None, 2)])
def test_contention_that_was_made_is_found_with_as_many_under_way_as_the_backend_has(backend, most):
    # Each of the four costs 1 s and takes 2 instead of 1. One was counted in a pass of 2 + 1 · n s,
    # n with those under way, and the time after it says that more were done.
    told = replace(samples(2.0 + 1 + most, 3.0 + most, done=1), backend=backend).costs()
    assert told.lost_compute[1] == (pytest.approx(1.0),)
    assert told.delays[1] == (pytest.approx((3 + most) / (1 + most) - 1),)


def test_a_bucket_takes_time_from_the_host_where_launches_were_hidden_from_the_other_passes():
    measured = replace(samples(3.0, 5.5, done=1), per_bucket_s=np.array([0.01, 0.03, 0.02]))
    assert measured.costs().launch_s == 0
    over_nccl = replace(measured, launches_hidden=True)
    assert over_nccl.costs().launch_s == 0.02
    assert over_nccl.costs(np.array([1, 1, 0])).launch_s == 0.03
    assert replace(over_nccl, per_bucket_s=np.full(3, -0.01)).costs().launch_s == 0


def test_what_computation_loses_is_told_by_all_reduces_that_are_launched_as_ddp_does():
    # Two of four were done in 5 s instead of 2: 1.5 s each. Their own delay stays that of
    # all-reduces without pause.
    without_pause = samples(3.0, 5.5, done=1)
    as_ready = samples(5.0, 7.0, done=2).beside[10.0]
    costs = replace(without_pause, launched={10.0: as_ready}).costs()
    assert costs.lost_compute == ((10.0,), (pytest.approx(1.5),))
    assert costs.delays == without_pause.costs().delays


def test_all_reduces_that_were_done_before_the_pass_was_are_not_called_slow():
    seen_to_end = samples(8.0, 8.0, done=4).costs()
    assert seen_to_end.delays == ((10.0,), (0.0,))
    assert seen_to_end.lost_compute == ((10.0,), (pytest.approx(6 / 4),))


def test_rounds_that_are_drawn_are_asked_for_their_own_times_and_counts():
    counted = samples(8.0, 8.0, done=4)
    beside = replace(counted.beside[10.0], done=np.array([4.0, 3.0, 3.0]))
    counted = replace(counted, beside={10.0: beside}, bookkeeping_s=np.array([0.2, 0.6, 1.0]))
    assert counted.costs(np.array([0, 0, 0])).delays[1] == (0.0,)
    # Three counted, and by time the fourth, too: each took 2 s.
    assert counted.costs(np.array([1, 2, 1])).delays[1] == (pytest.approx(1.0),)
    assert counted.costs(np.array([1, 2, 1])).copy_in_s_per_byte == pytest.approx(0.6 / 2 / 100)


@pytest.mark.parametrize("difference_s", [-0.7, 0.2, 3.0])
def test_copies_are_those_recorded_whatever_two_noisy_passes_differ_by(difference_s):
    noisy = replace(samples(3.0, 5.5, done=1), bookkeeping_s=np.full(3, difference_s))
    recorded = replace(noisy, copy_out_s=np.array([0.05, 0.04, 9.0]))
    costs = recorded.costs()
    assert costs.copy_in_s_per_byte == costs.copy_out_s_per_byte == pytest.approx(0.05 / 100)
    assert recorded.costs(np.array([1, 1, 0])).copy_out_s_per_byte == pytest.approx(0.04 / 100)


def test_where_ddp_recorded_nothing_half_of_what_it_adds_is_copies_out():
    unknown = replace(samples(3.0, 5.5, done=1), copy_out_s=np.full(3, np.nan))
    assert unknown.costs() == samples(3.0, 5.5, done=1).costs()


def test_what_was_not_counted_is_told_by_time_alone():
    # As in the first test, where the count agrees with the time.
    assert samples(3.0, 5.5, done=float("nan")).costs() == samples(3.0, 5.5, done=1).costs()
