"""When two runs have a speedup, what it is, and how far it can be trusted."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from text_run_support import write_text_run

from common.analysis.scaling.speedups import (
    NOT_COUNTED,
    per_sample_speedup,
    ratio_interval,
    speedup,
    why_not_comparable,
)
from common.analysis.scaling.study_files import read_runs
from common.analysis.scaling.training_run import RunIdentity, ScalingRun
from common.analysis.sweep_speedups import sweep_speedups
from common.errors import UserError

ONE = RunIdentity(
    world_size=1,
    data="ag_news",
    model="small",
    precision="float32",
    input_shape="128",
    global_batch=32,
    batch_per_rank=32,
    distinct_per_epoch=10_000,
    processed_per_epoch=10_000,
    processor="a GPU",
)
FOUR = dataclasses.replace(ONE, world_size=4, batch_per_rank=8)


def changed(**fields: object) -> RunIdentity:
    return dataclasses.replace(FOUR, **fields)


@pytest.mark.parametrize(
    ("fields", "regime"),
    [
        ({}, "strong"),
        ({"global_batch": 128, "batch_per_rank": 32}, "weak"),
        ({"processed_per_epoch": 10_002}, "strong"),  # a sampler may fill up its last batch
    ],
)
def test_the_same_work_is_comparable(fields: dict, regime: str) -> None:
    assert why_not_comparable(ONE, changed(**fields), regime) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "optimized"}, "model differs"),
        ({"data": "imdb"}, "data set differs"),
        ({"precision": "bfloat16"}, "precision differs"),
        ({"input_shape": "512"}, "shape of a sample differs"),
        ({"global_batch": 128}, "global batch differs"),
        ({"distinct_per_epoch": 2_500, "processed_per_epoch": 2_500}, "distinct samples per epoch"),
        ({"processed_per_epoch": 40_000}, "each 4.0 times"),
        ({"distinct_per_epoch": None}, NOT_COUNTED),
        ({"processor": "another GPU"}, "processor differs"),
        ({"precision": None}, "precision is recorded for one of the two only"),
    ],
)
def test_each_difference_is_refused_by_its_name(fields: dict, reason: str) -> None:
    assert reason in why_not_comparable(ONE, changed(**fields), "strong")


def test_weak_scaling_asks_for_the_same_batch_per_rank() -> None:
    assert "batch per rank differs" in why_not_comparable(ONE, FOUR, "weak")


def test_what_nobody_recorded_is_not_taken_to_be_equal() -> None:
    base = dataclasses.replace(ONE, precision=None)
    assert why_not_comparable(base, changed(precision=None), "strong") == (
        "precision is not recorded"
    )


def run_of(identity: RunIdentity, times: list[float], name: str = "run") -> ScalingRun:
    table = pd.DataFrame({"epoch": range(1, len(times) + 1), "train_time_s": times})
    return ScalingRun(name, Path(), identity, table)


def test_speedup_and_efficiency_of_times_that_are_exact() -> None:
    found = speedup([run_of(ONE, [99, 8, 8])], [run_of(FOUR, [99, 2.5, 2.5])], "strong")
    assert found.value == pytest.approx(3.2)
    assert found.efficiency == pytest.approx(0.8)  # over four ranks
    assert (found.low, found.high) == pytest.approx((3.2, 3.2))


def test_a_difference_is_raised_with_both_names() -> None:
    with pytest.raises(UserError, match=r"a and b: not comparable: model differs"):
        speedup([run_of(ONE, [1, 1], "a")], [run_of(changed(model="x"), [1, 1], "b")], "strong")


def test_an_interval_over_runs_is_wider_than_one_over_their_epochs() -> None:
    # Epochs of a run agree to 1 %; runs differ by 10 %.
    bases = [run_of(ONE, [9, *(level * np.array([0.99, 1.0, 1.01]))]) for level in (8, 8.8, 8.2)]
    others = [run_of(FOUR, [9, *(level * np.array([0.99, 1.0, 1.01]))]) for level in (2, 2.2, 2.1)]
    single = speedup(bases[:1], others[:1], "strong")
    repeated = speedup(bases, others, "strong")
    assert single.over == "epochs"
    assert repeated.over == "repeated runs"
    assert repeated.high - repeated.low > 3 * (single.high - single.low)
    assert repeated.low < 4 < repeated.high


def test_intervals_over_runs_hold_the_truth_as_often_as_they_say() -> None:
    draw, held, trials = np.random.default_rng(5), 0, 400
    for _ in range(trials):
        levels = [level * np.exp(0.05 * draw.standard_normal((3, 1))) for level in (8, 2)]
        interval, over = ratio_interval(*(list(side) for side in levels))
        assert over == "repeated runs"
        held += interval.low <= 4 <= interval.high
    assert 0.92 <= held / trials <= 0.99


def test_a_single_epoch_has_no_interval_and_all_warm_up_no_speedup() -> None:
    found = speedup([run_of(ONE, [9, 8])], [run_of(FOUR, [9, 2])], "strong")
    assert math.isnan(found.low)
    with pytest.raises(UserError, match="all of its 1 epochs are warm-up"):
        speedup([run_of(ONE, [9])], [run_of(FOUR, [9, 2])], "strong")


def test_repetitions_have_to_be_of_one_configuration() -> None:
    with pytest.raises(UserError, match="not repetitions"):
        speedup([run_of(ONE, [1, 1])], [run_of(FOUR, [1, 1]), run_of(ONE, [1, 1])], "strong")
    with pytest.raises(UserError, match="one of the two sides has no run"):
        speedup([run_of(ONE, [1, 1])], [], "strong")


def test_without_a_sampler_there_is_a_speedup_per_sample_only(tmp_path: Path) -> None:
    # Twice the samples in 1.2 times the time.
    write_text_run(tmp_path / "one", 1, (12.0, 10.0, 10.0))
    write_text_run(tmp_path / "two", 2, (14.0, 12.0, 12.0), passes=2)
    one, two = read_runs(tmp_path).runs
    with pytest.raises(UserError, match=r"2 ranks computed 2,000 samples .* each 2\.0 times"):
        speedup([one], [two], "strong")
    assert per_sample_speedup([one], [two]).value == pytest.approx(2 / 1.2)


def sweep(slow_round: float = 1.0, plain: bool = True) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Makes arms and steps whose times are 10 ms a sample-batch of 32, and 2 ms of exchange.

    ``slow_round`` stretches every second round, whatever the arm.
    """
    settings = [
        ("strong", 1, 32, 1, "none"),
        ("strong", 2, 16, 1, "none"),
        ("weak", 1, 32, 1, "none"),
        ("weak", 2, 32, 1, "none"),
        ("weak", 1, 32, 4, "accumulation=4"),
        ("weak", 2, 32, 4, "accumulation=4"),
    ]
    columns = ["regime", "world_size", "batch_per_rank", "accumulation", "change"]
    arms = pd.DataFrame(settings, columns=columns).rename_axis("arm").reset_index()
    arms["global_batch"] = arms["world_size"] * arms["batch_per_rank"] * arms["accumulation"]
    arms = arms.assign(compression="none", bucket_cap_mb=25, precision="float32")
    draw, rows = np.random.default_rng(3), []
    for place in range(12):
        stretch = slow_round if place % 2 else 1.0
        for arm, (_, ranks, batch, many, _) in enumerate(settings):
            step_ms = (10 * batch / 32 * many + 2 * (ranks > 1)) * stretch
            for step in range(4):
                for rank in range(ranks):
                    noise = 1 + 0.01 * draw.standard_normal()
                    # The first step is slow, and rank 1 always a little faster than rank 0.
                    time = step_ms * noise * (5 if step == 0 else 1) * (0.9 if rank else 1)
                    for kind in ("timed", "plain") if plain else ("timed",):
                        rows.append(
                            {"rank": rank, "arm": arm, "kind": kind, "round": place}
                            | {"epoch": 0, "step": step, "warmup": step == 0}
                            | {"step_time_ms": time * (1.3 if kind == "timed" and plain else 1)}
                        )
    return arms, pd.DataFrame(rows)


