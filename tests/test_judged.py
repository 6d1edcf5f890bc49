"""What is said of simulated measurements whose truth is known, with this project's own noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from command_line import ROOT
from numpy.typing import NDArray
from scipy import stats

from common.judged import DISTURBED, Judged, Verdict, compared, fastest, rival_of
from common.samples import CONFIDENCE, LEAST_ROUNDS, Interval, per_round, widest

SWEEP = ("ddp_benchmark/ddp-times.csv", "backward_time_ms", "bucket_cap_mib")
RECORDED = (
    ("assignment2", *SWEEP),
    ("assignment2/emulated-2x2gbit", *SWEEP),
    ("assignment0", "options/options-times.csv", "step_time_ms", "arm"),
)
PAGES = 250


def recorded_noise() -> list[NDArray]:
    """Returns what recorded rounds are off by, in logarithms: without arms' and rounds' means."""
    pools = []
    for folder, name, column, arm in RECORDED:
        samples = pd.read_csv(ROOT / "data" / "epyc-2-cores" / folder / name)
        logs = np.log(per_round(samples.assign(rank=0), column, arm).dropna()).to_numpy()
        rounds, arms = logs.shape
        left = logs - logs.mean(axis=1, keepdims=True)
        left -= left.mean(axis=0)
        # Taking means away makes residuals smaller than the noise that they come from.
        pools.append(left.ravel() * math.sqrt(rounds * arms / ((rounds - 1) * (arms - 1))))
    return pools


NOISE = recorded_noise()


def pages(rounds: int, arms: int, faster: float = 0.0, count: int = PAGES) -> list[pd.DataFrame]:
    """Draws the times of so many tables; arm 0 of each takes less than the others by ``faster``."""
    draw = np.random.default_rng(rounds * 100 + arms)
    tables = []
    for page in range(count):
        noise = draw.choice(NOISE[page % len(NOISE)], size=(rounds, arms))
        rounds_slow = draw.normal(0, 0.1, size=(rounds, 1))  # slow for all arms alike
        times = 100 * np.exp(noise + rounds_slow)
        times[:, 0] /= 1 + faster
        tables.append(pd.DataFrame(times))
    return tables


def upper_limit(share: float, count: int = PAGES) -> float:
    """Returns the number that a share of so many pages exceeds once in a thousand studies."""
    return float(stats.binom.ppf(0.999, count, share))


@pytest.mark.parametrize(
    ("rounds", "arms"),
    [
        (4, 8),
        *(
            pytest.param(rounds, arms, marks=pytest.mark.slow)
            for rounds, arms in ((4, 2), (6, 4), (8, 4))
        ),
    ],
)
def test_where_nothing_differs_few_tables_say_that_something_does(rounds: int, arms: int) -> None:
    drawn = pages(rounds, arms)
    best = sum(fastest(times).lead.is_settled for times in drawn)
    any_told = sum(any(one.is_settled for one in compared(times, 0).values()) for times in drawn)
    assert best <= upper_limit(1 - CONFIDENCE)
    assert any_told <= upper_limit(1 - CONFIDENCE)


@pytest.mark.parametrize(
    ("arms", "half_width"),
    [(2, 0.05), pytest.param(4, 0.03, marks=pytest.mark.slow)],
)
def test_rounds_that_go_on_by_width_alone_make_no_differences(arms: int, half_width: float) -> None:
    enough = []
    for times in pages(18, arms):
        counts = range(LEAST_ROUNDS, len(times) + 1)
        narrow = (count for count in counts if widest(times[:count]) <= half_width)
        enough.append(times[: next(narrow, len(times))])
    assert {len(times) for times in enough} - {18}  # some end before the time is up
    best = sum(fastest(times).lead.is_settled for times in enough)
    any_told = sum(any(one.is_settled for one in compared(times, 0).values()) for times in enough)
    assert best <= upper_limit(1 - CONFIDENCE)
    assert any_told <= upper_limit(1 - CONFIDENCE)


@pytest.mark.parametrize(
    ("rounds", "arms", "faster", "share"),
    [
        (6, 2, 0.1, 0.9),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((12, 7, 0.05, 0.4), (4, 4, 0.2, 0.9))
        ),
    ],
)
def test_a_planted_difference_is_settled_and_the_right_arm_named(
    rounds: int, arms: int, faster: float, share: float
) -> None:
    found = [fastest(times) for times in pages(rounds, arms, faster)]
    settled = [one for one in found if one.lead.is_settled]
    assert len(settled) >= share * PAGES
    wrong = sum(one.arm != 0 for one in settled)
    assert wrong <= upper_limit(1 - CONFIDENCE)
    assert all(one.tied == (one.arm,) for one in settled)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_of_few_rounds_nothing_is_settled_however_large_the_difference(rounds: int) -> None:
    times = pd.DataFrame({"a": [100.0, 101.0, 102.0], "b": [300.0, 301.0, 306.0]})[:rounds]
    found = fastest(times)
    assert found.arm == "a"
    assert found.lead.verdict is Verdict.OPEN
    assert found.tied == ("a", "b")
    assert found.lead.said == f"not settled: {4 - rounds} more round{'s' * (rounds < 3)}"


def test_what_is_said_is_students_interval_of_the_logarithms_of_ratios() -> None:
    [times] = pages(6, 3, count=1)
    said = compared(times, 0)[2]
    logs = np.log(times[2] / times[0])
    low, high = stats.ttest_1samp(logs, 0).confidence_interval(1 - 0.05 / 2)  # two comparisons
    assert (said.interval.low, said.interval.high) == pytest.approx((np.exp(low), np.exp(high)))
    assert said.estimate == pytest.approx(np.exp(logs.mean()))


def test_rounds_that_lack_an_arm_are_left_out_and_an_arm_without_any_is_not_measured() -> None:
    [times] = pages(6, 3, 0.5, count=1)
    times.loc[0, 1] = np.nan
    times[3] = np.nan
    against = compared(times, 0)
    assert against[1].rounds == 5
    assert against[3].verdict is Verdict.NOT_MEASURED
    assert fastest(times).tied == (0,)
    assert fastest(times[[0]]) is None


def test_a_disturbed_machine_has_no_verdict_but_on_what_was_not_measured() -> None:
    clear = Interval(2.0, 1.9, 2.1, rounds=8)
    assert Judged(clear).is_settled
    assert Judged(clear, machine=DISTURBED).verdict is Verdict.DISTURBED
    nothing = Interval(math.nan, math.nan, math.nan)
    assert Judged(nothing, machine=DISTURBED).verdict is Verdict.NOT_MEASURED


def test_a_level_is_settled_by_its_rounds_alone() -> None:
    level = Interval(1.0, 0.9, 1.1, rounds=6)
    assert Judged(level, null=None).is_settled
    assert Judged(level).verdict is Verdict.HIDDEN


def test_as_many_rounds_as_are_said_to_settle_a_difference_do() -> None:
    values = np.log(1.05) + np.array([-0.08, 0.08] * 4)
    interval = Interval(1.0, 1.0, 1.0)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    interval = Interval(float(np.exp(values.mean())), np.exp(low), np.exp(high), rounds=8)
    asked = Judged(interval).rounds_to_settle
    repeated = np.resize(values, asked + asked % 2)
    assert stats.ttest_1samp(repeated, 0).confidence_interval(0.95).low > 0
    fewer = np.resize(values, asked // 2)
    assert stats.ttest_1samp(fewer, 0).confidence_interval(0.95).low < 0
    assert Judged(Interval(1.0001, 0.9, 1.1, rounds=8)).rounds_to_settle is None
    # Where rounds lack as well, what is said counts from those that there are.
    few = Judged(replace(interval, rounds=8), least_rounds=9)
    assert few.said == f"not settled: {few.rounds_to_settle - 8} more rounds"
    assert Judged(interval).said == "hidden by noise"


def test_an_arm_whose_name_is_no_number_is_an_arm_like_others() -> None:
    [times] = pages(8, 3, 0.5, count=1)  # the first takes less
    for place in range(3):
        names = [1.0, 2.0, 3.0]
        names[place] = math.nan
        first = fastest(times.set_axis(names, axis=1))
        assert str(first.arm) == str(names[0])
        assert len(first.tied) == 1
        rival = rival_of(times.set_axis(names, axis=1), names[1])
        assert rival.is_settled
        assert rival.estimate < 0.8
