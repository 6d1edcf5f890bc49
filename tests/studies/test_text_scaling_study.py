"""The judgements of the text scaling study, on tables whose answers are known."""

from __future__ import annotations

import pandas as pd
import pytest

from common.errors import UserError
from common.studies.text_scaling import TextScalingStudy, cases, flags, judge


def losses(apart: float) -> pd.DataFrame:
    rows = [
        {"dataset": "imdb", "precision": precision, "difference": 0.0}
        for precision in ("fp64",) * 3
    ]
    rows += [
        {"dataset": "imdb", "precision": "fp32", "difference": value} for value in (0.0, apart, 0.0)
    ]
    return pd.DataFrame(rows)


def accuracies(two_ranks: tuple[float, ...]) -> pd.DataFrame:
    """Makes accuracies in which one rank has 0.80, 0.82 and 0.84: a spread of 0.04."""
    return pd.DataFrame(
        {"dataset": "imdb", "seed": seed, "ranks": ranks, "accuracy": value}
        for ranks, values in ((1, (0.80, 0.82, 0.84)), (2, two_ranks))
        for seed, value in enumerate(values)
    )


def verdicts(apart: float, two_ranks: tuple[float, ...]) -> list[tuple[float, float, bool]]:
    table = judge(losses(apart), accuracies(two_ranks))
    return [tuple(row) for row in table[["at_most", "found", "held"]].to_numpy()]


def test_one_step_apart_is_seen_and_so_is_one_that_is_no_number():
    assert verdicts(2e-6, (0.8, 0.8, 0.8))[1] == (1e-5, 2e-6, True)
    assert verdicts(2e-5, (0.8, 0.8, 0.8))[1] == (1e-5, 2e-5, False)
    assert not verdicts(float("nan"), (0.8, 0.8, 0.8))[1][2]


@pytest.mark.parametrize(
    ("two_ranks", "spread", "apart", "held"),
    [
        ((0.84, 0.82, 0.80), 0.04, 0.0, True),
        ((0.79, 0.79, 0.79), 0.04, 0.03, True),
        ((0.77, 0.77, 0.77), 0.04, 0.05, False),
        ((0.73, 0.77, 0.81), 0.08, 0.05, True),  # the wider spread counts
    ],
)
def test_accuracies_are_held_against_the_spread_of_seeds(two_ranks, spread, apart, held):
    at_most, found, was_held = verdicts(0.0, two_ranks)[-1]
    assert (at_most, found) == pytest.approx((spread, apart))
    assert was_held == held


def test_both_sides_have_the_same_global_batch_and_differ_in_nothing_else():
    study = TextScalingStudy()
    for case in cases(study):
        one, two = (dict(f[2:].split("=") for f in flags(study, case, n, ".")[1:]) for n in (1, 2))
        different = {name for name in one if one[name] != two[name]}
        assert different == {"batch_size", "run_id"}
        assert int(one["batch_size"]) == 2 * int(two["batch_size"]) == int(one["total_batch_size"])


def test_a_batch_that_two_ranks_cannot_share_is_refused():
    with pytest.raises(UserError, match="global_batch 31"):
        TextScalingStudy(global_batch=31)
