"""The ablation on recorded networks: its cases are fair, and each term is what it says."""

from __future__ import annotations

import numpy as np
import pytest

from common.analysis.buckets.ablation import (
    ADDED,
    AT_OWN_SPEED,
    LEFT_OUT,
    OWN_SPEED,
    compare,
    compare_at_own_speed,
    exposed_communication,
    own_speed_model,
    ready_samples,
    summary,
    term_errors,
    whole_steps,
)
from common.analysis.buckets.ablation_figures import plot_bands, plot_terms
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import open_networks
from common.perfmodel.model import BY_HAND, CURVE, FULL, SEVERAL, SLOWEST
from common.perfmodel.uncertainty import prediction_bands
from common.runtime.paths import project_root


@pytest.fixture(scope="module")
def run():
    return open_run(project_root() / "data/epyc-2-cores/assignment2")


@pytest.fixture(scope="module")
def networks(run):
    """Returns the slowest network and loopback."""
    slowest, *_, loopback = open_networks(run.run_dir).runs
    return [slowest, loopback]


@pytest.fixture(scope="module")
def table(run, networks):
    return term_errors(networks, ready_samples(run))


@pytest.mark.slow
def test_the_full_model_is_the_one_that_is_evaluated_elsewhere(run, table):
    full = compare(run)[FULL]
    own = table[(table["network"] == "loopback") & (table["group"] == ADDED)]
    last = own.iloc[-1]
    assert last["term"] == FULL
    assert last["median_error"] == pytest.approx(full.median_error)
    assert last["cases"] == len(full.table)


def test_at_the_sweeps_own_speed_terms_of_communication_cannot_make_up_for_computation(run):
    models, own = compare(run), compare_at_own_speed(run)
    assert list(own) == [name for name in models if name != OWN_SPEED]
    assert own[FULL].median_error == models[OWN_SPEED].median_error
    assert own_speed_model(run).profile.backward_s == pytest.approx(run.local_s)
    # In the recorded run a pass took as long while gradients were timed as in the sweep.
    assert run.profile.backward_s == pytest.approx(run.local_s, rel=0.01)
    for name in (CURVE, FULL):
        assert own[name].median_error == pytest.approx(models[name].median_error, abs=0.01)
    assert own[CURVE].median_error > 1.5 * own[FULL].median_error
    table = summary(models, own).set_index("model")
    assert table.loc[FULL, "median error"] == models[FULL].median_error
    assert table[AT_OWN_SPEED].to_dict() == {name: own[name].median_error for name in own}


def test_every_model_is_judged_on_every_distinct_bucketing(networks, table):
    for network in networks:
        cases = table.loc[table["network"] == network.link, "cases"]
        assert set(cases) == {len(network.sweep.distinct().measured_s())}


def test_every_network_has_the_same_terms_and_sums_up_from_the_closed_form(networks, table):
    for network in networks:
        own = table[table["network"] == network.link]
        added = own[own["group"] == ADDED]
        assert added["term"].iloc[0] == BY_HAND
        if not network.links.empty:  # over loopback two errors make up for each other, see above
            assert added["median_error"].iloc[-1] < added["median_error"].iloc[0]
        assert len(own[own["group"] == LEFT_OUT]) == 7
        assert SEVERAL in set(own.loc[own["group"] == LEFT_OUT, "term"])
    assert not table.isna().any(axis=None)


def test_without_samples_of_ranks_the_slowest_rank_is_no_term(networks):
    terms = set(term_errors(networks[:1])["term"])
    assert SLOWEST not in terms
    assert CURVE in terms


def test_exposed_communication_begins_where_ddp_begins_to_count(run):
    # Of a single bucket all is exposed: the all-reduce, which nothing runs beside, and the copies
    # of all gradients out of it.
    row = exposed_communication(run).set_index("bucket_cap_mib").loc[64]
    copies_s = run.costs.copy_out_s_per_byte * run.profile.total_bytes
    expected_s = run.all_reduce.curve.time_s(float(run.profile.total_bytes)) + copies_s
    assert row["predicted_ms"] == pytest.approx(expected_s * 1e3)


def test_whole_steps_follow_measured_ones(run):
    steps = whole_steps(run)
    assert len(steps) == len(run.sweep.distinct().measured_s())
    assert (steps["predicted_ms"] > run.local_s * 1e3).all()
    assert steps["error"].abs().median() < 0.1


def test_figures_show_every_term_and_every_cap(run, table):
    figure = plot_terms(table, "made up")
    left, right = figure.axes
    assert len(left.get_yticks()) == table[table["group"] == ADDED]["term"].nunique()
    assert len(right.get_yticks()) == len(
        table[table["group"] != ADDED].drop_duplicates(["group", "term"])
    )
    bands = prediction_bands(run.calibration, [None, 1, 4], draws=5)
    (axes,) = plot_bands(bands.table, "made up", run.sweep).axes
    (line,) = (one for one in axes.lines if one.get_label() == "predicted")
    assert np.asarray(line.get_xdata()).tolist() == [1, 4]
