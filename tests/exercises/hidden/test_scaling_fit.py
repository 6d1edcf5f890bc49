"""A4.3: laws with planted parameters, and fits that have to be refused."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from common.course.sandbox.student import Student
from common.course.sandbox.wire import Raised

RANKS = np.array([2.0, 3, 4, 6, 8, 16])
PLANTED = (
    ("AMDAHL", (0.07,)),
    ("GUSTAFSON", (0.2,)),
    ("USL", (0.05, 0.004)),
    ("USL", (0.0, 0.01)),
)


def speedup_of(law: str, ranks: np.ndarray, *parameters: float) -> np.ndarray:
    """Computes the speedup that a law states."""
    if law == "GUSTAFSON":
        return ranks - parameters[0] * (ranks - 1)
    contention, coherence = (*parameters, 0.0)[:2]
    return ranks / (1 + contention * (ranks - 1) + coherence * ranks * (ranks - 1))


def test_planted_parameters_are_found(student: Student) -> None:
    fits = student.exercise("scaling_fit")
    for name, planted in PLANTED:
        law, speedup = getattr(fits, name), speedup_of(name, RANKS, *planted)
        values, _, _ = fits.fit_parameters(law, RANKS, speedup)
        assert values == pytest.approx(planted, rel=1e-9, abs=1e-12)
        columns, left, slope = fits.linear_form(law, RANKS, speedup)
        assert columns @ np.array(planted) == pytest.approx(left, abs=1e-12)
        _, further, _ = fits.linear_form(law, RANKS, speedup * (1 + 1e-6))
        assert np.abs(further - left) == pytest.approx(slope * speedup * 1e-6, rel=1e-3)


def test_a_fit_to_noise_is_the_least_sum_of_squared_relative_errors(
    student: Student, generator: np.random.Generator
) -> None:
    fits = student.exercise("scaling_fit")
    for name, planted in PLANTED[:3]:
        noise = generator.lognormal(0, 0.01, len(RANKS))
        speedup = speedup_of(name, RANKS, *planted) * noise
        values, rows, target = fits.fit_parameters(getattr(fits, name), RANKS, speedup)

        def squares(guess: np.ndarray, law: str = name, speedup: np.ndarray = speedup) -> float:
            return float(((speedup_of(law, RANKS, *guess) / speedup - 1) ** 2).sum())

        best = minimize(squares, planted, method="Nelder-Mead", options={"xatol": 1e-12})
        assert squares(values) <= best.fun * 1.02
        assert ((rows @ values - target) ** 2).sum() == pytest.approx(squares(values), rel=0.1)


def test_parameters_stay_within_their_bounds(student: Student) -> None:
    fits = student.exercise("scaling_fit")
    faster, slower = (
        fits.fit_parameters(fits.AMDAHL, RANKS, s) for s in (1.1 * RANKS, 0.5 / RANKS)
    )
    assert faster[0] == pytest.approx([0])
    assert slower[0] == pytest.approx([1])
    assert (fits.fit_parameters(fits.USL, RANKS, 1.1 * RANKS)[0] == 0).all()


def test_points_with_smaller_errors_count_more(student: Student) -> None:
    fits = student.exercise("scaling_fit")
    speedup = speedup_of("AMDAHL", RANKS, 0.1)
    speedup[-1] *= 1.5
    errors = np.full(len(RANKS), 0.01)
    errors[-1] = 100.0
    assert fits.fit_parameters(fits.AMDAHL, RANKS, speedup, errors)[0] == pytest.approx(
        [0.1], rel=1e-3
    )


def test_what_cannot_be_fitted_is_refused(student: Student) -> None:
    fits = student.exercise("scaling_fit")

    def refused(law: str, ranks: list[float], speedup: list[float]) -> str:
        with pytest.raises(Raised, match=r"^UserError: ") as error:
            fits.check_points(getattr(fits, law), np.array(ranks), np.array(speedup))
        return str(error.value)

    three, four = [1.0, 2, 4, 8], [1.0, 2, 4, 8, 16]
    fits.check_points(fits.AMDAHL, np.array(three), np.array(three))
    fits.check_points(fits.USL, np.array(four), np.array(four))
    assert "Amdahl" in refused("AMDAHL", [1, 2, 4], [1, 2, 3])
    assert "needs 4 numbers of ranks above 1; here are 3" in refused("USL", three, three)
    assert "here are 2" in refused("AMDAHL", [2, 2, 2, 4], [1, 2, 3, 4])
    assert "whole" in refused("AMDAHL", [2, 3, 4.5], [1, 2, 3])
    assert "whole" in refused("AMDAHL", [0, 2, 4, 8], [1, 2, 3, 4])
    assert "finite" in refused("AMDAHL", [2, 4, 8], [1, 2, float("nan")])
    assert "finite" in refused("AMDAHL", [2, 4, 8], [1, 2, 0])
    assert "speedups" in refused("AMDAHL", [2, 4, 8], [1, 2])
