"""The reading of training runs: run directories are made up, so that the answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from assignment1_support import ENVIRONMENT, MIB, SETTINGS, steps, write_run, write_training

from common.analysis import runs
from common.analysis.data_parallel.loss_curves import agreement, learned, smoothed_loss
from common.analysis.data_parallel.training_parts import peak_memory, training_overlap
from common.analysis.data_parallel.training_runs import open_learning, open_training
from common.errors import UserError
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.sharding import Sharding

# Which runs are compared


def test_runs_are_told_apart_by_what_they_trained_not_by_their_folders(tmp_path: Path) -> None:
    write_training(tmp_path / "20260102-c", "FULL_SHARD", 2)
    write_training(tmp_path / "20260102-a", "DDP", 4)
    write_training(tmp_path / "20260102-b", "DDP", 2)
    write_training(tmp_path / "20260102-d", "single", 1)
    training = open_training(tmp_path)
    assert [run.key for run in training.compared] == [
        ("single", 1),
        ("DDP", 2),
        ("DDP", 4),
        ("FULL_SHARD", 2),
    ]
    # only a strategy that ran on several numbers of ranks needs them in its name
    assert [name for name, _ in training.named()] == [
        "one device",
        "DDP × 2",
        "DDP × 4",
        "FULL_SHARD",
    ]
    assert [run.accumulation for run in training.compared] == [4, 2, 1, 2]


def test_of_two_runs_of_a_strategy_the_newer_one_counts(tmp_path: Path) -> None:
    write_training(tmp_path / "a", "DDP", 2, [5.0, 4.0], started="2026-01-02T03:00:00+00:00")
    write_training(tmp_path / "b", "DDP", 2, [5.0, 3.0], started="2026-01-01T03:00:00+00:00")
    assert open_training(tmp_path).compared[0].loss[1] == 4.0


def test_runs_that_did_not_complete_are_not_read(tmp_path: Path) -> None:
    write_training(tmp_path / "ddp", "DDP", 2)
    failed = write_training(tmp_path / "fsdp", "FULL_SHARD", 2)
    (failed / "environment.json").write_text(
        json.dumps(ENVIRONMENT | {"status": "failed", "world_size": 2})
    )
    assert [run.strategy for run in open_training(tmp_path).compared] == ["DDP"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no complete training run"):
        open_training(tmp_path / "empty")


@pytest.mark.parametrize(
    ("setting", "value"), [("model", "gpt2-pico"), ("num_steps", 7), ("seq_len", 32), ("seed", 1)]
)
def test_runs_that_trained_something_else_are_not_compared(
    tmp_path: Path, setting: str, value: object
) -> None:
    write_training(tmp_path / "one", "single", 1)
    # of unknown entropy, so that it is no learning run either
    write_training(tmp_path / "two", "DDP", 2, **{setting: value, "entropy_nats": None})
    with pytest.raises(UserError, match=f"^{setting} differs between .* cannot be compared"):
        open_training(tmp_path)


def test_the_learning_run_is_the_longest_one_and_apart_from_the_comparison(tmp_path: Path) -> None:
    write_training(tmp_path / "a", "single", 1)
    write_training(tmp_path / "b", "DDP", 2)
    losses = [5.0 - 0.1 * step for step in range(20)]
    write_training(tmp_path / "c", "DDP", 2, losses, model="gpt2-pico")
    training = open_training(tmp_path)
    assert training.learning.settings["model"] == "gpt2-pico"
    assert [run.settings["model"] for run in training.compared] == ["gpt2-nano", "gpt2-nano"]


def test_strategies_that_trained_longest_are_a_comparison_and_no_learning_run(
    tmp_path: Path,
) -> None:
    write_training(tmp_path / "a", "single", 1)
    write_training(tmp_path / "b", "DDP", 2)
    assert open_training(tmp_path).learning is None
    # and a shorter run beside them is one that they cannot be compared with
    write_training(tmp_path / "c", "FULL_SHARD", 2, [9.0, 8.0])
    with pytest.raises(UserError, match=r"^num_steps differs"):
        open_training(tmp_path)


def test_where_no_run_learned_for_long_the_recorded_one_is_shown_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_training(tmp_path / "mine" / "a", "DDP", 2)
    write_training(tmp_path / "recorded" / "a", "DDP", 2)
    write_training(tmp_path / "recorded" / "b", "DDP", 2, [5.0] * 20)
    monkeypatch.setattr(runs, "recorded_assignment", lambda assignment: tmp_path / "recorded")
    mine = open_learning(tmp_path / "mine")
    assert mine.folder == tmp_path / "recorded"
    assert mine.learning_origin.startswith("> **Recorded data, not yours.**")
    assert "ddplab run assignment1" not in mine.learning_origin  # which made the run without it
    # a run that has one is shown itself
    assert open_learning(tmp_path / "recorded").learning.settings["num_steps"] == 20


# Loss


def test_the_largest_difference_is_that_of_any_two_curves_at_any_step(tmp_path: Path) -> None:
    write_training(tmp_path / "a", "single", 1, [9.0, 8.0, 7.0, 6.0])
    write_training(tmp_path / "b", "DDP", 2, [9.0, 8.25, 7.0, 6.0])
    write_training(tmp_path / "c", "FULL_SHARD", 2, [9.0, 7.5, 7.0, 6.0])
    training = open_training(tmp_path)
    # neither is that far from the first, but these two are from each other
    assert (agreement(training).largest_nats, agreement(training).step) == (0.75, 1)


@pytest.mark.parametrize(
    ("precision", "away", "equal"),
    [
        ("float32", 0.0, True),
        ("float32", 5e-4, True),
        ("float32", 2e-3, False),
        ("bfloat16", 2e-3, True),
        ("bfloat16", 0.1, False),
        ("TensorFloat-32", 0.01, True),
    ],
)
def test_loss_curves_agree_where_rounding_in_their_precision_explains_the_difference(
    tmp_path: Path, precision: str, away: float, equal: bool
) -> None:
    settings = {"tf32": True} if precision == "TensorFloat-32" else {"precision": precision}
    write_training(tmp_path / "a", "single", 1, [9.0, 8.0], **settings)
    assert agreement(open_training(tmp_path)).equal is None  # one curve agrees with nothing
    write_training(tmp_path / "b", "DDP", 2, [9.0, 8.0 + away], **settings)
    found = agreement(open_training(tmp_path))
    assert found.equal is equal
    assert (found.curves, found.precision) == (2, precision)
    assert found.largest_nats == pytest.approx(away, abs=1e-12)
    assert found.step == (1 if away else 0)


def test_what_was_learned_is_a_share_of_what_the_order_of_tokens_is_worth(tmp_path: Path) -> None:
    write_training(tmp_path / "a", "DDP", 2)
    write_training(tmp_path / "b", "DDP", 2, [5.0] * 18 + [3.0, 2.5])
    run = open_training(tmp_path).learning
    smooth = smoothed_loss(run)
    assert smooth.attrs["window"] == 3
    assert smooth.iloc[-2] == pytest.approx((5.0 + 3.0 + 2.5) / 3)
    found = learned(run)
    # the entropy is 2 nats and the unigram entropy 5
    assert found.final_nats == 2.75
    assert found.above_entropy_nats == pytest.approx(0.75)
    assert found.share == pytest.approx((5 - 2.75) / (5 - 2))
    assert (found.averaged_steps, found.steps) == (2, 20)
    worse = [5.0] * 18 + [5.5, 6.5]
    write_training(tmp_path / "c", "DDP", 2, worse, started="2026-01-03T03:04:05+00:00")
    assert learned(open_training(tmp_path).learning).share == pytest.approx(-1 / 3)


def test_without_a_unigram_entropy_the_learned_share_is_unknown(tmp_path: Path) -> None:
    write_training(tmp_path / "a", "DDP", 2)
    write_training(tmp_path / "b", "DDP", 2, [3.0] * 20, unigram_entropy_nats=None)
    found = learned(open_training(tmp_path).learning)
    assert found.above_entropy_nats == pytest.approx(1.0)
    assert pd.isna(found.share)


# Steps, memory, overlap


def test_a_step_is_its_slowest_ranks_and_profiled_ones_are_left_out(tmp_path: Path) -> None:
    times = [[90.0, 10.0], [10.0, 20.0], [30.0, 10.0], [10.0, 70.0]]
    rows = steps(times, profiled=(3,))
    settings = SETTINGS | {"strategy": "DDP"}
    write_run(tmp_path / "a", settings, {"world_size": 2}, training_steps=rows)
    run = open_training(tmp_path).compared[0]
    assert run.step_times_ms()["step_time_ms"].tolist() == [90.0, 20.0, 30.0]


def test_memory_is_predicted_for_each_runs_own_micro_batch_and_sharding(tmp_path: Path) -> None:
    write_training(tmp_path / "a", "single", 1, peak_bytes=100 * MIB)
    write_training(tmp_path / "b", "FULL_SHARD", 2, peak_bytes=50 * MIB)
    write_training(tmp_path / "c", "DDP", 2)
    pd.DataFrame({"rank": [0, 1], "peak_bytes": [40 * MIB, 50 * MIB]}).to_csv(
        tmp_path / "b" / "memory.csv", index=False
    )
    training = open_training(tmp_path)
    table = peak_memory(training).set_index("strategy")
    for run in training.compared:
        sharding = Sharding("none" if run.strategy == "single" else run.strategy, run.ranks)
        expected = predict_memory(run.workload, sharding).peak_bytes
        assert table.loc[run.strategy, "predicted_bytes"] == expected
        assert run.workload.batch_size == 4
    assert table.loc["single", "error"] == pytest.approx(
        table.loc["single", "predicted_bytes"] / (100 * MIB) - 1
    )
    parts = ["parameters", "gradients", "optimizer states", "communication"]
    of_peak = table[[*parts, "activations and the rest"]].sum(axis=1)
    assert of_peak.tolist() == table["predicted_bytes"].tolist()
    assert table.loc["FULL_SHARD", "parameters"] == table.loc["DDP", "parameters"] / 2
    # the rank that needs most counts
    of_ranks = table.loc["FULL_SHARD", ["least_bytes", "measured_bytes"]]
    assert of_ranks.tolist() == [40 * MIB, 50 * MIB]
    assert pd.isna(table.loc["DDP", "measured_bytes"])
    assert table["share_of_ddp"].isna().all()


def test_measured_memory_is_compared_with_one_devices_and_ddps_on_most_ranks(
    tmp_path: Path,
) -> None:
    write_training(tmp_path / "a", "single", 1, peak_bytes=100 * MIB)
    write_training(tmp_path / "b", "DDP", 2, peak_bytes=120 * MIB)
    write_training(tmp_path / "c", "DDP", 4, peak_bytes=160 * MIB)
    write_training(tmp_path / "d", "FULL_SHARD", 2, peak_bytes=80 * MIB)
    table = peak_memory(open_training(tmp_path)).set_index("name")
    assert list(table.index) == ["one device", "DDP × 2", "DDP × 4", "FULL_SHARD"]
    assert table["over_single_bytes"].tolist() == [0, 20 * MIB, 60 * MIB, -20 * MIB]
    assert table["share_of_ddp"].tolist() == [100 / 160, 120 / 160, 1.0, 0.5]


def write_overlap(run: Path, rows: list[tuple]) -> None:
    """Writes a trainer's tables: (rank, step, step, computing, communicating, both) in ms."""
    columns = ["rank", "step", "step_ms", "computation_ms", "communication_ms", "overlap_ms"]
    table = pd.DataFrame(rows, columns=columns)
    exposed = table["communication_ms"] - table["overlap_ms"]
    idle = table["step_ms"] - table["computation_ms"] - exposed
    table.assign(exposed_communication_ms=exposed, idle_ms=idle, copy_ms=0.0).to_csv(
        run / "step-overlap.csv", index=False
    )
    sent = [(rank, step, "all_reduce", size, 1) for rank, step, *_ in rows for size in (8, 10**6)]
    names = ["rank", "step", "operation", "size_bytes", "count"]
    pd.DataFrame(sent, columns=names).to_csv(run / "step-collectives.csv", index=False)


