"""A4.3: laws with planted parameters, and fits that have to be refused."""

from __future__ import annotations

import numpy as np
import pytest
from arguments import assert_unchanged
from scipy.optimize import minimize

from common.course.sandbox.student import Student
from common.course.sandbox.wire import Raised


def ranks_of(draw: np.random.Generator) -> np.ndarray:
    """Draws seven different numbers of ranks above 1."""
    return np.sort(draw.choice(np.arange(2, 33), 7, replace=False)).astype(float)


def planted_in(draw: np.random.Generator) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Draws parameters of each law, and of the last one without contention."""
    serial, share = draw.uniform(0.02, 0.3, 2).tolist()
    contention, coherence = draw.uniform(0.02, 0.1), draw.uniform(0.002, 0.02)
    return (
        ("AMDAHL", (serial,)),
        ("GUSTAFSON", (share,)),
        ("USL", (contention, coherence)),
        ("USL", (0.0, coherence)),
    )


def speedup_of(law: str, ranks: np.ndarray, *parameters: float) -> np.ndarray:
    """Computes the speedup that a law states."""
    if law == "GUSTAFSON":
        return ranks - parameters[0] * (ranks - 1)
    contention, coherence = (*parameters, 0.0)[:2]
    return ranks / (1 + contention * (ranks - 1) + coherence * ranks * (ranks - 1))


def test_planted_parameters_are_found(student: Student, generator: np.random.Generator) -> None:
    fits = student.exercise("scaling_fit")
    for name, planted in planted_in(generator):
        ranks = ranks_of(generator)
        law, speedup = getattr(fits, name), speedup_of(name, ranks, *planted)
        values, _, _ = fits.fit_parameters(law, ranks, speedup)
        # A solver that iterates to a bound ends 1e-6 from it; those planted are 0 or above 0.002.
        assert values == pytest.approx(planted, rel=1e-4, abs=1e-5), f"parameters of {name}"
        columns, side, slope = fits.linear_form(law, ranks, speedup)
        assert columns @ np.array(planted) == pytest.approx(side, abs=1e-12), f"sides of {name}"
        solved = np.linalg.lstsq(columns, side, rcond=None)[0]  # of zeros, anything would be
        assert solved == pytest.approx(planted, rel=1e-6, abs=1e-9), f"columns of {name}"
        _, further, _ = fits.linear_form(law, ranks, speedup * (1 + 1e-6))
        moved = np.abs(further - side)
        assert moved == pytest.approx(slope * speedup * 1e-6, rel=1e-3), f"slope of {name}"
        assert_unchanged(student, "scaling_fit", "fit_parameters", law, ranks, speedup, 0.1 * ranks)


def check_least_squares(
    student: Student,
    law: str,
    planted: tuple[float, ...],
    ranks: np.ndarray,
    speedup: np.ndarray,
    errors: np.ndarray | None,
) -> None:
    """Checks a fit, in which each error counts in units of its own, against a search.

    The search begins with the planted parameters: where the student's are, it may find none.
    """
    fits = student.exercise("scaling_fit")
    words = f"{law}, {'no errors' if errors is None else 'errors of the points'}"
    arguments = () if errors is None else (errors,)
    values, rows, target = fits.fit_parameters(getattr(fits, law), ranks, speedup, *arguments)
    units = speedup if errors is None else errors

    def squares(guess: np.ndarray) -> float:
        return float((((speedup_of(law, ranks, *guess) - speedup) / units) ** 2).sum())

    assert np.shape(values) == np.shape(planted), f"number of parameters: {words}"
    best = minimize(squares, planted, method="Nelder-Mead", options={"xatol": 1e-12})
    assert squares(values) <= best.fun * 1.02, f"not the least sum of squared errors: {words}"
    solved = ((rows @ values - target) ** 2).sum()
    is_same = solved == pytest.approx(squares(values), rel=0.1)
    assert is_same, f"rows and targets are not in units of the errors: {words}"


def test_a_fit_to_noise_is_the_least_sum_of_squared_relative_errors(
    student: Student, generator: np.random.Generator
) -> None:
    for name, planted in planted_in(generator)[:3]:
        ranks = ranks_of(generator)
        noise = generator.lognormal(0, 0.01, len(ranks))
        speedup = speedup_of(name, ranks, *planted) * noise
        check_least_squares(student, name, planted, ranks, speedup, None)


def test_parameters_stay_within_their_bounds(
    student: Student, generator: np.random.Generator
) -> None:
    fits = student.exercise("scaling_fit")
    ranks = ranks_of(generator)
    for name, planted in planted_in(generator)[:3]:
        law = getattr(fits, name)
        faster, _, _ = fits.fit_parameters(law, ranks, 1.1 * ranks)
        none = pytest.approx(0.0 * np.array(planted), abs=1e-5)
        assert faster == none, f"{name}: more than linear speedup"
        if name != "USL":
            slower, _, _ = fits.fit_parameters(law, ranks, 0.5 / ranks)
            assert slower == pytest.approx([1]), f"{name}: slower than one rank"


def test_points_with_smaller_errors_count_more(
    student: Student, generator: np.random.Generator
) -> None:
    for name, planted in planted_in(generator)[:3]:
        ranks = ranks_of(generator)
        speedup = speedup_of(name, ranks, *planted)
        errors = speedup * 10 ** generator.uniform(-4, -2, len(ranks))
        noisy = speedup + errors * generator.normal(0, 1, len(ranks))
        check_least_squares(student, name, planted, ranks, noisy, errors)


def test_what_cannot_be_fitted_is_refused(student: Student) -> None:
    fits = student.exercise("scaling_fit")
    names = {"AMDAHL": "Amdahl", "USL": "Universal Scalability Law"}

    def check(words: str, law: str, ranks: list[float], speedup: list[float]) -> None:
        """Checks that points are refused in a message that begins and goes on as it has to."""
        case = f"{names[law]} of {len(ranks)} ranks, {len(speedup)} speedups"
        try:
            fits.check_points(getattr(fits, law), np.array(ranks), np.array(speedup))
        except Raised as error:
            message = str(error)
        else:
            pytest.fail(f"not refused: {case}, words {words!r}")
        assert message.startswith(f"UserError: {names[law]}"), f"{case}: it says {message}"
        assert words in message, f"{case}: it says {message}"

    three, four = [1.0, 2, 4, 8], [1.0, 2, 4, 8, 16]
    fits.check_points(fits.AMDAHL, np.array(three), np.array(three))
    fits.check_points(fits.USL, np.array(four), np.array(four))
    check("needs 3 numbers of ranks above 1; here are 2", "AMDAHL", [1, 2, 4], [1, 2, 3])
    check("needs 4 numbers of ranks above 1; here are 3", "USL", three, three)
    check("here are 2", "AMDAHL", [2, 2, 2, 4], [1, 2, 3, 4])
    check("here are 0", "AMDAHL", [1, 1, 1], [1, 1, 1])
    for ranks in ([2, 3, 4.5], [0, 2, 4, 8], [-2, 2, 4, 8], [2, float("nan"), 4, 8]):
        check("whole", "AMDAHL", ranks, [1.0] * len(ranks))
    for speedup in (float("nan"), 0.0, -1.0, float("inf")):
        check("finite", "AMDAHL", [2, 4, 8, 16], [1, 2, speedup, 3])
    check("speedups", "AMDAHL", [2, 4, 8], [1, 2])
    check("speedups", "USL", [2, 4, 8, 16], [1, 2, 3, 4, 5])
