"""overlap_benchmark.py: what DDP adds besides waiting, measured in arms of rotated rounds.

The fixture's run has messages of 0.001 and 0.0625 MiB, 2 rounds, one measured step and 2 ranks.
"""

from __future__ import annotations

import math

import pandas as pd
import pytest

from common.perfmodel.tables import read_costs, read_overlap_samples

SIZES = [1048, 65536]  # 0.001 and 0.0625 MiB in bytes
ROUNDS, STEPS, RANKS = 2, 1, 2
PARAMETERS = 462_336  # of gpt2-pico
GRADIENTS = 28  # two layers of twelve, two embeddings, the last norm's two


@pytest.fixture(scope="module")
def times(overlap_run):
    return pd.read_csv(overlap_run / "overlap-times.csv")


def test_the_table_has_its_columns(times):
    assert list(times.columns) == [
        *("arm", "message_bytes", "messages", "round", "iteration", "rank"),
        *("backward_time_ms", "all_reduce_time_ms", "messages_done"),
        *("copy_out_time_ms", "gradient_bytes"),
    ]
    assert set(times["gradient_bytes"]) == {4 * PARAMETERS}  # in float32


def test_the_arms_are_local_two_of_ddp_and_by_size_three_of_all_reduces(times):
    arms = times[["arm", "message_bytes"]].drop_duplicates()
    assert sorted(arms.itertuples(index=False, name=None)) == sorted(
        [
            *(("local", 0), ("bookkeeping", 0), ("buckets", 4 * PARAMETERS // GRADIENTS)),
            *((arm, size) for size in SIZES for arm in ("launched", "continuous", "all_reduce")),
        ]
    )


def test_every_arm_is_measured_equally_often_on_every_rank(times):
    counts = times.groupby(["arm", "message_bytes", "messages", "round", "rank"]).size()
    alone = counts.index.get_level_values("arm") == "all_reduce"
    assert set(counts[~alone]) == {STEPS}
    assert set(counts[alone]) == {1}  # each the sum of many
    assert len(counts) == 9 * ROUNDS * RANKS  # the number of messages is planned once


def test_all_ranks_plan_the_same_number_of_messages(times):
    """They must: an all-reduce that one rank does not join never ends."""
    messages = times.groupby(["arm", "message_bytes"])["messages"].agg(["nunique", "max"])
    assert (messages["nunique"] == 1).all()
    assert (messages.loc[["local", "bookkeeping"], "max"] == 0).all()
    # As many are launched as the gradients' bytes make, but no more than a thousand.
    assert messages.loc["launched", "max"].tolist() == [1000, 4 * PARAMETERS // 65536]
    # Both arms of a pair do the same work.
    assert messages.loc["continuous", "max"].tolist() == messages.loc["all_reduce", "max"].tolist()


def test_a_bucket_for_each_gradient_is_counted(times, overlap_run):
    assert set(times[times["arm"] == "buckets"]["messages"]) == {GRADIENTS}
    samples = read_overlap_samples(overlap_run / "overlap-times.csv", "gloo")
    assert samples.per_bucket_s.shape == (ROUNDS,)
    assert samples.costs().launch_s == 0  # all-reduces that the pass launches hold it


def test_only_the_arm_without_a_backward_pass_has_no_backward_time(times):
    alone = times["arm"] == "all_reduce"
    assert (times[alone]["backward_time_ms"] == 0).all()
    assert (times[~alone]["backward_time_ms"] > 0).all()
    assert (times[alone]["all_reduce_time_ms"] > 0).all()
    # All-reduces launched during the pass are awaited after it.
    assert (times["all_reduce_time_ms"] >= times["backward_time_ms"]).all()


def test_all_reduces_that_were_done_in_time_are_counted(times):
    assert times["messages_done"].between(0, times["messages"]).all()
    assert (times["messages_done"] == times["messages"])[times["arm"] == "all_reduce"].all()
    # Those without pause are made to outlast the pass.
    continuous = times[times["arm"] == "continuous"]
    assert (continuous["messages_done"] < continuous["messages"]).any()
    # The pass launches the others, and some are done before it ends.
    assert (times[times["arm"] == "launched"]["messages_done"] > 0).any()


def test_copies_out_are_recorded_of_every_pass_under_ddp_on_one_rank_and_of_no_other(times):
    copied = times["arm"] == "bookkeeping"
    assert times[~copied]["copy_out_time_ms"].isna().all()
    recorded = times[copied]
    # They are the pass's last part: something, and not all of it.
    assert recorded["copy_out_time_ms"].between(0, recorded["backward_time_ms"], "neither").all()


def test_the_performance_model_reads_the_costs(overlap_run):
    costs = read_costs(overlap_run / "overlap-times.csv")
    sizes, lost_s = costs.lost_compute
    assert list(sizes) == SIZES
    assert all(math.isfinite(seconds) and seconds >= 0 for seconds in lost_s)
    assert list(costs.delays[0]) == SIZES
    assert min(costs.delays[1]) >= 0
    assert 0 < costs.copy_in_s_per_byte < 1e-6  # less than a second for a megabyte
    assert costs.copy_in_s_per_byte == costs.copy_out_s_per_byte
