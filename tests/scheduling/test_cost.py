"""Costs: their inverses against counting up, fits against coefficients that are known."""

from __future__ import annotations

import numpy as np
import pytest
from partition_support import Stairs

from common.errors import UserError
from common.exercises.min_max_partition import most_samples
from common.scheduling.cost import UNLIMITED, CalibratedCost, TokensCost, TokensSquaredCost
from common.scheduling.unequal_ranks import FastestOf, SlowestOf

KNOWN = CalibratedCost(3e-3, 1.2e-4, 1e-8)
SHAPES = np.array([(b, m) for b in (1, 2, 8, 32) for m in (4, 16, 64, 256)])


def test_costs_are_what_their_formulas_say() -> None:
    assert TokensCost()(3, 10) == 30
    assert TokensSquaredCost()(3, 10) == 300
    assert KNOWN(3, 10) == pytest.approx(3e-3 + 30 * 1.2e-4 + 300 * 1e-8)
    assert isinstance(TokensCost()(3, 10), int)
    both = np.array([1, 2])[:, None], np.array([5, 6, 7])
    assert TokensSquaredCost()(*both).tolist() == [[25, 36, 49], [50, 72, 98]]
    assert KNOWN(*both).shape == (2, 3)


@pytest.mark.parametrize(
    "cost",
    [
        *(TokensCost(), TokensSquaredCost(), KNOWN, Stairs(), Stairs(3)),
        *(CalibratedCost(1.0, 0.0, 0.0), CalibratedCost(0.0, 0.0, 1e-7)),
        *(CalibratedCost(0.1, 0.1, 0.1), CalibratedCost(1e3, 1e-9, 0.0)),
        FastestOf((TokensCost(), Stairs(9))),
        SlowestOf((KNOWN, KNOWN.scaled(1.5), Stairs())),
    ],
    ids=str,
)
def test_the_largest_batch_within_a_time_is_exact(cost) -> None:
    limit, batches = 60, np.arange(1, 61)[:, None]
    longest = np.array([1, 2, 3, 7, 16, 100, 256, 5000])
    table = cost(batches, longest)
    # Times that are reached exactly, and the floats next to them, are where rounding could err.
    reached = np.unique(np.asarray(table, float))[::7]
    for time in [*reached, *np.nextafter(reached, 0), *np.nextafter(reached, np.inf), 0.0]:
        counted = (table <= time).sum(axis=0)
        assert most_samples(cost, longest, float(time), limit).tolist() == counted.tolist()


def test_a_cost_that_does_not_depend_on_the_batch_has_no_largest_one() -> None:
    constant, longest = CalibratedCost(1.0, 0.0, 0.0), np.array([1, 9])
    assert constant.most(longest, 1.0).tolist() == [UNLIMITED] * 2
    assert constant.most(longest, 0.5).tolist() == [0, 0]
    assert CalibratedCost(0.0, 1e-320, 0.0).most(longest, 1.0).tolist() == [UNLIMITED] * 2


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    times = KNOWN(*SHAPES.T)
    fitted = CalibratedCost.fit(*SHAPES.T, times)
    assert fitted(*SHAPES.T) == pytest.approx(times, rel=1e-9)
    assert fitted.relative_error(*SHAPES.T, times) < 1e-9


def test_a_fit_under_noise_is_as_good_for_short_steps_as_for_long_ones() -> None:
    rng = np.random.default_rng(1)
    shapes = np.tile(SHAPES, (20, 1))
    times = KNOWN(*shapes.T) * rng.lognormal(0, 0.05, len(shapes))
    fitted = CalibratedCost.fit(*shapes.T, times)
    # Median of |noise| is 0.6745 · 5 %; the fit itself is nearer than that everywhere.
    assert fitted.relative_error(*shapes.T, times) == pytest.approx(0.034, abs=0.006)
    assert fitted(*SHAPES.T) == pytest.approx(KNOWN(*SHAPES.T), rel=0.03)


def test_one_measured_step_is_fitted_exactly() -> None:
    assert CalibratedCost.fit([8], [64], [0.02]).relative_error([8], [64], [0.02]) < 1e-12


def test_a_scaled_cost_is_that_of_a_slower_rank() -> None:
    assert KNOWN.scaled(2.0)(*SHAPES.T) == pytest.approx(2 * KNOWN(*SHAPES.T))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CalibratedCost(-1e-3, 0.0, 0.0), "c0_s is -0.001"),
        (lambda: CalibratedCost(0.0, float("nan"), 0.0), "c1_s is nan"),
        (lambda: CalibratedCost(0.0, 0.0, float("inf")), "c2_s is inf"),
        (lambda: CalibratedCost.fit([], [], []), "at least one"),
        (lambda: CalibratedCost.fit([1, 2], [3], [0.1, 0.2]), "2 batch sizes, 1 lengths"),
        (lambda: CalibratedCost.fit([1, 2], [3, 4], [0.1, 0.0]), "times must be above 0"),
    ],
)
def test_bad_coefficients_and_measurements_are_refused(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
