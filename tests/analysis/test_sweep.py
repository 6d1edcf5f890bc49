"""Sweeps: the slowest rank, the noise floor, distinct bucketings, accuracy; on made-up tables."""

import itertools
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from common.analysis.buckets.measurements import exposed_steps, local_backward_s
from common.analysis.buckets.sweep import read_sweep
from common.errors import UserError
from common.perfmodel.ddp.profile import BackwardProfile


def raw(times: dict[float, list[list[tuple[float, float]]]], buckets: dict[float, int]) -> list:
    """Makes rows of ddp-times.csv: by cap, round and iteration the backward times of two ranks."""
    rows = []
    for cap, rounds in times.items():
        for (round_, iterations), rank in itertools.product(enumerate(rounds), (0, 1)):
            for iteration, pair in enumerate(iterations):
                rows.append(
                    {
                        "bucket_cap_mib": cap,
                        "num_buckets": buckets[cap],
                        "first_bucket_bytes": 100 * buckets[cap],
                        "last_bucket_bytes": 7,
                        "round": round_,
                        "iteration": iteration,
                        "rank": rank,
                        "forward_time_ms": 1.0,
                        "backward_time_ms": pair[rank],
                        "step_time_ms": pair[rank] + 2,
                    }
                )
    return rows


def write(path: Path, rows: list) -> Path:
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    times = {
        1.0: [[(10, 12), (11, 10)], [(14, 9), (12, 12)]],  # slowest: 12, 11 | 14, 12
        2.0: [[(8, 8), (8, 7)], [(9, 10), (10, 3)]],  # slowest: 8, 8 | 10, 10
        4.0: [[(9, 9), (9, 9)], [(9, 9), (9, 9)]],  # the buckets of cap 2 again
    }
    return write(tmp_path / "ddp-times.csv", raw(times, {1.0: 5, 2.0: 3, 4.0: 3}))


def test_a_step_takes_as_long_as_its_slowest_rank(path: Path) -> None:
    sweep = read_sweep(path)
    assert sweep.world_size == 2
    assert sweep.measured_s() == pytest.approx({1.0: 0.012, 2.0: 0.009, 4.0: 0.009})
    table = sweep.summary().set_index("bucket_cap_mib")
    assert table.loc[1.0, "q25_ms"] == np.quantile([12, 11, 14, 12], 0.25)


def test_the_noise_floor_compares_two_halves_of_the_rounds(path: Path) -> None:
    # medians of even and odd rounds: 11.5 | 13, 8 | 10, 9 | 9
    expected = np.median([1 - 11.5 / 13, 1 - 8 / 10, 0])
    assert read_sweep(path).noise_floor() == pytest.approx(expected)


def test_one_round_has_no_noise_floor(tmp_path: Path) -> None:
    rows = raw({1.0: [[(10, 12)]]}, {1.0: 2})
    assert np.isnan(read_sweep(write(tmp_path / "t.csv", rows)).noise_floor())


def test_caps_with_the_same_buckets_are_one_case(path: Path) -> None:
    accuracy = read_sweep(path).accuracy_of({1.0: 0.012, 2.0: 0.010}.get)
    assert accuracy.table["bucket_cap_mib"].tolist() == [1.0, 2.0]
    # cap 2 and 4 pooled: 8, 8, 10, 10, 9, 9, 9, 9 -> median 9
    assert accuracy.table["measured_ms"].tolist() == pytest.approx([12, 9])
    assert accuracy.table["error"].tolist() == pytest.approx([0, 10 / 9 - 1])
    assert accuracy.median_error == pytest.approx((0 + 1 / 9) / 2)
    assert accuracy.worst_error == pytest.approx(1 / 9)


def test_a_case_is_as_wide_as_the_caps_that_gave_its_buckets(path: Path) -> None:
    assert read_sweep(path).widths() == {1.0: 1.0, 2.0: 4.0}


def with_sizes(rows: list, sizes: dict[float, str]) -> list:
    return [row | {"bucket_bytes": sizes[row["bucket_cap_mib"]]} for row in rows]


def test_bucketings_are_told_apart_by_all_their_sizes_where_these_are_known(tmp_path: Path) -> None:
    # Caps 2 and 4 make three buckets, the first and the last alike; the second differs at cap 4.
    caps = {1.0: 2, 2.0: 3, 4.0: 3, 8.0: 3}
    rows = raw({cap: [[(10, 12)]] for cap in caps}, caps)
    sizes = {1.0: "200 7", 2.0: "300 50 7", 4.0: "300 60 7", 8.0: "300 60 7"}
    known = read_sweep(write(tmp_path / "known.csv", with_sizes(rows, sizes)))
    assert known.smallest_alike() == {1.0: 1.0, 2.0: 2.0, 4.0: 4.0, 8.0: 4.0}
    older = read_sweep(write(tmp_path / "older.csv", rows))
    assert older.smallest_alike() == {1.0: 1.0, 2.0: 2.0, 4.0: 2.0, 8.0: 2.0}