def test_overlap_is_that_of_the_slower_rank(tmp_path: Path) -> None:
    run = write_training(tmp_path / "ddp", "DDP", 2)
    write_overlap(run, [(0, 5, 2.0, 1.0, 0.3, 0.3), (1, 5, 10.0, 6.0, 3.0, 1.0)])
    training = open_training(tmp_path)
    row = training_overlap(training).iloc[0]
    # 6 ms computed and 3 communicated, of which 1 at once; the rest of 10 ms is neither
    assert (row["step_ms"], row["computation_ms"], row["communication_ms"]) == (10, 6, 3)
    assert (row["overlap_ms"], row["exposed_communication_ms"], row["idle_ms"]) == (1, 2, 2)
    assert row["hidden"] == pytest.approx(1 / 3)
    assert row["collectives"] == "1 all_reduce"  # the one of 8 bytes is bookkeeping


def test_the_parts_of_a_traced_step_add_up_where_their_medians_would_not(tmp_path: Path) -> None:
    run = write_training(tmp_path / "ddp", "DDP", 1)
    # In each step another part is long: medians are 5 + 2 + 1 of a median step of 12.
    write_overlap(run, [(0, 5, 12, 9, 3, 1), (0, 6, 12, 5, 7, 1), (0, 7, 12, 5, 4, 2)])
    row = training_overlap(open_training(tmp_path)).iloc[0]
    parts = row["computation_ms"] + row["exposed_communication_ms"] + row["idle_ms"]
    assert parts == pytest.approx(row["step_ms"]) == 12
    hidden = row["communication_ms"] - row["exposed_communication_ms"]
    assert row["overlap_ms"] == pytest.approx(hidden)
    assert row["hidden"] == pytest.approx(4 / 14)  # of all that was communicated
    assert row["judged"].interval.estimate == row["hidden"]  # its interval is that of this number
    write_overlap(run, [(0, step, 12, 9, 3, 0) for step in range(4)])
    row = training_overlap(open_training(tmp_path)).iloc[0]
    assert row["hidden"] == row["judged"].interval.estimate == 0


