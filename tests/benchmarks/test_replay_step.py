"""The benchmarks of assignment 2 run on a replay as they do on a GPT-2: what can be replayed, what
their tables and records then say, and what is refused.

The runs replay gpt2-large on A100s (data/umd-2x4-a100), smaller and faster: 12 MB in 26 ms.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import yaml

from common.analysis.buckets.measurements import check_comparable
from common.analysis.buckets.sweep import read_sweep
from common.benchmarks.one_device.replayed_profile import open_replayed
from common.errors import UserError
from common.perfmodel.published import load_recorded
from common.perfmodel.tables import read_ready_times
from common.runtime.paths import project_root

pytestmark = pytest.mark.xdist_group("assignment2_runs")

SYSTEM, FACTOR, TIME_FACTOR = "umd-2x4-a100", 256, 32
SMALLER = ("--replay_factor", FACTOR, "--replay_time_factor", TIME_FACTOR)
REPLAY = ("--replay", SYSTEM, *SMALLER)
SWEEP = ("--bucket_cap_mb", 0.5, 4, "--rounds", 1, "--num_steps", 2, "--initial_steps", 0)
SWEEP += ("--timeline_steps", 0)
LATENCY_MS = 5
LABEL = "replay of umd-2x4-a100, sizes / 256, times / 32"


@pytest.fixture(scope="module")
def train(benchmark_run):
    return benchmark_run("train_benchmark", *REPLAY, "--warmup_steps", 1, "--num_steps", 3)


@pytest.fixture(scope="module")
def ddp(benchmark_run):
    return benchmark_run("ddp_benchmark", *REPLAY, *SWEEP)


@pytest.fixture(scope="module")
def delayed_ddp(benchmark_run):
    """Runs the same with 5 ms added to each bucket, the recording named in another way."""
    replay = ("--replay", project_root() / "data" / SYSTEM, *SMALLER)
    return benchmark_run("ddp_benchmark", *replay, *SWEEP, "--added_latency_ms", LATENCY_MS)


def config(run) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def hardware(run) -> str:
    return json.loads((run / "environment.json").read_text())["hardware"]


@pytest.mark.parametrize("name", [SYSTEM, f"data/{SYSTEM}", project_root() / "data" / SYSTEM])
def test_a_recorded_system_is_one_however_it_is_named(name):
    replayed = open_replayed(str(name), FACTOR, TIME_FACTOR)
    assert (replayed.source, replayed.label) == (SYSTEM, LABEL)


def test_sizes_and_times_are_each_divided_by_their_factor():
    recorded = load_recorded(SYSTEM).profile
    scaled = open_replayed(SYSTEM, FACTOR, TIME_FACTOR).profile
    assert scaled.names == recorded.names
    assert scaled.registration == recorded.registration
    assert scaled.backward_s == pytest.approx(recorded.backward_s / TIME_FACTOR)
    np.testing.assert_allclose(scaled.ready_s, recorded.ready_s / TIME_FACTOR)
    # Whole float32 elements: half of one off at most, and never none.
    assert (scaled.sizes_bytes % 4 == 0).all()
    assert (scaled.sizes_bytes >= 4).all()
    assert (abs(scaled.sizes_bytes - recorded.sizes_bytes / FACTOR) <= 2).all()


def test_by_default_a_recording_is_replayed_as_it_is():
    recorded, replayed = load_recorded(SYSTEM).profile, open_replayed(SYSTEM, 1)
    assert list(replayed.profile.sizes_bytes) == list(recorded.sizes_bytes)
    assert list(replayed.profile.ready_s) == list(recorded.ready_s)


def test_a_run_directory_one_above_it_and_the_table_itself_are_the_same_recording():
    recorded = "data/epyc-2-cores/assignment2"
    table = f"{recorded}/train_benchmark/gradient-ready-times.csv"
    opened = [open_replayed(name, 2) for name in (recorded, f"{recorded}/train_benchmark", table)]
    assert {one.source for one in opened} == {"epyc-2-cores/assignment2/train_benchmark"}
    expected = read_ready_times(project_root() / table)
    for one in opened:
        assert one.profile.names == expected.names
        assert one.profile.backward_s == expected.backward_s  # a size factor leaves the times


def test_what_is_replayed_can_be_replayed_again(train):
    again = open_replayed(str(train), 1)
    assert again.profile.names == load_recorded(SYSTEM).profile.names
    assert again.label == "replay of run, sizes / 1"  # outside the project: no path of this machine


def test_the_gradients_of_a_replay_are_measured_as_those_of_a_model(train):
    measured = read_ready_times(train / "gradient-ready-times.csv")
    expected = open_replayed(SYSTEM, FACTOR, TIME_FACTOR).profile
    assert measured.names == expected.names
    assert list(measured.sizes_bytes) == list(expected.sizes_bytes)
    assert measured.registration == expected.registration
    assert set(measured.kinds) == {"float32"}


def test_a_replay_has_no_layer_tables(train):
    tables = {path.name for path in train.glob("*.csv")}
    assert tables == {"gradient-ready-times.csv", "local-step-times.csv", "witness.csv"}


@pytest.mark.two_ranks
@pytest.mark.parametrize("run", ["train", "ddp"])
def test_the_record_says_what_was_replayed_and_nothing_of_a_model_that_was_not_there(run, request):
    folder = request.getfixturevalue(run)
    settings = config(folder)
    assert (settings["replay"], settings["replay_factor"]) == (SYSTEM, FACTOR)
    assert settings["model"] == LABEL
    assert settings["batch_size"] == settings["max_seq_len"] == "as recorded"
    assert hardware(folder).endswith(f", gloo, {LABEL}")


def test_the_record_of_added_latency_says_how_it_was_added(delayed_ddp, ddp):
    assert config(delayed_ddp)["added_latency_ms"] == LATENCY_MS
    note = "5 ms added to each bucket by a comm hook"
    assert hardware(delayed_ddp).endswith(f", gloo, {LABEL}, {note}")
    assert config(ddp)["added_latency_ms"] == 0
    assert "hook" not in hardware(ddp)


def test_ddps_buckets_are_those_of_the_profile(ddp, delayed_ddp):
    profile = open_replayed(SYSTEM, FACTOR, TIME_FACTOR).profile
    for run in (ddp, delayed_ddp):
        read_sweep(run / "ddp-times.csv").check_buckets(profile)  # raises where they are not


def test_no_backward_pass_is_shorter_than_the_latency_of_all_its_buckets(delayed_ddp):
    times = pd.read_csv(delayed_ddp / "ddp-times.csv")
    assert times["num_buckets"].min() > 1
    assert (times["backward_time_ms"] >= times["num_buckets"] * LATENCY_MS).all()


def test_a_replay_says_of_every_measured_step_how_late_it_was(ddp, ddp_run):
    late = pd.read_csv(ddp / "replay-lateness.csv")
    steps = pd.read_csv(ddp / "ddp-times.csv")
    keys = ["bucket_cap_mib", "round", "iteration", "rank"]
    assert list(late.columns) == [*keys, "lateness_ms"]
    both = late.merge(steps, on=keys, validate="one_to_one")
    assert len(both) == len(late) == len(steps)
    # Later than the whole pass lasted it cannot be, but for what it took autograd's own time for.
    assert (both["lateness_ms"] <= both["backward_time_ms"] + 50).all()
    assert not (ddp_run / "replay-lateness.csv").exists()  # a GPT-2 computes


def test_tables_of_one_replay_can_be_compared_however_it_was_named(train, ddp, delayed_ddp):
    for run in (ddp, delayed_ddp):
        tables = (train / "gradient-ready-times.csv", run / "ddp-times.csv")
        assert check_comparable(tables)["model"] == LABEL


def test_a_replay_is_never_mixed_with_a_model_another_factor_or_another_latency(
    train, ddp, delayed_ddp, train_run, tmp_path
):
    with pytest.raises(UserError, match="model differs"):
        check_comparable([train_run / "gradient-ready-times.csv", ddp / "ddp-times.csv"])
    with pytest.raises(UserError, match="added_latency_ms differs"):
        check_comparable([ddp / "ddp-times.csv", delayed_ddp / "ddp-times.csv"])
    other = shutil.copytree(train, tmp_path / "other")
    (other / "config.yaml").write_text(yaml.safe_dump(config(train) | {"replay_factor": 64.0}))
    with pytest.raises(UserError, match="replay_factor differs"):
        check_comparable([other / "gradient-ready-times.csv", ddp / "ddp-times.csv"])
