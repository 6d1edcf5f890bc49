"""The published all-reduce tables, and what the recorded models predict of them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares

from common.analysis.clusters.nccl_accuracy import (
    ALPHA_BETA,
    ANALYTIC,
    ENDPOINTS,
    FITTED,
    INTERPOLATED,
    MIB,
    TUNER,
    accuracy_by_model,
    curves,
    predictions,
    published_all_reduces,
)
from common.analysis.clusters.nccl_figures import plot_nccl_accuracy
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.nccl import NO_RAMP, RAMP, NcclAllReduce, Ramp
from common.perfmodel.collectives import AlphaBeta, MeasuredAllReduce
from common.perfmodel.published import UMD_A100

SHARED = Path(__file__).resolve().parents[3] / "shared" / "measured" / "nccl-tests"
ORIGINALS = {
    "a100-8": "a100_8x_sxm4_40gb_allreduce_oci.csv",
    "h100-2x8": "h100_16x_2node_a3mega_allreduce.csv",
}
FROM_POINTS = {
    INTERPOLATED: MeasuredAllReduce,
    ALPHA_BETA: AlphaBeta.fit,
    ENDPOINTS: AlphaBeta.from_endpoints,
}


def computed(table: str, *, bare: bool = False) -> NcclAllReduce:
    """Makes a model that needs no table, as data/nccl-models/source.yaml says it was made."""
    name, gpus = {"h100-2x8": ("h100-a3mega", 16)}.get(table, ("a100-ib", 8))
    cluster, algorithms = load_cluster(name), None
    if table == UMD_A100:
        cluster = replace(cluster, gpus_per_node=4, network_gb_per_s=24.0)
        algorithms = ("Tree",)
    if bare:
        plain = replace(cluster, network_latency_us=0.0)
        return NcclAllReduce(plain, gpus, algorithms=algorithms, ramp=NO_RAMP)
    return NcclAllReduce(cluster, gpus, algorithms=algorithms)


@pytest.fixture(scope="module")
def accuracy() -> pd.DataFrame:
    return accuracy_by_model().set_index(["table", "model", "fitted_on"]).sort_index()


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


@pytest.mark.parametrize("table", published_all_reduces(), ids=lambda table: table.name)
def test_the_recorded_predictions_are_of_sizes_that_the_fit_had_not(table) -> None:
    """Computed anew: each model is made of the sizes that are not predicted."""
    recorded = predictions()
    recorded = recorded[recorded["table"] == table.name]
    sizes, times = table.curve.sizes_bytes, table.curve.times_s
    for (model, fitted_on), rows in recorded.groupby(["model", "fitted_on"]):
        outside = np.isin(sizes, rows["size_bytes"])
        assert rows["measured_s"].to_numpy() == pytest.approx(times[outside])
        if model not in FROM_POINTS:
            continue
        if fitted_on == "all but one":
            for row in rows.itertuples():
                kept = sizes != row.size_bytes
                made = FROM_POINTS[model](sizes[kept], times[kept])
                assert made.time_s(row.size_bytes) == pytest.approx(row.predicted_s)
        else:
            made = FROM_POINTS[model](sizes[~outside], times[~outside])
            assert made.time_s(rows["size_bytes"].to_numpy()) == pytest.approx(rows["predicted_s"])


@pytest.mark.parametrize("table", published_all_reduces(), ids=lambda table: table.name)
def test_the_recorded_analytic_model_is_the_one_that_predicts_clusters(table) -> None:
    recorded = predictions().set_index(["table", "model"]).sort_index()
    for name, bare in ((ANALYTIC, False), (TUNER, True)):
        rows = recorded.loc[(table.name, name)]
        made = computed(table.name, bare=bare)
        assert made.time_s(rows["size_bytes"].to_numpy()) == pytest.approx(rows["predicted_s"])
    line = curves().set_index(["table", "model"]).sort_index().loc[(table.name, ANALYTIC)]
    expected = computed(table.name).time_s(line["size_bytes"].to_numpy())
    assert line["time_s"].to_numpy() == pytest.approx(expected)


def test_the_ramp_is_the_one_that_fits_the_a100_table() -> None:
    curve = published_all_reduces()[0].curve
    cluster = load_cluster("a100-ib")

    def errors(logs: np.ndarray) -> np.ndarray:
        model = NcclAllReduce(cluster, 8, ramp=Ramp(*np.exp(logs)))
        return np.log(model.time_s(curve.sizes_bytes) / curve.times_s) / 0.03

    known = [RAMP.launch_s, RAMP.slowdown, RAMP.slice_bytes]
    found = least_squares(errors, np.log(known) + 0.3, loss="soft_l1").x
    assert np.exp(found) == pytest.approx(known, rel=0.02)


@pytest.mark.parametrize("table", ORIGINALS)
def test_every_second_size_is_predicted_within_four_per_cent_on_average(table, accuracy) -> None:
    errors = accuracy.loc[table]["mean_error"].groupby("model").mean()
    assert errors[FITTED] < 0.04
    # a curve through the points is worse, a line far worse
    assert errors[FITTED] < errors[INTERPOLATED]
    assert errors[FITTED] < errors[ALPHA_BETA] / 2
    assert errors[FITTED] < errors[ENDPOINTS] / 2


def test_left_out_sizes_of_the_noisy_table_are_within_its_noise(accuracy) -> None:
    assert accuracy.loc[UMD_A100, FITTED]["within_std"].item() == pytest.approx(14 / 19)


def test_the_analytic_errors_are_stated_for_every_table(accuracy) -> None:
    for table in published_all_reduces():
        for model in (TUNER, ANALYTIC):
            row = accuracy.loc[table.name, model].iloc[0]
            assert row["sizes"] == (table.curve.sizes_bytes > MIB).sum()
            assert row["mean_error"] > 0
        assert accuracy.loc[table.name, ANALYTIC]["note"].item()


def test_the_figure_shows_every_table_and_says_where_it_comes_from() -> None:
    figure = plot_nccl_accuracy()
    titles = {axes.get_title(loc="left") for axes in figure.axes} - {""}
    assert titles == {table.title for table in published_all_reduces()}
    caption = figure.get_supxlabel()
    assert "nccl-tests" in caption
    assert "University of Maryland" in caption
