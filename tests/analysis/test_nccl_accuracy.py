"""The published all-reduce tables: what the fit must reach on sizes it has not seen."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from common.analysis.clusters.nccl_accuracy import (
    ALPHA_BETA,
    ANALYTIC,
    ENDPOINTS,
    FITTED,
    INTERPOLATED,
    MIB,
    ODD,
    TUNER,
    accuracy_table,
    noisy_fit,
    predictions,
    published_all_reduces,
)
from common.analysis.clusters.nccl_figures import plot_nccl_accuracy
from common.perfmodel.cluster.nccl import RAMP
from common.perfmodel.cluster.nccl_fit import calibrate_ramp
from common.perfmodel.published import UMD_A100

pytestmark = pytest.mark.xdist_group("nccl_accuracy")  # its tables are made once

SHARED = Path(__file__).resolve().parents[3] / "shared" / "measured" / "nccl-tests"
ORIGINALS = {
    "a100-8": "a100_8x_sxm4_40gb_allreduce_oci.csv",
    "h100-2x8": "h100_16x_2node_a3mega_allreduce.csv",
}


@pytest.fixture(scope="module")
def accuracy() -> pd.DataFrame:
    return accuracy_table().set_index(["table", "model", "fitted_on"]).sort_index()


@pytest.mark.parametrize("name", ORIGINALS)
def test_our_tables_have_the_published_numbers(name: str) -> None:
    path = SHARED / ORIGINALS[name]
    if not path.is_file():
        pytest.skip(f"no {path}: the published file is not part of the project")
    with path.open() as file:
        rows = [(float(row["bytes"]), float(row["time_us"])) for row in csv.DictReader(file)]
    curve = next(table.curve for table in published_all_reduces() if table.name == name)
    assert curve.sizes_bytes.tolist() == [size for size, _ in rows]
    assert curve.times_s * 1e6 == pytest.approx([time for _, time in rows])


@pytest.mark.parametrize("table", ORIGINALS)
def test_every_second_size_is_predicted_within_four_per_cent_on_average(table, accuracy) -> None:
    errors = accuracy.loc[table]["mean_error"].groupby("model").mean()
    assert errors[FITTED] < 0.04
    # a curve through the points is worse, a line far worse
    assert errors[FITTED] < errors[INTERPOLATED]
    assert errors[FITTED] < errors[ALPHA_BETA] / 2
    assert errors[FITTED] < errors[ENDPOINTS] / 2


def test_left_out_sizes_of_the_noisy_table_are_within_its_noise(accuracy) -> None:
    within = accuracy.loc[UMD_A100, FITTED]["within_std"].item()
    assert within >= 2 / 3
    fit = noisy_fit()
    assert fit.within_std == round(within * 19)
    assert any("noisy" in note and f"{fit.within_std} of 19" in note for note in fit.notes)


def test_a_left_out_size_is_predicted_from_all_the_others() -> None:
    noisy = next(table for table in published_all_reduces() if table.name == UMD_A100)
    for out in (0, 12, 18):
        others = noisy.fit(np.arange(19) != out)
        predicted = others.time_s(noisy.curve.sizes_bytes[out])
        assert noisy_fit().left_out_s[out] == pytest.approx(predicted)


def test_held_out_errors_are_of_sizes_that_the_fit_had_not() -> None:
    held_out = predictions()
    curve = published_all_reduces()[0].curve
    rows = held_out[(held_out["table"] == "a100-8") & (held_out["model"] == INTERPOLATED)]
    for fitted_on, group in rows.groupby("fitted_on"):
        first = 0 if fitted_on == ODD else 1
        assert group["size_bytes"].tolist() == curve.sizes_bytes[first::2].tolist()
        # by hand: a straight line between the neighbours
        sizes, times = curve.sizes_bytes[1 - first :: 2], curve.times_s[1 - first :: 2]
        inside = (group["size_bytes"] > sizes[0]) & (group["size_bytes"] < sizes[-1])
        expected = np.interp(group["size_bytes"], sizes, times)
        assert group["predicted_s"][inside].to_numpy() == pytest.approx(expected[inside])


def test_the_analytic_errors_are_stated_for_every_table(accuracy) -> None:
    for table in published_all_reduces():
        for model in (TUNER, ANALYTIC):
            row = accuracy.loc[table.name, model].iloc[0]
            assert row["sizes"] == (table.curve.sizes_bytes > MIB).sum()
            assert row["mean_error"] > 0
        assert accuracy.loc[table.name, ANALYTIC]["note"].item()


def test_the_ramp_is_the_one_that_fits_the_a100_table() -> None:
    a100 = published_all_reduces()[0]
    found = calibrate_ramp(a100.cluster, 8, a100.curve.sizes_bytes, a100.curve.times_s)
    assert RAMP.launch_s == pytest.approx(found.launch_s, rel=0.02)
    assert RAMP.slowdown == pytest.approx(found.slowdown, rel=0.02)
    assert RAMP.slice_bytes == pytest.approx(found.slice_bytes, rel=0.02)


def test_the_figure_shows_every_table_and_says_where_it_comes_from() -> None:
    figure = plot_nccl_accuracy()
    titles = {axes.get_title(loc="left") for axes in figure.axes} - {""}
    assert titles == {table.title for table in published_all_reduces()}
    caption = figure.get_supxlabel()
    assert "nccl-tests" in caption
    assert "University of Maryland" in caption