def test_the_price_of_tracing_is_against_the_steps_that_were_not_traced(tmp_path: Path) -> None:
    settings = SETTINGS | {"strategy": "DDP"}
    # the profiler was on in the two long steps
    rows = steps([[10.0], [10.0], [12.0], [90.0], [90.0]], profiled=(3, 4))
    run = write_run(tmp_path / "ddp", settings, {"world_size": 1}, training_steps=rows)
    write_overlap(run, [(0, 3, 15.0, 9.0, 3.0, 1.0), (0, 4, 15.0, 9.0, 3.0, 1.0)])
    assert training_overlap(open_training(tmp_path)).iloc[0]["slowdown"] == 1.5
    every = steps([[10.0], [10.0]], profiled=(0, 1))
    run = write_run(tmp_path / "all" / "ddp", settings, {"world_size": 1}, training_steps=every)
    write_overlap(run, [(0, 0, 10.0, 9.0, 3.0, 2.0), (0, 1, 10.0, 9.0, 3.0, 2.0)])
    assert pd.isna(training_overlap(open_training(tmp_path / "all")).iloc[0]["slowdown"])


def test_runs_without_traces_say_so(tmp_path: Path) -> None:
    write_training(tmp_path / "ddp", "DDP", 2)
    with pytest.raises(UserError, match="no traces"):
        training_overlap(open_training(tmp_path))
