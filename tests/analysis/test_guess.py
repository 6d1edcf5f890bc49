"""A reader's guess on a figure."""

from __future__ import annotations

import numpy as np
import pytest

from common.analysis.guess import with_guess
from common.analysis.picture import describe
from common.analysis.style import CourseFigure, figure


def drawn() -> CourseFigure:
    with figure("a caption", ncols=2) as (fig, panels):
        for axes in panels:
            axes.plot([1, 10], [1, 10])
            axes.set_xscale("log")
    return fig


def lines(fig: CourseFigure) -> list[list[np.ndarray]]:
    return [[line.get_xydata() for line in axes.lines] for axes in fig.axes]


@pytest.mark.parametrize(("axis", "expected"), [("x", [[4, 0], [4, 1]]), ("y", [[0, 4], [1, 4]])])
def test_a_guess_is_a_line_on_its_panel_and_in_the_words(axis: str, expected: list) -> None:
    fig = with_guess(drawn(), 2, "MiB", axis=axis, scale=2.0)
    first, second = lines(fig)
    assert len(second) == 1
    np.testing.assert_array_equal(first[1], expected)
    assert "your guess: 2 MiB" in describe(fig)


def test_without_a_guess_nothing_is_drawn_or_said(capsys: pytest.CaptureFixture) -> None:
    assert [len(panel) for panel in lines(with_guess(drawn(), None))] == [1, 1]
    assert with_guess(None, 8) is None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("guess", ["8", True, float("nan"), [8], 0, -1.5])
def test_a_guess_that_cannot_be_drawn_gets_one_line(
    guess: object, capsys: pytest.CaptureFixture
) -> None:
    assert [len(panel) for panel in lines(with_guess(drawn(), guess))] == [1, 1]
    [line] = capsys.readouterr().out.splitlines()
    assert "is not drawn" in line


@pytest.mark.parametrize(("axis", "guess"), [("x", 400.0), ("y", 0.02), ("y", 30.0)])
def test_the_panel_is_made_longer_for_a_guess_beyond_it(axis: str, guess: float) -> None:
    fig = drawn()
    axes = fig.axes[0]
    axes.set_xlim(0.5, 20)
    axes.set_ylim(20, 0.5)  # upside down
    with_guess(fig, guess, axis=axis)
    limits = axes.get_xlim() if axis == "x" else axes.get_ylim()
    assert min(limits) < guess < max(limits)
    assert axes.yaxis.get_inverted()
    other = axes.get_ylim() if axis == "x" else axes.get_xlim()
    assert sorted(other) == [0.5, 20]
