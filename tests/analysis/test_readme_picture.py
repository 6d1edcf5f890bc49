"""The README's picture shows the recorded sweep, from zero, with the best points where they are."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from PIL import Image

from common.analysis.buckets import readme_picture
from common.analysis.buckets.readme_picture import (
    COMMAND,
    PICTURE,
    PictureSettings,
    caption,
    draw,
    main,
    notes,
    slowest_network,
)
from common.analysis.style import RED
from common.errors import UserError
from common.runtime.paths import project_root

README = project_root() / "README.md"
SHOWN_PIXELS, LEAST_LETTERS = 700, 12
"""How wide a README shows a picture, and how high the letters on it have to be then."""


@pytest.fixture(scope="module")
def recorded():
    return slowest_network()


def medians(recorded) -> pd.Series:
    """Returns the medians of the sweep by cap, computed from the raw table."""
    link = f"emulated-2x{recorded.rate_bit_per_s / 1e9:g}gbit"
    path = project_root() / f"data/epyc-2-cores/assignment2/{link}/ddp_benchmark/ddp-times.csv"
    table = pd.read_csv(path)
    steps = table.groupby(["bucket_cap_mib", "round", "iteration"])["backward_time_ms"].max()
    return steps.groupby("bucket_cap_mib").median()


def test_the_readme_shows_the_recorded_run_and_says_how_it_was_drawn(recorded):
    # Otherwise: run the command, and write what it prints below the picture.
    with Image.open(project_root() / PICTURE) as picture:
        assert picture.info["Description"] == notes(recorded)["Description"]
        assert picture.width >= 2 * SHOWN_PIXELS
    text = README.read_text()
    assert f"]({PICTURE})" in text
    assert caption(recorded) in " ".join(text.split())
    assert f"`{COMMAND}`" in caption(recorded)


def rings(axes) -> list:
    return [line for line in axes.get_lines() if line.get_markeredgecolor() == RED]


def test_of_four_rounds_no_measured_cap_is_marked_and_of_eight_those_that_are_tied(recorded):
    [axes] = draw(recorded).axes
    assert rings(axes) == []
    assert not any("measured best" in str(line.get_label()) for line in axes.get_lines())
    assert "No measured cap is called best: 4 rounds of 6." in caption(recorded)
    steps = recorded.sweep.steps
    twice = pd.concat([steps, steps.assign(round=steps["round"] + 4)])
    eight = replace(recorded, sweep=replace(recorded.sweep, steps=twice))
    [axes] = draw(eight).axes
    names = [str(line.get_label()) for line in axes.get_lines()]
    [label] = [name for name in names if name.startswith("measured best: ")]
    named = [float(cap) for cap in re.findall(r"(?<![\d.])[\d.]*\d", label.partition(": ")[2])]
    caps = [line.get_xdata()[0] for line in rings(axes)]
    assert caps == named[len(named) - len(caps) :]
    measured = medians(recorded)
    assert [line.get_ydata()[0] for line in rings(axes)] == pytest.approx(measured[caps].tolist())
    assert measured.idxmin() in caps
    assert "called best" not in caption(eight)


def test_time_begins_at_zero_and_the_predicted_best_is_lowest(recorded):
    [axes] = draw(recorded).axes
    assert axes.get_ylim()[0] == 0
    drawn = {line.get_label(): line for line in axes.get_lines()}
    [star] = [line for name, line in drawn.items() if "b*" in name]
    line = drawn["predicted"]
    lowest = np.min(line.get_ydata())
    assert star.get_ydata() == pytest.approx([lowest])
    low, high = line.get_xdata()[line.get_ydata() <= lowest * (1 + 1e-9)][[0, -1]]
    assert low <= star.get_xdata()[0] <= high


def test_the_cap_matters_on_the_link_that_is_shown(recorded):
    measured = medians(recorded)
    assert measured.max() > 1.15 * measured.min()


def test_letters_can_be_read_where_a_readme_shows_it(recorded):
    figure = draw(recorded)
    figure.draw_without_rendering()
    letters = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    pixels_per_point = SHOWN_PIXELS / figure.get_figwidth() / 72
    assert min(text.get_fontsize() for text in letters) * pixels_per_point >= LEAST_LETTERS


def test_the_command_writes_a_light_picture_and_prints_the_caption(
    tmp_path, capsys, monkeypatch, recorded
):
    monkeypatch.setattr(readme_picture, "slowest_network", lambda _: recorded)
    main(PictureSettings(output=str(tmp_path / "picture.png")))
    assert caption(recorded) in capsys.readouterr().out
    with Image.open(tmp_path / "picture.png") as picture:
        corner = picture.convert("RGB").getpixel((0, 0))
    assert corner == (255, 255, 255)


def test_a_run_without_hosts_and_a_folder_that_is_not_there_are_refused(
    tmp_path: Path, monkeypatch, recorded
):
    with pytest.raises(UserError, match="no such run directory"):
        main(PictureSettings(run_dir=str(tmp_path / "none")))
    monkeypatch.setattr(readme_picture, "slowest_network", lambda _: recorded)
    with pytest.raises(UserError, match="No such file"):
        main(PictureSettings(output=str(tmp_path / "none" / "picture.png")))