def test_a_sweep_of_one_bucket_each_is_read_as_any_other(tmp_path: Path) -> None:
    # pandas takes a column of single sizes for numbers.
    rows = with_sizes(raw({1.0: [[(10, 12)]]}, {1.0: 1}), {1.0: "100"})
    assert set(read_sweep(write(tmp_path / "t.csv", rows)).steps["bucket_bytes"]) == {"100"}


def test_buckets_of_other_sizes_in_the_middle_are_of_another_model(tmp_path: Path) -> None:
    # Gradients of 300, 50 and 7 bytes; at a cap of 40 bytes each makes a bucket of its own.
    cap = 40 / 2**20
    profile = BackwardProfile(
        names=("a", "b", "c"),
        sizes_bytes=np.array([300, 50, 7]),
        ready_s=np.array([1.0, 2.0, 3.0]),
        backward_s=3.0,
    )
    rows = raw({cap: [[(10, 12)]]}, {cap: 3})
    for sizes, refused in (("300 50 7", False), ("300 51 7", True)):
        sweep = read_sweep(write(tmp_path / "t.csv", with_sizes(rows, {cap: sizes})))
        with pytest.raises(UserError, match="of other sizes") if refused else nullcontext():
            sweep.check_buckets(profile)


def test_what_a_rank_waits_for_another_is_not_its_exposed_communication(tmp_path: Path) -> None:
    # Rank 1 computes 30 ms longer, and then both wait 5 ms for the last bucket.
    keys = {"bucket_cap_mib": 2.0, "round": 0}
    rows = [
        keys | {"iteration": i, "rank": rank, "communication_time_ms": 80.0, "overlap_time_ms": own}
        for i in range(3)
        for rank, own in ((0, 45.0), (1, 75.0))
    ]
    assert exposed_steps(write(tmp_path / "t.csv", rows)).tolist() == [5.0] * 3


def test_regret_is_what_following_the_prediction_costs(path: Path) -> None:
    accuracy = read_sweep(path).accuracy_of({1.0: 0.001, 2.0: 0.002}.get)
    assert (accuracy.predicted_best_mib, accuracy.measured_best_mib) == (1.0, None)
    assert accuracy.best.tied == (1.0, 2.0)
    # medians of two rounds: 11.5, 13 at 1 MiB; of what 2 and 4 MiB both give 8.5, 9.5
    assert accuracy.regret.estimate == pytest.approx((11.5 / 8.5 * 13 / 9.5) ** 0.5 - 1)
    assert accuracy.regret.said == "not settled: 4 more rounds"


def test_the_default_cap_stays_out_of_the_comparison(tmp_path: Path) -> None:
    rows = raw({1.0: [[(10, 12)], [(10, 12)]]}, {1.0: 2})
    default = [{**row, "bucket_cap_mib": "None", "num_buckets": 9} for row in rows]
    sweep = read_sweep(write(tmp_path / "t.csv", rows + default))
    assert list(sweep.measured_s()) == [1.0]
    assert len(sweep.summary()) == 2
    with pytest.raises(UserError, match="no cap was both predicted and measured"):
        read_sweep(write(tmp_path / "t.csv", default)).accuracy_of(lambda cap: 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="rank"), "no column 'rank'"),
        (lambda t: t.assign(backward_time_ms=-1), "line 2"),
        (lambda t: t.assign(rank=t["rank"] + 1), "ranks are"),
        (lambda t: t.iloc[:0], "no rows"),
    ],
)
def test_tables_that_cannot_be_sweeps_are_refused(path: Path, change, message: str) -> None:
    change(pd.read_csv(path)).to_csv(path, index=False)
    with pytest.raises(UserError, match=message):
        read_sweep(path)


def test_local_time_is_the_median_of_the_slowest_rank(tmp_path: Path) -> None:
    rows = [
        {"round": 0, "iteration": i, "rank": r, "backward_time_ms": t}
        for i, pair in enumerate([(3, 5), (4, 2), (9, 1)])
        for r, t in enumerate(pair)
    ]
    assert local_backward_s(write(tmp_path / "l.csv", rows)) == pytest.approx(0.005)
