"""The judgements of the micro-batches study, on tables whose answers are known."""

from __future__ import annotations

import pandas as pd
import pytest

from common.benchmarks.simulated_modes import calibrated_cost
from common.scheduling.cost import CalibratedCost
from common.studies.micro_batches import judge_modes, judge_planning, judge_slowed

MODES = {"static": 100.0, "dynamic": 60.0, "dynamic_calibrated": 58.0, "karmarkar_karp": 101.0}


def mode_times(loss: float = 0.7, waiting_ms: float = 6.0) -> pd.DataFrame:
    """Makes twenty steps on two ranks; the second rank is the slower one by 1 ms."""
    rows = []
    for step in range(20):
        for mode, time_ms in {**MODES, "control": 50.0}.items():
            for rank in range(2):
                row = {"mode": mode, "step": step, "rank": rank, "same_batch": mode != "control"}
                row |= {"step_time_ms": time_ms + rank - 1, "waiting_time_ms": waiting_ms}
                row["compute_time_ms"] = time_ms / 2
                rows.append(row | {"loss": loss if mode == "dynamic" else 0.7})
    return pd.DataFrame(rows)


def found(rows: list) -> dict[str, tuple]:
    return {promise: (at_most, value) for promise, at_most, value in rows}


def test_ratios_are_of_the_slowest_rank():
    verdicts = found(judge_modes(mode_times(), "sst2"))
    assert verdicts["sst2: dynamic's mean step over static's"] == (0.65, pytest.approx(0.6))
    assert verdicts["sst2: dynamic's P95 of steps over static's"][1] == pytest.approx(0.6)
    below = verdicts["sst2: dynamic's mean over static's, below Karmarkar–Karp's"]
    assert below == (pytest.approx(1.01), pytest.approx(0.6))


def test_another_loss_on_the_same_texts_is_seen():
    name = "sst2: losses of the same texts, same weights"
    assert found(judge_modes(mode_times(), "sst2"))[name][1] == 0
    assert found(judge_modes(mode_times(loss=0.70001), "sst2"))[name][1] > 1e-5


def test_waiting_is_counted_in_points_above_the_control():
    verdicts = found(judge_modes(mode_times(), "imdb"))
    (waiting,) = (value for name, value in verdicts.items() if "that dynamic waits" in name)
    # 12 of 119 ms against 12 of 99 ms.
    assert waiting[1] == pytest.approx(100 * (12 / 119 - 12 / 99))


@pytest.mark.parametrize(("found_at", "first"), [(10, 10), (30, 30), (99, float("inf"))])
def test_a_slowed_rank_is_found_when_its_factor_is(found_at, first):
    rows = []
    for step in range(40):
        for mode, time_ms in {"not_told": 90.0, "dynamic_calibrated": 66.0, "told": 60.0}.items():
            for rank in range(2):
                row = {"mode": mode, "step": step, "rank": rank, "step_time_ms": time_ms}
                row |= {"slow_factor": 2.0 if rank else 1.0}
                rows.append(row | {"estimated_factor": 2.1 if rank and step >= found_at else 1.0})
    when, ratio = judge_slowed(pd.DataFrame(rows))
    assert when[1:] == (20, first)
    assert ratio[1:] == (1.1, pytest.approx(1.1))


def test_the_slowest_cost_to_plan_with_counts():
    rows = [
        {"world_size": ranks, "global_batch": batch, "cost": cost, "time_ms": time_ms}
        for ranks, batch in ((64, 512), (1024, 4096))
        for cost, time_ms in (("tokens", 0.5), ("calibrated", 2.0), ("calibrated", 4.0))
    ]
    assert [row[1:] for row in judge_planning(pd.DataFrame(rows))] == [(1, 3), (5, 3)]


def test_the_cost_for_the_simulation_fits_the_calibration():
    cost = CalibratedCost(5e-3, 2e-4, 3e-8)
    sizes = [(b, m) for b in (1, 4, 16) for m in (8, 32, 128)]
    samples = pd.DataFrame(
        {"batch_size": b, "longest": m, "time_ms": float(cost(b, m)) * 1e3 * noise, "rank": rank}
        for b, m in sizes
        for rank, noise in enumerate((0.98, 1.0, 1.02))
    )
    fitted = calibrated_cost(samples)
    assert fitted.c0_s == pytest.approx(cost.c0_s, rel=1e-6)
    assert fitted.c1_s == pytest.approx(cost.c1_s, rel=1e-6)