def test_a_sweep_is_compared_in_samples_per_second_with_the_same_change_on_one_rank() -> None:
    table = sweep_speedups(*sweep()).set_index("arm")
    assert table["step_ms"].tolist() == pytest.approx([10, 7, 10, 12, 40, 42], rel=0.02)
    expected = [1, 10 / 7, 1, 20 / 12, 1, 80 / 42]
    assert table["speedup"].tolist() == pytest.approx(expected, rel=0.02)
    assert table.loc[3, "efficiency"] == pytest.approx(10 / 12, rel=0.02)
    assert table.loc[3, "throughput_samples_per_s"] == pytest.approx(64 / 12e-3, rel=0.02)
    assert ((table["speedup_low"] <= table["speedup"]) & table["refused"].eq("")).all()
    assert table["global_batch_changed"].tolist() == [False] * 4 + [True] * 2


def test_timed_steps_are_used_where_there_are_no_plain_ones() -> None:
    table = sweep_speedups(*sweep(plain=False))
    assert table["step_ms"].tolist() == pytest.approx([10, 7, 10, 12, 40, 42], rel=0.02)


def test_a_machine_that_slows_down_with_the_rounds_does_not_widen_the_interval() -> None:
    # Both sides of a ratio are drawn from the same rounds, so a slow one is slow for both.
    steady, unsteady = (sweep_speedups(*sweep(slow_round=factor)) for factor in (1.0, 1.5))
    width = [(table["speedup_high"] - table["speedup_low"]).iloc[3] for table in (steady, unsteady)]
    assert width[1] < 3 * width[0]


def test_an_arm_without_one_on_one_rank_is_refused_by_name() -> None:
    arms, steps = sweep()
    kept = arms["arm"].isin([1, 2, 3])
    table = sweep_speedups(arms[kept], steps[steps["arm"].isin([1, 2, 3])]).set_index("arm")
    assert math.isnan(table.loc[1, "speedup"])
    assert "no arm on one rank with this change and this global batch" in table.loc[1, "refused"]
    assert table.loc[3, "speedup"] == pytest.approx(20 / 12, rel=0.02)
