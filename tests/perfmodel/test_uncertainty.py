"""The band around a prediction, where statistics say what it must be, and on recorded tables."""

from __future__ import annotations

from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
from perfmodel_support import refused, write_csv

from common.perfmodel.calibration import Calibration, read_calibration
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.model import DdpModel
from common.perfmodel.samples import AllReduceSamples, ReadySamples
from common.perfmodel.tables import (
    read_all_reduce,
    read_costs,
    read_ready_samples,
    read_ready_times,
)
from common.perfmodel.uncertainty import Chance, prediction_bands, spread_by_source
from common.samples import Interval

RECORDED = Path(__file__).resolve().parents[2] / "data" / "epyc-2-cores" / "assignment2"
TABLES = (
    RECORDED / "train_benchmark" / "gradient-ready-times.csv",
    RECORDED / "allreduce_benchmark" / "allreduce-samples.csv",
    RECORDED / "overlap_benchmark" / "overlap-times.csv",
)
CAPS = [None, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 64]


@pytest.fixture(scope="module")
def recorded():
    return read_calibration(*TABLES, backend="gloo")


def made_up(ready_s, all_reduce_s, costs: DdpCosts | None = None) -> Calibration:
    """Makes samples of one gradient of 4 bytes: one rank's ready times, and an all-reduce of it."""
    times = np.asarray(all_reduce_s)
    return Calibration(
        ReadySamples(("p",), np.array([4]), ("float32",), (0,), np.array(ready_s)[:, None, None]),
        AllReduceSamples(np.array([4.0, 8.0]), np.stack([times, 2 * times])[:, None], 2),
        costs=costs or DdpCosts(),
    )


def drawn_times_s(times_s, count: int = 200) -> np.ndarray:
    """Draws all-reduces of 4 and 8 bytes from [2, rounds, calls] times: [count, 2]."""
    samples = AllReduceSamples(np.array([4.0, 8.0]), np.array(times_s), 2)
    generator = np.random.default_rng(0)
    return np.array([samples.drawn(generator).times_s for _ in range(count)])


def test_where_no_round_has_all_sizes_only_calls_are_drawn():
    drawn = drawn_times_s([[[1.0, 2.0], [np.nan, np.nan]], [[np.nan, np.nan], [4.0, 8.0]]])
    # Two calls of two are drawn: their median is either one or the middle.
    assert [set(column) for column in drawn.T] == [{1.0, 1.5, 2.0}, {4.0, 6.0, 8.0}]


def test_all_samples_give_the_prediction_that_the_tables_give(recorded):
    bands = prediction_bands(recorded, CAPS, draws=2)
    profile, network = read_ready_times(TABLES[0]), read_all_reduce(TABLES[1])
    two = {"costs": read_costs(TABLES[2]), "in_flight": 2, "crowded_network": network.crowded}
    for cap, predicted_ms in zip(CAPS, bands.table["predicted_ms"], strict=True):
        expected = DdpModel(profile, network.curve, **two).at_cap(cap).total_s
        assert predicted_ms == pytest.approx(expected * 1e3)


def test_draws_surround_the_prediction(recorded):
    table = prediction_bands(recorded, CAPS, draws=50).table
    assert (table["low_ms"] < table["predicted_ms"]).all()
    assert (table["predicted_ms"] < table["high_ms"]).all()
    assert (table["low_ms"] < table["median_ms"]).all()
    # 0.5 and 1 MiB give the same buckets, and are one case.
    same = table.set_index("bucket_cap_mib").loc[[0.5, 1.0]].drop_duplicates()
    assert len(same) == 1


def test_the_same_seed_gives_the_same_band_and_another_seed_another(recorded):
    first, again = (prediction_bands(recorded, [1, 8], draws=20, seed=3) for _ in range(2))
    other = prediction_bands(recorded, [1, 8], draws=20, seed=4)
    assert first.drawn_s.tolist() == again.drawn_s.tolist()
    assert first.table.equals(again.table)
    assert first.drawn_s.tolist() != other.drawn_s.tolist()


def test_samples_without_spread_leave_no_band():
    bands = prediction_bands(made_up([3.0] * 5, [1.0] * 5), [1], draws=50)
    row = bands.table.iloc[0]
    assert row["low_ms"] == row["predicted_ms"] == row["high_ms"] == pytest.approx(4000)
    assert row["best_share"] == 1


