"""The model of a run's step: copies by size, bucket views, and whose all-reduces count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scaling_evidence import MIB, MadeUp, case_of, examined_for

from common.benchmarks.scaling.verify_changes import one_rank_step_s, predictions
from common.diagnose.changes import open_changes
from common.diagnose.evidence.evidence import open_evidence
from common.diagnose.evidence.measured_step import model_from_evidence
from common.diagnose.unexplained import BASELINE_ERROR
from common.errors import UserError
from common.perfmodel.scaling.step_model import StepModel, StepSettings, predict
from common.runtime.paths import project_root


def write_costs(folder: Path, times_ms: dict[int, float]) -> None:
    """Writes costs.csv: copies of each size take this long on both ranks."""
    rows = [
        {"rank": rank, "cost": "copy", "size_bytes": size, "repeat": repeat, "time_ms": time_ms}
        for size, time_ms in times_ms.items()
        for rank in range(2)
        for repeat in range(3)
    ]
    pd.DataFrame(rows).to_csv(folder / "costs.csv", index=False)


def model_of(folder: Path, **options: bool) -> StepModel:
    return model_from_evidence(open_evidence(folder), **options)


def test_copies_of_one_measured_size_cost_in_proportion_to_theirs(tmp_path):
    # 4 MiB, all gradients, take 8 ms: 2 ms a MiB, however small or large the bucket.
    folder = MadeUp(noise=0.0).write(tmp_path / "run")
    write_costs(folder, {4 * MIB: 8.0})
    copies = model_of(folder).costs["copy"]
    for mib in (1 / 64, 0.5, 1, 2, 3, 4, 40):
        assert copies.time_s(mib * MIB) == pytest.approx(0.002 * mib)
    model = model_of(folder)
    for cap_mb in (0.5, 100.0):  # four buckets, and one
        found = predict(model, replace(model.settings, bucket_cap_mb=cap_mb)).exchange
        # In the pass 4 MiB are copied in, half of what the copies there and back take.
        assert found.compute_alone_s == pytest.approx(model.together.backward.time_s(32) + 0.004)


def test_below_the_smallest_of_several_sizes_copies_cost_in_proportion(tmp_path):
    folder = MadeUp(noise=0.0).write(tmp_path / "run")
    write_costs(folder, {MIB: 1.0, 4 * MIB: 10.0})
    copies = model_of(folder).costs["copy"]
    assert copies.time_s(MIB / 8) == pytest.approx(0.001 / 8)
    assert copies.time_s(MIB) == pytest.approx(0.001)
    assert copies.time_s(2.5 * MIB) == pytest.approx(0.0055)
    assert copies.time_s(8 * MIB) == pytest.approx(0.020)


def test_a_watched_script_with_bucket_views_copies_nothing_back(tmp_path):
    views = {rank: {"gradient_as_bucket_view": True} for rank in range(2)}
    folder = MadeUp(noise=0.0, facts=views).write(tmp_path / "views")
    plain = MadeUp(noise=0.0).write(tmp_path / "plain")
    for each in (folder, plain):
        write_costs(each, {4 * MIB: 8.0})
    assert model_of(folder).gradient_as_bucket_view
    assert not model_of(plain).gradient_as_bucket_view  # nobody said
    assert model_of(plain, gradient_as_bucket_view=True).gradient_as_bucket_view
    # Two buckets of 2 MiB: the last one's way back, 2 of the 8 ms, is at the end of every pass.
    models = [replace(model_of(each), contention=0.0) for each in (plain, folder)]
    with_copy_s, without_s = (predict(model).exchange.total_s for model in models)
    assert with_copy_s - without_s >= 0.002 - 1e-9


@pytest.mark.parametrize("measured_on", [1, 4])
def test_all_reduces_of_other_ranks_than_the_steps_predict_nothing(tmp_path, measured_on):
    folder = MadeUp().write(tmp_path / "run")
    table = folder / "allreduce-samples.csv"
    one = pd.read_csv(table).query("rank == 0")
    everywhere = [one.assign(rank=rank) for rank in range(measured_on)]
    pd.concat(everywhere).to_csv(table, index=False)
    with pytest.raises(UserError, match=f"measured on {measured_on} ranks, the steps .* on 2"):
        model_of(folder)
    not_judged = dict(examined_for(case_of(folder), "bucket-cap").not_judged)
    assert f"measured on {measured_on} ranks" in not_judged["bucket-cap"]


def test_the_recorded_changes_are_predicted_within_the_stated_error():
    """The sweep of ``ddplab study remedies`` predicts what its changes brought, in the same job."""
    recorded = project_root() / "data/xeon-2-cores/study-remedies/emulated-2x1gbit"
    arms = pd.read_csv(recorded / "sweep/arms.csv")
    arm = arms[arms["world_size"] == 2].iloc[0]
    model = model_of(recorded / "sweep", gradient_as_bucket_view=True)
    made = open_changes(recorded / "changes").table.set_index("change")
    proposals = pd.read_csv(recorded / "changes/proposals.csv")
    columns = ["batch_per_rank", "accumulation", "compression", "bucket_cap_mb"]
    settings = {
        row["change"]: StepSettings(**row[columns].to_dict()) for _, row in proposals.iterrows()
    }
    one_s = one_rank_step_s(recorded / "sweep", arm)
    predicted = predictions(model, list(settings.items()), arm, one_s).set_index("change")
    errors = np.log(predicted["predicted_speedup"] / made["speedup"]).drop("none")
    assert len(errors) == 4
    assert np.sqrt((errors**2).mean()) <= BASELINE_ERROR
