"""The published sweep on two A100s: bucket counts, a flat curve, two GPUs from one."""

from __future__ import annotations

import pandas as pd
import pytest
from perfmodel_support import refused

from common.perfmodel.cluster.published_sweep import (
    PUBLISHED,
    deviation_by_bandwidth,
    explain_efficiency,
    explain_sweep,
    least_bandwidth_gb_per_s,
)


@pytest.mark.parametrize("model", ["gpt2", "gpt2-large"])
def test_the_predicted_curve_is_as_flat_as_the_published_one(model):
    found = explain_sweep(model)
    assert found.worst_deviation < 0.01
    # and it is flat because there is little to hide
    assert found.communication_share < 0.02
    assert found.spread("predicted_ms") < found.communication_share
    assert found.table["predicted_ms"].mean() == pytest.approx(found.table["measured_ms"].mean())
    assert 0.5 < found.mfu < 1  # of the float32 peak


@pytest.mark.parametrize("model", ["gpt2", "gpt2-large"])
def test_buckets_are_as_many_as_the_published_profile_counted(model):
    table = explain_sweep(model).table
    published = table["published_buckets"].tolist()
    # The author's gpt2-large at 500 MiB has 6 buckets, as the model says for 512 positions.
    assert table["num_buckets"].tolist() == published


def test_a_slow_link_would_not_give_a_flat_curve():
    slow, fast = deviation_by_bandwidth("gpt2", [10, 300]).to_dict("records")
    assert slow["worst_deviation"] > 0.01 > fast["worst_deviation"]
    assert slow["communication_share"] > 0.1
    least = least_bandwidth_gb_per_s("gpt2")
    around = deviation_by_bandwidth("gpt2", [0.98 * least, 1.02 * least])["worst_deviation"]
    assert around[0] > 0.01 > around[1]


def test_two_gpus_are_predicted_from_one():
    found = explain_efficiency()
    error = found["predicted_efficiency"] - found["measured_efficiency"]
    assert error.abs().max() < 0.02
    assert (found["without_stragglers"] > found["predicted_efficiency"]).all()


def test_a_model_that_was_not_published_is_refused(tmp_path):
    with refused("gpt2-xl", "gpt2, gpt2-large"):
        explain_sweep("gpt2-xl")
    table = pd.read_csv(PUBLISHED / "step-times.csv")
    table.loc[0, "step_time_ms"] = -1
    table.to_csv(tmp_path / "step-times.csv", index=False)
    (tmp_path / "source.yaml").write_text((PUBLISHED / "source.yaml").read_text())
    with refused("line 2", "step_time_ms"):
        explain_sweep("gpt2", folder=tmp_path)
