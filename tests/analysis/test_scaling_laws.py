"""Laws of scaling: closed forms recovered from noise, intervals that hold, fits refused."""

import numpy as np
import pytest

from common.analysis.scaling.laws import FittedLaw, fit_law
from common.errors import UserError
from common.exercises.scaling_fit import AMDAHL, GUSTAFSON, USL, Law

RANKS = np.array([1.0, 2, 3, 4, 6, 8])


def by_hand(name: str, n: np.ndarray, *values: float) -> np.ndarray:
    """Computes the laws once more, as their authors wrote them."""
    if name == "Amdahl":
        return n / (1 + values[0] * (n - 1))
    if name == "Gustafson":
        return values[0] + (1 - values[0]) * n
    return n / (1 + values[0] * (n - 1) + values[1] * n * (n - 1))


CASES = [(AMDAHL, (0.1,)), (GUSTAFSON, (0.25,)), (USL, (0.08, 0.01))]
KNOWN = ("scatter", "errors", "rounds")
"""What is known of the noise of each case's points."""


def values_of(fitted: FittedLaw) -> list[float]:
    return [interval.estimate for interval in fitted.parameters.values()]


@pytest.mark.parametrize(("law", "true"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_parameters_come_back_from_exact_points(law: Law, true: tuple[float, ...]) -> None:
    fitted = fit_law(law, RANKS, by_hand(law.name, RANKS, *true))
    assert values_of(fitted) == pytest.approx(true)
    assert fitted.predict([16]) == pytest.approx(by_hand(law.name, np.array([16.0]), *true))
    assert fitted.largest_error == pytest.approx(0, abs=1e-9)
    assert fitted.r_squared == pytest.approx(1)
    assert fitted.predict([1]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("law", "true", "known"),
    [(*case, known) for case, known in zip(CASES, KNOWN, strict=True)],
    ids=lambda v: getattr(v, "name", ""),
)
def test_the_interval_holds_the_truth_about_as_often_as_it_says(
    law: Law, true: tuple[float, ...], known: str
) -> None:
    generator = np.random.default_rng(5)
    speedup = by_hand(law.name, RANKS, *true)
    trials = 10 if known == "rounds" else 100
    held = np.zeros(len(true))
    for _ in range(trials):
        if known == "rounds":
            rounds = speedup * (1 + 0.02 * generator.standard_normal((5, len(RANKS))))
            fitted = fit_law(law, RANKS, rounds.mean(axis=0), rounds=rounds)
            assert fitted.method == "bootstrap over 5 rounds"
        else:
            noisy = speedup * (1 + 0.02 * generator.standard_normal(len(RANKS)))
            width = 1.96 * 0.02 * speedup
            bounds = {"low": noisy - width, "high": noisy + width} if known == "errors" else {}
            fitted = fit_law(law, RANKS, noisy, **bounds)
        held += [
            e.low <= t <= e.high for e, t in zip(fitted.parameters.values(), true, strict=True)
        ]
    # 95 % is meant; so few trials, and σ and κ that cannot be told apart well, leave this.
    assert (held / trials >= 0.8).all()


def test_without_anything_to_agree_on_the_universal_law_is_amdahls() -> None:
    points = by_hand("Amdahl", RANKS, 0.2)
    amdahl, usl = fit_law(AMDAHL, RANKS, points), fit_law(USL, RANKS, points)
    assert values_of(usl) == pytest.approx([0.2, 0], abs=1e-9)
    assert usl.predict(RANKS) == pytest.approx(amdahl.predict(RANKS))
    assert amdahl.peak_ranks is None


def test_the_peak_is_where_no_other_number_of_ranks_is_faster() -> None:
    true = (0.05, 0.004)
    fitted = fit_law(USL, RANKS, by_hand(USL.name, RANKS, *true))
    everywhere = np.linspace(1, 60, 100_001)
    highest = everywhere[by_hand(USL.name, everywhere, *true).argmax()]
    assert fitted.peak_ranks == pytest.approx(highest, abs=1e-3)
    low, high = fitted.peak_interval
    assert low <= fitted.peak_ranks + 1e-6
    assert high >= fitted.peak_ranks - 1e-6


def test_where_more_ranks_never_hurt_there_is_no_peak() -> None:
    assert fit_law(USL, RANKS, RANKS).peak_ranks == np.inf


def test_ranks_that_only_slow_each_other_down_peak_at_one() -> None:
    fitted = fit_law(USL, RANKS, by_hand(USL.name, RANKS, 1.5, 0.01))
    assert fitted.peak_ranks == 1
    assert values_of(fitted) == pytest.approx([1.5, 0.01])


@pytest.mark.parametrize(
    ("law", "true", "most"),
    [
        (AMDAHL, (0.1,), 10.0),
        (AMDAHL, (0.0,), np.inf),
        (GUSTAFSON, (0.25,), np.inf),
        (USL, (0.2, 0.0), 5.0),
        (USL, (1.5, 0.01), 1.0),
    ],
)
def test_the_most_speedup_is_what_no_number_of_ranks_exceeds(
    law: Law, true: tuple[float, ...], most: float
) -> None:
    fitted = fit_law(law, RANKS, by_hand(law.name, RANKS, *true))
    assert fitted.most_speedup == pytest.approx(most, rel=1e-4)


def test_the_band_is_wider_where_nothing_was_measured() -> None:
    generator = np.random.default_rng(2)
    noisy = by_hand(USL.name, RANKS, 0.05, 0.005) * (1 + 0.02 * generator.standard_normal(6))
    low, high = fit_law(USL, RANKS, noisy).band([4, 16])
    assert (high - low)[1] > 2 * (high - low)[0]
    assert (low < high).all()


def test_points_known_better_count_more() -> None:
    points = by_hand("Amdahl", RANKS, 0.1)
    wrong = points.copy()
    wrong[-1] *= 0.7
    width = np.where(RANKS == 8, 0.5, 0.01)
    trusted = fit_law(AMDAHL, RANKS, wrong, low=wrong - width, high=wrong + width)
    assert values_of(trusted) == pytest.approx([0.1], rel=0.02)
    assert abs(values_of(fit_law(AMDAHL, RANKS, wrong))[0] - 0.1) > 0.01


def test_bad_input_is_refused() -> None:
    # What points cannot be fitted is task A4.3's to refuse: test_scaling_fit.py.
    with pytest.raises(UserError, match="6 numbers of ranks and 5 speedups"):
        fit_law(USL, RANKS, RANKS[:5])
    with pytest.raises(UserError, match="a speedup for each of 6 points"):
        fit_law(USL, RANKS, RANKS, rounds=np.ones((4, 3)))
