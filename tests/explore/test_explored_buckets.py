"""What the explorer computes of buckets, against brute force and closed forms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from explore_support import MIB, small_system

from common.errors import NotYetWritten, UserError
from common.exercises.bucket_assignment import assign_buckets
from common.exercises.bucket_time import backward_time_s
from common.explore import buckets
from common.explore.buckets import (
    BucketSettings,
    cap_curve,
    efficiency,
    explore,
    falls_below,
    first_settings,
    placed,
    with_contention,
)
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.perfetto_trace import in_flight_lanes

CONTENTION = DdpCosts(
    copy_in_s_per_byte=1e-10,
    lost_compute=((1e5, 1e7), (1e-4, 4e-3)),
    delays=((1e5, 1e7), (2e-4, 1e-3)),
)


def by_hand_s(settings: BucketSettings, cap_bytes: int) -> float:
    """Computes T at a cap by the exercise's recurrence, with a line for the all-reduces."""
    profile = small_system().start.model.profile
    ready_s = profile.ready_s * settings.compute
    found = assign_buckets(profile.sizes_bytes.tolist(), cap_bytes)
    # A ring: latency grows with n − 1, the share of the bytes is (n − 1) / n; measured on 4.
    latency = settings.alpha_us * 1e-6 * (settings.ranks - 1) / 3
    share = ((settings.ranks - 1) / settings.ranks) / (3 / 4)
    # The curve's shortest time is that of 1,000 bytes, which it is for all smaller ones.
    return backward_time_s(
        profile.sizes_bytes.tolist(),
        ready_s.tolist(),
        found,
        lambda size: latency + (size - 1000) * share / (settings.beta_gb_per_s * 1e9),
    )


@pytest.mark.parametrize(
    "moved",
    [{}, {"alpha_us": 9000.0}, {"beta_gb_per_s": 0.3}, {"ranks": 64}, {"compute": 0.4, "ranks": 2}],
    ids=str,
)
def test_no_cap_of_brute_force_is_faster_than_b_star(moved: dict) -> None:
    system = small_system()
    settings = replace(first_settings(system, 2.0), **moved)
    view = explore(system, settings)
    total = system.start.model.profile.total_bytes
    times = {cap: by_hand_s(settings, cap) for cap in range(1, total + 1, total // 400)}
    assert view.best.total_s <= min(times.values()) * (1 + 1e-9)
    assert view.best.total_s == pytest.approx(
        by_hand_s(settings, int(view.best.cap_mib * MIB)), rel=1e-9
    )
    assert view.timeline.total_s == pytest.approx(by_hand_s(settings, 2 * MIB), rel=1e-9)
    for cap, time in times.items():
        assert view.best.predicted_s(cap / MIB) == pytest.approx(time, rel=1e-9)


def test_alpha_and_beta_are_those_of_both_ends_of_the_curve() -> None:
    line = small_system().line
    assert line.alpha_s == pytest.approx(1e-3 + 1e3 / 1e9)
    assert line.bandwidth_bytes_per_s == pytest.approx(1e9)


def test_settings_that_move_nothing_change_nothing() -> None:
    system = small_system(CONTENTION)
    same = placed(system, first_settings(system, 1.0)).model
    assert same.network is system.start.model.network
    assert same.costs == CONTENTION
    known = system.start.model.best_cap()
    assert explore(system, first_settings(system, 1.0)).best.cap_mib == known.cap_mib


def test_contention_is_scaled_and_copies_stay() -> None:
    assert with_contention(CONTENTION, 1.0) == CONTENTION
    none = with_contention(CONTENTION, 0.0)
    assert (none.lost_compute[1], none.delays[1]) == ((0.0, 0.0), (0.0, 0.0))
    assert none.copy_in_s_per_byte == CONTENTION.copy_in_s_per_byte
    twice = with_contention(CONTENTION, 2.0)
    assert twice.delays[1] == pytest.approx((4e-4, 2e-3))
    system = small_system(CONTENTION)
    times = [
        explore(system, replace(first_settings(system, 2.0), contention=much)).timeline.total_s
        for much in (0.0, 1.0, 3.0)
    ]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_efficiency_is_one_ranks_step_over_the_step() -> None:
    system = small_system()
    settings = replace(first_settings(system, 2.0), compute=2.0)
    found = efficiency(system, settings, 2.0, ranks=(2, 16))
    alone_s = 2 * (0.02 + system.alone.local_backward_s) + 0.005
    steps = [2 * 0.02 + by_hand_s(replace(settings, ranks=n), 2 * MIB) + 0.005 for n in (2, 16)]
    assert found == pytest.approx([1.0, alone_s / steps[0], alone_s / steps[1]], rel=1e-9)
    view = explore(system, settings)
    first = falls_below(view, 0.8)
    place = view.ranks.index(first)
    assert view.at_cap[place] < 0.8 <= view.at_cap[place - 1]


def test_a_system_of_any_number_of_ranks_has_its_own_among_those_shown() -> None:
    system = replace(small_system(), ranks=6)
    view = explore(system, first_settings(system, 4.0))
    assert view.ranks[:5] == (1, 2, 4, 6, 8)
    assert len(view.at_cap) == len(view.ranks)


def test_the_curve_has_every_bucketing_and_marks_those_near_the_best() -> None:
    system = small_system()
    best = explore(system, first_settings(system, 2.0)).best
    caps, times_ms, near_ms = cap_curve(best)
    assert (np.diff(caps) >= 0).all()
    assert caps[0] == 1 / 16
    for cap, time, near in zip(caps, times_ms, near_ms, strict=True):
        assert time == pytest.approx(best.predicted_s(cap) * 1e3)
        assert np.isnan(near) == (time > best.total_s * 1e3 * 1.01)


def test_all_reduces_of_one_lane_do_not_overlap() -> None:
    system = small_system()
    model = replace(system.start.model, in_flight=2)
    timeline = model.at_cap(1.0)
    found = in_flight_lanes(timeline.events)
    assert set(found) == {0, 1}
    for lane in (0, 1):
        own = [event for event, where in zip(timeline.events, found, strict=True) if where == lane]
        for one, after in itertools.pairwise(own):
            assert one.end_s <= after.start_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "changed",
    [{"ranks": 1}, {"alpha_us": 0.0}, {"cap_mib": -1.0}, {"contention": float("nan")}],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(changed: dict) -> None:
    with pytest.raises(UserError):
        replace(first_settings(small_system(), 1.0), **changed)


def test_what_needs_an_unwritten_task_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(*_: object, **__: object) -> None:
        raise NotYetWritten("A2.3")

    system = small_system()
    monkeypatch.setattr("common.perfmodel.ddp.bucketings.walk_bucketings", not_there)
    view = explore(system, first_settings(system, 2.0))
    assert view.unwritten == ("A2.3",)
    assert (view.best, view.at_best) == (None, None)
    assert view.timeline.num_buckets > 1
    assert len(view.at_cap) == len(buckets.RANKS) + 1
