"""Modes compared on the same global batches: on tables from closed forms."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from micro_batch_support import (
    MODES,
    calibration_rows,
    cost_ms,
    mode_times,
    opened,
    slow_rows,
    write_comparison,
    write_lab,
    write_records,
)
from scipy import stats

from common.analysis.micro_batches import calibration, lengths
from common.analysis.micro_batches.calibration import slow_found, slow_plans, slow_summary
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import (
    DATA_SETS,
    ModeComparison,
    by_step,
    read_comparison,
)
from common.analysis.micro_batches.mode_figures import mode_ratios, per_sample
from common.analysis.micro_batches.summary import loss_agreement, training_measures
from common.analysis.micro_batches.waiting import (
    STEPS_ALIKE,
    WAITING,
    static_imbalance,
    static_waits,
    unequal_ranks_ms,
    waiting_points,
)
from common.analysis.show import show
from common.errors import UserError
from common.samples import mean_ratio
from common.scheduling.cost import CalibratedCost, TokensCost
from common.scheduling.partition import min_max_contiguous


def compared(folder: Path, times: pd.DataFrame) -> ModeComparison:
    """Writes these times as a run, and reads it."""
    return read_comparison(opened(write_comparison(folder, times)))


def optimum(batch: np.ndarray, ranks: int) -> list[list[int]]:
    """Returns the split with the smallest bottleneck in padded tokens."""
    return min_max_contiguous(batch, ranks, TokensCost())


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> ModeComparison:
    """Compares twenty global batches of 8 texts in all modes, on two ranks."""
    return compared(tmp_path_factory.mktemp("compared") / "run", mode_times())


# Ratios


def test_ratios_are_taken_on_the_same_global_batch(comparison: ModeComparison) -> None:
    ratios = comparison.ratios()
    same = ["static", "dynamic", "dynamic_calibrated", "karmarkar_karp"]
    assert ratios.columns.tolist() == same
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
    found = compared(tmp_path / "run", times).summary.loc["dynamic"]
    columns = ["ratio", "ratio_low", "ratio_high", "paired_median"]
    assert found[columns].tolist() == pytest.approx([0.7] * 4)


def test_the_interval_of_a_noisy_ratio_holds_the_true_one(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    held = 0
    for trial in range(6):
        times = mode_times(40, {"static": 1.0, "dynamic": 0.6})
        truth = np.where(times["mode"] == "dynamic", 80.0, 100.0)
        noise = 1 + 0.1 * draw.standard_normal((40, len(set(times["mode"]))))
        order = times["order"].to_numpy()
        times["step_time_ms"] = truth * noise[times["step"], order]
        found = compared(tmp_path / f"{trial}", times)
        row = found.summary.loc["dynamic"]
        held += row["ratio_low"] <= 0.8 <= row["ratio_high"]
        # two halves of 20 steps with 10 % of noise: half the time within 0.67 of 0.1·√(2/20)
        assert found.noise_floor == pytest.approx(0.67 * 0.1 * np.sqrt(2 / 20), rel=0.6)
    assert held >= 5


def test_a_mode_within_its_noise_is_not_told_from_static_or_from_the_fastest(
    tmp_path: Path,
) -> None:
    # two modes take 0.7 of static and one takes as long; two of them are 5 % off, up and down
    factors = {
        "static": 1.0,
        "dynamic": 0.7,
        "dynamic_calibrated": 0.7,
        "karmarkar_karp": 1.0,
        "control": 0.7,
    }
    times = mode_times(40, dict.fromkeys(factors, 1.0))
    noisy = times["mode"].isin(["dynamic_calibrated", "karmarkar_karp"])
    noise = np.where(noisy, np.where(times["step"] % 2 == 0, 1.05, 0.95), 1.0)
    times["step_time_ms"] = 100 * times["mode"].map(factors) * noise
    summary = compared(tmp_path / "run", times).summary
    assert pd.isna(summary.loc["static", "differs"])
    settled, hidden = "settled", "hidden by noise"
    assert summary["differs"].drop("static").tolist() == [settled, settled, hidden]
    assert summary["tied"].tolist() == [False, True, True, False]


def test_of_few_steps_no_mode_is_told_from_static_and_all_are_tied(tmp_path: Path) -> None:
    found = compared(tmp_path / "run", mode_times(5))
    assert set(found.summary["differs"].dropna()) == {"not settled: 1 more round"}
    assert found.summary["tied"].all()
    assert not found.pays  # though dynamic takes about 0.7 of static in each of them
    of_one_step = compared(tmp_path / "one", mode_times(1))
    assert of_one_step.summary["ratio_low"].drop("static").isna().all()
    assert of_one_step.per_sample["ratio_low"].drop("static").isna().all()


@pytest.mark.slow
def test_the_interval_of_modes_with_other_batches_holds_the_true_ratio(tmp_path: Path) -> None:
    draw = np.random.default_rng(7)
    held = told = 0
    for trial in range(60):
        times = mode_times(24, {"static": 1.0, "token_budget": 0.5})
        is_budget = times["mode"] == "token_budget"
        # steps of other texts: of 8 to 15 ms a text, and of 6 to 10 texts a step where any number
        texts = np.where(is_budget, draw.integers(6, 11, len(times)), 8)
        times["global_batch"] = texts
        times["step_time_ms"] = texts * draw.uniform(8, 15, len(times))
        times = times[times["rank"] == 0]
        row = compared(tmp_path / f"{trial}", times).per_sample.loc["token_budget"]
        held += row["ratio_low"] <= 1 <= row["ratio_high"]
        told += row["differs"] == "settled"
    assert (held, told) == (60 - told, told)
    assert told <= stats.binom.ppf(0.999, 60, 0.05)


def test_waiting_is_a_share_of_all_ranks_time_and_differences_are_those_of_the_shares(
    tmp_path: Path,
) -> None:
    times = mode_times(20, unequal={"control": 0.9, "dynamic": 0.8})
    # steps of very different length and waiting: the mean of their shares is not the share
    longer = ["step_time_ms", "waiting_time_ms"]
    times[longer] = times[longer].mul(np.linspace(1, 9, 20)[times["step"]], axis=0)
    times.loc[times["step"] > 12, "waiting_time_ms"] *= 0.2
    found = compared(tmp_path / "run", times)
    sums = times.groupby("mode")[longer].sum()
    share = sums["waiting_time_ms"] / sums["step_time_ms"]
    assert found.waiting[share.index].tolist() == pytest.approx(share.tolist())
    assert static_waits(found).estimate == pytest.approx(share["static"])
    table = waiting_points(found)
    for mode, row in table.drop("control").iterrows():
        above = row["above_control"].estimate
        assert above == pytest.approx(100 * (share[mode] - share["control"]))
    for mode in ("dynamic", "karmarkar_karp"):
        above = table.loc[mode, "above_static"].estimate
        assert above == pytest.approx(100 * (share[mode] - share["static"]))
    cells = ["equal lengths (control)", f"{share['control']:.1%}", "–", "–"]
    assert show(table, WAITING).cells[-1] == cells


def test_steps_of_a_ratio_of_sums_have_its_mean_and_its_interval() -> None:
    draw = np.random.default_rng(5)
    sizes = pd.Series(draw.uniform(1, 9, 20))
    values = sizes * draw.uniform(0.1, 0.9, 20)
    steps, ratio = by_step(values, sizes), mean_ratio(values, sizes)
    assert steps.mean() == pytest.approx(ratio.estimate)
    off = stats.t.ppf(0.975, 19) * stats.sem(steps) / ratio.estimate
    assert off == pytest.approx(np.log(ratio.high / ratio.estimate))


def test_equal_steps_have_the_intervals_of_their_shares(tmp_path: Path) -> None:
    times = mode_times(20, unequal={"control": 0.9})
    times["step_time_ms"] = 10.0
    table = waiting_points(compared(tmp_path / "run", times))
    points = times.groupby(["mode", "step"])["waiting_time_ms"].mean() * 10
    static, control, dynamic = (points[mode] for mode in ("static", "control", "dynamic"))
    # six modes are held against the control at once, three others against static
    for judged, test, claims in (
        (
            table.loc["static", "above_control"],
            stats.ttest_ind(static, control, equal_var=False),
            6,
        ),
        (table.loc["dynamic", "above_static"], stats.ttest_rel(dynamic, static), 3),
    ):
        ends = test.confidence_interval(1 - 0.05 / claims)
        assert [judged.interval.low, judged.interval.high] == pytest.approx([*ends])


def test_imbalance_of_static_is_that_of_its_fullest_and_emptiest_rank(
    comparison: ModeComparison,
) -> None:
    found = static_imbalance(comparison)
    # seven steps of 400, seven of 440, six of 480; the other rank has half, and half of it is text
    assert found["fullest"] == pytest.approx((7 * 400 + 7 * 440 + 6 * 480) / 20)
    assert found["emptiest"] == pytest.approx(found["fullest"] / 2)
    assert found["excess"] == pytest.approx(1 / 0.75 - 1)
    assert found["text_share"] == pytest.approx(0.5)


def test_modes_with_other_batches_are_compared_by_the_text(tmp_path: Path) -> None:
    times = mode_times()
    # as long a step, for twice as many texts: half the time a text
    budget = times["mode"] == "token_budget"
    times.loc[budget, "global_batch"] = 16
    static_ms = times[times["mode"] == "static"].groupby("step")["step_time_ms"].max()
    times.loc[budget, "step_time_ms"] = times.loc[budget, "step"].map(static_ms)
    found = compared(tmp_path / "run", times)
    assert found.own_batch_modes == ["length_grouped", "token_budget"]
    assert "token_budget" not in found.summary.index
    table = found.per_sample
    assert table.loc["token_budget", "ratio"] == pytest.approx(0.5)
    assert not table.loc["token_budget", "same_batch"]
    assert table.loc["dynamic", "ratio"] == pytest.approx(found.summary.loc["dynamic", "ratio"])
    assert table.loc["dynamic", "same_batch"]
    assert table.loc["token_budget", "texts"] == 16


def test_padded_tokens_promise_a_ratio_even_where_it_is_a_loss(tmp_path: Path) -> None:
    write_comparison(tmp_path / "run", mode_times(20, {"static": 1.0, "dynamic": 1.3}))
    lab = open_assignment3(tmp_path)
    assert lab.comparison.dynamic["padded_ratio"] == pytest.approx(1.3)
    [row] = show(lab.comparisons, DATA_SETS).cells
    assert row[1:5] == ["settled", "no", "20", "1.30"]  # differs, pays, steps, promised


# Costs, slow ranks, many ranks


def test_costs_are_fitted_to_medians_of_each_rank() -> None:
    timed = calibration_rows()
    fitted = calibration.fit_costs(timed, CalibratedCost.fit)
    # one pass of three took three times as long: the median does not see it
    assert fitted[1].c0_s == pytest.approx(5e-3)
    assert fitted[1].c1_s == pytest.approx(2e-5)
    errors = calibration.calibration_errors(calibration.with_predicted(timed, fitted))
    assert errors["largest error"].max() < 1e-6
    assert errors["points"].tolist() == [9, 9]


def test_the_fixed_share_is_that_of_the_bottleneck_rank(comparison: ModeComparison) -> None:
    fitted = calibration.fit_costs(comparison.calibration, CalibratedCost.fit)
    expected = np.mean([5 / cost_ms(1, 400 + 40 * (step % 3)) for step in range(20)])
    assert calibration.fixed_share(comparison, fitted) == pytest.approx(expected)
    share, ratio = calibration.measured_points([comparison], CalibratedCost.fit)["sst2"]
    assert share == pytest.approx(expected)
    assert ratio == comparison.summary.loc["dynamic", "compute_ratio"]


def test_errors_of_a_prediction_are_relative_and_by_rank() -> None:
    table = pd.DataFrame({"rank": [0, 0, 0, 1], "time_ms": [10.0] * 4})
    table["predicted_ms"] = [11.0, 8.0, 10.5, 10.0]
    errors = calibration.calibration_errors(table).set_index("rank")
    assert errors.loc[0, ["median error", "largest error"]].tolist() == pytest.approx([0.1, 0.2])
    assert errors.loc[1, "median error"] == 0


def test_a_slow_rank_is_found_when_its_estimate_stays_close() -> None:
    table = slow_rows()
    found = slow_summary(table)
    assert (found.rank, found.factor, found.estimate, found.found_at) == (1, 2.0, 2.0, 10)
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


def test_steps_with_a_slow_rank_are_split_where_it_is_found() -> None:
    table = slow_rows()
    never_told, before, after = slow_plans(table).itertuples(index=False, name=None)
    # 1.5 times the step of a plan that was told, until step 10 of 40
    assert never_told[1:3] == (40, 1.5)
    assert before[1:3] == (10, 1.5)
    assert after[1:3] == (30, 1.0)
    assert [plan[3].estimate for plan in (never_told, before, after)] == pytest.approx(
        [1.5, 1.5, 1]
    )
    assert slow_found(table)["from step"] == "10"
    table["estimated_factor"] = 1.0
    # 10 of its 40 steps took 1.5, and 30 took 1
    assert slow_plans(table).iloc[-1, 1:3].tolist() == [40, 1.0]
    assert slow_found(table)["estimate stays within 25%"] == "no"


def test_bottlenecks_are_over_the_bound_of_the_same_texts(tmp_path: Path) -> None:
    simulation = open_assignment3(write_lab(tmp_path / "lab")).simulation
    table = simulation.summary().set_index(["dataset", "mode", "world_size"])["ratio"]
    # the median draw is 4 % above the first
    assert table["imdb", "static", 8] == pytest.approx(2.5 * 1.04)
    assert table["imdb", "dynamic", 1024] == pytest.approx(1.1 * 1.04)
    # half the bottleneck for half the texts is as good
    assert table["imdb", "token_budget", 1024] == pytest.approx(1.1 * 1.04)
    # static and the best mode that pads, on the fewest and on the most ranks
    shown = simulation.extremes().set_index(["data set", "mode"])
    assert shown.columns.tolist() == ["8 ranks", "1,024 ranks"]
    assert shown.loc[("sst2", "static")].tolist() == pytest.approx([2.5 * 1.04, 6 * 1.04])
    assert shown.loc[("sst2", "dynamic")].tolist() == pytest.approx([1.1 * 1.04] * 2)
    assert len(shown) == 6
    # of three plans in 0.25, 0.5 and 9 ms
    planning = simulation.plan_times()
    assert planning.iloc[0].tolist() == [64, 512, 0.5]


# Lengths


def test_promised_ratios_are_of_the_fullest_rank() -> None:
    even = np.full(100, 50)
    # nothing to win where all texts are equally long
    assert lengths.promised_ratio(even, 2, 8, optimum) == 1
    # six of eight on one rank: half as much again
    assert lengths.promised_ratio(even, 2, 8, lambda *_: [[*range(6)], [6, 7]]) == 1.5


def test_splits_of_a_batch_are_beside_their_lower_bound() -> None:
    by_hand = np.array([10, 1, 1, 1])
    splits = {"as they come": lengths.equal_counts(4, 2), "optimum": optimum(by_hand, 2)}
    table = lengths.split_table(by_hand, splits).set_index("split")
    assert table.index.tolist() == ["as they come", "optimum", "lower bound"]
    # 2 × 10 and 2 × 1, then 1 × 10 and 3 × 1; the longest text alone takes 10
    assert table["slowest rank"].tolist() == [20, 10, 10]
    assert table["all ranks"].tolist() == [22, 13, 13]
    assert table.loc["optimum", "slowest over the first"] == 0.5
    # where no text is long, the bound is an even share: 5 tokens on two ranks
    short = lengths.split_table(np.array([2, 2, 1]), {"any": [[0, 1], [2]]})
    assert short["slowest rank"].iloc[-1] == 3


def test_the_expected_longest_text_is_that_of_all_draws() -> None:
    values = np.array([1, 2, 3])
    # of two texts: 1 in 1 of 9 draws, 2 in 3, 3 in 5
    expected = (1 * 1 + 2 * 3 + 3 * 5) / 9
    assert lengths.expected_longest(values, 2) == pytest.approx(expected)
    row = lengths.length_table({"three": values}, count=2).iloc[0]
    assert row["longest over mean"] == pytest.approx(expected / 2)
    assert row["texts of the greatest length"] == pytest.approx(1 / 3)


def test_a_constant_share_of_a_step_is_left_as_it_is() -> None:
    left = lengths.with_constant(pd.Series({"sst2": 0.58}), [0, 0.8])
    # 0.8 + 0.2 · 0.58
    assert left.loc["sst2"].tolist() == [0.58, pytest.approx(0.916)]


# A whole run


def test_a_run_of_all_stages_is_opened(tmp_path: Path) -> None:
    lab = open_assignment3(write_lab(tmp_path / "lab"))
    assert lab.comparison.dataset == "sst2"  # that of the training runs
    assert [other.dataset for other in lab.other_data] == ["ag_news"]
    assert list(lab.training) == ["static", "dynamic"]
    assert lab.origin == (
        "> Measured in this run: a pretend machine; 2026-01-02; run lab. "
        "sst2, model small, 8 texts a step on 2 ranks."
    )


def test_a_run_without_training_calibration_or_simulation_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    folder = write_comparison(tmp_path / "run", mode_times(5, {"static": 1.0, "dynamic": 0.6}))
    (folder / "calibration.csv").unlink()
    (folder / "slow-rank.csv").unlink()
    lab = open_assignment3(folder)
    assert (lab.training, lab.simulation, lab.other_data) == ({}, None, ())
    assert training_measures(lab.training).empty
    assert loss_agreement(lab.training).empty
    assert calibration.measured_points(lab.comparisons, CalibratedCost.fit) == {}
    missing = [part for part, found in lab.contents.items() if found == "not in this run"]
    assert missing == [
        "modes with batches of their own",
        "calibrated costs",
        "one rank slowed on purpose",
        "simulation of many ranks",
    ]


def test_training_runs_that_differ_are_left_out_with_the_reason(tmp_path: Path) -> None:
    lab = write_lab(tmp_path / "lab")
    settings = (lab / "train_dynamic" / "config.yaml").read_text()
    (lab / "train_dynamic" / "config.yaml").write_text(settings.replace("seed: 42", "seed: 1"))
    found = open_assignment3(lab)
    assert not found.training
    assert "seed differs" in found.left_out
    assert found.left_out in found.contents.values()


def test_comparisons_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        open_assignment3(tmp_path / "nothing")
    write_records(tmp_path / "empty", {})
    with pytest.raises(UserError, match=r"no complete run with mode-times.csv"):
        open_assignment3(tmp_path / "empty")
    failed = write_comparison(tmp_path / "failed", mode_times(3), {"status": "failed"})
    with pytest.raises(UserError, match=r"no complete run with mode-times.csv"):
        open_assignment3(failed)
    lacking = write_comparison(tmp_path / "lacking", mode_times(3).drop(columns="padded_tokens"))
    with pytest.raises(UserError, match=r"mode-times.csv: no column 'padded_tokens'"):
        open_assignment3(lacking)
    without = write_comparison(tmp_path / "without", mode_times(3, {"dynamic": 0.6}))
    with pytest.raises(UserError, match="no steps of mode static"):
        open_assignment3(without)


def test_every_interval_that_is_shown_is_counted(comparison: ModeComparison) -> None:
    intervals = {
        frozenset((mode, base))
        for base, over in (("static", comparison.judged), ("dynamic", comparison.over_dynamic))
        for mode in over
    }
    # Any of the four modes on the same batches may be the fastest: all pairs of them count.
    same = itertools.combinations(comparison.modes, 2)
    assert comparison.claims == len(intervals | {frozenset(pair) for pair in same}) == 10


def test_std_over_ranks_is_that_of_a_training_run(tmp_path: Path) -> None:
    found = compared(tmp_path / "run", mode_times(10))
    judged = unequal_ranks_ms(found)[STEPS_ALIKE]
    # Of two ranks, each is half of their difference away; all steps end together.
    rows = found.times[found.times["mode"] == "static"].groupby("step")["compute_time_ms"]
    halves = (rows.max() - rows.min()) / 2
    assert judged.estimate == pytest.approx(stats.trim_mean(halves, 0.1))


def test_ends_of_few_steps_are_not_drawn(tmp_path: Path) -> None:
    noise = np.random.default_rng(3).uniform(0.9, 1.1, 1000)
    found = []
    for steps in (2, 20):
        times = mode_times(steps)
        times["step_time_ms"] *= noise[: len(times)]
        found.append(compared(tmp_path / f"{steps}", times))
    for draw in (mode_ratios, per_sample):
        few, many = (draw(each).axes[0] for each in found)
        lengths = []
        for axes in (few, many):
            [bar] = [bar for bar in axes.containers if isinstance(bar, ErrorbarContainer)]
            lengths.append([end[0] - begin[0] for begin, end in bar.lines[2][0].get_segments()])
        assert lengths[0] == [0] * len(lengths[1])
        assert min(lengths[1]) > 0
        assert few.get_xlim()[1] < 2 * many.get_xlim()[1]
