"""Contention: planted slowdowns are found again in one run; where they cannot be, it says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from perfmodel_support import MIB, make_profile, refused

from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.contention import (
    LARGEST_SLOWDOWN,
    OverlappedRun,
    fit_contention,
    split_lost_compute,
)
from common.perfmodel.profile import DdpCosts
from common.perfmodel.samples import OverlapSamples
from common.perfmodel.simulator import simulate_backward

PROFILE = make_profile([MIB] * 20, np.arange(1, 21) * 0.05)  # 20 MiB in 1 s
COPIES = DdpCosts(copy_in_s_per_byte=1e-9, copy_out_s_per_byte=2e-9)
PACED = DdpCosts(1e-9, 2e-9, lost_compute=((1e6, 1e7), (0.1, 1.0)))
FAST, SLOW = AlphaBeta(0.001, 40e6), AlphaBeta(0.001, 8e6)  # 0.5 s and 2.6 s of all-reduces


def run_of(network, costs: DdpCosts, cap_mib: float, *, ends: bool = False) -> OverlappedRun:
    """What a machine with these costs would measure, in five passes with a little noise."""
    timeline = simulate_backward(PROFILE, network, cap_mib, costs=costs)
    noise = np.array([0.998, 1.001, 1.0, 0.999, 1.002])
    return OverlappedRun(
        timeline.total_s * noise,
        timeline.compute_end_s * noise if ends else (),
        DdpOptions(cap_mib),
    )


@pytest.mark.parametrize("s", [1.0, 1.2, 1.7])
@pytest.mark.parametrize("r", [1.0, 1.5])
def test_a_planted_slowdown_is_found_in_one_run_and_holds_for_all_caps(s, r):
    planted = DdpCosts(1e-9, 2e-9, communication_slowdown=r, compute_slowdown=s)
    given = DdpCosts(1e-9, 2e-9, communication_slowdown=r)
    fit = fit_contention(PROFILE, FAST, run_of(FAST, planted, 2), given, noise=1e-3)
    assert fit.identified
    assert fit.compute_slowdown == pytest.approx(s, abs=0.01)
    low, high = fit.compute_range
    assert low <= s + 1e-3
    assert high >= s - 1e-3
    for cap in (1, 5, 10, 20):
        expected = simulate_backward(PROFILE, FAST, cap, costs=planted).total_s
        found = simulate_backward(PROFILE, FAST, cap, costs=fit.costs).total_s
        assert found == pytest.approx(expected, rel=0.01)


def test_a_communication_bound_run_does_not_tell_the_slowdown_and_what_was_measured_stays():
    planted = DdpCosts(1e-9, 2e-9, compute_slowdown=1.4)
    fit = fit_contention(PROFILE, SLOW, run_of(SLOW, planted, 2), PACED)
    assert not fit.identified
    low, high = fit.compute_range
    assert low == 1.0
    assert high > 1.9
    assert fit.costs == PACED
    assert "cannot be told" in fit.note
    assert "measured apart stays" in fit.note
    assert "none is assumed" in fit_contention(PROFILE, SLOW, run_of(SLOW, planted, 2)).note


def test_the_end_of_computation_tells_both_slowdowns_where_communication_is_critical():
    planted = DdpCosts(1e-9, 2e-9, communication_slowdown=1.3, compute_slowdown=1.4)
    run = run_of(SLOW, planted, 2, ends=True)
    fit = fit_contention(PROFILE, SLOW, run, COPIES, noise=1e-3)
    assert fit.identified
    assert fit.compute_slowdown == pytest.approx(1.4, abs=0.02)
    assert fit.communication_slowdown == pytest.approx(1.3, abs=0.02)


def test_where_computation_is_critical_its_end_tells_what_a_second_of_all_reduce_takes_from_it():
    planted = DdpCosts(1e-9, 2e-9, communication_slowdown=1.3, compute_slowdown=1.4)
    run = run_of(FAST, planted, 2, ends=True)
    fit = fit_contention(PROFILE, FAST, run, COPIES, noise=1e-3)
    assert fit.identified
    assert fit.communication_slowdown == 1.0  # as given: nothing contradicts it
    lost = [
        costs.communication_slowdown * (1 - 1 / costs.compute_slowdown)
        for costs in (planted, fit.costs)
    ]
    assert lost[1] == pytest.approx(lost[0], abs=0.02)
    for cap in (1, 5):
        expected = simulate_backward(PROFILE, FAST, cap, costs=planted).total_s
        found = simulate_backward(PROFILE, FAST, cap, costs=fit.costs).total_s
        assert found == pytest.approx(expected, rel=0.01)


def test_a_run_that_is_faster_than_the_model_has_no_contention():
    timeline = simulate_backward(PROFILE, FAST, 2, costs=COPIES)
    run = OverlappedRun([0.95 * timeline.total_s], options=DdpOptions(2))
    fit = fit_contention(PROFILE, FAST, run, COPIES)
    assert fit.compute_slowdown == 1.0
    assert fit.costs == COPIES


def test_a_run_slower_than_any_slowdown_explains_is_not_explained():
    run = OverlappedRun([100.0], options=DdpOptions(2))
    fit = fit_contention(PROFILE, FAST, run, PACED)
    # The range is a point at the end of the search: nothing was found there.
    assert fit.compute_slowdown == LARGEST_SLOWDOWN
    assert not fit.identified
    assert fit.costs == PACED


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), ["no backward pass"]),
        (([1.0, -1.0],), ["T", "above 0"]),
        (([np.nan],), ["T"]),
        (([1.0], [0.0]), ["end of computation"]),
        (([1.0], [2.0]), ["after the backward pass"]),
    ],
)
def test_an_impossible_run_is_refused(arguments, words):
    with refused("overlapped run", *words):
        OverlappedRun(*arguments)


# --- from the raw arms ---------------------------------------------------------------------------


def samples(beside_s: float, until_done_s: float, done: float) -> OverlapSamples:
    """Passes of 2 s; beside them four all-reduces without pause, which alone take 4 s."""
    return OverlapSamples(
        bookkeeping_s=np.full(3, 0.2),
        paced_s={},
        continuous_s={10.0: np.array([[[beside_s] * 3], [[until_done_s] * 3]])},
        all_reduce_s={10.0: np.array([[4.0] * 3])},
        local_s=np.full(3, 2.0),
        gradient_bytes=100.0,
        done={10.0: np.full(3, done)},
        messages={10.0: 4.0},
    )


def test_saturation_is_worked_out_by_hand():
    # The pass takes 3 s instead of 2. What is left of the all-reduces then takes 2.5 s, so 1.5 of
    # the four were done, one of them whole: each took 2 s instead of 1, and cost 1 s / 1.5.
    costs = samples(3.0, 5.5, done=1).saturated_costs()
    assert costs.slowdowns == ((10.0,), (pytest.approx(2.0),))
    assert costs.lost_compute == ((10.0,), (pytest.approx(1 / 1.5),))
    assert costs.copy_in_s_per_byte == pytest.approx(0.2 / 2 / 100)


def test_what_was_counted_bounds_what_the_time_says():
    # By time none was done, but three were seen to be; by time all were, but no more than two can
    # be under way besides the one that was counted.
    assert samples(3.0, 9.0, done=3).saturated_costs().lost_compute[1] == (pytest.approx(1 / 3),)
    assert samples(3.0, 3.0, done=1).saturated_costs().lost_compute[1] == (pytest.approx(1 / 3),)


def test_all_reduces_that_were_done_before_the_pass_was_are_not_called_slow():
    assert samples(8.0, 8.0, done=3).costs().communication_slowdown == pytest.approx(8 / 4)
    seen_to_end = samples(8.0, 8.0, done=4)
    assert seen_to_end.costs().communication_slowdown == 1.0
    assert seen_to_end.costs(np.array([2, 0, 0])).communication_slowdown == 1.0
    assert seen_to_end.saturated_costs().slowdowns == ((10.0,), (1.0,))


def test_rounds_that_are_drawn_are_asked_for_their_own_counts():
    counted = replace(samples(8.0, 8.0, done=4), done={10.0: np.array([4.0, 3.0, 3.0])})
    assert counted.costs(np.array([0, 0, 0])).communication_slowdown == 1.0
    assert counted.costs(np.array([1, 2, 1])).communication_slowdown == pytest.approx(2.0)


def test_a_pass_that_is_no_slower_loses_nothing():
    costs = samples(1.9, 4.0, done=2).saturated_costs()
    assert costs.lost_compute == ((10.0,), (0.0,))


def test_without_counts_nothing_is_made_of_them():
    with refused("overlap samples", "not counted"):
        replace(samples(3.0, 5.5, done=1), done={}).saturated_costs()


def test_lost_computation_splits_into_a_launch_and_a_slowdown():
    # An all-reduce of S bytes takes S seconds alone and 0.25 + 0.5·S from computation.
    network = AlphaBeta(0.0, 1.0)
    lost = DdpCosts(communication_slowdown=2.0, lost_compute=((1.0, 2.0, 4.0), (0.75, 1.25, 2.25)))
    split = split_lost_compute(lost, network)
    assert split.lost_compute is None
    assert split.launch_s == pytest.approx(0.25)
    # Beside computation it lasts 2·S, of which computation loses 0.5·S: s = 2 / 1.5.
    assert split.compute_slowdown == pytest.approx(2 / 1.5)
    # Far from the end of the pass both say the same.
    profile = make_profile([2, 2], [1.0, 100.0], tail_s=100.0)
    for costs in (lost, split):
        timeline = simulate_backward(profile, network, 2 / MIB, costs=costs)
        assert timeline.compute_end_s == pytest.approx(200 + 2 * 1.25)


@pytest.mark.parametrize(
    ("lost_s", "launch_s", "slowdown"),
    [
        ((2.0, 1.0), 1.5, 1.0),  # less for a longer one: noise, no slowdown
        ((0.5, 2.0), 0.0, 1 / (1 - 0.9)),  # no launch below 0: a line through the origin
        ((5.0, 10.0), 0.0, LARGEST_SLOWDOWN),  # more than the all-reduce lasts
    ],
)
def test_neither_part_of_the_split_is_below_zero(lost_s, launch_s, slowdown):
    split = split_lost_compute(DdpCosts(lost_compute=((1.0, 2.0), lost_s)), AlphaBeta(0.0, 1.0))
    assert split.launch_s == pytest.approx(launch_s)
    assert split.compute_slowdown == pytest.approx(min(slowdown, LARGEST_SLOWDOWN))


def test_splitting_what_was_not_measured_is_refused():
    with refused("nothing to split"):
        split_lost_compute(COPIES, FAST)
