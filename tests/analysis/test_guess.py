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
    fig = with_guess(drawn(), 2, "MiB", axis=axis, panel=1, scale=2.0)
    first, second = lines(fig)
    assert len(first) == 1
    np.testing.assert_array_equal(second[1], expected)
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
