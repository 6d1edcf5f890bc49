"""Modes compared on the same global batches: on tables from closed forms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from micro_batch_support import (
    ENVIRONMENT,
    MODES,
    calibration_rows,
    cost_ms,
    mode_times,
    slow_rows,
    write_comparison,
    write_lab,
    write_records,
)

from common.analysis import length_plots, planned_costs
from common.analysis import micro_batch_narrative as narrative
from common.analysis import mode_narrative as words
from common.analysis.assignment3 import open_assignment3
from common.analysis.mode_comparison import ModeComparison, read_comparison
from common.analysis.mode_simulation import slow_summary
from common.errors import UserError
from common.scheduling.cost import CalibratedCost, TokensCost
from common.scheduling.partition import min_max_contiguous


@pytest.fixture
def comparison(tmp_path: Path) -> ModeComparison:
    """Twenty global batches of 8 texts in all modes, on two ranks."""
    return read_comparison(write_comparison(tmp_path / "run", mode_times()))


# Ratios


def test_ratios_are_taken_on_the_same_global_batch(comparison: ModeComparison) -> None:
    ratios = comparison.ratios()
    assert ratios.columns.tolist() == [
        *("static", "dynamic", "dynamic_calibrated", "karmarkar_karp"),
    ]
    # 5 ms and 20 µs a token of the fuller rank, and 1 ms of exchange
    for step, tokens in enumerate((400, 440, 480, 400)):
        step_ms = {mode: cost_ms(1, tokens * ratio) + 1 for mode, ratio in MODES.items()}
        expected = step_ms["dynamic"] / step_ms["static"]
        assert ratios.loc[step, "dynamic"] == pytest.approx(expected)
    table = comparison.summary
    assert table.loc["dynamic", "padded_ratio"] == pytest.approx(0.6)
    assert table.loc["static", ["ratio", "p95_ratio", "paired_median"]].tolist() == [1, 1, 1]
    means = comparison.slowest().mean()
    assert table.loc["dynamic", "ratio"] == pytest.approx(means["dynamic"] / means["static"])
    assert table.loc["dynamic", "compute_ratio"] == pytest.approx(
        (means["dynamic"] - 1) / (means["static"] - 1)
    )


def test_pairing_takes_the_difference_of_batches_out_of_the_interval(tmp_path: Path) -> None:
    times = mode_times(30, {"static": 1.0, "dynamic": 0.6})
    # batches differ up to tenfold, and in every one of them dynamic takes 0.7 of static
    scale = 1 + 9 * np.random.default_rng(1).random(30)
    times["step_time_ms"] = scale[times["step"]] * np.where(times["mode"] == "static", 1.0, 0.7)
    found = read_comparison(write_comparison(tmp_path / "run", times)).summary.loc["dynamic"]
    assert found[["ratio", "ratio_low", "ratio_high", "paired_q25"]].tolist() == pytest.approx(
        [0.7] * 4
    )


def test_the_interval_of_a_noisy_ratio_holds_the_true_one(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    held = 0
    for trial in range(12):
        times = mode_times(40, {"static": 1.0, "dynamic": 0.6})
        truth = np.where(times["mode"] == "dynamic", 80.0, 100.0)
        noise = 1 + 0.1 * draw.standard_normal((40, len(set(times["mode"]))))
        order = times["order"].to_numpy()
        times["step_time_ms"] = truth * noise[times["step"], order]
        found = read_comparison(write_comparison(tmp_path / f"{trial}", times))
        row = found.summary.loc["dynamic"]
        held += row["ratio_low"] <= 0.8 <= row["ratio_high"]
        # two halves of 20 steps with 10 % of noise: half the time within 0.67 of 0.1·√(2/20)
        assert found.noise_floor == pytest.approx(0.67 * 0.1 * np.sqrt(2 / 20), rel=0.6)
    assert held >= 10


def test_waiting_is_a_share_of_all_ranks_time_above_the_control(tmp_path: Path) -> None:
    times = mode_times(10, unequal={"control": 0.9})
    found = read_comparison(write_comparison(tmp_path / "run", times))
    own = times[times["mode"] == "static"]
    share = own["waiting_time_ms"].sum() / own["step_time_ms"].sum()
    control = times[times["mode"] == "control"]
    floor = control["waiting_time_ms"].sum() / control["step_time_ms"].sum()
    assert found.waiting["static"] == pytest.approx(share)
    assert found.summary.loc["static", "waiting_points"] == pytest.approx((share - floor) * 100)
    assert found.summary.loc["dynamic", "waiting"] == 0


def test_modes_with_other_batches_are_compared_by_the_text(tmp_path: Path) -> None:
    times = mode_times()
    # as long a step, for twice as many texts: half the time a text
    budget = times["mode"] == "token_budget"
    times.loc[budget, "global_batch"] = 16
    static_ms = times[times["mode"] == "static"].groupby("step")["step_time_ms"].max()
    times.loc[budget, "step_time_ms"] = times.loc[budget, "step"].map(static_ms)
    found = read_comparison(write_comparison(tmp_path / "run", times))
    assert found.own_batch_modes == ["length_grouped", "token_budget"]
    assert "token_budget" not in found.summary.index
    table = found.per_sample
    assert table.loc["token_budget", "ratio"] == pytest.approx(0.5)
    assert not table.loc["token_budget", "same_batch"]
    assert table.loc["dynamic", "ratio"] == pytest.approx(found.summary.loc["dynamic", "ratio"])


def test_padded_tokens_promise_a_ratio_even_where_it_is_a_loss(tmp_path: Path) -> None:
    write_comparison(tmp_path / "run", mode_times(20, {"static": 1.0, "dynamic": 1.3}))
    shown = words.datasets_shown(open_assignment3(tmp_path))
    assert shown.loc[0, "promised"] == pytest.approx(1.3)


# Costs, slow ranks, many ranks


def test_costs_are_fitted_to_medians_of_each_rank() -> None:
    timed = calibration_rows()
    costs = planned_costs.fit_costs(timed, CalibratedCost.fit)
    # one pass of three took three times as long: the median does not see it
    assert costs[1].c0_s == pytest.approx(5e-3)
    assert costs[1].c1_s == pytest.approx(2e-5)
    predicted = planned_costs.with_predicted(timed, costs)
    errors = planned_costs.calibration_errors(predicted)
    assert errors["worst_error"].max() < 1e-6
    assert errors["points"].tolist() == [9, 9]


def test_the_fixed_share_is_that_of_the_bottleneck_rank(comparison: ModeComparison) -> None:
    costs = planned_costs.fit_costs(comparison.calibration, CalibratedCost.fit)
    expected = np.mean([5 / cost_ms(1, 400 + 40 * (step % 3)) for step in range(20)])
    assert planned_costs.fixed_share(comparison, costs) == pytest.approx(expected)


def test_errors_of_a_prediction_are_relative_and_by_rank() -> None:
    table = pd.DataFrame({"rank": [0, 0, 0, 1], "time_ms": [10.0] * 4})
    table["predicted_ms"] = [11.0, 8.0, 10.5, 10.0]
    errors = planned_costs.calibration_errors(table).set_index("rank")
    assert errors.loc[0, ["median_error", "worst_error"]].tolist() == pytest.approx([0.1, 0.2])
    assert errors.loc[1, "median_error"] == 0


def test_a_slow_rank_is_found_when_its_estimate_stays_close() -> None:
    table = slow_rows(found_at=10)
    found = slow_summary(table)
    assert (found.rank, found.factor, found.estimate, found.found_at) == (1, 2.0, 2.0, 10)
    assert (found.before, found.after) == (1.5, 1.0)
    # a machine that is slower for all ranks alike changes nothing
    drifting = table.assign(estimated_factor=table["estimated_factor"] * (1 + table["step"] / 40))
    assert slow_summary(drifting).found_at == 10
    # an estimate that goes away again had not been found
    late = table["step"].eq(20) & table["rank"].eq(1)
    table.loc[late, "estimated_factor"] = 1.2
    assert slow_summary(table).found_at == 21
    # and one that never comes near it neither
    table["estimated_factor"] = 1.0
    assert slow_summary(table).found_at is None


def test_bottlenecks_are_over_the_bound_of_the_same_texts(tmp_path: Path) -> None:
    simulation = open_assignment3(write_lab(tmp_path / "lab")).simulation
    table = simulation.summary().set_index(["dataset", "mode", "world_size"])["ratio"]
    # the median draw is 4 % above the first
    assert table["imdb", "static", 8] == pytest.approx(2.5 * 1.04)
    assert table["imdb", "dynamic", 1024] == pytest.approx(1.1 * 1.04)
    # half the bottleneck for half the texts is as good
    assert table["imdb", "token_budget", 1024] == pytest.approx(1.1 * 1.04)


def test_promised_ratios_are_of_the_fullest_rank() -> None:
    even = np.full(100, 50)
    plan = lambda batch, ranks: min_max_contiguous(batch, ranks, TokensCost())  # noqa: E731
    # nothing to win where all texts are equally long
    assert planned_costs.promised_ratio(even, 2, 8, plan, draws=5) == 1
    by_hand = np.array([10, 1, 1, 1])
    equal = planned_costs.equal_counts(4, 2)
    assert planned_costs.bottleneck(by_hand, equal) == 20
    assert planned_costs.bottleneck(by_hand, plan(by_hand, 2)) == 10


def test_the_expected_longest_text_is_that_of_all_draws() -> None:
    lengths = np.array([1, 2, 3])
    # of two texts: 1 in 1 of 9 draws, 2 in 3, 3 in 5
    expected = (1 * 1 + 2 * 3 + 3 * 5) / 9
    assert length_plots.expected_longest(lengths, 2) == pytest.approx(expected)


# A whole run


def test_a_run_of_all_stages_is_opened(tmp_path: Path) -> None:
    lab = open_assignment3(write_lab(tmp_path / "lab"))
    assert lab.comparison.dataset == "sst2"  # that of the training runs
    assert [other.dataset for other in lab.others] == ["ag_news"]
    assert list(lab.training) == ["static", "dynamic"]


def test_a_run_without_training_calibration_or_simulation_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    folder = write_comparison(tmp_path / "run", mode_times(5, {"static": 1.0, "dynamic": 0.6}))
    (folder / "calibration.csv").unlink()
    (folder / "slow-rank.csv").unlink()
    lab = open_assignment3(folder)
    assert (lab.training, lab.simulation, lab.others) == ({}, None, ())
    assert narrative.training_shown(lab).empty
    assert words.measured_points(lab, CalibratedCost.fit) == {}


def test_training_runs_that_differ_are_left_out_with_the_reason(tmp_path: Path) -> None:
    lab = write_lab(tmp_path / "lab")
    settings = (lab / "train_dynamic" / "config.yaml").read_text()
    (lab / "train_dynamic" / "config.yaml").write_text(settings.replace("seed: 42", "seed: 1"))
    opened = open_assignment3(lab)
    assert not opened.training
    assert "seed differs" in narrative.loss_sentence(opened)


def test_comparisons_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        open_assignment3(tmp_path / "nothing")
    write_records(tmp_path / "empty", {})
    with pytest.raises(UserError, match=r"no complete run with mode-times.csv"):
        open_assignment3(tmp_path / "empty")
    folder = write_comparison(tmp_path / "run", mode_times(3))
    record = json.dumps(ENVIRONMENT | {"status": "failed"})
    (folder / "environment.json").write_text(record)
    with pytest.raises(UserError, match=r"no complete run with mode-times.csv"):
        open_assignment3(folder)
    shutil.rmtree(folder)
    write_comparison(folder, mode_times(3).drop(columns="padded_tokens"))
    with pytest.raises(UserError, match=r"mode-times.csv: no column 'padded_tokens'"):
        open_assignment3(folder)
    shutil.rmtree(folder)
    write_comparison(folder, mode_times(3, {"dynamic": 0.6}))
    with pytest.raises(UserError, match="no steps of mode static"):
        open_assignment3(folder)
