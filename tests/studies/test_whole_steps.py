"""The study of whole steps: what runs, and what becomes of its tables."""

from __future__ import annotations

import pandas as pd
import pytest
import tyro
import yaml

from common.analysis.data_parallel.emulated_strategies import open_emulated
from common.benchmarks.buckets.allreduce import AllReduceBenchmark
from common.benchmarks.buckets.overlap import OverlapBenchmark
from common.benchmarks.strategies import StrategyBenchmark
from common.errors import UserError
from common.runtime.flags import as_flags
from common.runtime.paths import project_root
from common.studies.whole_steps import (
    CONFIG,
    RATIOS,
    WholeStepsStudy,
    measurements,
    ranges_of,
    ratios_of,
    steps_of,
    summary_of,
)

SETTINGS = {
    "allreduce_benchmark": AllReduceBenchmark,
    "overlap_benchmark": OverlapBenchmark,
    "compare_strategies": StrategyBenchmark,
}


def test_every_measurement_is_a_script_with_flags_that_it_takes_and_a_section_of_the_preset():
    sections = yaml.safe_load(CONFIG.read_text())
    found = measurements(WholeStepsStudy(rounds=5))
    assert {name for name, _, _ in found} == set(SETTINGS)
    for name, script, flags in found:
        assert script.is_file()
        assert name in sections
        settings = tyro.cli(SETTINGS[name], args=as_flags(flags))
        assert settings.rounds in (4, 5, 6)


def test_a_recorded_run_has_a_row_for_each_strategy():
    steps = steps_of(open_emulated(project_root() / "data" / "epyc-2-cores" / "assignment1"))
    assert set(steps["strategy"]) == {"DDP", "FULL_SHARD", "SHARD_GRAD_OP"}
    assert steps["error"].tolist() == pytest.approx(
        (steps["predicted_ms"] / steps["measured_ms"] - 1).tolist()
    )
    assert steps["n"].isna().all()  # two rounds tell nothing of the spread


def test_ranges_are_over_the_runs_that_are_known_well_enough():
    rows = [
        ("DDP", 1, 0.01, 0.005),
        ("DDP", 2, -0.03, 0.014),
        ("DDP", 3, 0.2, 0.016),  # too noisy to judge
        ("FULL_SHARD", 1, 0.1, 0.02),
        ("FULL_SHARD", 2, 0.1, float("nan")),
    ]
    steps = pd.DataFrame(rows, columns=["strategy", "run", "error", "n"])
    ranges = ranges_of(steps).set_index("strategy")
    assert ranges.loc["DDP", ["runs", "judged"]].tolist() == [3, 2]
    assert ranges.loc["DDP", ["lowest", "highest", "worst_n"]].tolist() == [-0.03, 0.01, 0.016]
    assert ranges.loc["FULL_SHARD", "judged"] == 0
    assert ranges.loc["FULL_SHARD", ["lowest", "highest"]].isna().all()


def test_ratios_are_of_the_same_round_and_of_the_slowest_rank():
    names = ("DDP", "FULL_SHARD", *RATIOS)
    rows = [
        {"strategy": name, "round": round_, "iteration": iteration, "rank": rank}
        | {"step_time_ms": (10.0 + place) * (round_ + 1) + rank}
        for place, name in enumerate(names)
        for round_ in range(3)
        for iteration in range(2)
        for rank in range(2)
    ]
    ratios = ratios_of(pd.DataFrame(rows)).set_index(["strategy", "round"])["ratio"]
    assert ratios["MY_BUCKETS", 0] == pytest.approx((12 + 1) / (10 + 1))
    assert ratios["MY_FSDP", 2] == pytest.approx((14 * 3 + 1) / (11 * 3 + 1))
    table = summary_of(ratios_of(pd.DataFrame(rows)))
    assert table.loc[("MY_ZERO1", "DDP"), "median"] == pytest.approx((13 * 2 + 1) / (10 * 2 + 1))


def test_settings_that_cannot_be_are_one_line():
    with pytest.raises(UserError, match="runs is 0"):
        WholeStepsStudy(runs=0)
