"""Settings with short caps, and plans that stay within what they may cost."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.perfmodel.buckets import short_cap
from common.tuning.ddp_setting import DdpSetting
from common.tuning.tune_settings import TuneSettings
from common.tuning.visit_plan import (
    FEWEST_FINAL,
    MOST_FINAL,
    MOST_WITH_TIME_LEFT,
    ROUNDS_PER_LEVEL,
    plan_visits,
    rounds_with_time_left,
    successive_halving,
    with_final_rounds,
)


@given(low=st.integers(1, 2**40), more=st.integers(0, 2**40))
def test_a_short_cap_is_one_of_the_interval(low, more):
    cap = short_cap(low, low + more)
    assert low <= int(cap * 2**20) <= low + more


def test_a_wide_interval_needs_one_digit():
    assert short_cap(2 * 2**20, 32 * 2**20) == 8
    assert short_cap(26 * 2**20, 27 * 2**20) == 26
    assert short_cap(1, 1) * 2**20 >= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"cap_mib": 0},
        {"cap_mib": 4, "first_mib": -1},
        {"first_mib": 1},
        {"compression": "fp8"},
        {"accumulation": 0},
    ],
)
def test_settings_that_ddp_would_not_take_are_refused(wrong):
    with pytest.raises(UserError):
        DdpSetting(**wrong)


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf")])
def test_a_share_is_a_share(share):
    with pytest.raises(UserError, match="share"):
        TuneSettings(share=share)


@given(
    visits=st.integers(-50, 400),
    candidates=st.integers(1, 8),
    options=st.lists(st.integers(1, 3), max_size=2),
)
def test_a_plan_stays_within_its_visits_or_is_the_poorest(visits, candidates, options):
    plan = plan_visits(visits, candidates, options)
    # a level visits its candidates and the default, the end two settings and the options
    counted = sum((n + 1) * ROUNDS_PER_LEVEL for n in plan.levels)
    counted += plan.final_rounds * (2 + sum(plan.options))
    assert plan.visits == counted
    poorest = plan.levels == () and plan.final_rounds == FEWEST_FINAL and not plan.options
    assert counted <= visits or poorest
    assert FEWEST_FINAL <= plan.final_rounds <= MOST_FINAL
    assert list(plan.options) == options[: len(plan.options)]
    assert all(a > b for a, b in itertools.pairwise(plan.levels))
    assert not plan.levels or plan.levels[0] <= candidates


@given(visits=st.integers(0, 300), left=st.floats(-10, 300))
def test_the_end_of_a_plan_fits_into_what_is_left(visits, left):
    plan = plan_visits(visits, 8, (1, 2))
    shorter = with_final_rounds(plan, left)
    assert shorter.levels == plan.levels
    assert shorter.options == plan.options[: len(shorter.options)]
    assert shorter.final_rounds <= plan.final_rounds
    ends = shorter.final_rounds * (2 + sum(shorter.options))
    assert ends <= left or (shorter.final_rounds, shorter.options) == (FEWEST_FINAL, ())


@given(done=st.integers(FEWEST_FINAL, MOST_FINAL), left=st.floats(-100, 300))
def test_rounds_with_time_left_fit_into_it(done, left):
    more = rounds_with_time_left(done, left)
    assert 0 <= 2 * more <= max(0, left)
    assert done + more <= MOST_WITH_TIME_LEFT
    # one more would not fit, or is not wanted
    assert 2 * (more + 1) > left or done + more == MOST_WITH_TIME_LEFT


@given(visits=st.integers(0, 300), more=st.integers(0, 100))
def test_more_visits_never_make_a_poorer_choice(visits, more):
    fewer, plan = plan_visits(visits, 8, (1, 2)), plan_visits(visits + more, 8, (1, 2))
    assert sum(plan.levels) >= sum(fewer.levels)


@pytest.mark.parametrize("reference", [None, "default"])
def test_halving_ranks_by_all_rounds_so_far_and_puts_what_died_behind(reference):
    """A round is twice as slow for all; b is the fastest of its level, and then a in two rounds."""
    seconds = {
        0: [{"default": 9, "a": 5, "b": 4, "c": 7}, {"default": 18, "a": 10, "b": 8, "c": 14}],
        1: [{"default": 9, "a": 2, "b": 4}, {"default": 18, "a": 4, "b": 8}],
    }
    visited, rows = [], []

    def times_after(level, arms):
        visited.append(arms)
        rows.extend(seconds[level])
        return pd.DataFrame(rows)

    ranked = successive_halving(
        ["a", "dead", "b", "c", "later"], [4, 2], times_after, str, reference
    )
    assert visited == [["a", "dead", "b", "c"], ["b", "a"]]
    assert ranked == ["a", "b", "c", "dead", "later"]
