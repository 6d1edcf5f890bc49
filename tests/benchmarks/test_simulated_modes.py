"""simulate_modes.py: one small run, checked against plans made again and against the bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from common.benchmarks.micro_batches import simulated_modes
from common.benchmarks.micro_batches.simulated_modes import (
    COLUMNS,
    PACKED,
    PLANNING_COLUMNS,
    ModeSimulation,
    lower_bound_s,
    main,
)
from common.data.text_lengths import LengthDistribution
from common.errors import UserError
from common.runtime.records.run_directory import read_environment
from common.scheduling.cost import CalibratedCost
from common.scheduling.modes import MODES, SAME_BATCH
from common.scheduling.partition import bounded_plan

SMALL = ModeSimulation(
    datasets=("sst2", "imdb"),
    world_sizes=(4, 16),
    rank_batch=6,
    draws=2,
    samples=600,
    planning_world_sizes=(3, 8),
    planning_batches=(20, 30),
    planning_repeats=4,
    run_id="run",
)


def distribution(name: str) -> LengthDistribution:
    """Draws lengths like those of short reviews, whatever is recorded."""
    rng = np.random.default_rng(len(name))
    return LengthDistribution.of(np.clip(rng.lognormal(3.2, 0.7, 5000), 3, 500), name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the simulation once; returns its folder."""
    folder = tmp_path_factory.mktemp("simulated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_modes, "read_text_lengths", distribution)
        main(replace(SMALL, output_dir=str(folder)))
    return folder / "run"


@pytest.fixture(scope="module")
def table(run: Path) -> pd.DataFrame:
    return pd.read_csv(run / "simulated-bottlenecks.csv")


def test_there_is_a_row_for_each_data_set_world_size_draw_and_mode(
    run: Path, table: pd.DataFrame
) -> None:
    assert read_environment(run)["status"] == "complete"
    assert tuple(table.columns) == COLUMNS
    keys = ["dataset", "world_size", "draw", "mode"]
    assert len(table) == len(table[keys].drop_duplicates()) == 2 * 2 * 2 * (len(MODES) + 2)
    assert set(table["mode"]) == {*MODES, *PACKED}
    same = table[table["same_batch"]]
    assert set(same["mode"]) == {*SAME_BATCH, *PACKED}
    assert (same["samples"] == same["global_batch"]).all()
    assert (same["global_batch"] == 6 * same["world_size"]).all()
    own = table[~table["same_batch"]]
    assert (own["samples"] / own["global_batch"]).between(0.85, 1.15).all()


def test_modes_that_share_the_batch_share_its_bound_and_tokens(table: pd.DataFrame) -> None:
    shared = table[table["same_batch"]].groupby(["dataset", "world_size", "draw"])
    assert (shared[["lower_bound_ms", "tokens"]].nunique() == 1).all().all()
    assert table[["dataset", "lower_bound_ms"]].drop_duplicates().shape[0] >= 8  # draws differ


def test_nothing_is_below_the_bound_and_no_padded_plan_below_dynamic(table: pd.DataFrame) -> None:
    assert (table["bottleneck_ms"] >= table["lower_bound_ms"] * (1 - 1e-12)).all()
    keys = ["dataset", "world_size", "draw"]
    by_mode = table[table["same_batch"]].set_index([*keys, "mode"])["bottleneck_ms"].unstack()
    assert (by_mode["dynamic"] <= by_mode[["static", "karmarkar_karp"]].min(axis=1)).all()
    assert (by_mode["dynamic"] < 0.8 * by_mode["static"]).all()
    assert (by_mode["packed_karmarkar_karp"] <= by_mode["dynamic"]).all()


def test_the_bound_holds_for_optimal_plans_and_is_met_by_equal_texts() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        cost = CalibratedCost(*(rng.uniform(0, 1, 3) * (1e-2, 1e-4, 1e-6)))
        ranks = int(rng.integers(1, 9))
        lengths = rng.integers(1, 300, int(rng.integers(ranks, 60)))
        best = bounded_plan(lengths, ranks, cost).bottleneck
        assert lower_bound_s(lengths, ranks, cost) <= best * (1 + 1e-12)
    equal = np.full(24, 17)
    cost = CalibratedCost(1e-3, 1e-4, 1e-7)
    assert lower_bound_s(equal, 4, cost) == pytest.approx(cost(6, 17), rel=1e-12)
    assert lower_bound_s(np.array([1, 90]), 2, cost) == pytest.approx(cost(1, 90), rel=1e-12)


def test_every_plan_that_was_timed_is_in_the_table(run: Path) -> None:
    times = pd.read_csv(run / "planning-times.csv")
    assert tuple(times.columns) == PLANNING_COLUMNS
    assert (times.groupby(["world_size", "global_batch", "cost"]).size() == 4).all()
    assert set(zip(times["world_size"], times["global_batch"], strict=True)) == {(3, 20), (8, 30)}
    assert set(times["cost"]) == {"tokens", "tokens_sq", "calibrated"}
    assert (times["time_ms"] > 0).all()


def test_a_data_set_without_recorded_lengths_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown data set 'sst3'"):
        main(replace(SMALL, datasets=("sst3",), output_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())