def test_a_size_with_few_calls_is_known_as_badly_as_few_calls_tell():
    # 1 and 3 s were measured, each once. Two draws of them are 1 and 1, 1 and 3 (in either order)
    # or 3 and 3: their median is 1, 2, 2 or 3. A size with 64 calls has 64 draws.
    few = np.full(64, np.nan)
    few[:2] = 1.0, 3.0
    many = np.tile([1.0, 3.0], 32)
    drawn = drawn_times_s(np.stack([few, many])[:, None], 600)[:, 0]
    shares = [float((drawn == median).mean()) for median in (1.0, 2.0, 3.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.04)


def test_a_band_around_another_prediction_keeps_its_relative_width():
    chance = Chance(Interval(2.0, 1.8, 2.4), widest="all-reduces", moved=0.2)
    moved = chance.around(1.0)
    band = moved.predicted_s
    assert (band.estimate, band.low, band.high) == pytest.approx((1.0, 0.9, 1.2))
    assert moved.share == pytest.approx(chance.share)
    assert "900.0 to 1200.0 ms" in moved.text()


def test_the_band_of_one_median_is_that_of_order_statistics():
    # T is the median of 9 ready times 1 … 9, plus a constant. A drawn median is at most k with
    # the chance that at least 5 of 9 draws are; its 5 % and 95 % quantiles are 3 and 7.
    ready = np.arange(1.0, 10.0)
    bands = prediction_bands(made_up(ready, [1.0] * 5), [1], draws=400)
    drawn = bands.drawn_s[:, 0] - 1
    assert set(np.round(drawn, 9)) <= set(ready)
    for k in range(1, 10):
        chance = sum(comb(9, j) * (k / 9) ** j * (1 - k / 9) ** (9 - j) for j in range(5, 10))
        assert (drawn <= k + 1e-9).mean() == pytest.approx(chance, abs=0.06)
    assert bands.table.iloc[0][["low_ms", "high_ms"]].tolist() == pytest.approx([4000, 8000])


def test_bands_cover_the_truth_about_as_often_as_they_say():
    # Ready times and all-reduces scatter around 100 s and 10 s; T of the true medians is 110 s.
    generator = np.random.default_rng(1)
    inside = 0
    for seed in range(40):
        samples = made_up(100 + generator.normal(size=30), 10 + generator.normal(size=30))
        row = prediction_bands(samples, [1], draws=40, seed=seed).table.iloc[0]
        inside += row["low_ms"] <= 110e3 <= row["high_ms"]
    assert 0.78 <= inside / 40 <= 0.99


def test_without_an_overlap_table_the_costs_are_taken_as_they_are():
    costs = DdpCosts(copy_out_s_per_byte=0.25)
    samples = made_up([3.0] * 4, [1.0] * 4, costs)
    assert prediction_bands(samples, [1], draws=2).table["predicted_ms"][0] == pytest.approx(5000)


def test_sizes_with_fewer_calls_are_drawn_from_the_calls_that_they_have():
    # One round: the small size was called four times, the large one once.
    drawn = drawn_times_s([[[1.0, 2.0, 3.0, 4.0]], [[9.0, np.nan, np.nan, np.nan]]])
    assert (drawn[:, 1] == 9.0).all()
    assert drawn[:, 0].min() < 2 < 3 < drawn[:, 0].max()


def test_a_round_that_was_cut_off_is_not_drawn():
    times_s = np.arange(1.0, 13).reshape(2, 2, 3)
    times_s[1, 1] = np.nan  # the run ended before the second size's second round
    small, large = drawn_times_s(times_s).T
    assert 1 <= small.min() <= small.max() <= 3
    assert 7 <= large.min() <= large.max() <= 9


def test_added_latency_is_paid_by_every_bucket():
    samples = replace(made_up([3.0] * 4, [1.0] * 4), added_latency_s=0.5)
    assert prediction_bands(samples, [1], draws=2).table["high_ms"][0] == pytest.approx(4500)


def test_the_band_by_source_is_that_of_the_source_that_scatters():
    # The pass is always 3 s; the all-reduce of the one bucket is 1, 2 or 3 s.
    spreads = spread_by_source(made_up([3.0] * 5, [1.0, 2.0, 3.0]), 1)
    assert spreads["backward passes"] == spreads["passes beside all-reduces"] == 0
    assert 0.1 < spreads["all-reduces"] <= 2 / 5


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([],), {}, ["no caps"]),
        (([1],), {"draws": 1}, ["1 draws", "at least 2"]),
        (([1],), {"level": 1.0}, ["level 1"]),
        (([0],), {}, ["cap"]),
    ],
)
def test_an_impossible_band_is_refused(recorded, arguments, options, words):
    with refused(*words):
        prediction_bands(recorded, *arguments, **options)


# --- samples by rank -----------------------------------------------------------------------------


def test_the_profile_of_one_rank_and_of_all():
    ready = np.array([[[1.0, 5.0], [2.0, 3.0]], [[3.0, 5.0], [2.0, 4.0]], [[2.0, 6.0], [4.0, 4.0]]])
    samples = ReadySamples(("a", "b"), np.array([4, 8]), ("float32",) * 2, (1, 0), ready)
    # Slowest by pass: a 2, 3, 4; b 5, 5, 6.
    assert samples.profile().ready_s.tolist() == [3.0, 5.0]
    assert samples.profile(rank=0).ready_s.tolist() == [2.0, 5.0]
    assert samples.profile(rank=1).ready_s.tolist() == [2.0, 4.0]
    ranks = samples.profile(per_rank=True)
    assert ranks.rank_ready_s.tolist() == [[2.0, 5.0], [2.0, 4.0]]
    assert ranks.slowest_ready_s.tolist() == [2.0, 5.0]
    # The same pass drawn three times.
    assert samples.profile(np.array([2, 2, 2])).ready_s.tolist() == [4.0, 6.0]


def test_a_missing_sample_is_left_out_of_the_median(tmp_path):
    rows = [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 5.0)]  # (rank, iteration, ms): rank 1 misses one
    header = "rank,iteration,parameter,registration_index,dtype,size_bytes,ready_time_ms"
    lines = [(rank, i, "p", 0, "float32", 4, ms) for rank, i, ms in rows]
    path = write_csv(tmp_path / "gradient-ready-times.csv", header, lines)
    assert read_ready_times(path).ready_s.tolist() == pytest.approx([3.5e-3])
    profile = read_ready_samples(path).profile(per_rank=True)
    assert profile.rank_ready_s.ravel().tolist() == pytest.approx([1.5e-3, 5e-3])
    assert profile.backward_s == pytest.approx(5e-3)
